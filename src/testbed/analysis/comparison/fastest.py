"""Write what a race found: the verdict from fresh runs, the reason, and a table of the configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testbed.analysis.comparison.files import arms_from
from testbed.analysis.comparison.two_arms import Comparison, compare_arms
from testbed.analysis.report.breakdown import breakdown
from testbed.analysis.runs.load import Run
from testbed.analysis.statistics import NO_DIFFERENCE
from testbed.errors import InputError
from testbed.sweep.field import Prediction
from testbed.sweep.race import SLOWER_THAN, Difference, Race
from testbed.sweep.race_runs import Fresh

FASTEST, EQUIVALENT, NOT_RUN = "fastest", "equivalent", "did not run"
UNDECIDED = "not all ran"
LEADS, LEFT = "leads", "left in the race"


@dataclass(frozen=True)
class Standing:
    """A configuration of the race. `ratio`: its speed over the winner's, from the race's own runs."""

    name: str
    state: str
    tokens_per_s: tuple[float, ...]
    ratio: Difference | None
    seconds_per_step: float | None
    predicted: Prediction | None

    def as_json(self) -> dict[str, Any]:
        said = self.predicted
        return {
            "name": self.name,
            "state": self.state,
            "tokens_per_s": list(self.tokens_per_s),
            "ratio_to_the_winner": None if self.ratio is None else self.ratio.as_ratio(),
            "seconds_per_step": self.seconds_per_step,
            "predicted_seconds_per_step": None if said is None else [said.seconds, said.low, said.high],
        }


def standings(
    race: Race, winner: str, tokens_per_step: Mapping[str, int], predictions: Mapping[str, Prediction]
) -> list[Standing]:
    """Return every configuration that was to run, the fastest first."""
    evidence = race.evidence() if race.runs else None
    found = []
    for name in race.names:
        speeds = tuple(run.tokens_per_s for run in race.runs if run.name == name)
        state = race.out.get(name) or (LEADS if name == winner else LEFT if speeds else NOT_RUN)
        ratio = evidence.difference(name, winner) if evidence is not None and speeds and name != winner else None
        seconds = tokens_per_step[name] / float(np.median(speeds)) if speeds else None
        found.append(Standing(name, state, speeds, ratio, seconds, predictions.get(name)))
    return sorted(found, key=lambda each: (each.seconds_per_step is None, each.seconds_per_step or 0.0))


def standings_table(rows: Sequence[Standing], names: Mapping[str, str]) -> str:
    """Return the standings as a table for a terminal, with configurations in words."""
    width = max(map(len, names.values()))
    lines = [f"{'':{width}}  runs   step (s)  predicted (s)          speed / winner's"]
    for row in rows:
        step = "" if row.seconds_per_step is None else f"{row.seconds_per_step:.4g}"
        said = row.predicted
        predicted = "" if said is None else f"{said.seconds:.3g} [{said.low:.3g}, {said.high:.3g}]"
        ahead = row.state.removeprefix(SLOWER_THAN)
        state = SLOWER_THAN + names[ahead] if ahead in names else row.state
        speed = f"{predicted:21}  {_times(row.ratio):20}"
        lines.append(f"{names[row.name]:{width}}  {len(row.tokens_per_s):4}  {step:>9}  {speed}  {state}")
    return "\n".join(lines)


def _times(difference: Difference | None) -> str:
    if difference is None:
        return ""
    ratio, low, high = difference.as_ratio()
    return f"{ratio:.2f}x" if low is None or high is None else f"{ratio:.2f}x [{low:.2f}, {high:.2f}]"


def verdict(
    fresh: Fresh | None, left: Sequence[str], names: Mapping[str, str], not_run: Sequence[str] = ()
) -> tuple[str, str]:
    """Return the verdict in a word and in a sentence.

    Args:
        fresh: None: there was no time for it, or nothing to compare.
        left: what the race did not show to be slower, the winner first.
        names: configurations in words.
        not_run: configurations of the field that never ran. With one, nothing is the fastest of all.
    """
    kind, sentence = _of_those_that_ran(fresh, left, names)
    if not not_run:
        return kind, sentence
    missing = f"{', '.join(names[name] for name in not_run)} did not run"
    if fresh is None and len(left) == 1:
        return UNDECIDED, f"{names[left[0]]} ran, and {missing}: it is not shown to be the fastest of all"
    return UNDECIDED if kind == FASTEST else kind, f"of those that ran, {sentence}; {missing}"


def _of_those_that_ran(fresh: Fresh | None, left: Sequence[str], names: Mapping[str, str]) -> tuple[str, str]:
    others = [names[name] for name in left[1:]]
    if fresh is None:
        if others:
            return NO_DIFFERENCE, f"no detectable difference between {', '.join([names[left[0]], *others])}"
        return FASTEST, f"{names[left[0]]} is the fastest; there is no other one to measure it against again"
    a, b, ratio = names[fresh.winner], names[fresh.runner_up], fresh.ratio
    numbers = f"{fresh.pairs} fresh runs of each" + ("" if ratio is None else f", {_times(ratio)}")
    if ratio is not None and ratio.low > 0 and len(left) <= 2:
        return FASTEST, f"{a} is the fastest: {_percent(ratio)} faster than {b} ({numbers})"
    if ratio is not None and ratio.is_within(fresh.equivalent):
        return EQUIVALENT, f"{a} and {b} are equivalent within {fresh.equivalent:.1%} ({numbers})"
    tied = ", ".join(dict.fromkeys([a, b, *others]))
    return NO_DIFFERENCE, f"no detectable difference between {tied} ({a} over {b}: {numbers})"


def _percent(ratio: Difference) -> str:
    numbers = [f"{100 * np.expm1(each):.1f}" for each in (ratio.estimate, ratio.low, ratio.high)]
    return f"{numbers[0]} % [{numbers[1]}, {numbers[2]}]"


def compared(folders: tuple[Path, Path], names: tuple[str, str]) -> Comparison:
    """Return the comparison of two folders of fresh runs. InputError if their work is not equal."""
    a, b, _ = arms_from(folders[:1], folders[1:])
    found = compare_arms(a, b, names)
    if found.mismatches:
        raise InputError(
            f"{names[0]} and {names[1]} did not do equal work: {', '.join(map(str, found.mismatches))}; no time of one "
            "compares with the other's"
        )
    return found


def reason(folders: tuple[Path, Path], names: tuple[str, str]) -> str | None:
    """Return in which part of a step two configurations differ most, from profiled runs if both have one."""
    runs = [arm.runs for arm in arms_from(folders[:1], folders[1:])[:2]]
    profiled = [[run for run in side if run.record.get("attribution")] for side in runs]
    found = [breakdown(side) for side in (profiled if all(profiled) else [_plain(side) for side in runs])]
    a, b = found
    if a is None or b is None or a.seconds.keys() != b.seconds.keys():
        return None
    saved = {part: b.seconds[part] - a.seconds[part] for part in a.seconds}
    part = max(saved, key=lambda each: abs(saved[each]))
    whole = sum(saved.values())
    less = "less" if saved[part] > 0 else "more"
    source = "under the profiler" if a.is_attributed else "by the clock of the phases"
    return (
        f"{names[0]} spends {1000 * abs(saved[part]):.1f} ms {less} of a step in {part} than {names[1]} "
        f"({1000 * a.seconds[part]:.1f} against {1000 * b.seconds[part]:.1f} ms); all parts together "
        f"{1000 * abs(whole):.1f} ms {'less' if whole > 0 else 'more'} ({source})"
    )


def _plain(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if not run.instrumented]


def predicted_and_measured(rows: Sequence[Standing], winner: str) -> str:
    """Return the winner's step time in the race with the predicted one."""
    row = next(row for row in rows if row.name == winner)
    measured, said = f"{row.seconds_per_step:.4g} s", row.predicted
    if said is None or row.seconds_per_step is None:
        return f"a step took {measured}; no plan predicted it"
    side = "inside" if said.low <= row.seconds_per_step <= said.high else "outside"
    interval = f"{said.seconds:.3g} s, {said.low:.3g} to {said.high:.3g}"
    return f"a step took {measured}; the plan said {interval} ({said.label}): {side} its interval"
