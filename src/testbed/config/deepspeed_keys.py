"""What becomes of each key of DeepSpeed's configuration file, in one table. No torch.

A file may come from a stranger, and DeepSpeed writes where it is told: only keys that stand here are passed on.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from testbed.config.deepspeed_scheduler import KINDS, is_number, shown
from testbed.config.flag_types import AUTO, LARGEST_COUNT


def _is_whole(value: Any, least: int = 0, most: int = LARGEST_COUNT) -> bool:
    return is_number(value) and least <= value <= most and value == int(value)  # 5e8 is a float in JSON


_RECORDED = ("wall_clock_breakdown", False)  # passed on, as earlier runs recorded it
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


@dataclass(frozen=True)
class Fate:
    """What becomes of a key.

    Attributes:
        what: "flag": flags say the same, and deepspeed_file.py takes the value for them; "passed": DeepSpeed gets the
            value; "without effect": any value is taken, and none changes the run; "refused": with the reason, unless it
            has a value that asks for nothing, which is not passed on.
        said: the names of the flags, the kind of value that is passed, or the reason.
        harmless: values that ask for nothing, where it is refused. Of a section, an object with the values of its keys
            that do. Empty: any value asks for something.
    """

    what: Literal["flag", "passed", "without effect", "refused"]
    said: str
    harmless: tuple[Any, ...] = (False,)


Flag, Passed = functools.partial(Fate, "flag"), functools.partial(Fate, "passed")
Refused, WithoutEffect = functools.partial(Fate, "refused"), functools.partial(Fate, "without effect")
SECTIONS: tuple[str, ...] = ("optimizer", "optimizer.params", "scheduler", "scheduler.params", "zero_optimization")
SECTIONS += ("zero_optimization.offload_optimizer", "zero_optimization.offload_param", "fp16", "bf16")
SECTIONS += ("activation_checkpointing", "checkpoint")
_QUANTIZING = "it rounds what it sends, so the run would compute something else than its baseline"
_OLDER_NAME = 'it is an older name; write "{}": {{"device": "cpu"}} instead, or give --offload'
_GONE = "DeepSpeed has removed it"
_OTHER = "it would train another model or on other batches"
_PRECISION = "it follows --precision and --mixed_precision"
_OWN_CHECKPOINTS = "the testbed writes and reads checkpoints itself, with --save_every and --resume"
_NVME = "the testbed offloads to host memory only, with --offload"
_OWN_ADAMW = "every run type trains with the same AdamW or Muon; --optimizer chooses"
_RECOMPUTE = "DeepSpeed's own recomputation is not used; give --activation_checkpointing"
_MONITOR = "the testbed records every run itself, and writes only into its folder; give --tensorboard"
_SUMMED = "gradients are averaged, not summed"
_RANKS = "ZeRO shares the model among all ranks alike; --run_type tensor and pipeline cut it otherwise"
_ZENFLOW = "it updates weights with older gradients than the baseline does"
_TRACE = "it would wait for the device inside the step; give --profile"


def _each(names: str, fate: Fate, section: str = "") -> dict[str, Fate]:
    return {f"{section}.{name}" if section else name: fate for name in names.split()}


_ZERO, _OPTIMIZER = "zero_optimization", "zero_optimization.offload_optimizer"
_PARAM = "zero_optimization.offload_param"
# Names without "stage3_" are those of the fields in DeepSpeed; it takes both.
_STAGE_3_SIZES = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance module_granularity_threshold"
)
_STAGE_3_SWITCHES = "use_all_reduce_for_fetch_params allgather_sequential"

# DeepSpeed's defaults of sections that do nothing with them
_AIO = {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "thread_count": 1, "overlap_events": True}
_PIPELINE = {"partition": "best", "activation_checkpoint_interval": 0, "pipe_partitioned": True,
             "grad_partitioned": True}  # fmt: skip
_COMPILE = {"free_activation_threshold": 10 * 1024 * 1024, "offload_activation_pin_memory": True,
            "double_buffer": True, "keep_int_input_tensors": True}  # fmt: skip

KEYS: dict[str, Fate] = {
    "train_micro_batch_size_per_gpu": Flag("micro_batch_size_per_gpu"),
    "gradient_accumulation_steps": Flag("grad_accum_steps"),
    "train_batch_size": Flag("global_batch_size"),
    "gradient_clipping": Flag("max_grad_norm"),
    "steps_per_print": Flag("steps_per_print"),
    "optimizer.type": Flag("optimizer"),
    "optimizer.params.lr": Flag("learning_rate"),
    "optimizer.params.eps": Flag("adam_eps"),
    "optimizer.params.weight_decay": Flag("weight_decay"),
    "optimizer.params.betas": Flag("adam_beta1, adam_beta2"),
    "scheduler.type": Flag("lr_schedule"),
    **_each(" ".join(sorted({name for kind in KINDS.values() for name in kind})),
            Flag("lr_schedule, learning_rate, warmup_steps, warmup_shape, lr_decay_steps, decay_share, "
                 "min_learning_rate"), "scheduler.params"),
    "zero_optimization.stage": Flag("zero_stage"),
    "zero_optimization.reduce_bucket_size": Flag("reduce_bucket_size"),
    "zero_optimization.allgather_bucket_size": Flag("allgather_bucket_size"),
    "zero_optimization.overlap_comm": Flag("overlap_comm"),
    **_each("device", Flag("offload"), _OPTIMIZER),
    **_each("device", Flag("offload"), _PARAM),
    "fp16.enabled": Flag("precision"),
    "bf16.enabled": Flag("precision"),
    # passed on
    **_each("contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions "
            "ignore_unused_parameters round_robin_gradients parameter_alignment memory_efficient_linear "
            f"override_module_apply log_trace_cache_warnings enable_sanity_checks {_STAGE_3_SWITCHES}",
            Passed(SWITCH), _ZERO),
    **_each(" ".join(f"stage3_{name}" for name in _STAGE_3_SWITCHES.split()), Passed(SWITCH), _ZERO),
    **_each(f"sub_group_size zero_hpz_partition_size {_STAGE_3_SIZES}", Passed(WHOLE), _ZERO),
    **_each(" ".join(f"stage3_{name}" for name in _STAGE_3_SIZES.split()), Passed(WHOLE), _ZERO),
    **_each("pin_memory", Passed(SWITCH), _OPTIMIZER),
    **_each("ratio", Passed(SHARE), _OPTIMIZER),
    **_each("pin_memory", Passed(SWITCH), _PARAM),
    **_each("loss_scale", Passed(SCALE), "fp16"),
    **_each("initial_scale_power", Passed(POWER), "fp16"),
    **_each("loss_scale_window hysteresis min_loss_scale", Passed(COUNT), "fp16"),
    **_each("consecutive_hysteresis", Passed(SWITCH), "fp16"),
    **_each("immediate_grad_update check_grad_overflow", Passed(SWITCH), "bf16"),
    # without effect
    "zero_allow_untested_optimizer": WithoutEffect("the optimizer is the baseline's, which DeepSpeed has to allow"),
    "optimizer.params.torch_adam": WithoutEffect("AdamW is the testbed's own in any case"),
    "checkpoint.tag_validation": WithoutEffect("the testbed writes its checkpoints itself"),
    # the rest of known sections
    **_each("adam_w_mode bias_correction", Refused(_OWN_ADAMW, (True,)), "optimizer.params"),
    **_each("amsgrad", Refused(_OWN_ADAMW), "optimizer.params"),
    "optimizer.params.max_grad_norm": Refused("the norm is limited by gradient_clipping or --max_grad_norm", ()),
    "optimizer.legacy_fusion": Refused(_OWN_ADAMW),
    "zero_optimization.compute_grad_norm": Refused("every run records and limits the gradient's norm", (True,)),
    "zero_optimization.load_from_fp32_weights": Refused(_OWN_CHECKPOINTS, (True,)),
    **_each("elastic_checkpoint pipeline_loading_checkpoint", Refused(_OWN_CHECKPOINTS), _ZERO),
    **_each("gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
            "stage3_gather_fp16_weights_on_model_save",
            WithoutEffect("a run always writes whole weights, model.safetensors, in fp32"), _ZERO),
    "zero_optimization.zenflow": Refused(_ZENFLOW, ()),
    "zero_optimization.cpu_offload": Refused(_OLDER_NAME.format("offload_optimizer")),
    "zero_optimization.cpu_offload_param": Refused(_OLDER_NAME.format("offload_param")),
    "zero_optimization.cpu_offload_use_pin_memory": Refused("it is an older name of offload_optimizer.pin_memory"),
    "zero_optimization.legacy_stage1": Refused("it is an older stage 1; give --zero_stage 1"),
    **_each("zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights",
            Refused(_QUANTIZING), _ZERO),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Refused("Muon here is the testbed's; give --optimizer"),
    "zero_optimization.leaf_module": Refused("the model has no modules to treat as one"),
    **_each("mics_shard_size", Refused(_GONE, (-1,)), _ZERO),
    **_each("mics_hierarchical_params_gather zeropp_loco_param", Refused(_GONE), _ZERO),
    **_each("nvme_path pipeline_read pipeline_write fast_init", Refused(_NVME), _OPTIMIZER),
    **_each("super_offload", Refused("--offload optimizer moves the optimizer without it"), _OPTIMIZER),
    **_each("cpuadam_cores_perc", Refused("it is a part of super_offload", (0.8,)), _OPTIMIZER),
    **_each("nvme_path", Refused(_NVME), _PARAM),
    **_each("buffer_count", Refused(_NVME, (4,)), _OPTIMIZER),
    **_each("buffer_count", Refused(_NVME, (5,)), _PARAM),
    **_each("buffer_size", Refused(_NVME, (10**8,)), _PARAM),
    **_each("max_in_cpu", Refused(_NVME, (10**9,)), _PARAM),
    "fp16.auto_cast": Refused("the model's inputs are token numbers, which have no precision"),
    "fp16.fp16_master_weights_and_grads": Refused(_PRECISION),
    **_each("bf16_master_weights_and_grads bf16_optimizer_states", Refused(_PRECISION), "bf16"),
    **_each("partition_activations contiguous_memory_optimization cpu_checkpointing profile "
            "synchronize_checkpoint_boundary", Refused(_RECOMPUTE), "activation_checkpointing"),
    "activation_checkpointing.number_checkpoints": Refused(_RECOMPUTE, ()),
    **_each("load_universal use_node_local_storage parallel_write writer checkpoint_serialization",
            Refused(_OWN_CHECKPOINTS), "checkpoint"),
    # whole sections and single values that no one takes
    "torch_autocast": Refused("it follows --precision"),
    "pipeline": Refused("ZeRO does not cut the model into stages", (False, _PIPELINE)),
    "data_types": Refused(_PRECISION),
    "gradient_accumulation_dtype": Refused(_PRECISION, ()),
    "fp8": Refused("it follows --precision and the flags beside it"),
    "amp": Refused("it follows --precision"),
    "bfloat16": Refused("it is an older name of the section bf16"),
    **_each("communication_data_type seq_parallel_communication_data_type",
            Refused("gradients are averaged as --precision and --mixed_precision say", ())),
    "prescale_gradients": Refused(_SUMMED),
    "gradient_predivide_factor": Refused(_SUMMED, (1.0,)),
    "gradient_allreduce_op": Refused(_SUMMED, ("mean",)),
    "sparse_gradients": Refused("gradients are averaged whole"),
    "managed_gradient_accumulation": Refused("the testbed leaves accumulation to DeepSpeed", (True,)),
    **_each("compression_training quantize_training weight_quantization progressive_layer_drop eigenvalue "
            "sparse_attention", Refused(_OTHER)),
    **_each("data_efficiency curriculum_learning", Refused(_OTHER)),
    "dataloader_drop_last": Refused("every run type reads the same batches, from the testbed's own loader"),
    "timers": Refused("the testbed times every step itself, and DeepSpeed's timer would wait for the device inside "
                      "the step"),
    **_each("tensorboard wandb csv_monitor comet monitor_config", Refused(_MONITOR)),
    **_each("flops_profiler memory_breakdown wall_clock_breakdown", Refused(_TRACE)),
    "comms_logger": Refused("give --log_collectives or --profile, which write into the run's folder"),
    **_each("dump_state log_level", Refused("the effective configuration stands in training_metrics.json")),
    **_each("nebula datastates_ckpt checkpoint_engine", Refused(_OWN_CHECKPOINTS)),
    "aio": Refused(_NVME, (False, _AIO)),
    "autotuning": Refused("it starts runs of its own and writes their files; scripts/find_fastest.py compares runs"),
    **_each("elasticity graph_harvesting", Refused(_GONE)),
    **_each("tensor_parallel expert_parallel sequence_parallel_size hybrid_engine",
            Refused(_RANKS, (False, 1, {"autotp_size": 0, "tp_size": 1}))),
    "use_data_before_expert_parallelism": Refused(_RANKS),
    "compile": Refused("it follows --compile", (False, _COMPILE)),
    "zenflow": Refused(_ZENFLOW),
    "vocabulary_size": Refused("it follows --vocab_size", ()),
    **_each("disable_allgather disable_python_gc", Refused("every run type runs alike in this")),
    "zero_force_ds_cpu_optimizer": Refused(_OWN_ADAMW),
}  # fmt: skip


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
    if fate.what != "refused" or _is_harmless(value, fate):
        return ""
    if "." in place or not isinstance(value, dict):
        return f"{place} = {shown(value)} cannot be taken: {fate.said}; remove it"
    return f"the section {place!r} cannot be taken: {fate.said}; remove it"


def is_nothing(value: Any) -> bool:
    """Return whether a value leaves it to the flags: null or "auto"."""
    return value is None or value == AUTO


def _is_harmless(value: Any, fate: Fate) -> bool:
    """Tell whether a value asks for nothing: a default of DeepSpeed's, or a section in which all is off."""
    if isinstance(value, dict):
        defaults = next((each for each in fate.harmless if isinstance(each, dict)), {})
        return bool(fate.harmless) and _is_off(value, defaults)
    return any(_is_same(value, each) for each in fate.harmless)


