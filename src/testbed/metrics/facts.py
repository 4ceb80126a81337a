"""Collect all of training_metrics.json that is known before the first step."""

from __future__ import annotations

import dataclasses
import os
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from testbed.autotune.attention import own_choice
from testbed.config.environment_variables import instruments_in
from testbed.config.run_types import STRATEGIES
from testbed.config.settings import CheckedRun, RunSettings
from testbed.config.table import FLAGS
from testbed.data.windows import Windows, num_windows
from testbed.distributed.launch import Launch, command_of_start
from testbed.io import now_utc
from testbed.metrics import environment
from testbed.metrics.file import SCHEMA_VERSION
from testbed.model import flops
from testbed.model.shape import size_name
from testbed.strategies.deepspeed_config import effective_config, sha256_of

STEPS_NOTE = "epochs[].steps counts micro steps, as in 2.0; read micro_steps and optimizer_steps instead"
_IN_CONFIG = {flag.in_config: name for name, flag in FLAGS.items() if flag.in_config}


def facts_of_run(
    checked: CheckedRun, sha256: dict[str, str], launch: Launch, device: torch.device, backend: str | None
) -> dict[str, Any]:
    """Return the file as it is before training; the recorder adds the rest.

    Args:
        sha256: of the token files, targets included, under "train" and "val".
    """
    settings = checked.settings
    commit, is_dirty = environment.commit()
    hardware = environment.hardware(device, launch, backend)
    multiplies_in = "fp8" if settings.compute.matmul == "fp8" else settings.compute.precision
    peak, peak_source = flops.peak_from_table(hardware["gpu_name"], multiplies_in) or (None, None)
    instruments = [*settings.instruments, *instruments_in(os.environ)]
    instruments += ["wall_clock_breakdown of DeepSpeed"] if _breaks_down_wall_clock(settings) else []
    facts: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run_id": f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{uuid.uuid4().hex[:8]}",  # noqa: TID251 - a moment, for people
        "timestamp_utc": now_utc(),
        "git_commit": commit,
        "git_dirty": is_dirty,
        "command_line": command_of_start(launch, sys.argv),
        "instrumented": bool(instruments),
        "instruments": instruments,
        "env": environment.versions(),
        "host": environment.host(),
        "hardware": {**hardware, "num_devices": _num_devices(settings, device, launch)},
        "training_config": _training_config(checked, sha256, device),
        "data": _data(checked),
        "settings": settings.as_recorded(),
        "deepspeed_config": _deepspeed_config(settings),
        "schema_notes": {"steps": STEPS_NOTE},
        "memory": {"per_rank": []},
        "flops": {
            "per_token_palm": flops.flops_per_token_palm(settings.shape, settings.data.seq_length),
            "per_token_causal": flops.flops_per_token_causal(settings.shape, settings.data.seq_length),
            "peak_flops_per_s_per_device": peak,
            "peak_source": peak_source,
        },
        "sample": None,
        "shutdown": {"destroy_process_group_called": False, "quiet_nccl_monitor": settings.compute.quiet_nccl_monitor},
    }
    slurm = environment.scheduler()
    if slurm is not None:
        facts["scheduler"] = slurm
    return facts


def _num_devices(settings: RunSettings, device: torch.device, launch: Launch) -> int:
    """Return one device per rank; for DataParallel's single process, all that are visible."""
    drives_all = STRATEGIES[settings.training.run_type].devices == "all" and device.type == "cuda"
    return torch.cuda.device_count() if drives_all else launch.world_size


def _training_config(checked: CheckedRun, sha256: dict[str, str], device: torch.device) -> dict[str, Any]:
    settings = checked.settings
    return {
        **{recorded: settings.value(name) for recorded, name in _IN_CONFIG.items()},
        "total_steps": settings.plan.total_steps,
        "data_world_size": settings.plan.data_world_size,
        "automatic_choices": {name: settings.value(name) for name in sorted(settings.origin.chosen)},
        "mesh": dataclasses.asdict(settings.plan.mesh),
        "math_changes": list(settings.plan.math_changes),
        "model_name": size_name(settings.shape),
        "model_size": settings.shape.describe(),
        "num_parameters": settings.shape.num_parameters,
        "optimizer": {"adamw": "AdamW", "muon": "Muon"}[settings.optimizer.name],
        "deepspeed_enabled": settings.deepspeed.zero_stage is not None,
        "dataset_name": Path(settings.data.train_data_path).stem,
        "dataset_subset_sizes": {
            "train": num_windows(checked.train_file, settings.data.seq_length),
            "val": num_windows(checked.val_file, settings.data.seq_length),
        },
        "dataset_sha256": sha256,
        "tokenizer": checked.train_file.tokenizer,
        "attention": f"sdpa {_kernel(settings, device)}",
    }


def _kernel(settings: RunSettings, device: torch.device) -> str:
    attention = settings.model.attention
    return own_choice(settings, device) if attention == "auto" else attention


def _data(checked: CheckedRun) -> dict[str, int | None]:
    settings = checked.settings
    used = settings.plan.steps_per_epoch * settings.batch.global_batch_size
    return {
        "tokens_train": len(checked.train_file.tokens),
        "tokens_val": len(checked.val_file.tokens),
        "sequences_per_epoch": used,
        "sequences_dropped_per_epoch": num_windows(checked.train_file, settings.data.seq_length) - used,
        "steps_per_epoch": settings.plan.steps_per_epoch,
        "target_tokens_train": _target_tokens(Windows(checked.train_file, settings.data.seq_length)),
        "target_tokens_val": _target_tokens(Windows(checked.val_file, settings.data.seq_length)),
    }


def _target_tokens(windows: Windows) -> int | None:
    """Return the tokens that are learned of a file of pairs; None for text."""
    return None if windows.token_file.targets is None else windows.num_target_tokens()


def _breaks_down_wall_clock(settings: RunSettings) -> bool:
    """Return whether DeepSpeed's timers synchronise the device several times a step."""
    file = settings.plan.deepspeed_file
    return file is not None and bool(file.content.get("wall_clock_breakdown", False))


def _deepspeed_config(settings: RunSettings) -> dict | None:
    file = settings.plan.deepspeed_file
    if file is None:
        return None
    effective = effective_config(settings)
    return {
        "path": str(file.path),
        "file_sha256": file.sha256,
        "sha256": sha256_of(effective),
        "selected": {
            "fp16_enabled": settings.compute.precision == "fp16",
            "wall_clock_breakdown": _breaks_down_wall_clock(settings),
            "zero_stage": settings.deepspeed.zero_stage,
        },
        "effective": effective,
    }
