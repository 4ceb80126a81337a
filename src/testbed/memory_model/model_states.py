"""Compute the bytes of weights, gradients and optimizer state that a rank must hold. No torch.

Padding of the embedding counts, and the tied head counts once per rank. Activations, communication buckets and host
memory of --offload do not. tests/memory_model/test_model_states.py compares with live tensors.

Symbols: P parameters, N data ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from testbed.memory_model.job import DenseModel, Job, framework_of
from testbed.memory_model.stages import Stage, stages_of, stages_of_ranks

FP32, MOMENTS = 4, 8  # bytes per parameter; Adam's two moments are fp32 in every run type, Muon's one too
ZERO_3_SUB_GROUP = 10**9  # DeepSpeed's sub_group_size: parameters that stage 3 updates at once
LIVE = 10**9  # DeepSpeed's stage3_max_live_parameters: weights that stage 3 keeps gathered
BUCKET = 25 * 2**20  # bytes of DDP's buckets, and of those in which other strategies average over data ranks
PERSISTENT = 100_000  # DeepSpeed's stage3_param_persistence_threshold: smaller tensors stay whole in stage 3
FSDP_PROGRAMS = ("llm-foundry", "torchtitan")


def engine_of(job: Job) -> str:
    """Return which program's rules decide what a rank holds: "torch", "deepspeed" or "megatron"."""
    if job.strategy is not None:
        return job.strategy.engine
    if framework_of(job.stack) == "megatron":
        return "megatron"
    is_fsdp = any(word in job.stack.lower() for word in FSDP_PROGRAMS)
    is_zero = "deepspeed" in job.stack.lower() or (job.layout.zero_stage in (1, 2) and not is_fsdp)
    return "deepspeed" if is_zero else "torch"


def main_gradient_bytes(job: Job) -> int:
    """Return the bytes of an element of Megatron's main gradients; the recipes of Megatron-Bridge reduce in 16 bits."""
    return 2 if "megatron-bridge" in job.stack.lower() else FP32


def shards_weights(job: Job) -> bool:
    """Return whether weights lie in shards; stage 2 of FSDP (SHARD_GRAD_OP) only keeps them gathered for longer."""
    return job.layout.zero_stage == 3 or (job.layout.zero_stage == 2 and engine_of(job) == "torch")


@dataclass(frozen=True)
class Held:
    """What a pipeline rank holds of a model, on the fullest tensor rank. Sizes in elements, padding included."""

    model: DenseModel
    stages: tuple[Stage, ...]
    tensor_ranks: int = 1

    @cached_property
    def blocks(self) -> int:
        """How many blocks it has."""
        return sum(len(stage.blocks) for stage in self.stages)

    @cached_property
    def embeds(self) -> bool:
        return any(stage.embeds for stage in self.stages)

    @cached_property
    def predicts(self) -> bool:
        return any(stage.predicts for stage in self.stages)

    @property
    def kind(self) -> tuple[tuple[int, bool, bool], ...]:
        """What ranks of one kind have in common: blocks and ends of each stage."""
        return tuple((len(stage.blocks), stage.embeds, stage.predicts) for stage in self.stages)

    @cached_property
    def block(self) -> int:
        """Elements of one block. Cut are the matrices and the biases of their outputs; the biases of what is summed
        over the tensor ranks (twice) and two norms are on all of them."""
        model = self.model
        if not self.blocks:
            return 0
        on_all = 2 * model.hidden * (not model.gated) + 2 * model.norm_parameters
        return part_of(model.block_parameters - on_all, self.tensor_ranks) + on_all

    @property
    def matrices(self) -> int:
        """Elements of the blocks' matrices: those that Muon updates and that autocast casts."""
        return self.blocks * part_of(self.model.block_matrix_parameters, self.tensor_ranks)

    @cached_property
    def table(self) -> int:
        """Elements of the head's matrix, or else of the embedding, which are cut by rows."""
        return part_of(self.model.vocab, self.tensor_ranks) * self.model.hidden if self.embeds or self.predicts else 0

    @cached_property
    def elements(self) -> int:
        """All of it. A tied table counts once where the rank has both ends."""
        model, embeds, predicts = self.model, self.embeds, self.predicts
        tables = self.table * (2 if embeds and predicts and not model.tied else 1)
        ends = model.position_parameters * embeds + model.norm_parameters * predicts
        return self.blocks * self.block + tables + ends


