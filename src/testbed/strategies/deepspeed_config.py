"""The effective DeepSpeed configuration: the user's file with what the flags decide."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings
from testbed.config.deepspeed_file import OFFLOADED
from testbed.config.flag_types import AUTO


def effective_config(settings: RunSettings) -> dict[str, Any]:
    """Return what `deepspeed.initialize` receives: the file with each "auto" filled in and each silent default named.

    The optimizer is the baseline's, not built by DeepSpeed, so no optimizer section remains.
    """
    assert settings.plan.deepspeed_file is not None, "only --run_type optimized trains with DeepSpeed"
    config = json.loads(json.dumps(settings.plan.deepspeed_file.content))
    config.pop("optimizer", None)
    config["train_batch_size"] = settings.batch.global_batch_size
    config["train_micro_batch_size_per_gpu"] = settings.batch.micro_batch_size_per_gpu
    config["gradient_accumulation_steps"] = settings.batch.grad_accum_steps
    config["steps_per_print"] = 2**31  # the run prints its own progress, outside the step clock
    # DeepSpeed's own throughput timer is on by default and waits for the device twice per micro batch.
    config["timers"] = {"throughput": {"enabled": False}}
    config["zero_optimization"] = _zero_section(config.get("zero_optimization", {}), settings)
    # DeepSpeed clips by itself unless told 0 (its default is 1.0). Stage 0 sums squares in float32, 3e-5 off at 124M
    # parameters, so there the strategy clips with the float64 norm of the other run types.
    config["gradient_clipping"] = 0.0 if settings.deepspeed.zero_stage == 0 else settings.optimizer.max_grad_norm
    config["zero_allow_untested_optimizer"] = True  # the same as in the baseline
    config["zero_force_ds_cpu_optimizer"] = False
    config.setdefault("fp16", {})["enabled"] = settings.compute.precision == "fp16"
    if settings.compute.precision != "fp16":
        config.pop("fp16")
    config.update(_bf16_sections(config.get("bf16", {}), settings))
    # What gradients are accumulated and averaged in. DeepSpeed's own default is the dtype of the weights; it is named
    # here. Its fp32 accumulation over bf16 weights would cost 4 bytes per gradient element in place of 2 (stages 2 and
    # 3: of a shard), in stage 1 an optimizer of its own (BF16_Optimizer) that holds both for the whole model.
    is_native = config["bf16"]["enabled"]
    weights = settings.compute.precision if is_native or settings.compute.precision == "fp16" else "fp32"
    config["data_types"] = {"grad_accum_dtype": weights}
    config.setdefault("communication_data_type", weights)
    return _without_auto(config)


def _zero_section(given: dict[str, Any], settings: RunSettings) -> dict[str, Any]:
    """Return the file's zero_optimization with the place of everything that a flag decides filled in."""
    zero = {
        **given,
        "stage": settings.deepspeed.zero_stage,
        "reduce_bucket_size": settings.deepspeed.reduce_bucket_size,
        "allgather_bucket_size": settings.deepspeed.allgather_bucket_size,
        "overlap_comm": settings.deepspeed.overlap_comm == "on",  # its own default depends on the stage
    }
    assert settings.deepspeed.offload is not None
    for section in OFFLOADED["parameters"]:
        zero[section] = {"device": "none"}
        if section in OFFLOADED[settings.deepspeed.offload]:
            of_file = given.get(section)
            own = of_file if isinstance(of_file, dict) else {}
            # page-locked memory is for copies to and from a GPU; a file may still refuse it
            is_pinned = settings.compute.device == "cuda" and own.get("pin_memory") is not False
            zero[section] = {**own, "device": "cpu", "pin_memory": is_pinned}
    return zero


def _bf16_sections(given: dict[str, Any], settings: RunSettings) -> dict[str, Any]:
    """Return the sections for bf16: by autocast over fp32 weights, like the baseline, or in DeepSpeed's own mode."""
    if settings.compute.precision == "bf16" and settings.compute.mixed_precision == "native":
        # bf16 weights and gradients, fp32 masters that begin at the rounded weights. Its defaults, as its users get
        # them, but named: a step whose gradients overflow is skipped, and its norm is recorded as infinite.
        own = {"immediate_grad_update": False, "check_grad_overflow": True, **given, "enabled": True}
        return {"bf16": own, "torch_autocast": {"enabled": False}}
    # Unless told of no "safe" modules, its autocast averages the gradients of every nn.Linear in bf16.
    autocast = {
        "enabled": settings.compute.precision == "bf16",
        "dtype": "bfloat16",
        "lower_precision_safe_modules": [],
    }
    return {"bf16": {"enabled": False}, "torch_autocast": autocast}


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """Drop what is still "auto": DeepSpeed's own default then holds (it does not know the word everywhere)."""
    kept = {key: value for key, value in config.items() if value != AUTO}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}


def sha256_of(config: dict[str, Any]) -> str:
    """Return the hash of a configuration, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
