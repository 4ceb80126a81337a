"""Runs of one configuration are an arm: the repeats that an interval is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from testbed.analysis.runs import Run

# Settings in which repeats of one configuration may differ: where they wrote, what they said, and the seed, which a
# protocol may vary on purpose (whether two arms then did equal work is another question, see comparability.py).
NOT_PART_OF_AN_ARM = frozenset(
    "checkpoint_path seed steps_per_print sample_prompt sample_tokens train_data_path val_data_path save_every "
    "keep_best timing_sample_every tensorboard".split()
)


@dataclass(frozen=True, eq=False)
class Arm:
    """All runs of one configuration, in the order of their paths."""

    label: str
    runs: tuple[Run, ...]

    @property
    def tokens_per_s(self) -> list[float]:
        """Throughput of every run that may enter a headline: one number per run is what repeats are."""
        return [run.tokens_per_s for run in self.measured_runs]

    @property
    def measured_runs(self) -> tuple[Run, ...]:
        """The runs that may enter a headline: finished, slowed down by no profiler, and no copies of one another."""
        fit = [
            run
            for run in self.runs
            if run.status == "complete" and not run.instrumented and run.tokens_per_s is not None
        ]
        return tuple(without_copies(fit)[0])


def without_copies(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[Run, str]]]:
    """The runs without copies of those before them, and each copy with the words that say of what.

    A copy has the run_id and the step times of another run: it is the same measurement, and no repeat. What records
    neither (versions 1 and 2.0) cannot be told to be a copy.
    """
    seen: dict[tuple, Run] = {}
    kept, copies = [], []
    for run in runs:
        key = (run.run_id, run.step_times_s.tobytes())
        if run.run_id is None or not len(run.step_times_s) or key not in seen:
            seen[key] = run
            kept.append(run)
        else:
            copies.append((run, f"a copy of {seen[key].path} (run_id {run.run_id}), and a copy is no repeat"))
    return kept, copies


def rank_count(run: Run) -> int | None:
    """Devices that compute: the ranks, but all devices of the single process of run type dp."""
    return run.record.get("hardware", {}).get("num_devices") or run.world_size


def hardware_of(run: Run, name: str) -> Any:
    """A field of the file's hardware; None: not recorded, or without a say in how fast the devices compute.

    Threads of the CPU count where the CPU computes. A GPU's ranks share the cores, so their threads follow from the
    number of ranks.
    """
    hardware = run.record.get("hardware", {})
    if name == "cpu_threads_per_rank" and hardware.get("device_type") != "cpu":
        return None
    return hardware.get(name)


def deepspeed_config_hash(run: Run) -> str | None:
    """SHA-256 of the effective DeepSpeed configuration: it holds options of a JSON file that no setting shows."""
    return (run.record.get("deepspeed_config") or {}).get("sha256")


def group_into_arms(runs: Sequence[Run]) -> list[Arm]:
    """Group runs, as `load_run` gives them, by configuration, in the order in which configurations first appear.

    Arms whose runs carry the same label get what their settings differ in added to it.
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(json.dumps(configuration(run), sort_keys=True, default=str), []).append(run)
    groups = list(members.values())
    labels = [group[0].label for group in groups]
    for label in {label for label in labels if labels.count(label) > 1}:
        alike = [number for number, other in enumerate(labels) if other == label]
        for number, added in zip(alike, _differing_settings([groups[number][0] for number in alike]), strict=True):
            labels[number] = f"{label}, {added}" if added else label
    return [Arm(label, tuple(group)) for label, group in zip(labels, groups, strict=True)]


def configuration(run: Run) -> dict[str, Any]:
    """What makes two runs repeats of one another: settings, work, devices, and whether they are instrumented."""
    settings = _settings(run)
    # How far a run came is no setting; the versions that record no settings have nothing else.
    left_out = {"seed", "optimizer_steps", "tokens"} if settings else {"seed"}
    return {
        "version": run.version,
        "label": None if settings else run.label,
        "settings": settings,
        "work": {name: value for name, value in run.work.items() if name not in left_out},
        "ranks": rank_count(run),
        "devices": [hardware_of(run, name) for name in ("device_type", "gpu_name", "cpu_name", "cpu_threads_per_rank")],
        "deepspeed_config": deepspeed_config_hash(run),
        "instrumented": run.instrumented,
    }


def _settings(run: Run) -> dict[str, Any]:
    recorded = run.record.get("settings", {})
    return {name: value for name, value in recorded.items() if name not in NOT_PART_OF_AN_ARM}


def _differing_settings(runs: Sequence[Run]) -> list[str]:
    """For each run the settings in which the runs differ, in words: "bucket_cap_mb 50".

    The hash of the DeepSpeed configuration stands beside them where they do not tell the runs apart.
    """
    settings = [_settings(run) for run in runs]
    names = sorted({name for each in settings for name in each})
    differing = [name for name in names if len({str(each.get(name)) for each in settings}) > 1]
    told = [", ".join(f"{name} {each.get(name)}" for name in differing) for each in settings]
    hashes = [f"DeepSpeed configuration {str(deepspeed_config_hash(run))[:8]}" for run in runs]
    if len(set(told)) == len(told) or len(set(hashes)) == 1:
        return told
    return [", ".join(filter(None, pair)) for pair in zip(told, hashes, strict=True)]