def _is_off(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Tell whether a section asks for nothing: it is off, or each of its values is off or a default."""
    return section.get("enabled") is False or all(
        _is_off(value, defaults)
        if isinstance(value, dict)
        else is_nothing(value) or value is False or _is_same(value, defaults.get(key))
        for key, value in section.items()
    )


def _is_same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)  # 1 == True in Python


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
    rows: dict[tuple[str, str], list[str]] = {}
    for key, fate in KEYS.items():
        rows.setdefault((fate.what, _words(fate)), []).append(f"`{key}`")
    lines = ["| Key of the file | What becomes of it |", "|---|---|"]
    for order in ("flag", "passed", "without effect", "refused"):
        for (what, words), keys in rows.items():
            if what == order:
                lines.append(f"| {', '.join(keys)} | {words} |")
    return "\n".join([*lines, "| any other | refused |"])


def _words(fate: Fate) -> str:
    if fate.what == "flag":
        return f"taken as {', '.join(f'`--{name}`' for name in fate.said.split(', '))}"
    if fate.what == "passed":
        return f"passed to DeepSpeed: {fate.said}"
    if fate.what == "without effect":
        return f"without effect: {fate.said}"
    defaults = [json.dumps(value) for value in fate.harmless if value is not False and not isinstance(value, dict)]
    harmless = " or ".join(f"`{value}`" for value in defaults)
    return f"refused{f' unless {harmless}' if harmless else ''}: {fate.said}"
