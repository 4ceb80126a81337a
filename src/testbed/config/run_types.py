"""Registry of run types: what the strategy of each is, what it supports, and the flags that it has.

A new strategy is one row here and one file in strategies/. Nothing else asks for a run type by its name: what the rest
of the code wants to know of a strategy is a field of its row. tests/config/test_run_types.py checks both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

REFERENCE = "baseline"  # the single process that every strategy is compared with
PLAIN = "ddp"  # taken on several ranks where nothing says which strategy is the fastest


@dataclass(frozen=True, kw_only=True)
class StrategyEntry:
    """A row of the registry. A field has no default, so that a new strategy answers every question.

    Attributes:
        module: file in strategies/, imported only when the strategy is used.
        devices: "one" device; "all" CUDA devices of a node, driven by one process; or one "per_rank".
        engine: "torch", or "deepspeed" where DeepSpeed builds the optimizer and writes the checkpoint.
        keeps: what a rank has of the model at rest: the "whole" model, "shards" of the state of all layers, some
            "stages" (layers), "parts" of each layer, or what the "axes" of its mesh say.
        sends: how data ranks exchange gradients: "nothing"; "tensors", one after the other, and nothing overlaps;
            "buckets" during backward; "shards" of weights and gradients in each pass (a mesh without shards: "at_end");
            "zero" as the ZeRO stage says; or "at_end", all at once after backward.
        state_layout: how the ranks hold weights and moments: "replicated", all on all ranks; "sharded", in parts;
            or "per_rank", different values under one name. What several ranks have of the first two, and is not part,
            must be equal and is compared by hash before it is saved. "per_rank" is saved for each rank, and resumes on
            the same ranks only.
        equals_baseline: whether a step computes what a single process computes. If not, no verdict compares it with
            those that do, and `differs_because` is the reason.
        differs_because: what a step computes differently; None if `equals_baseline`.
        refuses: flags of MAY_REFUSE that do not work with it, with the reason.
        gloo_on_cuda: whether its collectives are those that gloo has for tensors on a GPU: all-reduce and broadcast.
        micro_batch: how --micro_batch_size_per_gpu auto finds one on CUDA: "tried" by real steps, "predicted", or
            "given" by the user alone.
        compiles_with: values of --activation_checkpointing with which --compile auto compiles it: each is a case of
            tests/strategies/test_strategies_agree.py, with a named attention kernel.
        options: flags that only some strategies have, and their defaults for this one.
    """

    module: str
    class_name: str
    summary: str
    devices: Literal["one", "all", "per_rank"]
    engine: Literal["torch", "deepspeed"]
    keeps: Literal["whole", "shards", "stages", "parts", "axes"]
    sends: Literal["nothing", "tensors", "buckets", "shards", "zero", "at_end"]
    state_layout: Literal["replicated", "sharded", "per_rank"]
    equals_baseline: bool
    differs_because: str | None
    refuses: Mapping[str, str]
    gloo_on_cuda: bool
    micro_batch: Literal["tried", "predicted", "given"]
    compiles_with: tuple[str, ...]
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.equals_baseline == bool(self.differs_because):
            raise TypeError(f"{self.class_name}: give differs_because, in words, exactly where equals_baseline=False")
        if unknown := self.refuses.keys() - MAY_REFUSE.keys():
            raise TypeError(f"{self.class_name}: refuses knows {sorted(MAY_REFUSE)}, not {sorted(unknown)}")

    @property
    def is_distributed(self) -> bool:
        """Return whether it runs as several ranks; else as one process, which refuses more."""
        return self.devices == "per_rank"

    @property
    def cuts_model(self) -> bool:
        """Return whether ranks compute different parts of the same sequence."""
        return self.keeps in ("stages", "parts")


# what a row may refuse: the flag with its value, or a condition on it, and what else there is to give
MAY_REFUSE: dict[str, tuple[dict[str, Any], str]] = {
    "matmul fp8": ({"matmul": "fp8"}, "leave --matmul out"),
    "precision fp16": ({"precision": "fp16"}, "give --precision bf16"),
    "dropout": ({"dropout": lambda dropout: dropout > 0}, "give --dropout 0"),
    "compile": ({"compile": True}, "give --compile off"),
    "async_mode async": ({"async_mode": "async"}, "leave --async_mode out"),
}
NO_FP8 = "8-bit layers are not built for it"
NO_FP16 = "its loss scale would have to be decided over ranks that hold different weights, which is not built"
_WHOLE_MODEL = {"skip_gradient_sync": None}  # a rank that holds all weights can do a step without the others
_PIPELINE_AXES = {"pipeline_stages": None}

STRATEGIES = {
    "baseline": StrategyEntry(
        module="baseline",
        class_name="Baseline",
        summary="plain PyTorch on one device",
        devices="one",
        engine="torch",
        keeps="whole",
        sends="nothing",
        state_layout="replicated",
        equals_baseline=True,
        differs_because=None,
        refuses={},
        gloo_on_cuda=True,
        micro_batch="tried",
        compiles_with=("none",),
        options={},
    ),
    "dp": StrategyEntry(
        module="data_parallel",
        class_name="DataParallel",
        summary="torch.nn.DataParallel: one process drives all CUDA devices",
        devices="all",
        engine="torch",
        keeps="whole",
        sends="at_end",
        state_layout="replicated",
        equals_baseline=True,
        differs_because=None,
        refuses={
            "matmul fp8": NO_FP8,
            "dropout": "every device would drop the same places of its part of the batch",
            "compile": "DataParallel copies the model in every pass, and a copy is not compiled",
        },
        gloo_on_cuda=False,
        micro_batch="given",
        compiles_with=(),
        options={},
    ),
    "allreduce": StrategyEntry(
        module="allreduce",
        class_name="AllReduce",
        summary="one blocking all-reduce per gradient after backward",
        devices="per_rank",
        engine="torch",
        keeps="whole",
        sends="tensors",
        state_layout="replicated",
        equals_baseline=True,
        differs_because=None,
        refuses={},
        gloo_on_cuda=True,
        micro_batch="tried",
        compiles_with=("none",),
        options=_WHOLE_MODEL,
    ),
    "ddp": StrategyEntry(
        module="ddp",
        class_name="DDP",
        summary="DistributedDataParallel: gradients travel in buckets during backward",
        devices="per_rank",
        engine="torch",
        keeps="whole",
        sends="buckets",
        state_layout="replicated",
        equals_baseline=True,
        differs_because=None,
        refuses={},
        gloo_on_cuda=True,
        micro_batch="tried",
        compiles_with=("none", "block"),
        options={**_WHOLE_MODEL, "bucket_cap_mb": 25.0, "gradient_compression": "none"},
    ),
    "fsdp": StrategyEntry(
        module="mesh",
        class_name="Mesh",
        summary="FSDP2: weights, gradients and optimizer state in shards, also hybrid",
        devices="per_rank",
        engine="torch",
        keeps="shards",
        sends="shards",
        state_layout="sharded",
        equals_baseline=True,
        differs_because=None,
        refuses={"precision fp16": NO_FP16},
        gloo_on_cuda=False,
        micro_batch="predicted",
        compiles_with=("none",),
        options={"reshard_after_forward": "on", "shard_size": None, "mixed_precision": "autocast"},
    ),
    "optimized": StrategyEntry(
        module="deepspeed_zero",
        class_name="DeepSpeedZero",
        summary="DeepSpeed ZeRO 0 to 3, with offloading",
        devices="per_rank",
        engine="deepspeed",
        keeps="shards",
        sends="zero",
        state_layout="sharded",
        equals_baseline=True,
        differs_because=None,
        refuses={
            "matmul fp8": NO_FP8,
            "async_mode async": "DeepSpeed writes its checkpoints while the loop waits",
        },
        gloo_on_cuda=False,
        micro_batch="predicted",
        compiles_with=("none",),  # ZeRO 0 to 2; config/compatibility.py refuses stage 3
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
        module="pipeline",
        class_name="ModelParallel",
        summary="layers split over ranks, one micro batch at a time",
        devices="per_rank",
        engine="torch",
        keeps="stages",
        sends="at_end",
        state_layout="sharded",
        equals_baseline=True,
        differs_because=None,
        refuses={"matmul fp8": NO_FP8, "precision fp16": NO_FP16},
        gloo_on_cuda=False,
        micro_batch="given",
        compiles_with=("none",),
        options=_PIPELINE_AXES,
    ),
    "pipeline": StrategyEntry(
        module="pipeline",
        class_name="Pipeline",
        summary="layers split over ranks: gpipe, 1f1b, interleaved_1f1b, zero_bubble",
        devices="per_rank",
        engine="torch",
        keeps="stages",
        sends="at_end",
        state_layout="sharded",
        equals_baseline=True,
        differs_because=None,
        refuses={"matmul fp8": NO_FP8, "precision fp16": NO_FP16},
        gloo_on_cuda=False,
        micro_batch="given",
        compiles_with=("none",),
        options={**_PIPELINE_AXES, "pipeline_schedule": "1f1b", "stages_per_rank": None},
    ),
    "tensor": StrategyEntry(
        module="mesh",
        class_name="Mesh",
        summary="attention heads, MLP and vocabulary split over ranks",
        devices="per_rank",
        engine="torch",
        keeps="parts",
        sends="at_end",
        state_layout="sharded",
        equals_baseline=True,
        differs_because=None,
        refuses={"matmul fp8": NO_FP8, "precision fp16": NO_FP16},
        gloo_on_cuda=False,
        micro_batch="predicted",
        compiles_with=("none",),
        options={"tensor_parallel_size": None, "sequence_parallel": "off"},
    ),
    "mesh": StrategyEntry(
        module="pipeline",
        class_name="AnyMesh",
        summary="any product of copies, shards, tensor, context and pipeline ranks",
        devices="per_rank",
        engine="torch",
        keeps="axes",
        sends="shards",
        state_layout="sharded",
        equals_baseline=True,
        differs_because=None,
        refuses={"matmul fp8": NO_FP8, "precision fp16": NO_FP16},
        gloo_on_cuda=False,
        micro_batch="predicted",
        compiles_with=("none",),
        options={
            "shard_size": None,
            "reshard_after_forward": None,
            "tensor_parallel_size": 1,
            "sequence_parallel": "off",
            "context_parallel_size": 1,
            "context_parallel_method": "ring",
            "pipeline_stages": 1,
            "pipeline_schedule": "1f1b",
            "stages_per_rank": None,
        },
    ),
}
# axis of a mesh, by the flag of its size -> the flags that say how it works
HOW_AXES_WORK = {
    "tensor_parallel_size": ("sequence_parallel",),
    "context_parallel_size": ("context_parallel_method",),
    "pipeline_stages": ("pipeline_schedule", "stages_per_rank"),
}
ALL_OPTIONS = frozenset(name for entry in STRATEGIES.values() for name in entry.options)
WITH_AUTOMATIC_MICRO_BATCH = tuple(name for name, entry in STRATEGIES.items() if entry.micro_batch != "given")


def can_find_micro_batch(run_type: str, num_stages: int) -> bool:
    """Return whether a run can look for its micro batch. A mesh with stages cannot, as a pipeline."""
    return run_type in WITH_AUTOMATIC_MICRO_BATCH and num_stages == 1


def run_types_with(**fields: Any) -> tuple[str, ...]:
    """Return the run types whose row has these values."""
    return tuple(
        name
        for name, entry in STRATEGIES.items()
        if all(getattr(entry, field) == value for field, value in fields.items())
    )


def run_types_that_work_with(flag: str) -> tuple[str, ...]:
    """Return the run types that do not refuse a flag of MAY_REFUSE."""
    return tuple(name for name, entry in STRATEGIES.items() if flag not in entry.refuses)
