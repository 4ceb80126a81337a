"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): each matrix of a block is cut over the tensor ranks.

Query, key, value and the MLP's first matrix are cut by rows, so that a rank has whole heads and whole MLP channels; the
projections into the residual stream are cut by columns, and a sum over the ranks completes each: two sums in a block's
forward pass, two in its backward pass. The embedding, which is the head too, is cut by tokens: no rank ever holds the
logits of all of them. LayerNorms, positions and the residual stream are alike on all tensor ranks.

Shapes: B micro batch, T sequence, C channels.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from testbed.distributed.process_group import device_mesh
from testbed.distributed.tensors import average_
from testbed.model.gpt2 import GPT2, smoothing_sum
from testbed.optim.optimizer import gradient_of, local_tensor
from testbed.step import MicroBatch, StepResult
from testbed.strategies import state_files
from testbed.strategies.baseline import Baseline

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings


class TensorParallel(Baseline):
    """Tensor ranks read the same micro batches and compute the same loss; the first of them reports it. Data ranks
    average their gradients after the last backward pass."""

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        mesh = device_mesh(settings.plan.mesh, device)
        shard_model_(model.to(device), mesh["tensor"])
        super().__init__(settings, model, device)
        model.smoothing_sum = smoothing_sum_of_shards
        self.data_rank = mesh.get_local_rank("data")
        self.data_world_size = settings.plan.mesh.data
        self._data_group = mesh.get_group("data")
        self._reports = mesh.get_local_rank("tensor") == 0

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        return self._counted_once(super().train_step(micro_batches, learning_rate))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        with loss_parallel():
            return self._counted_once(super().evaluate(micro_batches))

    def _counted_once(self, result: StepResult) -> StepResult:
        """Return the result as it counts in the world's: all tensor ranks know the whole loss, and one adds it."""
        if self._reports:
            return result
        return dataclasses.replace(result, loss_sum=torch.zeros_like(result.loss_sum), num_target_tokens=0)

    def accumulation(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Compute the cross entropy of sharded logits, in which three numbers per token cross the ranks."""
        return loss_parallel()

    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        loss_sum = super().loss_sum(micro_batch)
        assert isinstance(loss_sum, DTensor)
        return loss_sum.to_local()

    def synchronise_gradients(self) -> None:
        average_((local_tensor(gradient_of(parameter)) for parameter in self.parameters), self._data_group)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = cast("dict[str, torch.Tensor]", get_model_state_dict(self.model, options=options))
        for name, tensor in weights.items():
            if ".attn.c_attn." in name:
                weights[name] = _exchange_order(tensor, self.settings.plan.mesh.tensor, 3)
        return weights

    def state(self) -> state_files.State:
        """c_attn's rows lie here in the order of the ranks; in the files they lie in the model's."""
        return {
            section: {
                name: _as_pieces(tensor) if ".attn.c_attn." in name and isinstance(tensor, DTensor) else tensor
                for name, tensor in tensors.items()
            }
            for section, tensors in super().state().items()
        }


def _as_pieces(tensor: DTensor) -> DTensor:
    """Return the same memory with where in the model's own order its rows lie: this rank's queries, keys and values are
    three pieces of the whole matrix. torch.distributed.checkpoint reads and writes such pieces one by one."""
    of_rank = tensor.to_local().detach().chunk(3)
    first = tensor.device_mesh.get_local_rank() * len(of_rank[0])
    columns = (0,) * (tensor.dim() - 1)
    starts = [(part * (len(tensor) // 3) + first, *columns) for part in range(3)]
    pieces = LocalShardsWrapper(list(of_rank), starts)
    return DTensor.from_local(
        pieces, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def shard_model_(model: GPT2, mesh: DeviceMesh) -> None:
    """Replace the matrices by this rank's pieces. Every rank comes with the same whole model, so nothing is sent."""
    for block in model.blocks:
        for parameter in block.attn.c_attn.parameters():
            parameter.data = _exchange_order(parameter.data, 3, mesh.size())
        block.attn.num_heads //= mesh.size()
    by_rows, by_columns = ColwiseParallel(), RowwiseParallel()  # named after x W; nn.Linear's weight is W transposed
    plan = {
        "h.*.attn.c_attn": by_rows,
        "h.*.attn.c_proj": by_columns,
        "h.*.mlp.c_fc": by_rows,
        "h.*.mlp.c_proj": by_columns,
        # the head is a product with a sharded matrix, so it wants its input as a DTensor
        "ln_f": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, plan, src_data_rank=None)
    model.register_module("wte", VocabularyParallelEmbedding(model.wte.weight, mesh))
    model.padding_bias = distribute_tensor(model.padding_bias, mesh, [Shard(0)], src_data_rank=None)


def smoothing_sum_of_shards(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return `smoothing_sum` of logits that are cut by tokens: each rank's own columns, added over the ranks."""
    assert isinstance(logits, DTensor)
    mesh = logits.device_mesh
    first = mesh.get_local_rank() * -(-logits.shape[-1] // mesh.size())
    of_rank = smoothing_sum(logits.to_local(), targets, vocab_size, first)
    return DTensor.from_local(of_rank, mesh, [Partial()]).redistribute(placements=[Replicate()])


def _exchange_order(tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Return rows that lie as (outer, inner, rest) in the order (inner, outer, rest).

    c_attn's rows are query, key, value, each with the heads of all ranks: (3, ranks, heads of a rank x D). Cut in equal
    pieces, a rank must get its heads of all three: (ranks, 3, heads of a rank x D).
    """
    rows = tensor.unflatten(0, (outer, inner, -1))
    return rows.transpose(0, 1).flatten(0, 2).contiguous()


class VocabularyParallelEmbedding(nn.Module):
    """Each rank looks up the tokens whose rows it holds, zeros for the others; the sum over ranks is the embedding.

    RowwiseParallel for nn.Embedding does the same, but its backward pass makes a gradient with the rows of all tokens.
    """

    def __init__(self, weight: torch.Tensor, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))
        self.first = mesh.get_local_rank() * -(-len(weight) // mesh.size())  # row of the whole matrix

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, DTensor)
        rows = self.weight.to_local()
        ids = ids - self.first
        is_elsewhere = (ids < 0) | (ids >= len(rows))
        found = F.embedding(ids.masked_fill(is_elsewhere, 0), rows)  # (B, T, C)
        found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return DTensor.from_local(found, self.mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()
