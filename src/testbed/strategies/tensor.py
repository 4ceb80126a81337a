"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): each matrix of a block is cut over the tensor ranks.

Query, key, value and the MLP's first matrix are cut by rows, so that a rank has whole heads and whole MLP channels; the
projections into the residual stream are cut by columns, and a sum over the ranks completes each: two sums in a block's
forward pass, two in its backward pass. The embedding, which is the head too, is cut by tokens: no rank ever holds the
logits of all of them.

With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) the residual stream between them is cut by tokens
of the sequence: each sum becomes a reduce-scatter, and an all-gather stands before the next matrix, in backward again,
so that only a piece is kept. Without it the stream and the LayerNorms are alike on all tensor ranks.

Shapes: B micro batch, T sequence, C channels, V vocabulary, n tensor ranks.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from testbed.model.gpt2 import GPT2
from testbed.step import NOT_A_TARGET


def cut_matrices_(model: GPT2, mesh: DeviceMesh, is_sequence_cut: bool) -> None:
    """Replace a model's matrices, or those of a stage, by this rank's pieces. Every rank comes with the same whole
    ones, so nothing is sent.

    Args:
        mesh: the tensor ranks.
        is_sequence_cut: sequence parallelism.
    """
    for block in model.blocks:
        for parameter in block.attn.c_attn.parameters():
            parameter.data = exchange_order(parameter.data, 3, mesh.size())
        block.attn.num_heads //= mesh.size()
    stream = Shard(1) if is_sequence_cut else Replicate()
    # named after x W; nn.Linear's weight is W transposed
    plan: dict[str, ParallelStyle] = {"h.*.attn.c_proj": RowwiseParallel(output_layouts=stream)}
    plan["h.*.mlp.c_proj"] = RowwiseParallel(output_layouts=stream)
    if is_sequence_cut:
        plan |= {"h.*.ln_1": SequenceParallel(), "h.*.ln_2": SequenceParallel()}
        plan |= {"ln_f": SequenceParallel()} if model.predicts else {}
        for block in model.blocks:
            block.attn.register_module("c_attn", GatheringLinear(block.attn.c_attn, mesh))
            block.mlp.register_module("c_fc", GatheringLinear(block.mlp.c_fc, mesh))
    else:
        plan |= {"h.*.attn.c_attn": ColwiseParallel(), "h.*.mlp.c_fc": ColwiseParallel()}
    if not model.blocks:  # the end of a pipeline
        plan = {name: style for name, style in plan.items() if not name.startswith("h.")}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if model.embeds or model.predicts:
        model.register_module("wte", VocabularyParallelEmbedding(model.wte.weight, mesh, stream))
    if model.embeds and is_sequence_cut:
        model.register_module("wpe", PositionsOfPiece(model.wpe.weight, mesh))
    if model.predicts:
        model.padding_bias = distribute_tensor(model.padding_bias, mesh, [Shard(0)], src_data_rank=None)
        model.head = functools.partial(_head_of_piece if is_sequence_cut else _head, mesh)
        first = mesh.get_local_rank() * -(-model.shape.padded_vocab_size // mesh.size())
        model.loss_sum = functools.partial(_loss_sum, mesh.get_group(), first)


class VocabularyParallelEmbedding(nn.Module):
    """Each rank looks up the tokens whose rows it holds, zeros for the others; the sum over ranks is the embedding.

    RowwiseParallel for nn.Embedding does the same, but its backward pass makes a gradient with the rows of all tokens.
    """

    def __init__(self, weight: torch.Tensor, mesh: DeviceMesh, stream: Shard | Replicate):
        super().__init__()
        self.mesh, self.stream = mesh, stream
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))
        self.first = mesh.get_local_rank() * -(-len(weight) // mesh.size())  # row of the whole matrix

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (B, T, C) for (B, T) ids; (B, T / n, C) where the stream is cut."""
        rows = part_of(self.weight)
        ids = ids - self.first
        is_elsewhere = (ids < 0) | (ids >= len(rows))
        found = F.embedding(ids.masked_fill(is_elsewhere, 0), rows)  # (B, T, C)
        found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return DTensor.from_local(found, self.mesh, [Partial()]).redistribute(placements=[self.stream]).to_local()


class PositionsOfPiece(nn.Module):
    """Position embedding where the residual stream is cut. Each rank looks up the positions of its own tokens, and its
    gradient is partial: the sum over the tensor ranks is the gradient of the whole sequence."""

    def __init__(self, weight: torch.Tensor, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()], src_data_rank=None))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return (T / n, C) for (T,) positions."""
        assert isinstance(self.weight, DTensor)
        rows = self.weight.to_local(grad_placements=[Partial()])
        return F.embedding(positions.chunk(self.mesh.size())[self.mesh.get_local_rank()], rows)


def _head(mesh: DeviceMesh, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's (B, T, V / n) logits of (B, T, C)."""
    x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    return F.linear(x, part_of(weight), None if bias is None else part_of(bias))


def _head_of_piece(mesh: DeviceMesh, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's (B, T, V / n) logits of its (B, T / n, C)."""
    return gathered_linear(part_of(x), part_of(weight), None if bias is None else part_of(bias), mesh)


class GatheringLinear(nn.Module):
    """This rank's rows of a linear layer, whose input is cut by tokens of the sequence."""

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)], src_data_rank=None))
        self.bias = nn.Parameter(distribute_tensor(layer.bias, mesh, [Shard(0)], src_data_rank=None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, T, outputs / n) for (B, T / n, inputs)."""
        return gathered_linear(part_of(x), part_of(self.weight), part_of(self.bias), self.mesh)


def gathered_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mesh: DeviceMesh) -> torch.Tensor:
    """Return the linear layer of a gathered input, (B, T, outputs / n) of (B, T / n, inputs).

    Backward gathers the input again: kept, it would be the largest part of a block that is not cut.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _GatheredLinear.apply(x, weight, bias, mesh.get_group())


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        whole, transfer = _gather(x, group)
        transfer.wait()
        return F.linear(_in_order(whole, x), weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        whole, arriving = _gather(x, ctx.group)  # behind the first product
        of_whole = gradient @ weight
        pieces = torch.cat(of_whole.chunk(ctx.group.size(), dim=1))
        of_piece = torch.empty_like(x, memory_format=torch.contiguous_format)
        leaving = dist.reduce_scatter_tensor(of_piece, pieces, group=ctx.group, async_op=True)  # behind the second
        arriving.wait()
        rows = gradient.flatten(0, 1)
        of_weight = rows.t() @ _in_order(whole, x).flatten(0, 1)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        leaving.wait()
        return of_piece, of_weight, of_bias, None


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, dist.Work]:
    """Gather the pieces of all ranks, one after the other in the first dimension. Returns what to wait for too."""
    everyone = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    return everyone, dist.all_gather_into_tensor(everyone, x.contiguous(), group=group, async_op=True)


def _in_order(everyone: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the pieces of all ranks as one sequence."""
    return torch.cat(everyone.split(x.shape[0]), dim=1)


def _loss_sum(
    group: dist.ProcessGroup, first: int, logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, smoothing: float
) -> torch.Tensor:
    """Return what `gpt2.loss_sum` does, of this rank's (B, T, V / n) logits. The same on every tensor rank."""
    return _CutCrossEntropy.apply(logits.flatten(0, 1).float(), targets.flatten(), first, vocab_size, smoothing, group)


class _CutCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits that are cut by tokens: a maximum and two or three numbers per token cross the ranks, and
    nothing in backward.

    With smoothing e a target t costs lse - (1 - e) x_t - e mean_v x_v, where lse is the logarithm of the sum of exp(x).
    """

    @staticmethod
    def forward(ctx, logits, targets, first, vocab_size, smoothing, group):
        is_elsewhere = (targets < first) | (targets >= first + logits.shape[-1])
        column = (targets - first).masked_fill(is_elsewhere, 0).unsqueeze(-1)
        is_target = targets != NOT_A_TARGET
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        logits = logits - largest.unsqueeze(-1)
        num_real = min(max(vocab_size - first, 0), logits.shape[-1])  # the rest is padding, minus infinity
        of_target = logits.gather(-1, column).squeeze(-1).masked_fill(is_elsewhere, 0.0)
        sums = [logits.exp().sum(-1), of_target]
        if smoothing:
            sums.append(logits[:, :num_real].sum(-1))
        of_all = torch.stack(sums)
        dist.all_reduce(of_all, group=group)
        lse = of_all[0].log()
        losses = lse - (1 - smoothing) * of_all[1]
        if smoothing:
            losses = losses - smoothing / vocab_size * of_all[2]
        ctx.save_for_backward(logits, lse, column, is_elsewhere, is_target)
        ctx.smoothing, ctx.vocab_size, ctx.num_real = smoothing, vocab_size, num_real
        return losses.masked_fill(~is_target, 0.0).sum()

    @staticmethod
    def backward(ctx, gradient):
        logits, lse, column, is_elsewhere, is_target = ctx.saved_tensors
        found = (logits - lse.unsqueeze(-1)).exp_()
        found.scatter_add_(-1, column, ((1 - ctx.smoothing) * (is_elsewhere.float() - 1.0)).unsqueeze(-1))
        if ctx.smoothing:
            found[:, : ctx.num_real] -= ctx.smoothing / ctx.vocab_size
        return found.mul_(gradient * is_target.unsqueeze(-1)), None, None, None, None, None


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; its gradient is a part of the whole one's."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def exchange_order(tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Return rows that lie as (outer, inner, rest) in the order (inner, outer, rest).

    c_attn's rows are query, key, value, each with the heads of all ranks: (3, ranks, heads of a rank x D). Cut in equal
    pieces, a rank must get its heads of all three: (ranks, 3, heads of a rank x D).
    """
    rows = tensor.unflatten(0, (outer, inner, -1))
    return rows.transpose(0, 1).flatten(0, 2).contiguous()


def in_models_order(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return a piece of c_attn, the same memory, with where in the model's own order its rows lie.

    A tensor rank's queries, keys and values are three pieces of the whole matrix. If these lie in shards too, what a
    rank has may begin and end inside one. torch.distributed.checkpoint reads and writes such pieces one by one.

    Args:
        tensor: on a mesh with the axis "tensor", and "fsdp" where it lies in shards.
    """
    tensor = tensor.detach()
    assert isinstance(tensor, DTensor)
    mesh, mine = tensor.device_mesh, tensor.to_local()
    names = mesh.mesh_dim_names or ()
    of_rank, rank = len(tensor) // ranks, mesh.get_local_rank("tensor")
    first = 0
    if "fsdp" in names:  # it cuts a tensor rank's rows into pieces of equal length, the last ones shorter or empty
        length = -(-of_rank // mesh.size(names.index("fsdp")))
        first = min(mesh.get_local_rank("fsdp") * length, of_rank)
    last, third = first + len(mine), of_rank // 3
    columns = (0,) * (tensor.dim() - 1)
    pieces, starts = [], []
    for part in range(3):
        begin, end = max(first, part * third), min(last, (part + 1) * third)
        if begin < end:
            pieces.append(mine[begin - first : end - first])
            starts.append((part * (len(tensor) // 3) + rank * third + begin - part * third, *columns))
    wrapped = LocalShardsWrapper(pieces, starts)
    return DTensor.from_local(
        wrapped, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
