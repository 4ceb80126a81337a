"""Registry of run types: the strategy of each, and the flags that it has.

A new strategy is one row here and one file in strategies/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StrategyEntry:
    """A row of the registry. `module` is imported only when the strategy is used."""

    module: str
    class_name: str
    summary: str
    is_distributed: bool = True  # False: one process, refuses more than one rank
    options: Mapping[str, Any] = field(default_factory=dict)  # flags that only it has, and their defaults


_WHOLE_MODEL = {"skip_gradient_sync": None}  # a rank that holds all weights can do a step without the others
_PIPELINE_AXES = {"pipeline_stages": None}

STRATEGIES = {
    "baseline": StrategyEntry("baseline", "Baseline", "plain PyTorch on one device", is_distributed=False),
    "dp": StrategyEntry("data_parallel", "DataParallel", "torch.nn.DataParallel, one process", is_distributed=False),
    "allreduce": StrategyEntry(
        "allreduce", "AllReduce", "one blocking all-reduce per gradient after backward", options=_WHOLE_MODEL
    ),
    "ddp": StrategyEntry(
        "ddp",
        "DDP",
        "DistributedDataParallel",
        options={**_WHOLE_MODEL, "bucket_cap_mb": 25.0, "gradient_compression": "none"},
    ),
    "fsdp": StrategyEntry(
        "fsdp",
        "FSDP",
        "FSDP2, sharded weights; also hybrid",
        options={"reshard_after_forward": "on", "shard_size": None, "mixed_precision": "autocast"},
    ),
    "optimized": StrategyEntry(
        "deepspeed_zero",
        "DeepSpeedZero",
        "DeepSpeed ZeRO 0-3",
        options={
            "zero_stage": 1,
            "offload": "none",
            "reduce_bucket_size": 200_000_000,
            "allgather_bucket_size": 200_000_000,
            "overlap_comm": "on",
            "mixed_precision": "autocast",
        },
    ),
    "model_parallel": StrategyEntry(
        "pipeline", "ModelParallel", "layers over ranks, one micro batch at a time", options=_PIPELINE_AXES
    ),
    "pipeline": StrategyEntry(
        "pipeline",
        "Pipeline",
        "layers over ranks, micro batches overlapped",
        options={**_PIPELINE_AXES, "pipeline_schedule": "1f1b", "stages_per_rank": None},
    ),
    "tensor": StrategyEntry(
        "tensor_parallel",
        "TensorParallel",
        "heads, MLP and vocabulary over ranks",
        options={"tensor_parallel_size": None},
    ),
}
ALL_OPTIONS = frozenset(name for entry in STRATEGIES.values() for name in entry.options)
