"""What becomes of each key of DeepSpeed's configuration file, in one table. No torch.

A file may come from a stranger, and DeepSpeed writes where it is told: only keys that stand here are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from testbed.config.deepspeed_scheduler import KINDS, is_number, shown
from testbed.config.flag_types import AUTO, LARGEST_COUNT

What = Literal["flag", "passed", "without effect", "refused"]


class Fate(NamedTuple):
    """What becomes of a key.

    Attributes:
        what: "flag": deepspeed_file.py takes the value for flags; "passed": DeepSpeed gets it; "without effect": any
            value is taken, and none changes the run; "refused": unless the value asks for nothing.
        said: the names of the flags, the kind of value that is passed, or the reason.
    """

    what: What
    said: str


def _is_whole(value: Any, least: int = 0, most: int = LARGEST_COUNT) -> bool:
    return is_number(value) and least <= value <= most and value == int(value)  # 5e8 is a float in JSON


SWITCH, WHOLE, COUNT, SHARE = "true or false", "a whole number from 0", "a whole number from 1", "a number from 0 to 1"
POWER, SCALE = "a whole number from 0 to 127", "a number from 0 to 2**127"  # what float32 holds
_IS_A: dict[str, Callable[[Any], bool]] = {
    SWITCH: lambda value: isinstance(value, bool),
    WHOLE: _is_whole,
    COUNT: lambda value: _is_whole(value, least=1),
    POWER: lambda value: _is_whole(value, most=127),
    SCALE: lambda value: is_number(value) and value <= 2.0**127,
    SHARE: lambda value: is_number(value) and value <= 1,
}
SECTIONS = (
    *("optimizer", "optimizer.params", "scheduler", "scheduler.params", "zero_optimization", "fp16", "bf16"),
    *("zero_optimization.offload_optimizer", "zero_optimization.offload_param", "activation_checkpointing"),
    "checkpoint",
)
_SCHEDULE = "lr_schedule, learning_rate, warmup_steps, warmup_shape, lr_decay_steps, decay_share, min_learning_rate"
# Names without "stage3_" are those of the fields in DeepSpeed; it takes both.
_STAGE_3_SIZES = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance module_granularity_threshold"
)
_STAGE_3_SWITCHES = "use_all_reduce_for_fetch_params allgather_sequential"


def _stage_3(names: str) -> str:
    return " ".join(f"{name} stage3_{name}" for name in names.split())


# what becomes of keys, what is said of it, and the names: a word that ends with a dot begins a section
_RECORDED = ("wall_clock_breakdown", False)  # passed on, as earlier runs recorded it
_ROWS: tuple[tuple[What, str, str], ...] = (
    ("flag", "micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu"),
    ("flag", "grad_accum_steps", "gradient_accumulation_steps"),
    ("flag", "global_batch_size", "train_batch_size"),
    ("flag", "max_grad_norm", "gradient_clipping"),
    ("flag", "steps_per_print", "steps_per_print"),
    ("flag", "optimizer", "optimizer. type"),
    ("flag", "learning_rate", "optimizer.params. lr"),
    ("flag", "adam_eps", "optimizer.params. eps"),
    ("flag", "weight_decay", "optimizer.params. weight_decay"),
    ("flag", "adam_beta1, adam_beta2", "optimizer.params. betas"),
    ("flag", "lr_schedule", "scheduler. type"),
    ("flag", _SCHEDULE, "scheduler.params. " + " ".join(sorted({name for kind in KINDS.values() for name in kind}))),
    ("flag", "zero_stage", "zero_optimization. stage"),
    ("flag", "reduce_bucket_size", "zero_optimization. reduce_bucket_size"),
    ("flag", "allgather_bucket_size", "zero_optimization. allgather_bucket_size"),
    ("flag", "overlap_comm", "zero_optimization. overlap_comm"),
    ("flag", "offload", "zero_optimization.offload_optimizer. device zero_optimization.offload_param. device"),
    ("flag", "precision", "fp16. enabled bf16. enabled"),
    ("passed", SWITCH,
     "zero_optimization. contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
     "ignore_unused_parameters round_robin_gradients parameter_alignment memory_efficient_linear "
     "override_module_apply log_trace_cache_warnings enable_sanity_checks " + _stage_3(_STAGE_3_SWITCHES)
     + " zero_optimization.offload_optimizer. pin_memory zero_optimization.offload_param. pin_memory "
     "fp16. consecutive_hysteresis bf16. immediate_grad_update check_grad_overflow"),
    ("passed", WHOLE, "zero_optimization. sub_group_size zero_hpz_partition_size " + _stage_3(_STAGE_3_SIZES)),
    ("passed", SHARE, "zero_optimization.offload_optimizer. ratio"),
    ("passed", SCALE, "fp16. loss_scale"),
    ("passed", POWER, "fp16. initial_scale_power"),
    ("passed", COUNT, "fp16. loss_scale_window hysteresis min_loss_scale"),
    ("without effect", "the optimizer is the testbed's, which DeepSpeed has to allow",
     "zero_allow_untested_optimizer optimizer.params. torch_adam"),
    ("without effect", "the testbed writes its checkpoints itself, with whole weights in fp32",
     "checkpoint. tag_validation zero_optimization. gather_16bit_weights_on_model_save "
     "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save"),
    ("refused", "every run type trains with the same AdamW or Muon; --optimizer chooses",
     "zero_force_ds_cpu_optimizer optimizer.params. adam_w_mode bias_correction amsgrad"),
    ("refused", "the gradient's norm is limited by gradient_clipping or --max_grad_norm",
     "optimizer.params. max_grad_norm"),
    ("refused", "the testbed writes and reads checkpoints itself, with --save_every and --resume",
     "nebula zero_optimization. load_from_fp32_weights elastic_checkpoint "
     "checkpoint. load_universal use_node_local_storage parallel_write"),
    ("refused", "the run would compute something else than its baseline",
     "compression_training quantize_training progressive_layer_drop eigenvalue sparse_attention data_efficiency "
     "curriculum_learning dataloader_drop_last prescale_gradients gradient_predivide_factor sparse_gradients "
     "zero_optimization. zenflow zero_quantized_weights zero_quantized_gradients"),
    ("refused", "it is an older name; write a section offload_optimizer or offload_param, or give --offload",
     "zero_optimization. cpu_offload cpu_offload_param cpu_offload_use_pin_memory"),
    ("refused", "the testbed offloads to host memory only, with --offload",
     "aio zero_optimization.offload_optimizer. nvme_path pipeline_read pipeline_write fast_init buffer_count "
     "zero_optimization.offload_param. nvme_path buffer_count buffer_size max_in_cpu"),
    ("refused", "it follows --precision, --mixed_precision and --matmul",
     "torch_autocast data_types fp8 amp bfloat16 communication_data_type fp16. auto_cast fp16_master_weights_and_grads "
     "bf16. bf16_master_weights_and_grads"),
    ("refused", "DeepSpeed's own recomputation is not used; give --activation_checkpointing",
     "activation_checkpointing. partition_activations contiguous_memory_optimization cpu_checkpointing profile "
     "synchronize_checkpoint_boundary number_checkpoints"),
    ("refused", "the testbed records every run itself, and writes only into its folder; give --track",
     "tensorboard wandb csv_monitor comet monitor_config dump_state"),
    ("refused", "it would wait for the device inside the step; give --profile",
     "flops_profiler memory_breakdown wall_clock_breakdown timers"),
    ("refused", "it would write outside the run's folder; give --log_collectives or --profile", "comms_logger"),
    ("refused", "it starts runs and writes their files; scripts/find_fastest.py compares runs", "autotuning"),
    ("refused", "ZeRO shares the model among all ranks alike; --run_type tensor and pipeline cut it otherwise",
     "pipeline tensor_parallel sequence_parallel_size"),
    ("refused", "it follows --compile", "compile"),
    ("refused", "DeepSpeed has removed it", "elasticity zero_optimization. legacy_stage1"),
)  # fmt: skip
_OFF: tuple[Any, ...] = (False, 0)
# where it is another value with which a refused key asks for nothing: DeepSpeed's defaults
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "optimizer.params.adam_w_mode": (True,),
    "optimizer.params.bias_correction": (True,),
    "optimizer.params.max_grad_norm": (),
    "zero_optimization.load_from_fp32_weights": (True,),
    "zero_optimization.offload_optimizer.buffer_count": (4,),
    "zero_optimization.offload_param.buffer_count": (5,),
    "zero_optimization.offload_param.buffer_size": (10**8,),
    "zero_optimization.offload_param.max_in_cpu": (10**9,),
    "gradient_predivide_factor": (1.0,),
    "sequence_parallel_size": (1,),
}


def _keys() -> Iterator[tuple[str, Fate]]:
    for what, said, words in _ROWS:
        section = ""
        for word in words.split():
            if word.endswith("."):
                section = word
            else:
                yield section + word, Fate(what, said)


KEYS: dict[str, Fate] = dict(_keys())


def faults_of_keys(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a sentence for each key that is unknown, refused, or of the wrong kind; flags check their own values."""
    for key, value in content.items():
        place = f"{prefix}{key}"
        if "." not in key and place in SECTIONS:
            if isinstance(value, dict):
                yield from faults_of_keys(value, f"{place}.")
            elif not is_nothing(value):
                yield f"{place} must be a JSON object"
        elif "." in key or place not in KEYS:
            yield f"{shown(place)} is not a key that the testbed knows, so it is not passed on to DeepSpeed; remove it"
        elif fault := _fault(place, KEYS[place], value):
            yield fault
        elif prefix == "zero_optimization." and f"stage3_{key}" in content:
            yield f"{place} and {prefix}stage3_{key} are two names of one key; keep one"


