"""The two sides of a comparison from what a user named: files, or folders that hold repeats at any depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from testbed.analysis.runs.arms import Arm, group_into_arms, without_copies
from testbed.analysis.runs.load import Run, find_runs, load_run
from testbed.errors import InputError, value_text
from testbed.io import missing

SHOWN = 6
RATE_TOLERANCE = 0.01  # rounding; a real contradiction is a factor
RECORDED_TWICE = ("activation_checkpointing", "zero_stage", "matmul")  # in two sections, by the same name and words


def arms_from(a: Sequence[Path], b: Sequence[Path]) -> tuple[Arm, Arm, list[str]]:
    """Return the arms A and B, and a sentence for each file found in a folder that cannot be read.

    InputError, one sentence: a named file that cannot be read, a folder without runs, a side that holds more than one
    configuration, a run that stands on both sides, a copy of a run that would count as a repeat, a file that
    contradicts itself.
    """
    unreadable: list[str] = []
    sides = {name: _load(name, paths, unreadable) for name, paths in (("A", a), ("B", b))}
    _refuse_runs_that_count_twice(sides)
    for name, runs in sides.items():
        for run in runs:
            if fault := contradiction(run):
                raise InputError(f"{name}: {run.path} contradicts itself: {fault}; it is not as a run wrote it")
    return _one_arm("A", sides["A"]), _one_arm("B", sides["B"]), unreadable


def _load(name: str, paths: Sequence[Path], unreadable: list[str]) -> list[Run]:
    files: dict[Path, Run] = {}
    for path in paths:
        if not path.exists():
            raise InputError(f"{name}: {path} {missing(path)}; name training_metrics.json files or folders of runs")
        found = find_runs(path) if path.is_dir() else [path]
        if not found:
            raise InputError(f"{name}: no training_metrics.json under {path}/; name the folder of a finished run")
        for file in found:
            if file.resolve() in files:
                continue
            try:
                files[file.resolve()] = load_run(file)
            except ValueError as error:
                if not path.is_dir():
                    raise InputError(f"{name}: {error}") from None
                unreadable.append(f"not counted: {error}")
    if not files:
        raise InputError(f"{name} holds no run that can be read: {'; '.join(unreadable)}")
    return [files[file] for file in sorted(files)]


def _refuse_runs_that_count_twice(sides: dict[str, list[Run]]) -> None:
    both = {run.path.resolve() for run in sides["A"]} & {run.path.resolve() for run in sides["B"]}
    if both:
        raise InputError(f"{sorted(both)[0]} stands on both sides; name different runs after --against")
    _, copies = without_copies([*sides["A"], *sides["B"]])
    if copies:
        raise InputError(f"{copies[0][0].path} is {copies[0][1]}; name each run once")


def contradiction(run: Run) -> str | None:
    """Return in what a file of version 2.2 says two things of one quantity, in a sentence; None if it does not."""
    if run.version != "2.2":
        return None
    config, settings = run.section("training_config"), run.section("settings")
    seconds = float(run.step_times_s.sum())
    if run.tokens_per_s and seconds > 0 and config.get("global_batch_size") and config.get("seq_len"):
        rate = config["global_batch_size"] * config["seq_len"] * len(run.step_times_s) / seconds
        if abs(run.tokens_per_s / rate - 1) > RATE_TOLERANCE:
            return f"its summary says {run.tokens_per_s:,.1f} tokens/s, its steps {rate:,.1f}"
    for name in RECORDED_TWICE:
        recorded, setting = config.get(name), settings.get(name)
        if None not in (recorded, setting) and recorded != setting:
            return f"its training_config has {name} {value_text(recorded)}, its settings {value_text(setting)}"
    return None


def _one_arm(name: str, runs: Sequence[Run]) -> Arm:
    """Return all of `runs` as one arm. How a run ended and whether it was instrumented is for `compare_arms` to judge.

    A profiler is a setting, so the profiled run of a sweep's cell is another configuration than its repeats; it counts
    for nothing here, and no more for the number of configurations.
    """
    arms = group_into_arms([run for run in runs if not run.instrumented] or runs)
    if len(arms) > 1:
        lines = [f"\n  {arm.label}: {arm.runs[0].path.parent}" for arm in arms[:SHOWN]]
        more = f"\n  and {len(arms) - SHOWN} more" if len(arms) > SHOWN else ""
        raise InputError(
            f"{name} holds {len(arms)} configurations, and a side is the repeats of one; name one of these:"
            f"{''.join(lines)}{more}"
        )
    return Arm(arms[0].label, tuple(runs))


def unreadable_text(unreadable: Sequence[str]) -> list[str]:
    hidden = len(unreadable) - SHOWN
    return [*unreadable[:SHOWN], *([f"not counted: {hidden} more files that cannot be read"] if hidden > 0 else [])]
