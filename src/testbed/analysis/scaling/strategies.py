"""Runs of a scaling study sorted into strategies and rank counts, and the arm that each is compared with.

A sweep says in sweep.json which cell a run belongs to. Without one, the settings decide: runs that differ only in
ranks, batch and seed are one strategy. An arm is the repeats of one strategy at one batch size on one number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from testbed.analysis.runs.arms import (
    Arm,
    arm_name,
    conditions,
    differing_conditions,
    how_text,
    rank_count,
    strategies_of,
    without_copies,
)
from testbed.analysis.runs.load import Run
from testbed.config.run_types import REFERENCE
from testbed.sweep.plan import Cell

INSTRUMENTED = "instrumented (a profiler or a debug switch was on): no throughput from it"
ALLOWED = "--allow-mismatch gives its figure, labelled"


@dataclass(frozen=True, eq=False)
class ScalingArm(Arm):
    """Repeats of one strategy at one batch size on one number of ranks; `batch_size` is per rank in weak scaling.

    `strategy` is what tells strategies apart, the plan's variant where there is one; `label` is its name for readers.
    """

    strategy: str
    batch_size: int | float | None
    is_planned: bool
    instrumented: tuple[Run, ...]  # the same configuration under a profiler: never throughput
    failed: tuple[Run, ...]  # the same configuration, never finished: no throughput, but no success

    @property
    def name(self) -> str:
        """ "ddp on 2 ranks"."""
        return arm_name(self.label, self.runs[0])

    @property
    def ranks(self) -> int:
        """Return the number of devices that compute; runs that do not record it are left out."""
        found = super().ranks
        assert found is not None
        return found


def sort_into_arms(
    runs: Sequence[Run],
    protocol: str,
    cells: Mapping[Path, Cell],
    allow_instrumented: bool = False,
) -> tuple[list[ScalingArm], dict[Run, str]]:
    """Return the arms by strategy (the baseline first), batch size and ranks, and why each other run was left out.

    Args:
        cells: folder of a run -> its cell in sweep.json.
        allow_instrumented: take instrumented runs for the throughput of configurations that have no others.
    """
    runs, copies = without_copies(runs)
    planned = {run for run in runs if not cells or run.path.parent in cells}
    left_out = {run: reason for run in runs if (reason := _why_left_out(run, run in planned))}
    plain = {_place(run, cells) for run in runs if run not in left_out}
    for run, reason in list(left_out.items()):
        is_alone = run in planned and run.tokens_per_s is not None and _place(run, cells) not in plain
        if reason == INSTRUMENTED and is_alone:
            left_out[run] = f"{INSTRUMENTED}; {ALLOWED}"
            if allow_instrumented:
                del left_out[run]
    profiled = [run for run, reason in left_out.items() if reason.startswith(INSTRUMENTED)]
    failed = [run for run in left_out if run in planned and run.status == "failed" and not run.instrumented]
    measured = [run for run in runs if run not in left_out]
    names = _names(measured, cells)
    members: dict[tuple, list[Run]] = {}
    for run in measured:
        key = (names[run][0], _batch_size(run, protocol), rank_count(run))
        members.setdefault(key, []).append(run)
    arms = [
        ScalingArm(
            names[members[key][0]][1],
            tuple(members[key]),
            strategy=key[0],
            batch_size=key[1],
            is_planned=members[key][0].path.parent in cells,
            instrumented=tuple(run for run in profiled if _identity(run) == _identity(members[key][0])),
            failed=tuple(run for run in failed if _place(run, cells) == _place(members[key][0], cells)),
        )
        for key in sorted(members, key=lambda key: (*_order(key[0]), key[1] or 0, key[2]))
    ]
    return arms, dict(copies) | left_out


def _why_left_out(run: Run, is_planned: bool) -> str | None:
    if rank_count(run) is None:
        return "the number of ranks is not recorded, and the throughput is of one of them"
    if run.status != "complete":
        return f"not complete, status {run.status}"
    if run.instrumented:
        return INSTRUMENTED
    if not is_planned:
        return "not in the plan of the sweep"
    return "no measured step" if run.tokens_per_s is None else None


def reference_of(arm: ScalingArm, arms: Sequence[ScalingArm]) -> ScalingArm | None:
    """Return the arm at one rank that speed-ups of `arm` are relative to.

    The baseline with the same settings beside the strategy's own (baseline:compile for ddp:compile); without one the
    plain baseline, and `reference_note` says what differs; without any baseline the same strategy. Where no plan says
    which batch sizes belong together, an arm without a reference of its own batch size gets one of another.
    """
    at_one_rank = [other for other in arms if other.ranks == 1]
    same_batch = [other for other in at_one_rank if other.batch_size == arm.batch_size]
    for candidates in (same_batch, [] if arm.is_planned else at_one_rank):
        baselines = [other for other in candidates if _is_baseline(other.strategy)]
        baselines.sort(key=lambda other: other.strategy != REFERENCE)
        if baselines and _is_baseline(arm.strategy):  # what a setting does to the baseline itself
            return baselines[0]
        if baselines:
            alike = (other for other in baselines if not differing_conditions(arm.runs, other.runs))
            return next(alike, baselines[0])
        if same := [other for other in candidates if other.strategy == arm.strategy]:
            return same[0]
    return None


def reference_note(arm: ScalingArm, reference: ScalingArm) -> str | None:
    """Return what else than the strategy the speed-up contains, because no baseline at one rank shares it."""
    differing = differing_conditions(arm.runs, reference.runs) if _is_baseline(reference.strategy) else []
    if not differing:
        return None
    sides = [[" and ".join(conditions(each.runs, name)) for each in (arm, reference)] for name in differing]
    words = ", ".join(f"{name} ({' against '.join(values)})" for name, values in zip(differing, sides, strict=True))
    return f"its reference, {reference.name}, differs in {words}, so the speed-up is of both"


def _is_baseline(strategy: str) -> bool:
    return strategy.partition(":")[0] == REFERENCE  # with settings of its own, such as baseline:compile


def _order(strategy: str) -> tuple:
    """Return a key that puts the baseline first, then names, numbers by size; a sweep takes its cells in turns."""
    parts = re.split(r"(\d+)", strategy)
    return not _is_baseline(strategy), [int(part) if part.isdecimal() else part for part in parts]


def _names(runs: Sequence[Run], cells: Mapping[Path, Cell]) -> dict[Run, tuple[str, str]]:
    """Return each run's strategy, the plan's variant or else what the settings say, and its name for readers."""
    names: dict[Run, tuple[str, str]] = {}
    called: dict[str, set[str]] = {}
    for run, found in zip(runs, strategies_of(runs), strict=True):
        cell = cells.get(run.path.parent)
        variant = found.variant if cell is None else cell.variant
        names[run] = (variant, found.name)
        called.setdefault(found.name, set()).add(variant)
    return {  # variants that differ in work alone have one name
        run: (variant, f"{name} ({variant})" if len(called[name]) > 1 else name)
        for run, (variant, name) in names.items()
    }


def _batch_size(run: Run, protocol: str) -> int | float | None:
    batch = run.work.get("global_batch_size")
    if batch is None or protocol != "weak":
        return batch
    per_rank = Fraction(batch, rank_count(run))
    return int(per_rank) if per_rank.denominator == 1 else float(per_rank)


def _place(run: Run, cells: Mapping[Path, Cell]) -> tuple:
    """Return where the plan puts a run; without one, what its settings say."""
    cell = cells.get(run.path.parent)
    return _identity(run) if cell is None else (cell.variant, cell.batch_size, rank_count(run))


def _identity(run: Run) -> tuple:
    """Return what a measured run and a run of the same configuration under a profiler have in common."""
    names = ("global_batch_size", "seq_len", "num_layers", "embedding_size", "precision")
    return (how_text(run, with_rank_settings=True), rank_count(run), *map(run.work.get, names))
