"""Describe a training run to the formulas: the model, how it is cut over devices, the batch, the devices. No torch.

A dense decoder-only transformer of any width, so that published runs of other models can be predicted too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from testbed.config.compatibility import auto_compile_blocker
from testbed.config.run_types import STRATEGIES, StrategyEntry
from testbed.config.settings import RunSettings
from testbed.distributed.mesh import MeshSizes
from testbed.memory_model.devices import Device, Link
from testbed.model.shape import ModelShape

RECOMPUTE = {
    "none": "none",
    "block": "full",
    "selective": "selective_op",
}  # --activation_checkpointing -> Job.recompute
# Programs that share their layers and kernels. pytorch: modules of PyTorch, as they come.
FRAMEWORKS = {
    **dict.fromkeys(("megatron-lm", "megatron-bridge", "simumax", "calculon"), "megatron"),
    **dict.fromkeys(("nanogpt", "build-nanogpt", "multinode-training-guide", "testbed"), "pytorch"),
    **dict.fromkeys(("llm.c", "modded-nanogpt"), "llm.c"),
}
NO_TRITON = ("pascal",)  # it needs compute capability 7.0
NOT_OVERLAPPED = ("tensors", "at_end")  # gradients are averaged after backward


def framework_of(program: str) -> str:
    """Return the family of programs whose layers and kernels a program has; itself where that is not known."""
    return FRAMEWORKS.get(program.rpartition("/")[-1].lower(), program)


@dataclass(frozen=True, kw_only=True)
class DenseModel:
    """A decoder-only transformer. All widths in elements; `vocab` as it lies in memory, padding included."""

    layers: int
    hidden: int
    heads: int
    seq_length: int
    kv_heads: int = 0  # that query heads share; 0: as many
    head_dim: int = 0  # 0: hidden / heads
    ffn: int = 0  # inner width of the MLP; 0: 4 hidden
    vocab: int = 50304
    gated: bool = False  # as Llama: SwiGLU, so three matrices in the MLP, RoPE, RMSNorm, no biases
    tied: bool | None = None  # one matrix is both embedding and head; None: unless `gated`
    max_positions: int | None = None  # rows of the learned positions; None: as many as seq_length

    def __post_init__(self) -> None:
        usual = {"kv_heads": self.heads, "head_dim": max(1, self.hidden // self.heads), "ffn": 4 * self.hidden}
        filled = {name: getattr(self, name) or size for name, size in usual.items()}
        filled |= {"tied": not self.gated} if self.tied is None else {}
        for name, value in filled.items():
            object.__setattr__(self, name, value)

    @classmethod
    @lru_cache(64)  # jobs of one model share what it has computed of itself
    def of_gpt2(cls, shape: ModelShape, seq_length: int) -> DenseModel:
        """Return what `src/gpt2.py` trains."""
        return cls(
            layers=shape.num_layers,
            hidden=shape.embedding_size,
            heads=shape.num_heads,
            vocab=shape.padded_vocab_size,
            seq_length=seq_length,
            max_positions=shape.max_position_embeddings,
        )

    @cached_property
    def block_matrix_parameters(self) -> int:
        """Elements of the matrices of one block: attention and MLP."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def head_parameters(self) -> int:
        """Elements of the matrix that makes logits."""
        return self.hidden * self.vocab

    @cached_property
    def block_parameters(self) -> int:
        """Elements of one block."""
        return sum(math.prod(shape) for shape in self.block_shapes())

    @cached_property
    def parameters(self) -> int:
        """All trainable elements, a tied head once."""
        embeddings = self.head_parameters * (1 if self.tied else 2)
        return self.layers * self.block_parameters + embeddings + self.position_parameters + self.norm_parameters

    @property
    def norm_parameters(self) -> int:
        """Elements of one norm."""
        return self.hidden * (1 if self.gated else 2)

    @property
    def position_parameters(self) -> int:
        """Elements of the learned positions."""
        return 0 if self.gated else (self.max_positions or self.seq_length) * self.hidden

    def block_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each tensor of a block in the order of its passes, matrices as (outputs, inputs)."""
        norm: list[tuple[int, ...]] = [(self.hidden,)] * (1 if self.gated else 2)
        attention = [(self.head_dim * (self.heads + 2 * self.kv_heads), self.hidden)]
        attention += [(self.hidden, self.head_dim * self.heads)]
        mlp = [(self.ffn, self.hidden)] * (2 if self.gated else 1) + [(self.hidden, self.ffn)]
        shapes: list[tuple[int, ...]] = []
        for half in (attention, mlp):
            shapes += norm
            for outputs, inputs in half:
                shapes += [(outputs, inputs)] if self.gated else [(outputs, inputs), (outputs,)]
        return shapes

    def flops_per_token(self, *, is_whole: bool = False) -> int:
        """FLOPs of forward and backward: 6 per element of a matrix that multiplies, and the causal half of attention.

        The convention of the published rows (`checks.flops_per_token`). No recomputation.

        Args:
            is_whole: attention counts in full, as in PaLM and in the MFU of src/gpt2.py.
        """
        matrices = self.layers * self.block_matrix_parameters + self.head_parameters
        scores = 6 * self.layers * self.heads * self.head_dim * self.seq_length
        return 6 * matrices + (2 if is_whole else 1) * scores


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks along each axis. data x tensor x pipeline x context is the number of devices."""

    data: int = 1  # shares of the global batch
    zero_stage: int = 0  # 0: nothing sharded, 1 optimizer, 2 and gradients, 3 and weights (FSDP)
    shard: int = 1  # data and context ranks that share one copy of what is sharded
    tensor: int = 1
    sequence_parallel: bool = False  # within `tensor`
    pipeline: int = 1
    virtual_stages: int = 1  # on each pipeline rank
    context: int = 1  # ranks that share a sequence

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: the same global batch, whatever the layout. Batches in sequences."""

    model: DenseModel
    layout: Layout
    micro_batch: float
    accumulation: float  # micro batches per optimizer step and data rank, those of a pipeline too
    run_type: str | None = None  # of src/gpt2.py; None for a run of another program
    stack: str = "testbed"  # the program that runs it, by the name of its repository
    precision: str = "bf16"  # of the large matrix products: fp32, fp16, bf16, fp8, ...
    has_16_bit_weights: bool = False  # weights and residual stream in 16 bits, not autocast over fp32
    recompute: str = "none"  # activation checkpointing: none, full, selective_attention, selective_op
    recompute_share: float = 1.0  # of the layers that `recompute` concerns
    compiled: bool = False
    attention: str = "flash"  # or "eager"
    optimizer: str = "adamw"
    schedule: str | None = None  # of the pipeline: gpipe, 1f1b, interleaved_1f1b, zero_bubble; None: one at a time
    offload: str = "none"
    dropout: float = 0.0
    label_smoothing: float = 0.0
    offload_layers: int | None = None  # with offload "activations": blocks whose activations wait in host memory
    gathers_keys: bool = False  # context ranks hold the keys and values of the whole sequence, and no ring
    on_cpu: bool = False  # some operations keep other tensors there
    reshards: bool = True  # fsdp: frees a block's gathered weights after its forward pass
    bucket_elements: float = 2e8  # of DeepSpeed's reduce and all-gather buckets
    overlap: bool = True  # collectives of the data ranks run behind the passes
    tensor_overlap: bool = False  # collectives of the tensor ranks run behind matrix products

    @property
    def strategy(self) -> StrategyEntry | None:
        """Return the registry's row of the run type; None for a run of another program."""
        return None if self.run_type is None else STRATEGIES[self.run_type]

    @property
    def sends(self) -> str:
        """Return how data ranks exchange gradients, as in StrategyEntry; nothing for a run of another program."""
        if self.strategy is None:
            return ""
        return "at_end" if self.strategy.keeps == "axes" and not self.layout.zero_stage else self.strategy.sends

    @property
    def product_bytes(self) -> int:
        """Bytes of an element that comes out of a large matrix product."""
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def tokens_per_pass(self) -> float:
        """Tokens of a micro batch on one rank."""
        return self.micro_batch * self.model.seq_length / self.layout.context

    @property
    def global_batch(self) -> float:
        return self.micro_batch * self.accumulation * self.layout.data

    @property
    def tokens_per_step(self) -> float:
        return self.global_batch * self.model.seq_length


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices and the links between them."""

    device: Device
    devices: int
    per_node: int  # of one host, which one launcher starts
    within_node: Link
    between_nodes: Link

    @property
    def joined(self) -> int:
        """Devices that `within_node` joins: those of a host, or of several with one switch."""
        return max(self.per_node, self.device.link_domain)

    def near_bytes_per_s(self, ranks: int) -> float:
        """Return what a device sends to `ranks` devices of its node, itself counted, per second."""
        speed, peer = self.within_node.bytes_per_s, self.device.peer_bytes_per_s
        return min(speed, peer * max(1, ranks - 1)) if peer else speed  # few neighbours use few of a device's links


def emulates_bf16(precision: str, device: Device) -> bool:
    """Return whether the GPU lacks native bf16. PyTorch compiles no bf16 kernels for it, and has no fused attention."""
    return precision == "bf16" and device.kind == "cuda" and "bf16" not in device.peak_flops


def job_of_settings(settings: RunSettings) -> Job:
    """Return the run of checked settings."""
    return job_of(settings.by_flag(), settings.plan.mesh, settings.shape)


def job_of(values: Mapping[str, Any], mesh: MeshSizes, shape: ModelShape, machine: Machine | None = None) -> Job:
    """Return the run that settings describe.

    Args:
        values: every flag, filled in.
        machine: whose devices may lack kernels; None: the device that the settings name, which has all of them.
    """
    run_type, precision = values["run_type"], values["precision"]
    entry, kind = STRATEGIES[run_type], machine.device.kind if machine else values["device"]
    stage = {"shards": 3, "zero": values["zero_stage"]}.get(entry.sends, 0)
    if entry.keeps == "axes" and mesh.shard == 1:
        stage = 0
    data, accumulation = mesh.data, values["grad_accum_steps"]
    if entry.devices == "all" and machine:  # one process, a micro batch on each device
        data, accumulation = machine.devices, -(-accumulation // machine.devices)
    precision = "fp8" if values["matmul"] == "fp8" else precision
    lacks_bf16 = machine is not None and emulates_bf16(precision, machine.device)
    compiles, on_cpu = values["compile"], kind == "cpu"
    if compiles is None:
        has_triton = machine is None or machine.device.architecture not in NO_TRITON
        compiles = kind == "cuda" and has_triton and not lacks_bf16 and auto_compile_blocker(values) is None
    # PyTorch has no fused attention for bf16 that is emulated, nor on a CPU with dropout, and writes its scores down
    is_eager = values["attention"] == "math" or lacks_bf16 or (on_cpu and values["dropout"])
    layout = Layout(
        data=data,
        zero_stage=stage,
        shard=mesh.shard if "shard_size" in entry.options and stage else data if stage else 1,
        tensor=mesh.tensor,
        sequence_parallel=values["sequence_parallel"] == "on",
        pipeline=mesh.pipeline,
        virtual_stages=(values["stages_per_rank"] or 1) if mesh.pipeline > 1 else 1,
        context=mesh.context,
    )
    is_16_bit_engine = entry.engine == "deepspeed" and precision == "fp16"
    return Job(
        model=DenseModel.of_gpt2(shape, values["seq_length"]),
        layout=layout,
        micro_batch=values["micro_batch_size_per_gpu"],
        accumulation=accumulation,
        run_type=run_type,
        precision=precision,
        has_16_bit_weights=values["mixed_precision"] == "native" or is_16_bit_engine,
        recompute=RECOMPUTE[values["activation_checkpointing"]],
        compiled=compiles,
        attention="eager" if is_eager else "flash",
        optimizer=values["optimizer"],
        schedule=values["pipeline_schedule"] if mesh.pipeline > 1 else None,
        offload=values["offload"] or "none",
        dropout=values["dropout"],
        label_smoothing=values["label_smoothing"],
        gathers_keys=mesh.context > 1 and values["context_parallel_method"] == "allgather",
        on_cpu=on_cpu,
        reshards=values["reshard_after_forward"] != "off",
        bucket_elements=values["reduce_bucket_size"] or Job.bucket_elements,
        overlap=(stage > 0 or entry.sends not in (*NOT_OVERLAPPED, "shards")) and values["overlap_comm"] != "off",
    )