def _fault(place: str, fate: Fate, value: Any) -> str:
    """Return why a value cannot be taken; empty if it can."""
    if is_nothing(value):
        return ""
    if fate.what == "passed" and not _IS_A[fate.said](value):
        return f'{place} must be {fate.said} or "auto", not {shown(value)}'
    if fate.what != "refused" or _asks_for_nothing(value, _HARMLESS.get(place, _OFF)):
        return ""
    if "." in place or not isinstance(value, dict):
        return f"{place} = {shown(value)} cannot be taken: {fate.said}; remove it"
    return f"the section {place!r} cannot be taken: {fate.said}; remove it"


def is_nothing(value: Any) -> bool:
    """Return whether a value leaves it to the flags: null or "auto"."""
    return value is None or value == AUTO


def _asks_for_nothing(value: Any, harmless: tuple[Any, ...] = _OFF) -> bool:
    """Return whether a value of a refused key is harmless, or a section is off or holds only what is."""
    if isinstance(value, dict):
        return value.get("enabled") is False or all(map(_asks_for_nothing, value.values()))
    is_same = [value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless]  # 1 == True
    return is_nothing(value) or any(is_same)


def passed_on(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a checked file without what DeepSpeed need not see: what has no effect, or asks for nothing."""
    kept: dict[str, Any] = {}
    for key, value in content.items():
        place = f"{prefix}{key}"
        if place in SECTIONS and isinstance(value, dict):
            inside = passed_on(value, f"{place}.")
            if inside or place in ("zero_optimization", "optimizer", "fp16", "bf16") or "offload" in place:
                kept[key] = inside
        elif place in SECTIONS or KEYS[place].what in ("flag", "passed") or (place, value) == _RECORDED:
            kept[key] = value
    return kept


def table() -> str:
    """Return the list for the documentation, as Markdown: keys with the same fate share a row."""
    rows: dict[Fate, list[str]] = {}
    for key, fate in KEYS.items():
        rows.setdefault(fate, []).append(f"`{key}`")
    lines = ["| Key of the file | What becomes of it |", "|---|---|"]
    for (what, said), keys in rows.items():
        flags = ", ".join(f"`--{name}`" for name in said.split(", "))
        words = {"flag": f"taken as {flags}", "passed": f"passed to DeepSpeed: {said}"}.get(what, f"{what}: {said}")
        lines.append(f"| {', '.join(keys)} | {words} |")
    return "\n".join([*lines, "| any other | refused |"])
