"""Two arms side by side: throughput with its interval, and everything that decides whether the ratio may be quoted.

The ratio alone misleads when arms did unequal work, learned unequally, ran one after the other or on other code. All
of that is collected here, for `scripts/compare_runs.py` and for reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.analysis.comparison.confounders import other_explanations
from testbed.analysis.runs.arms import Arm, arm_names, automatic_choices, configuration, without_copies
from testbed.analysis.runs.comparability import (
    Mismatch,
    differing_validation,
    instruments_in_words,
    loss_noise,
    mismatches,
)
from testbed.analysis.runs.load import Run
from testbed.analysis.statistics import FASTER, NOT_ENOUGH, Ratio, all_known, compare
from testbed.errors import InputError

WORSE = "learns worse"
VALIDATION = "Final validation loss"
NO_CLAIM, NOT_COMPARED = "no claim", "not compared"


@dataclass(frozen=True)
class Quantity:
    """One quantity of both arms, one value per run; None where a file does not record it.

    `ratio` is median a / median b with its 95 % interval where enough runs make one. Its verdict is not for showing:
    the claim of a comparison is about throughput, and many claims at 95 % are wrong more often than one.
    """

    name: str
    unit: str
    a: tuple[float, ...] | None
    b: tuple[float, ...] | None

    @property
    def ratio(self) -> Ratio | None:
        if not self.a or not self.b or min(*self.a, *self.b) <= 0:
            return None
        return compare(self.a, self.b)


@dataclass(frozen=True)
class Losses:
    """Final losses of the runs of both arms, and the difference that needs no other explanation than chance."""

    name: str
    a: tuple[float, ...]
    b: tuple[float, ...]
    noise: float  # see comparability.loss_noise
    noise_source: str

    @property
    def difference(self) -> float:
        """Median of a minus median of b: above 0 a is worse."""
        return float(np.median(self.a) - np.median(self.b))

    @property
    def is_unequal(self) -> bool:
        return abs(self.difference) > self.noise


@dataclass(frozen=True, eq=False)
class Comparison:
    """Result of comparing two arms; `a` and `b` hold the runs that count, `not_counted` the others with the reason."""

    name_a: str
    name_b: str
    a: Arm
    b: Arm
    ratio: Ratio
    mismatches: tuple[Mismatch, ...]
    quantities: tuple[Quantity, ...]
    losses: tuple[Losses, ...]
    settings: tuple[str, ...]  # in what the configurations differ, in words
    not_counted: tuple[tuple[Run, str], ...]
    warnings: tuple[str, ...]
    instrumented: tuple[str, ...] = ()  # a side and its instruments, where instrumented runs were allowed to count

    @property
    def worse_side(self) -> str | None:
        """ "a" or "b", the arm that learns worse than seeds explain. None: neither, or not known at unequal work."""
        unequal = [loss for loss in self.losses if loss.is_unequal] if not self.mismatches else []
        return ("a" if unequal[-1].difference > 0 else "b") if unequal else None

    @property
    def learns_worse(self) -> str | None:
        """Name of the arm of `worse_side`, for sentences: two arms can have the same name."""
        return self.worse_side and {"a": self.name_a, "b": self.name_b}[self.worse_side]

    @property
    def kind(self) -> str:
        """The verdict in a word: a faster arm that learns worse is not faster."""
        if self.mismatches or self.instrumented:
            return NOT_COMPARED  # of unequal work, or seeds that no run shares, the losses do not say who learns worse
        if self.ratio.verdict == NOT_ENOUGH:
            return NO_CLAIM
        return WORSE if self.worse_side == "a" and self.ratio.verdict == FASTER else self.ratio.verdict


def compare_arms(a: Arm, b: Arm, names: tuple[str, str] | None = None, allow_instrumented: bool = False) -> Comparison:
    """Compare two arms whose runs come from `load_run`; `names` stand in the sentences instead of the arms' own.

    Only finished runs without instruments count; where seeds vary within an arm, only those that both arms have.
    With `allow_instrumented` the instrumented runs of an arm count where it has no others, and every verdict says so.
    InputError when an arm is left with no run.
    """
    if names is None:
        of_a, of_b = arm_names((a, b))
        names = (of_a, of_b) if of_a != of_b else ("A", "B")
    runs_a, runs_b, not_counted = _counted(a, b, names, allow_instrumented)
    for name, runs in zip(names, (runs_a, runs_b), strict=True):
        if not runs:
            reasons = "; ".join(sorted({reason for run, reason in not_counted if run in (*a.runs, *b.runs)}))
            way_out = "; compare_runs.py --allow-mismatch gives a figure, labelled" * ("instrumented" in reasons)
            raise InputError(f"{name} has no run that counts: {reasons or 'it is empty'}{way_out}")
    arm_a, arm_b = Arm(a.label, runs_a), Arm(b.label, runs_b)
    return Comparison(
        names[0],
        names[1],
        arm_a,
        arm_b,
        compare(*([run.tokens_per_s for run in runs if run.tokens_per_s is not None] for runs in (runs_a, runs_b))),
        tuple(mismatches(runs_a, runs_b)),
        tuple(_quantities(runs_a, runs_b)),
        tuple(losses_of(names, runs_a, runs_b)),
        tuple(_settings_that_differ(runs_a[0], runs_b[0])),
        tuple(not_counted),
        tuple(other_explanations(names, runs_a, runs_b)),
        tuple(
            f"{name} by {instruments_in_words(runs[0])}"
            for name, runs in zip(names, (runs_a, runs_b), strict=True)
            if runs[0].instrumented
        ),
    )


def _counted(
    a: Arm, b: Arm, names: Sequence[str], allow_instrumented: bool
) -> tuple[tuple[Run, ...], tuple[Run, ...], list[tuple[Run, str]]]:
    copies = dict(copy for arm in (a, b) for copy in without_copies(arm.runs)[1])
    kept = [arm.measured_runs or (_instrumented(arm) if allow_instrumented else ()) for arm in (a, b)]
    not_counted = [
        (run, _why_not(run) or copies[run])
        for arm, runs in zip((a, b), kept, strict=True)
        for run in arm.runs
        if run not in runs
    ]
    seeds = [{run.work.get("seed") for run in runs} for runs in kept]
    shared = seeds[0] & seeds[1]
    if shared and seeds[0] != seeds[1]:
        for number, other in ((0, names[1]), (1, names[0])):
            without = [run for run in kept[number] if run.work.get("seed") not in shared]
            not_counted += [(run, f"no run of {other} has its seed {run.work['seed']}") for run in without]
            kept[number] = tuple(run for run in kept[number] if run not in without)
    return kept[0], kept[1], not_counted


def _instrumented(arm: Arm) -> tuple[Run, ...]:
    finished = [run for run in arm.runs if run.instrumented and run.status == "complete"]
    return tuple(without_copies([run for run in finished if run.tokens_per_s is not None])[0])


def _why_not(run: Run) -> str | None:
    if run.status != "complete":
        return f"its status is {run.status}"
    if run.instrumented:
        return f"it is instrumented ({instruments_in_words(run)})"
    return "it records no throughput" if run.tokens_per_s is None else None


def _quantities(a: Sequence[Run], b: Sequence[Run]) -> list[Quantity]:
    def wall_clock(run: Run) -> float | None:
        return run.section("timing").get("wall_clock_tokens_per_sec_global")

    def of(name: str, unit: str, read: Callable[[Run], float | None]) -> Quantity:
        return Quantity(name, unit, all_known(map(read, a)), all_known(map(read, b)))

    memory_meanings = {run.memory_meaning for run in (*a, *b)}
    memory = memory_meanings.pop() if len(memory_meanings) == 1 else "peak memory, measured differently"
    return [
        of("throughput", "tokens/s", lambda run: run.tokens_per_s),
        of("throughput by the wall clock", "tokens/s", wall_clock),
        of("step time, median", "s", lambda run: run.step_time_median_s),
        of("step time, p95", "s", lambda run: run.step_time_p95_s),
        of(memory, "bytes", lambda run: run.peak_memory_bytes if not memory_meanings else None),
    ]


def losses_of(names: Sequence[str], a: Sequence[Run], b: Sequence[Run]) -> list[Losses]:
    """Return training losses, then validation losses; one that a run lacks, or that does not compare, is left out."""
    found = []
    seeds_vary = any(len({run.work.get("seed") for run in runs}) > 1 for runs in (a, b))
    validation_compares = not differing_validation((*a, *b))
    for name, read in (
        ("Final training loss", lambda run: run.final_train_loss),
        (VALIDATION, lambda run: run.final_validation_loss if validation_compares else None),
    ):
        of_a, of_b = all_known(map(read, a)), all_known(map(read, b))
        if of_a is not None and of_b is not None:
            noise, side = loss_noise(of_a, of_b)
            source = "what seeds explain in published 124M runs"
            if min(len(of_a), len(of_b)) == 1:
                source = "beyond any seed's doing; one run of a side does not tell what seeds explain here"
            if side is not None:
                source = f"the {'seed-to-seed' if seeds_vary else 'run-to-run'} spread of {names[side]}"
            found.append(Losses(name, of_a, of_b, noise, source))
    return found


def _settings_that_differ(a: Run, b: Run) -> list[str]:
    first, second = configuration(a), configuration(b)
    # the one process of dp computes on several devices
    unit = "ranks" if (a.world_size, b.world_size) == (first["ranks"], second["ranks"]) else "devices"
    pairs = {unit: (first["ranks"], second["ranks"])}
    for name in sorted({*first["settings"], *second["settings"]}):
        pairs[name] = tuple(_setting_in_words(run, side["settings"], name) for run, side in ((a, first), (b, second)))
    pairs["DeepSpeed configuration"] = tuple(each["deepspeed_config"] and each["deepspeed_config"][:8]
                                             for each in (first, second))  # fmt: skip
    return [f"{name} {one} / {other}" for name, (one, other) in pairs.items() if one != other]


def _setting_in_words(run: Run, settings: dict[str, Any], name: str) -> Any:
    chosen = automatic_choices(run)
    if name in chosen:
        return f"auto ({chosen[name]})"
    return settings.get(name, run.section("settings").get(name))