def whole(model: DenseModel, tensor_ranks: int = 1) -> Held:
    """Return what a rank holds without a pipeline."""
    return Held(model, (Stage(range(model.layers), embeds=True, predicts=True),), tensor_ranks)


def held_by_rank(job: Job) -> tuple[Held, ...]:
    """Return what each pipeline rank holds. Stages are balanced by cost, as src/gpt2.py cuts them."""
    layout = job.layout
    virtual = layout.virtual_stages if layout.pipeline > 1 else 1
    return _held(job.model, layout.pipeline, virtual, layout.tensor, job.schedule)


@lru_cache(4096)  # jobs that differ in batch, shards or recomputation hold the same
def _held(model: DenseModel, ranks: int, virtual: int, tensor_ranks: int, schedule: str | None) -> tuple[Held, ...]:
    stages = stages_of(model, ranks * virtual)
    return tuple(Held(model, tuple(own), tensor_ranks) for own in stages_of_ranks(stages, ranks, schedule))


def ends_of_each(kinds: Sequence[Hashable]) -> list[int]:
    """Return the places of the first and the last of each kind, in order."""
    first = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
    last = {kind: place for place, kind in enumerate(kinds)}
    return sorted({*first.values(), *last.values()})


def keeps_table_whole(job: Job, held: Held) -> bool:
    """Return whether a rank with both ends of a pipeline keeps the tied embedding out of its shards.

    FSDP2 lets one root alone have a parameter, and there each stage is one (strategies/pipeline.py).
    """
    return held.embeds and held.predicts and len(held.stages) > 1 and bool(job.model.tied) and job.run_type is not None


def model_state_bytes(
    job: Job, held: Held | None = None, *, data_rank: int = 0, persistent: int = PERSISTENT
) -> dict[str, int]:
    """Bytes on one rank just before an update: gradients are complete, nothing has changed yet.

    Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 3.1 and figure 1): mixed-precision Adam takes 2 bytes per
    weight, 2 per gradient and K = 12 of optimizer state (fp32 master, two moments), of which stage 1 shards the
    last, stage 2 the last two, stage 3 all over N ranks. In fp32 and under autocast, weights and gradients take 4 each
    and the moments 8, as there the weights are their own masters. fsdp too: its native mixed precision casts what it
    gathers. Muon keeps one moment of the blocks' matrices in place of two; it runs without ZeRO.

    Args:
        held: of the model on this pipeline rank; None: all of it.
        data_rank: stages 1 and 2 of DeepSpeed do not give all of them the same.
        persistent: elements below which stage 3 of DeepSpeed also holds tensors whole on every rank.

    Returns:
        Bytes by kind: "parameters", "gradients", "optimizer".
    """
    layout, engine, stage = job.layout, engine_of(job), job.layout.zero_stage
    held = held or whole(job.model, layout.tensor)
    is_zero = engine == "deepspeed" and stage > 0
    if is_zero or (job.has_16_bit_weights and not (engine == "torch" and shards_weights(job))):
        part = part_of(held.elements, layout.shard if stage else 1)
        width = 2 if job.has_16_bit_weights else FP32
        gradient = main_gradient_bytes(job) if engine == "megatron" else width
        weights = part if shards_weights(job) else held.elements
        gradients = part if stage >= 2 else held.elements
        if is_zero and job.run_type is not None:  # DeepSpeed to the byte
            if stage == 3:
                weights += sum(size for group in _tensor_sizes(job.model) for size in group if size < persistent)
            else:
                gradients = _gradients_of_whole_tensors(job.model, layout.shard, data_rank)
        # More than needed with fp32 weights: DeepSpeed clones them into masters at every stage. Stage 3 means to reuse
        # them, but compares a device with its name, which is never equal.
        optimizer = (FP32 + MOMENTS) * part
        return {"parameters": width * weights, "gradients": gradient * gradients, "optimizer": optimizer}
    # PyTorch, and stage 0 of DeepSpeed
    ranks = layout.shard if shards_weights(job) else 1
    is_by_rows = ranks > 1 and layout.pipeline == layout.tensor == 1
    apart = held.table if ranks > 1 and keeps_table_whole(job, held) else 0
    elements = _elements_of_shards(job.model, ranks) if is_by_rows else apart + part_of(held.elements - apart, ranks)
    moments = MOMENTS * elements
    if job.optimizer == "muon":
        moments -= FP32 * part_of(held.matrices, ranks)
    return {"parameters": FP32 * elements, "gradients": FP32 * elements, "optimizer": moments}


