"""Rules for flags, strategies and ranks that do not work together. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.config.mesh import _divisors
from testbed.config.run_types import STRATEGIES, run_types_that_work_with
from testbed.distributed.mesh import MeshSizes
from testbed.errors import InputError

WITH_AUTOMATIC_MICRO_BATCH = tuple(name for name, entry in STRATEGIES.items() if entry.micro_batch != "given")


def check_combination(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    """Refuse settings that do not work together. `values` are final but for a precision of "auto".

    Raises:
        InputError: names the flags, the reason and the way out.
    """
    for check in (
        *(_check_backend, _check_precision, _check_deepspeed, _check_compile, _check_dropout, _check_tensor),
        *(_check_pipeline, _check_matmul, _check_micro_batch),
    ):
        check(values, mesh)


def _check_backend(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    """Check what no machine can do. autotune/device.py checks the rest once the device is known."""
    if values["backend"] == "nccl" and values["device"] == "cpu":
        raise InputError("--backend nccl with --device cpu: NCCL moves data between GPUs; use --backend gloo or auto")


def _check_precision(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    run_type, precision = values["run_type"], values["precision"]
    reason = STRATEGIES[run_type].refuses.get("precision fp16")
    if precision == "fp16" and reason:
        raise InputError(
            f"--precision fp16 with --run_type {run_type}: {reason}; use bf16, or fp16 with ddp or optimized"
        )
    if values["mixed_precision"] == "native" and precision != "bf16":
        raise InputError(
            f"--mixed_precision native with --precision {precision}: it is about how bf16 is used; give --precision "
            "bf16"
        )


def _check_deepspeed(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    stage, offload = values["zero_stage"], values["offload"]
    if stage == 0 and values["precision"] == "fp16":
        raise InputError(
            "--zero_stage 0 with --precision fp16: DeepSpeed's optimizer for that pair begins Adam at step 2 and "
            "trains differently; use --zero_stage 1, or bf16"
        )
    if stage == 0 and values["mixed_precision"] == "native":
        raise InputError(
            "--zero_stage 0 with --mixed_precision native: DeepSpeed's optimizer for that pair begins Adam at step 2 "
            "and trains differently; use --zero_stage 1, or --mixed_precision autocast"
        )
    if stage == 3 and values["activation_checkpointing"] == "selective":
        raise InputError(
            "--activation_checkpointing selective with --zero_stage 3: DeepSpeed gathers weights and adds biases in "
            "place inside the blocks, so what was kept is not what is computed again; use block, or fsdp"
        )
    if stage and values["optimizer"] == "muon":
        raise InputError(
            f"--optimizer muon with --zero_stage {stage}: ZeRO gives an optimizer flat pieces that cut through "
            "matrices, and DeepSpeed's own Muon clips after the orthogonalisation, which is another update; use "
            "--zero_stage 0, or --run_type fsdp, which shards as much"
        )
    bucket = values["allgather_bucket_size"]
    if stage in (1, 2) and bucket % 2:
        raise InputError(f"--allgather_bucket_size {bucket}: DeepSpeed needs an even number; give {bucket + 1}")
    if offload == "optimizer" and stage == 0:
        raise InputError("--offload optimizer needs ZeRO to shard the optimizer state; give --zero_stage 1, 2 or 3")
    if offload == "parameters" and stage != 3:
        raise InputError(
            f"--offload parameters with --zero_stage {stage}: only stage 3 shards the weights; give --zero_stage 3"
        )


def _check_compile(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    reason = compile_blocker(values)
    if values["compile"] and reason is not None:
        raise InputError(f"--compile {reason}, or give --compile off")


def compile_blocker(values: Mapping[str, Any]) -> str | None:
    """Return what --compile does not work with, why, and what does; None if it works."""
    entry = STRATEGIES[values["run_type"]]
    if "compile" in entry.refuses:
        return f"with --run_type {values['run_type']}: {entry.refuses['compile']}"
    if values["pipeline_schedule"] == "zero_bubble":
        return (
            "with --pipeline_schedule zero_bubble: it runs the backward pass of weights apart from that of "
            "activations, which a compiled block does not offer; use 1f1b"
        )
    if entry.keeps == "parts" and values["activation_checkpointing"] == "block":
        return (
            f"with --run_type {values['run_type']} and --activation_checkpointing block: the compiler cannot keep "
            "a device mesh for the recomputation; use selective"
        )
    if values["zero_stage"] == 3:
        return (
            "with --zero_stage 3: DeepSpeed gathers weights in hooks inside the blocks, which break a compiled block "
            "into pieces; use --zero_stage 2 or fsdp"
        )
    return None


def auto_compile_blocker(values: Mapping[str, Any]) -> str | None:
    """Return why --compile auto does not compile on CUDA; None if an agreement test covers it.

    Args:
        values: all flags, with the final precision.
    """
    if (reason := compile_blocker(values)) is not None:
        return reason
    run_type, recomputed = values["run_type"], values["activation_checkpointing"]
    unproven = None
    compiles_with = STRATEGIES[run_type].compiles_with
    if not compiles_with:
        unproven = f"--run_type {run_type}"
    elif recomputed not in compiles_with:
        unproven = f"--run_type {run_type} and --activation_checkpointing {recomputed}"
    elif values["precision"] == "fp16" or values["dropout"] > 0:
        unproven = "--precision fp16" if values["precision"] == "fp16" else f"--dropout {values['dropout']}"
    elif values["mixed_precision"] == "native" or values["matmul"] != "default":
        unproven = "--mixed_precision native" if values["mixed_precision"] == "native" else "--matmul fp8"
    if unproven is None:
        return None
    return f"with {unproven}: no test shows that compiled blocks compute the same there; give --compile to do it anyway"


def _check_matmul(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    """Check what --matmul fp8 needs. autotune/device.py checks the device."""
    if values["matmul"] != "fp8":
        return
    if values["device"] == "cpu":
        raise InputError("--matmul fp8 with --device cpu: no CPU multiplies in 8 bits; leave --matmul out")
    if reason := STRATEGIES[values["run_type"]].refuses.get("matmul fp8"):
        raise InputError(
            f"--matmul fp8 with --run_type {values['run_type']}: {reason}; use "
            f"{', '.join(run_types_that_work_with('matmul fp8'))}, or leave --matmul out"
        )
    if values["precision"] not in ("auto", "bf16") or values["mixed_precision"] == "native":
        given = "--mixed_precision native" if values["precision"] == "bf16" else f"--precision {values['precision']}"
        raise InputError(
            f"--matmul fp8 with {given}: what is not multiplied in 8 bits runs in bf16 autocast; give --precision bf16 "
            "or auto, and --mixed_precision autocast"
        )
    for name in ("embedding_size", "seq_length"):
        if values[name] % 16:
            raise InputError(
                f"--matmul fp8 with --{name} {values[name]}: 8-bit products need multiples of 16 on every side; give "
                f"{-(-values[name] // 16) * 16}"
            )


def _check_micro_batch(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    if values["micro_batch_size_per_gpu"] == "auto" and values["run_type"] not in WITH_AUTOMATIC_MICRO_BATCH:
        raise InputError(
            f"--micro_batch_size_per_gpu auto with --run_type {values['run_type']}: what its ranks hold is not known "
            f"before they run, and a pipeline wants many small ones; give a number, or use "
            f"{', '.join(WITH_AUTOMATIC_MICRO_BATCH)}"
        )


def _check_dropout(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    if values["dropout"] > 0 and mesh.tensor > 1:
        raise InputError(
            f"--dropout {values['dropout']} with --run_type {values['run_type']}: tensor ranks would need the same "
            "random numbers in the residual stream and different ones in their heads, which is not built; use "
            "--dropout 0"
        )
    reason = STRATEGIES[values["run_type"]].refuses.get("dropout")
    if values["dropout"] > 0 and reason:
        raise InputError(
            f"--dropout {values['dropout']} with --run_type {values['run_type']}: {reason}, or --dropout 0"
        )


def _check_tensor(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    size = mesh.tensor
    if values["num_heads"] % size:
        raise InputError(
            f"--tensor_parallel_size {size} (by default all ranks) does not divide --num_heads {values['num_heads']}: "
            f"every rank takes as many whole heads; possible are {_divisors(values['num_heads'])}"
        )


def _check_pipeline(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    if values["pipeline_stages"] is None:
        return
    stages = mesh.pipeline * (values["stages_per_rank"] or 1)
    units = values["num_layers"] + 2
    if stages > units:
        raise InputError(
            f"--pipeline_stages {mesh.pipeline} x {values['stages_per_rank'] or 1} stages per rank = {stages} stages, "
            f"but --num_layers {values['num_layers']}, the embedding and the head are {units} pieces; lower one of them"
        )
    if values["pipeline_schedule"] == "zero_bubble" and values["activation_checkpointing"] != "none":
        raise InputError(
            f"--activation_checkpointing {values['activation_checkpointing']} with --pipeline_schedule zero_bubble: it "
            "runs the backward pass in two halves, and a block is computed again for one only; use 1f1b, or none"
        )


def check_schedule(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    """Check that the pipeline schedule can run the micro batches of a step.

    Raises:
        InputError: it needs more of them, or another number.
    """
    schedule, count = values["pipeline_schedule"], values["grad_accum_steps"]
    if schedule is None:
        return
    way_out = "give a smaller --micro_batch_size_per_gpu or a larger --global_batch_size"
    if schedule in ("1f1b", "interleaved_1f1b", "zero_bubble") and count < mesh.pipeline:
        raise InputError(
            f"--pipeline_schedule {schedule} needs at least as many micro batches as pipeline ranks, {mesh.pipeline}, "
            f"but a step has {count}; {way_out}"
        )
    rounds = max(1, count // mesh.pipeline)
    if schedule == "interleaved_1f1b" and count % rounds:
        raise InputError(
            f"--pipeline_schedule interleaved_1f1b takes micro batches in {rounds} equal rounds, but a step "
            f"has {count}; choose batch sizes that make it a multiple of {mesh.pipeline}"
        )


def math_changes(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return in words what this run computes differently from the baseline; empty for equal mathematics."""
    entry, changes = STRATEGIES[values["run_type"]], []
    if entry.differs_because:
        changes.append(entry.differs_because)
    if values["skip_gradient_sync"]:
        steps = "of every even step " if values["skip_gradient_sync"] == "alternate" else ""
        changes.append(f"gradients {steps}are not synchronised: this is no training")
    if values["gradient_compression"] == "bf16":
        changes.append("gradients are averaged in bf16")
    if values["mixed_precision"] == "native" and entry.engine == "deepspeed":
        changes.append("DeepSpeed's own bf16 mode: bf16 weights, activations and averages of gradients")
    elif values["mixed_precision"] == "native":
        changes.append("FSDP's own mixed precision: bf16 weights and activations, gradients averaged in fp32")
    if entry.engine == "deepspeed" and values["precision"] == "fp16":
        changes.append("DeepSpeed's own fp16 mode: fp16 weights, activations and averages of gradients")
    if values["matmul"] == "fp8":
        changes.append("the linear layers of the blocks multiply in fp8")
    return tuple(changes)
