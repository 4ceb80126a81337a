"""Runs of a scaling study sorted into strategies and rank counts, and what keeps them from being compared.

A sweep says in sweep.json which cell a run belongs to. Without one, the settings decide: runs that differ only in
ranks, batch and seed are one strategy. An arm is the repeats of one strategy at one batch size on one number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from testbed.analysis.runs.arms import (
    DEVICE_FIELDS,
    Arm,
    arm_name,
    conditions,
    differing_conditions,
    hardware_of,
    how_text,
    rank_count,
    strategies_of,
    without_copies,
)
from testbed.analysis.runs.comparability import INSTRUMENTS, differing_work, instruments_in_words, unlike_seeds
from testbed.analysis.runs.load import Run
from testbed.config.run_types import REFERENCE

INSTRUMENTED = "instrumented (a profiler or a debug switch was on): no throughput from it"
ALLOWED = "--allow-mismatch gives its figure, labelled"


@dataclass(frozen=True, eq=False)
class ScalingArm(Arm):
    """Repeats of one strategy at one batch size on one number of ranks; `batch_size` is per rank in weak scaling.

    `strategy` is what tells strategies apart, the plan's variant where there is one; `label` is its name for readers.
    """

    strategy: str
    batch_size: int | None
    instrumented: tuple[Run, ...] = ()  # the same configuration under a profiler: never throughput
    failed: tuple[Run, ...] = ()  # the same configuration, never finished: no throughput, but no success
    stray_of: int | float | None = None  # without a plan: the batch size of the series whose work this arm does not do

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

    @property
    def series(self) -> int | float | None:
        """Return the batch size that the arm is compared at, which a stray does not have itself."""
        return self.batch_size if self.stray_of is None else self.stray_of


def sort_into_arms(
    runs: Sequence[Run], protocol: str, cells: Mapping[Path, dict] | None = None, allow_instrumented: bool = False
) -> tuple[list[ScalingArm], list[dict]]:
    """Return the arms by strategy (the baseline first), batch size and ranks, and what was left out: {path, reason}.

    Args:
        cells: folder of a run -> its cell in sweep.json.
        allow_instrumented: take instrumented runs for the throughput of configurations that have no others.
    """
    cells = cells or {}
    runs, copies = without_copies(runs)
    left_out = [_left_out(run, reason) for run, reason in copies]
    measured: list[Run] = []
    instrumented: list[Run] = []
    failed: dict[tuple, list[Run]] = {}
    for run in runs:
        is_planned = not cells or run.path.parent in cells
        if rank_count(run) is None:
            left_out.append(_left_out(run, "the number of ranks is not recorded, and the throughput is of one of them"))
        elif run.status != "complete":
            left_out.append(_left_out(run, f"not complete, status {run.status}"))
            if run.status == "failed" and not run.instrumented and is_planned:
                failed.setdefault(_place(run, cells), []).append(run)
        elif run.instrumented:
            instrumented.append(run)
        elif not is_planned:
            left_out.append(_left_out(run, "not in the plan of the sweep"))
        elif run.tokens_per_s is None:
            left_out.append(_left_out(run, "no measured step"))
        else:
            measured.append(run)
    plain = {_place(run, cells) for run in measured}
    profiled: dict[tuple, list[Run]] = {}
    for run in instrumented:
        is_planned = not cells or run.path.parent in cells
        is_alone = is_planned and run.tokens_per_s is not None and _place(run, cells) not in plain
        if is_alone and allow_instrumented:
            measured.append(run)
        else:
            profiled.setdefault(_identity(run), []).append(run)
            left_out.append(_left_out(run, f"{INSTRUMENTED}; {ALLOWED}" if is_alone else INSTRUMENTED))
    return [
        replace(
            arm,
            instrumented=tuple(profiled.get(_identity(arm.runs[0]), ())),
            failed=tuple(failed.get(_place(arm.runs[0], cells), ())),
        )
        for arm in _arms(measured, protocol, cells)
    ], left_out


def _place(run: Run, cells: Mapping[Path, dict]) -> tuple:
    """Return where the plan puts a run; without one, what its settings say."""
    cell = cells.get(run.path.parent)
    return _identity(run) if cell is None else (cell["variant"], cell.get("batch_size"), rank_count(run))


def reference_of(arm: ScalingArm, arms: Sequence[ScalingArm]) -> ScalingArm | None:
    """Return the arm at one rank that speed-ups of `arm` are relative to.

    The baseline with the same settings beside the strategy's own (baseline:compile for ddp:compile); without one the
    plain baseline, and `reference_note` says what differs; without any baseline the same strategy.
    """
    at_one_rank = [other for other in arms if other.ranks == 1 and other.batch_size == arm.series]
    baselines = [other for other in at_one_rank if _is_baseline(other.strategy)]
    baselines.sort(key=lambda other: other.strategy != REFERENCE)
    if not baselines:
        return next((other for other in at_one_rank if other.strategy == arm.strategy), None)
    if _is_baseline(arm.strategy):  # what a setting does to the baseline itself
        return baselines[0]
    alike = (other for other in baselines if not differing_conditions(arm.runs, other.runs))
    return next(alike, baselines[0])


def reference_note(arm: ScalingArm, reference: ScalingArm) -> str | None:
    """Return what else than the strategy the speed-up contains, because no baseline at one rank shares it."""
    if not _is_baseline(reference.strategy):
        return None
    differing = differing_conditions(arm.runs, reference.runs)
    if not differing:
        return None
    words = ", ".join(f"{name} ({_values(arm, name)} against {_values(reference, name)})" for name in differing)
    return f"its reference, {reference.name}, differs in {words}, so the speed-up is of both"


def _values(arm: ScalingArm, name: str) -> str:
    return " and ".join(conditions(arm.runs, name))


def mismatches(arm: ScalingArm, reference: ScalingArm, protocol: str) -> list[dict[str, Any]]:
    """Return the fields in which a run of `arm` did other work, or ran elsewhere, than the first run of `reference`.

    {field, baseline, mismatch}: one entry per field and value. None: not recorded, which is not equal. The seed may
    differ between repeats, but both arms must have drawn theirs from the same ones.
    """
    first = reference.runs[0]
    found: list[tuple[Any, ...]] = []
    for run in arm.runs:
        for item in differing_work((first, run), protocol):
            if item.field != "seed" or None in item.recorded:  # seeds are asked of the whole arm
                found.append((item.field, *item.recorded))
        elsewhere = [(f"hardware.{name}", hardware_of(first, name), hardware_of(run, name)) for name in DEVICE_FIELDS]
        elsewhere.append(("throughput is", first.tokens_per_s_meaning, run.tokens_per_s_meaning))
        if run.instrumented or first.instrumented:
            found.append((INSTRUMENTS, instruments_in_words(first), instruments_in_words(run)))
        found += [each for each in elsewhere if each[1] != each[2]]
    if protocol != "time_to_loss" and unlike_seeds(arm.runs, reference.runs):
        seeds = (sorted({run.work.get("seed") for run in each.runs}, key=str) for each in (reference, arm))
        found.append(("seed", *seeds))
    entries = [dict(zip(("field", "baseline", "mismatch"), each, strict=True)) for each in found]
    return [entry for number, entry in enumerate(entries) if entry not in entries[:number]]


def _is_baseline(strategy: str) -> bool:
    return strategy.partition(":")[0] == REFERENCE  # with settings of its own, such as baseline:compile


def _left_out(run: Run, reason: str) -> dict[str, str]:
    return {"path": str(run.path), "reason": reason}


def _arms(measured: Sequence[Run], protocol: str, cells: Mapping[Path, dict]) -> list[ScalingArm]:
    names, shown = _strategies(measured, cells)
    batches = [_batch_size(run, protocol, cells) for run in measured]
    rows = list(zip(measured, names, batches, map(rank_count, measured), strict=True))
    # Without a plan, a batch size that nothing at one rank shares is not a second series but unequal work, to be named.
    # A strategy that ran at several batch sizes on those ranks keeps them apart, for they are not repeats.
    referenced = {(name, batch) for _, name, batch, ranks in rows if ranks == 1 and batch is not None}
    ran_at: dict[tuple, set] = {}
    for _, name, batch, ranks in rows:
        ran_at.setdefault((name, ranks), set()).add(batch)
    members: dict[tuple, list[Run]] = {}
    stray_of: dict[tuple, int | float | None] = {}
    for run, name, batch, ranks in rows:
        own = [known for owner, known in sorted(referenced, key=str) if owner == name or _is_baseline(owner)]
        series = cells.get(run.path.parent, {}).get("compared_at", batch)
        if run.path.parent not in cells and batch not in own:
            first = batches[names.index(name)]
            series = own[0] if own else first if len(ran_at[name, ranks]) == 1 else batch
        if series != batch:
            stray_of[name, batch, ranks] = series
        members.setdefault((name, batch, ranks), []).append(run)
    return [
        ScalingArm(shown[members[key][0]], tuple(members[key]), key[0], key[1], stray_of=stray_of.get(key))
        for key in sorted(members, key=lambda key: (*_order(key[0]), key[1] or 0, key[2]))
    ]


def _order(strategy: str) -> tuple:
    """Return a key that puts the baseline first, then names, numbers by size; a sweep takes its cells in turns."""
    parts = re.split(r"(\d+)", strategy)
    return not _is_baseline(strategy), [int(part) if part.isdecimal() else part for part in parts]


def _strategies(runs: Sequence[Run], cells: Mapping[Path, dict]) -> tuple[list[str], dict[Run, str]]:
    """Return each run's strategy, the plan's variant or else what the settings say, and the name to show for it."""
    found = strategies_of(runs)
    variants = [
        cells[run.path.parent]["variant"] if run.path.parent in cells else strategy.variant
        for run, strategy in zip(runs, found, strict=True)
    ]
    called: dict[str, set[str]] = {}
    for variant, strategy in zip(variants, found, strict=True):
        called.setdefault(strategy.name, set()).add(variant)
    return variants, {  # variants that differ in work alone have one name
        run: strategy.name + (f" ({variant})" if len(called[strategy.name]) > 1 else "")
        for run, variant, strategy in zip(runs, variants, found, strict=True)
    }


def _batch_size(run: Run, protocol: str, cells: Mapping[Path, dict]) -> int | float | None:
    cell = cells.get(run.path.parent, {})
    if "batch_size" in cell:
        return cell["batch_size"]
    batch = run.work.get("global_batch_size")
    if batch is None or protocol != "weak":
        return batch
    per_rank = Fraction(batch, rank_count(run))
    return int(per_rank) if per_rank.denominator == 1 else float(per_rank)


def _identity(run: Run) -> tuple:
    """Return what a measured run and a run of the same configuration under a profiler have in common."""
    work = [
        run.work.get(name) for name in ("global_batch_size", "seq_len", "num_layers", "embedding_size", "precision")
    ]
    return (how_text(run, with_rank_settings=True), rank_count(run), *work)