def update_copy_bytes(model: DenseModel, data_ranks: int, zero_stage: int | None) -> int:
    """Bytes of the fp32 gradients that DeepSpeed's ZeRO makes inside the update, more than the paper counts.

    Adam reads fp32, so each parameter group's gradients are flattened and converted before its turn and freed after it.
    The matrices are one group and nearly everything. What they were converted from stays: stage 3 keeps its buffer of
    gradients for good, stages 1 and 2 have one for all groups, which the last group still needs.
    """
    if not zero_stage:
        return 0
    matrices = sum(_tensor_sizes(model)[0])
    at_once = min(matrices, ZERO_3_SUB_GROUP) if zero_stage == 3 else matrices
    return FP32 * part_of(at_once, data_ranks)


def _gradients_of_whole_tensors(model: DenseModel, ranks: int, rank: int) -> int:
    """Elements of gradient that a rank keeps in ZeRO 1 and 2: of every tensor that its part touches, all of it.

    DeepSpeed flattens each parameter group and cuts it in equal parts, through the middle of tensors. Its last backward
    then copies the gradient of a tensor on a cut whole into the buffers of both sides (`copy_grads_in_partition` of
    stage_1_and_2.py), so on many ranks the embedding decides, not P / N. Nothing else of the gradients remains, in
    stage 1 neither, where the paper has 2 P: there they are whole only while they accumulate.
    """
    kept = 0
    for sizes in _tensor_sizes(model):
        part = 2 * part_of(sum(sizes), 2 * ranks)  # aligned to 4 bytes of bf16
        end = 0
        for size in sizes:
            begin, end = end, end + size
            if begin < (rank + 1) * part and end > rank * part:
                kept += size
    return kept


@lru_cache(64)
def _tensor_sizes(model: DenseModel) -> tuple[list[int], list[int]]:
    """Return the elements of all matrices and of all vectors in model order: the two groups of the optimizer."""
    shapes = _shapes(model)
    return (
        [math.prod(shape) for shape in shapes if len(shape) > 1],
        [math.prod(shape) for shape in shapes if len(shape) == 1],
    )


def _elements_of_shards(model: DenseModel, ranks: int) -> int:
    """Return the elements on rank 0 where each tensor is cut by rows, as FSDP2 does: a row is never cut."""
    return sum(part_of(shape[0], ranks) * math.prod(shape[1:]) for shape in _shapes(model))


def _shapes(model: DenseModel) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors in model order."""
    shapes: list[tuple[int, ...]] = [(model.vocab, model.hidden)]
    if model.position_parameters:
        shapes.append((model.position_parameters // model.hidden, model.hidden))
    shapes += model.block_shapes() * model.layers
    shapes += [(model.hidden,)] * (model.norm_parameters // model.hidden)
    return shapes if model.tied else [*shapes, (model.vocab, model.hidden)]


def part_of(elements: int, ranks: int) -> int:
    """Return the size of one of equal parts, the last one padded."""
    return -(-elements // ranks)
