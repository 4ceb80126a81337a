"""Compute the bytes of weights, gradients and optimizer state that a rank must hold. No torch.

Padding of the embedding counts, and the tied head counts once per rank. Activations, communication buckets and host
memory of --offload do not. tests/planner/test_model_states.py compares with live tensors.

Symbols: P parameters, C channels, N data ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from testbed.distributed.mesh import MeshSizes
from testbed.model.shape import ModelShape
from testbed.planner.stages import Stage

FP32, MOMENTS = 4, 8  # bytes per parameter; Adam's two moments are fp32 in every run type, Muon's one too
UPDATE_COPY = "fp32 copy for update"  # a kind that the paper has not, see update_copy_bytes
ZERO_3_SUB_GROUP = 10**9  # DeepSpeed's sub_group_size: parameters that stage 3 updates at once


def model_state_bytes(
    shape: ModelShape,
    mesh: MeshSizes,
    *,
    zero_stage: int | None = None,
    has_16_bit_weights: bool = False,
    optimizer: str = "adamw",
    data_rank: int = 0,
    stages: Sequence[Stage] | None = None,
) -> dict[str, int]:
    """Bytes on one rank just before an update: gradients are complete, nothing has changed yet.

    Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 3.1 and figure 1): mixed-precision Adam takes 2 bytes per
    weight, 2 per gradient and K = 12 of optimizer state (fp32 master, two moments), of which stage 1 shards the
    last, stage 2 the last two, stage 3 all over N ranks. In fp32 and under autocast, weights and gradients take 4 each
    and the moments 8, as there the weights are their own masters.

    Args:
        mesh: says what is sharded: `shard` ranks share fsdp's weights, `tensor` ranks the matrices.
        zero_stage: of DeepSpeed; None for PyTorch's strategies. Stage 3 with stage3_param_persistence_threshold 0: up
            to that size (by default 100,000 elements) every rank also holds tensors whole.
        has_16_bit_weights: DeepSpeed's own fp16 or bf16 mode. Of no effect on fsdp, whose native mixed precision casts
            what it gathers: the shards stay fp32 and are the masters.
        optimizer: "muon" keeps one moment of the blocks' matrices in place of two; it runs without ZeRO.
        data_rank: stages 1 and 2 of DeepSpeed do not give all of them the same.
        stages: those of this pipeline rank; None where a rank holds all layers.

    Returns:
        Bytes by kind: "parameters", "gradients", "optimizer".
    """
    if not zero_stage:  # DeepSpeed's stage 0 keeps plain PyTorch tensors
        elements = _part(elements_held(shape, mesh.tensor, stages), mesh.shard)
        moments = MOMENTS * elements
        if optimizer == "muon":
            moments -= FP32 * _part(_block_matrix_elements(shape, mesh.tensor, stages), mesh.shard)
        return {"parameters": FP32 * elements, "gradients": FP32 * elements, "optimizer": moments}
    whole = elements_held(shape)
    part = _part(whole, mesh.data)
    width = 2 if has_16_bit_weights else FP32
    return {
        "parameters": width * (part if zero_stage == 3 else whole),
        "gradients": width * (part if zero_stage == 3 else _gradients_of_whole_tensors(shape, mesh.data, data_rank)),
        # More than needed with fp32 weights: DeepSpeed clones them into masters at every stage. Stage 3 means to reuse
        # them, but compares a device with its name, which is never equal.
        "optimizer": (FP32 + MOMENTS) * part,
    }


def published_zero_bytes(shape: ModelShape, data_ranks: int, zero_stage: int) -> dict[str, int]:
    """Return the bytes of mixed precision in figure 1 of the ZeRO paper. Stage 3 is its fully sharded one."""
    whole = elements_held(shape)
    part = _part(whole, data_ranks)
    return {
        "parameters": 2 * (part if zero_stage >= 3 else whole),
        "gradients": 2 * (part if zero_stage >= 2 else whole),
        "optimizer": 12 * (part if zero_stage >= 1 else whole),
    }


def update_copy_bytes(shape: ModelShape, data_ranks: int, zero_stage: int | None) -> int:
    """Bytes of the fp32 gradients that DeepSpeed's ZeRO makes inside the update, more than the paper counts.

    Adam reads fp32, so each parameter group's gradients are flattened and converted before its turn and freed after it.
    The matrices are one group and nearly everything. What they were converted from stays: stage 3 keeps its buffer of
    gradients for good, stages 1 and 2 have one for all groups, which the last group still needs.
    """
    if not zero_stage:
        return 0
    matrices = sum(_tensor_sizes(shape)[0])
    at_once = min(matrices, ZERO_3_SUB_GROUP) if zero_stage == 3 else matrices
    return FP32 * _part(at_once, data_ranks)


def elements_held(shape: ModelShape, tensor_ranks: int = 1, stages: Sequence[Stage] | None = None) -> int:
    """Return the parameters on the fullest tensor rank, padding included, of some pipeline stages or all."""
    channels = shape.embedding_size
    # c_attn 3C^2 + 3C, c_proj C^2, c_fc 4C^2 + 4C, c_proj 4C^2 are cut; the bias of what is summed over the tensor
    # ranks (C, twice) and two LayerNorms (2C each) are on all of them
    block = _part(12 * channels**2 + 7 * channels, tensor_ranks) + 6 * channels
    embedding = _part(shape.padded_vocab_size, tensor_ranks) * channels  # cut by rows
    everything = [Stage(range(shape.num_layers), embeds=True, predicts=True)]
    held = everything if stages is None else stages
    embeds, predicts = any(stage.embeds for stage in held), any(stage.predicts for stage in held)
    total = sum(len(stage.blocks) for stage in held) * block
    total += embedding * (embeds or predicts)  # the head is the same matrix: once where a rank holds both ends
    total += shape.num_position_parameters * embeds
    return total + 2 * channels * predicts  # the final LayerNorm


def _block_matrix_elements(shape: ModelShape, tensor_ranks: int, stages: Sequence[Stage] | None) -> int:
    """Return the elements that Muon updates: 12 C^2 of every block, split over the tensor ranks."""
    num_blocks = shape.num_layers if stages is None else sum(len(stage.blocks) for stage in stages)
    return num_blocks * _part(12 * shape.embedding_size**2, tensor_ranks)


def _gradients_of_whole_tensors(shape: ModelShape, ranks: int, rank: int) -> int:
    """Elements of gradient that a rank keeps in ZeRO 1 and 2: of every tensor that its part touches, all of it.

    DeepSpeed flattens each parameter group and cuts it in equal parts, through the middle of tensors. Its last backward
    then copies the gradient of a tensor on a cut whole into the buffers of both sides (`copy_grads_in_partition` of
    stage_1_and_2.py), so on many ranks the embedding decides, not P / N. Nothing else of the gradients remains, in
    stage 1 neither, where the paper has 2 P: there they are whole only while they accumulate.
    """
    kept = 0
    for sizes in _tensor_sizes(shape):
        part = 2 * _part(sum(sizes), 2 * ranks)  # aligned to 4 bytes of bf16
        end = 0
        for size in sizes:
            begin, end = end, end + size
            if begin < (rank + 1) * part and end > rank * part:
                kept += size
    return kept


def _tensor_sizes(shape: ModelShape) -> tuple[list[int], list[int]]:
    """Return the elements of all matrices and of all vectors in model order: the two groups of the optimizer."""
    channels = shape.embedding_size
    matrices = [shape.padded_vocab_size * channels, shape.num_position_parameters]
    matrices += [3 * channels**2, channels**2, 4 * channels**2, 4 * channels**2] * shape.num_layers
    # ln_1 gain and bias, c_attn, c_proj, ln_2 gain and bias, c_fc, c_proj
    vectors = [size * channels for size in (1, 1, 3, 1, 1, 1, 4, 1)] * shape.num_layers
    return matrices, [*vectors, channels, channels]


def _part(elements: int, ranks: int) -> int:
    """Return the size of one of equal parts, the last one padded."""
    return -(-elements // ranks)
