"""Runs of a scaling study sorted into strategies and rank counts, and what keeps them from being compared.

A sweep says in sweep.json which cell a run belongs to. Without one, the settings decide: runs that differ only in
ranks, batch and seed are one strategy. An arm is the repeats of one strategy at one batch size on one number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from testbed.analysis.arms import NOT_PART_OF_AN_ARM, hardware_of, rank_count, without_copies
from testbed.analysis.runs import WORK_FIELDS, Run

BASELINE = "baseline"

# Settings that follow the number of ranks. Arms that differ in them at the same ranks become strategies of their own.
_FOLLOW_RANKS = frozenset(
    "micro_batch_size_per_gpu grad_accum_steps pipeline_stages tensor_parallel_size shard_size threads_per_rank".split()
)
# Settings that say what is trained: they do not make another strategy, they make unequal work, and that is told.
_WORK_SETTINGS = frozenset(
    "epochs max_train_steps stop_at_step max_val_steps eval_every model num_layers num_heads embedding_size vocab_size "
    "max_position_embeddings dropout init_from seq_length global_batch_size enforce_global_batch_size learning_rate "
    "min_learning_rate warmup_steps lr_decay_steps weight_decay adam_beta1 adam_beta2 adam_eps max_grad_norm precision "
    "target_val_loss".split()
)
# How a run is looked at, not what it does; and what is compared as hardware.
_LOOKING = frozenset(
    "profile profile_mode timing_warmup_steps quiet_nccl_monitor device config overwrite resume".split()
)

# What a time to loss must have in common. Batch, schedule, optimizer and steps may be what is being compared.
_TASK_FIELDS = (
    *("num_layers", "num_heads", "embedding_size", "vocab_size", "max_position_embeddings", "init_from", "seq_len"),
    *("train_data_sha256", "val_data_sha256", "val_tokens"),
)
_IN_PROPORTION = ("global_batch_size", "tokens")  # in weak scaling, to the ranks
_HARDWARE_FIELDS = ("device_type", "gpu_name", "cpu_name", "cpu_threads_per_rank", "instance_type")


@dataclass(frozen=True, eq=False)
class ScalingArm:
    """Repeats of one strategy at one batch size on `ranks` devices; `batch_size` as the protocol holds it fixed."""

    strategy: str
    batch_size: int | None
    ranks: int
    runs: tuple[Run, ...]
    instrumented: tuple[Run, ...] = field(default=())  # the same configuration under a profiler: never throughput
    failed: tuple[Run, ...] = field(default=())  # the same configuration, never finished: no throughput, but no success
    stray_of: int | float | None = None  # without a plan: the batch size of the series whose work this arm does not do


def sort_into_arms(
    runs: Sequence[Run], protocol: str, cells: Mapping[Path, dict] | None = None
) -> tuple[list[ScalingArm], list[dict]]:
    """The arms by strategy (the baseline first), batch size and ranks, and what was left out: {path, reason}.

    Args:
        cells: folder of a run -> its cell in sweep.json.
    """
    left_out, measured, instrumented, failed = [], [], [], []
    runs, copies = without_copies(runs)
    left_out += [_left_out(run, reason) for run, reason in copies]
    for run in runs:
        if (ranks := rank_count(run)) is None:
            left_out.append(_left_out(run, "the number of ranks is not recorded, and the throughput is of one of them"))
        elif run.status != "complete":
            left_out.append(_left_out(run, f"not complete, status {run.status}"))
            if run.status == "failed" and not run.instrumented and (not cells or run.path.parent in cells):
                failed.append((run, ranks))
        elif run.instrumented:
            instrumented.append((run, ranks))
            left_out.append(_left_out(run, "instrumented (a profiler or a debug switch was on): no throughput from it"))
        elif cells and run.path.parent not in cells:
            left_out.append(_left_out(run, "not in the plan of the sweep"))
        elif run.tokens_per_s is None:
            left_out.append(_left_out(run, "no measured step"))
        else:
            measured.append((run, ranks))
    arms = _arms(measured, protocol, cells or {})
    profiled: dict[tuple, list[Run]] = {}
    for run, ranks in instrumented:
        profiled.setdefault(_identity(run, ranks), []).append(run)
    lost: dict[tuple, list[Run]] = {}
    for run, ranks in failed:
        lost.setdefault(_place(run, ranks, cells or {}), []).append(run)
    return [
        replace(
            arm,
            instrumented=tuple(profiled.get(_identity(arm.runs[0], arm.ranks), ())),
            failed=tuple(lost.get(_place(arm.runs[0], arm.ranks, cells or {}), ())),
        )
        for arm in arms
    ], left_out


def _place(run: Run, ranks: int, cells: Mapping[Path, dict]) -> tuple:
    """Where the plan puts a run; without one, what its settings say."""
    cell = cells.get(run.path.parent)
    return _identity(run, ranks) if cell is None else (cell["variant"], cell.get("batch_size"), ranks)


def reference_of(arm: ScalingArm, arms: Sequence[ScalingArm]) -> ScalingArm | None:
    """The arm that speed-ups of `arm` are relative to: baseline at one rank, else the same strategy at one rank."""
    batch = arm.batch_size if arm.stray_of is None else arm.stray_of
    at_one_rank = [other for other in arms if other.ranks == 1 and other.batch_size == batch]
    wanted = (
        lambda other: other.strategy == BASELINE,
        lambda other: _is_baseline(other.strategy),
        lambda other: other.strategy == arm.strategy,
    )
    return next((other for is_it in wanted for other in at_one_rank if is_it(other)), None)


def mismatches(arm: ScalingArm, reference: ScalingArm, protocol: str) -> list[dict[str, Any]]:
    """Fields in which a run of `arm` did other work, or worked on other hardware, than the first run of `reference`.

    {field, baseline, mismatch}: one entry per field and value. None: not recorded, which is not equal. In weak scaling
    the global batch and the tokens must grow exactly with the ranks; the seed may differ between repeats, but both arms
    must have drawn theirs from the same ones.
    """
    first = reference.runs[0]
    found: list[dict[str, Any]] = []
    for run in arm.runs:
        pairs = _compared_fields(run, first, protocol)
        pairs |= {f"hardware.{name}": (hardware_of(first, name), hardware_of(run, name)) for name in _HARDWARE_FIELDS}
        pairs["throughput is"] = (first.tokens_per_s_meaning, run.tokens_per_s_meaning)
        for name, (expected, value) in pairs.items():
            is_optional = name.startswith("hardware.")  # the name of a GPU on a CPU; None on both sides agrees
            if expected == value and (value is not None or is_optional):
                continue
            scaled = protocol == "weak" and name in _IN_PROPORTION and None not in (expected, value)
            if scaled and expected * arm.ranks == value * reference.ranks:
                continue
            entry = {"field": name, "baseline": expected, "mismatch": value}
            if entry not in found:
                found.append(entry)
    seeds, expected_seeds = ({run.work.get("seed") for run in each.runs} for each in (arm, reference))
    if protocol != "time_to_loss" and not (seeds <= expected_seeds or expected_seeds <= seeds):
        found.append({"field": "seed", "baseline": sorted(expected_seeds, key=str), "mismatch": sorted(seeds, key=str)})
    return found


def _is_baseline(strategy: str) -> bool:
    return strategy.partition(":")[0] == BASELINE  # with settings of its own, such as baseline:compile


def _compared_fields(run: Run, first: Run, protocol: str) -> dict[str, tuple[Any, Any]]:
    if protocol == "time_to_loss":
        known = [{**each.work, **each.validation} for each in (first, run)]
        return {name: (known[0].get(name), known[1].get(name)) for name in _TASK_FIELDS}
    # The seed of a repeat is the protocol's own; whether both arms used the same ones is asked of the whole arm. One
    # that is not recorded is asked here, like every field.
    names = [name for name in WORK_FIELDS if name != "seed" or None in (run.work.get(name), first.work.get(name))]
    return {name: (first.work.get(name), run.work.get(name)) for name in names}


def _left_out(run: Run, reason: str) -> dict[str, str]:
    return {"path": str(run.path), "reason": reason}


def _arms(measured: Sequence[tuple[Run, int]], protocol: str, cells: Mapping[Path, dict]) -> list[ScalingArm]:
    names = _strategy_names([run for run, _ in measured], cells)
    batches = [_batch_size(run, ranks, protocol, cells) for run, ranks in measured]
    # Without a plan, a batch size that nothing at one rank shares is no second series: it is unequal work, to be named.
    # A strategy that ran at several batch sizes on those ranks keeps them apart, for they are no repeats.
    referenced = {
        (name, batch)
        for name, batch, (_, ranks) in zip(names, batches, measured, strict=True)
        if ranks == 1 and batch is not None
    }
    ran_at: dict[tuple, set] = {}
    for name, batch, (_, ranks) in zip(names, batches, measured, strict=True):
        ran_at.setdefault((name, ranks), set()).add(batch)
    members: dict[tuple, list[Run]] = {}
    stray_of: dict[tuple, int | float | None] = {}
    for name, batch, (run, ranks) in zip(names, batches, measured, strict=True):
        own = [known for owner, known in sorted(referenced, key=str) if owner == name or _is_baseline(owner)]
        if run.path.parent not in cells and batch not in own:
            others = [known for other, known in zip(names, batches, strict=True) if other == name]
            if len(ran_at[name, ranks]) == 1:
                batch = (own or others)[0]
            elif own:
                stray_of[name, batch, ranks] = own[0]
        members.setdefault((name, batch, ranks), []).append(run)
    # The baseline first, then as planned, or else as found.
    planned = [cell["variant"] for cell in cells.values()]
    order = {name: place for place, name in reversed(list(enumerate([*planned, *names])))}
    return [
        ScalingArm(name, batch, ranks, tuple(members[name, batch, ranks]), stray_of=stray_of.get((name, batch, ranks)))
        for name, batch, ranks in sorted(
            members, key=lambda key: (not _is_baseline(key[0]), order[key[0]], key[1] or 0, key[2])
        )
    ]


def _batch_size(run: Run, ranks: int, protocol: str, cells: Mapping[Path, dict]) -> int | float | None:
    cell = cells.get(run.path.parent)
    batch = run.work.get("global_batch_size") if cell is None else cell.get("batch_size")
    if cell is not None or batch is None or protocol != "weak":
        return batch
    per_rank = Fraction(batch, ranks)
    return int(per_rank) if per_rank.denominator == 1 else float(per_rank)


def _identity(run: Run, ranks: int) -> tuple:
    """What a measured run and a run of the same configuration under a profiler have in common."""
    work = [
        run.work.get(name) for name in ("global_batch_size", "seq_len", "num_layers", "embedding_size", "precision")
    ]
    return (_how(run, with_rank_settings=True), ranks, *work)


def _how(run: Run, with_rank_settings: bool) -> str:
    """The settings that say how a step is spread over the ranks, as text to compare."""
    recorded = run.record.get("settings", {})
    config = run.record.get("training_config", {})
    ignored = NOT_PART_OF_AN_ARM | _WORK_SETTINGS | _LOOKING | (frozenset() if with_rank_settings else _FOLLOW_RANKS)
    # A switch that is off and a setting that older files lack say the same.
    how = {name: value for name, value in recorded.items() if name not in ignored and value not in (None, False)}
    how |= {name: config.get(name) for name in ("run_type", "zero_stage", "deepspeed_enabled")}
    return json.dumps(how, sort_keys=True, default=str)


def _strategy_names(runs: Sequence[Run], cells: Mapping[Path, dict]) -> list[str]:
    """For each run the name of its strategy: the plan's variant, else the run type and what sets it apart."""
    conflicts: dict[tuple, set[str]] = {}
    for run in runs:
        place = (_how(run, False), rank_count(run), run.work.get("global_batch_size"))
        conflicts.setdefault(place, set()).add(_how(run, True))
    split = {how for (how, *_), found in conflicts.items() if len(found) > 1}
    keys = [_how(run, with_rank_settings=_how(run, False) in split) for run in runs]
    names: dict[str, str] = {}
    for run, key in zip(runs, keys, strict=True):
        names.setdefault(key, _plain_name(run))
    for name in [name for name in set(names.values()) if list(names.values()).count(name) > 1]:
        alike = {key: json.loads(key) for key, other in names.items() if other == name}
        settings = sorted({setting for each in alike.values() for setting in each})
        differing = [setting for setting in settings if len({str(each.get(setting)) for each in alike.values()}) > 1]
        for key, each in alike.items():
            names[key] = f"{name}:{','.join(f'{setting}={each.get(setting)}' for setting in differing)}"
    return [
        cells[run.path.parent]["variant"] if run.path.parent in cells else names[key]
        for run, key in zip(runs, keys, strict=True)
    ]


def _plain_name(run: Run) -> str:
    config = run.record.get("training_config", {})
    if run.run_type is None:  # 2.0: the label starts with what its command line says
        return run.label.partition(",")[0]
    zero = config.get("zero_stage") if config.get("deepspeed_enabled") else None
    return run.run_type + (f":zero_stage={zero}" if zero is not None else "")
