"""The strategies and meshes that the agreement test covers."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from support.agreement import PAIRS
from testbed.config.run_types import STRATEGIES

# With the default epsilon of 1e-8 the result depends on the rounding of one weight. Its first gradient is 3e-8, where
# the median is 1e-3, and float32 gives it a relative error of 2 %. Adam's first step is g / (|g| + eps), so the weight
# is off by 2.4e-5 and later norms by 1e-5, with PyTorch's own smoothed loss too, and without smoothing for --seed 2.
SMOOTHED = "--label_smoothing 0.2 --adam_eps 1e-6"
EXACT = "--gelu exact"  # of nanoGPT and PyTorch, in place of GPT-2's tanh form

# Each shape of a batch is another graph, seconds to compile. These runs validate on whole batches alone; ddp, on all.
WHOLE_BATCHES = "--max_val_steps 1"
COMPILED = f"--compile --attention flash {WHOLE_BATCHES}"


def slow_but(every_day: Collection[str], names: Iterable[str]) -> list:
    """Return the names as parameters of a test, marked slow but for those that judge every change."""
    return [name if name in every_day else pytest.param(name, marks=pytest.mark.slow) for name in names]


# What each run type computes alike needs no run of each: fsdp, tensor and pipeline are shapes of one mesh.
SHAPES_OF_A_MESH = ("fsdp", "tensor", "model_parallel", "mesh")
OF_ONE_KIND = [
    name
    for name, entry in STRATEGIES.items()
    if entry.equals_baseline and name != "baseline" and name not in SHAPES_OF_A_MESH
]
# Any product of axes: name -> ranks, further flags, the mesh that must come out. Every pair of axes on 4 ranks.
_TENSOR, _STREAM = "--tensor_parallel_size 2", "--tensor_parallel_size 2 --sequence_parallel on"
_CONTEXT, _STAGES, _COPIES = "--context_parallel_size 2", "--pipeline_stages 2", "--shard_size 1"
_GATHERED = f"{_CONTEXT} --context_parallel_method allgather"
_ONE_PASS = "--micro_batch_size_per_gpu 8"  # a step of one micro batch
# Of ranks that work on the same sequences each does all passes of a step, and DTensor takes its time for each.
_TWO_PASSES, _FOUR_PASSES = _ONE_PASS, "--micro_batch_size_per_gpu 4"
MESHES = {
    "mesh": (4, _STREAM, "data=2 (replicate=1 x shard=2) pipeline=1 tensor=2"),
    "shards x tensor": (4, _TENSOR, "data=2 (replicate=1 x shard=2) pipeline=1 tensor=2"),
    "copies x cut stream": (4, f"{_COPIES} {_STREAM}", "data=2 pipeline=1 tensor=2"),
    "shards x context": (4, _CONTEXT, "data=2 (replicate=1 x shard=4) pipeline=1 tensor=1 context=2"),
    "copies x context": (4, f"{_COPIES} {_CONTEXT}", "data=2 pipeline=1 tensor=1 context=2"),
    "shards over context x copies": (
        *(4, f"{_CONTEXT} --shard_size 2"),
        "data=2 (replicate=2 x shard=2) pipeline=1 tensor=1 context=2",
    ),
    "context x tensor": (4, f"{_CONTEXT} {_TENSOR} {_COPIES} {_TWO_PASSES}", "data=1 pipeline=1 tensor=2 context=2"),
    "context x cut stream, gathered": (
        *(4, f"{_GATHERED} {_STREAM} {_TWO_PASSES}"),
        "data=1 (replicate=1 x shard=2) pipeline=1 tensor=2 context=2",
    ),
    "context of 4": (
        *(4, f"--context_parallel_size 4 {_TWO_PASSES}"),
        "data=1 (replicate=1 x shard=4) pipeline=1 tensor=1 context=4",
    ),
    "context of 4, gathered, whole weights": (
        *(4, f"--context_parallel_size 4 --context_parallel_method allgather {_COPIES} {_TWO_PASSES}"),
        "data=1 pipeline=1 tensor=1 context=4",
    ),
    "stages x shards": (4, _STAGES, "data=2 (replicate=1 x shard=2) pipeline=2 tensor=1"),
    "stages x copies": (4, f"{_STAGES} {_COPIES}", "data=2 pipeline=2 tensor=1"),
    "stages x tensor": (4, f"{_STAGES} {_STREAM} {_FOUR_PASSES}", "data=1 pipeline=2 tensor=2"),
    "stages x context": (4, f"{_STAGES} {_CONTEXT} {_COPIES} {_FOUR_PASSES}", "data=1 pipeline=2 tensor=1 context=2"),
    "stages x shards over context": (
        *(4, f"{_STAGES} {_CONTEXT} {_FOUR_PASSES}"),
        "data=1 (replicate=1 x shard=2) pipeline=2 tensor=1 context=2",
    ),
    "zero bubble x shards": (4, f"{_STAGES} --pipeline_schedule zero_bubble", None),
    "interleaved x shards": (4, f"{_STAGES} --pipeline_schedule interleaved_1f1b --reshard_after_forward on", None),
    "shards x tensor x copies": (8, f"--shard_size 2 {_STREAM}", "data=4 (replicate=2 x shard=2) pipeline=1 tensor=2"),
    "shards x tensor x context": (
        *(8, f"{_STREAM} {_CONTEXT} --micro_batch_size_per_gpu 4"),
        "data=2 (replicate=1 x shard=4) pipeline=1 tensor=2 context=2",
    ),
    "stages x shards x copies": (8, f"{_STAGES} --shard_size 2", "data=4 (replicate=2 x shard=2) pipeline=2 tensor=1"),
    "stages x tensor x copies": (8, f"{_STAGES} {_TENSOR} {_COPIES}", "data=2 pipeline=2 tensor=2"),
    "stages x context x shards": (
        *(8, f"{_STAGES} {_CONTEXT}"),
        "data=2 (replicate=1 x shard=4) pipeline=2 tensor=1 context=2",
    ),
    "shards x tensor, one micro batch": (4, f"{_STREAM} {_ONE_PASS}", None),
    "shards x context, one micro batch": (4, f"{_CONTEXT} {_ONE_PASS}", None),
    "stages x tensor, blocks recomputed": (
        4,
        f"{_STAGES} {_TENSOR} {_FOUR_PASSES} --activation_checkpointing block",
        None,
    ),
    "context x tensor, recomputed but products": (
        *(4, f"{_CONTEXT} {_STREAM} {_TWO_PASSES} --activation_checkpointing selective"),
        None,
    ),
    "context x tensor, label smoothing": (4, f"{_CONTEXT} {_STREAM} {_TWO_PASSES} {SMOOTHED}", None),
    "context x shards, pairs": (4, f"{_CONTEXT} {PAIRS}", None),
    "context x shards, compiled": (4, f"{_CONTEXT} {COMPILED}", None),
    "stages x cut stream, compiled": (4, f"{_STAGES} {_STREAM} {COMPILED}", None),
    "shards x tensor, Muon": (4, f"{_STREAM} --optimizer muon", None),
    "stages x cut stream, exact GELU": (4, f"{_STAGES} {_STREAM} {_FOUR_PASSES} {EXACT}", None),
}
# name -> run type, ranks, further flags, the mesh that must come out
VARIANTS = {
    run_type: (run_type, 2 if entry.is_distributed else 1, "", None)
    for run_type, entry in STRATEGIES.items()
    if run_type != "baseline" and entry.equals_baseline
} | {
    # the loss is the model's own, but for the last stage and for ranks that have a part of the logits
    "pipeline, label smoothing": ("pipeline", 2, SMOOTHED, None),
    "tensor, label smoothing": ("tensor", 2, SMOOTHED, None),
    "tensor, label smoothing compiled": ("tensor", 2, f"{SMOOTHED} {COMPILED}", None),
    "ddp, small buckets": ("ddp", 2, "--bucket_cap_mb 0.02", "data=2 pipeline=1 tensor=1"),
    "ddp, blocks recomputed": ("ddp", 2, "--activation_checkpointing block", None),
    # compiled: a kernel is always named in what --compile auto compiles, and the graph has it. Of each
    # run type one is compiled
    "allreduce, compiled": ("allreduce", 2, COMPILED, None),
    "ddp, compiled": ("ddp", 2, "--compile --attention flash", None),
    "ddp, blocks compiled and recomputed": (
        # buckets smaller than a block: else the compiler would have nothing to cut
        *("ddp", 2, f"{COMPILED} --activation_checkpointing block --bucket_cap_mb 0.02"),
        None,
    ),
    "fsdp, compiled": ("fsdp", 2, COMPILED, None),
    "ZeRO 2, compiled": ("optimized", 2, f"--zero_stage 2 {COMPILED}", None),
    "model_parallel, compiled": ("model_parallel", 2, COMPILED, None),
    "pipeline, compiled": ("pipeline", 2, COMPILED, None),
    "fsdp, weights kept": (
        "fsdp",
        2,
        "--reshard_after_forward off",
        "data=2 (replicate=1 x shard=2) pipeline=1 tensor=1",
    ),
    "fsdp, recomputed but products": ("fsdp", 2, "--activation_checkpointing selective", None),
    "fsdp, hybrid": ("fsdp", 4, "--shard_size 2", "data=4 (replicate=2 x shard=2) pipeline=1 tensor=1"),
    "ZeRO 0": ("optimized", 2, "--zero_stage 0", None),
    "ZeRO 2": ("optimized", 2, "--zero_stage 2", None),
    "ZeRO 3": ("optimized", 2, "--zero_stage 3", None),
    "ZeRO 3, parameters offloaded": ("optimized", 2, "--zero_stage 3 --offload parameters", None),
    "ZeRO 1, optimizer offloaded": ("optimized", 2, "--zero_stage 1 --offload optimizer", None),
    "ZeRO 2, recomputed but products": ("optimized", 2, "--zero_stage 2 --activation_checkpointing selective", None),
    "ZeRO 3, blocks recomputed": ("optimized", 2, "--zero_stage 3 --activation_checkpointing block", None),
    "gpipe": ("pipeline", 2, "--pipeline_schedule gpipe", "data=1 pipeline=2 tensor=1"),
    "interleaved": ("pipeline", 2, "--pipeline_schedule interleaved_1f1b", "data=1 pipeline=2 tensor=1"),
    "zero bubble": ("pipeline", 2, "--pipeline_schedule zero_bubble", "data=1 pipeline=2 tensor=1"),
    "pipeline, blocks recomputed": ("pipeline", 2, "--activation_checkpointing block", None),
    "1f1b on 4": ("pipeline", 4, "", "data=1 pipeline=4 tensor=1"),
    "zero bubble x data": (
        *("pipeline", 4, "--pipeline_stages 2 --pipeline_schedule zero_bubble"),
        "data=2 pipeline=2 tensor=1",
    ),
    "tensor x data": ("tensor", 4, "--tensor_parallel_size 2", "data=2 pipeline=1 tensor=2"),
    **{
        f"{name}, Muon": (run_type, ranks, f"{flags} --optimizer muon".strip(), None)
        for name, run_type, ranks, flags in (
            ("ddp", "ddp", 2, ""),
            ("fsdp", "fsdp", 2, ""),
            ("ZeRO 0", "optimized", 2, "--zero_stage 0"),
            ("pipeline", "pipeline", 2, ""),
            ("tensor", "tensor", 2, ""),
        )
    },
    **{name: ("mesh", ranks, flags, mesh) for name, (ranks, flags, mesh) in MESHES.items()},
    "tensor, recomputed but products": ("tensor", 2, "--activation_checkpointing selective", None),
    **{
        f"{run_type}, pairs": (run_type, 2 if STRATEGIES[run_type].is_distributed else 1, PAIRS, None)
        for run_type in OF_ONE_KIND
    },
    "ZeRO 3, pairs": ("optimized", 2, f"--zero_stage 3 {PAIRS}", None),
}
# what rounds to bf16: run type, flags; compiled only where the strategy casts by itself or keeps its casts
BF16 = {
    "baseline, compiled": ("baseline", f"--precision bf16 {COMPILED}"),
    "ddp": ("ddp", "--precision bf16"),
    "ddp, gradients compressed": ("ddp", "--gradient_compression bf16"),
    "fsdp": ("fsdp", "--precision bf16"),
    "ZeRO 2": ("optimized", "--precision bf16 --zero_stage 2"),
    "pipeline": ("pipeline", "--precision bf16"),
    "tensor": ("tensor", "--precision bf16"),
    **{
        f"{name}, compiled": (run_type, f"--precision bf16 {flags}{COMPILED}")
        for name, run_type, flags in (
            ("ddp", "ddp", ""),
            ("fsdp", "fsdp", ""),
            ("ZeRO 2", "optimized", "--zero_stage 2 "),
            ("tensor", "tensor", ""),
        )
    },
    "shards x context": ("mesh", f"--precision bf16 {_CONTEXT}"),
    "shards x tensor": ("mesh", f"--precision bf16 {_STREAM}"),
    "stages x context": ("mesh", f"--precision bf16 {_STAGES} {_CONTEXT}"),
    "stages x tensor": ("mesh", f"--precision bf16 {_STAGES} {_TENSOR}"),
    # weights, gradients and the residual stream are rounded too
    "fsdp, native": ("fsdp", "--precision bf16 --mixed_precision native"),
    "ZeRO 2, native": ("optimized", "--precision bf16 --mixed_precision native --zero_stage 2"),
}
