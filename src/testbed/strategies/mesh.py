"""Shards, tensor and context parallelism, and copies of all that, in any product; pipeline.py puts stages around it.

`parallelize` applies the axes in their order and can be read at one go. What an axis is, its own file says: tensor.py,
context.py, and FSDP2 for the shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from testbed.config.run_types import STRATEGIES
from testbed.distributed.axes import Axes
from testbed.distributed.process_group import gather_objects
from testbed.distributed.tensors import reduce_
from testbed.model.gpt2 import GPT2
from testbed.optim.optimizer import gradient_of, local_tensor
from testbed.step import MicroBatch, StepResult
from testbed.strategies import state_files
from testbed.strategies.baseline import Baseline
from testbed.strategies.context import METHODS, order_of_rank
from testbed.strategies.tensor import cut_matrices_, exchange_order, in_models_order

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings

C_ATTN = ".attn.c_attn."  # of its names; its rows lie in the order of the tensor ranks


class Mesh(Baseline):
    """Ranks of one tensor or context group read the same micro batches. Gradients are added over all ranks that compute
    some of the same weights: by FSDP2 with every micro batch where weights lie in shards, else after the last one."""

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        self.axes = Axes(settings.plan.mesh, device)
        self.data_rank, self.data_world_size = self.axes.data_rank, settings.plan.mesh.data
        self.is_sharded = settings.plan.mesh.shard > 1 or STRATEGIES[settings.training.run_type].keeps == "shards"
        self.is_native = settings.compute.mixed_precision == "native"
        if self.is_sharded:
            self.keeps_casts = False  # a whole model in bf16 is what sharding is to avoid
        # The model comes on the host. What cuts it moves each piece, so that no device ever holds the whole.
        model = self.stages_of(settings, model)
        self.forward_modules = parallelize(self, settings, model)
        super().__init__(settings, model, device)
        self.summed_over = self.data_world_size
        is_first = not any(self.axes.ranks[axis] for axis in ("tensor", "context"))
        self._counts_tokens, self._reports = is_first, self.axes.ranks["tensor"] == 0

    def stages_of(self, settings: RunSettings, model: GPT2) -> GPT2:
        """Return the layers of this rank: here all of them."""
        return model

    def modules_to_call(self, model: GPT2) -> list[nn.Module]:
        """Return the modules that a step calls, each the root of its shards."""
        return [model]

    def kept_whole(self, model: GPT2) -> set[nn.Parameter]:
        """Return the parameters that do not lie in shards where the others do."""
        return set()

    def of_this_rank(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return this context rank's part of the sequences. It does not know how many targets are in it."""
        if self.axes.sizes.context == 1:
            return micro_batch
        ranks, rank = self.axes.sizes.context, self.axes.ranks["context"]
        order = order_of_rank(micro_batch.inputs.shape[1], ranks, rank, self.device)
        inputs, targets = micro_batch.inputs[:, order], micro_batch.targets[:, order]
        return dataclasses.replace(micro_batch, inputs=inputs, targets=targets)

    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        return super().loss_sum(self.of_this_rank(micro_batch))

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        return self.counted_once(super().train_step(micro_batches, learning_rate))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        return self.counted_once(super().evaluate(micro_batches))

    def counted_once(self, result: StepResult) -> StepResult:
        """Return the result as it counts in the world's. Tensor ranks know the whole loss, and one adds it. Context
        ranks know the loss of their part, and one of them says for how many tokens."""
        loss_sum = result.loss_sum if self._reports else torch.zeros_like(result.loss_sum)
        num_tokens = result.num_target_tokens if self._counts_tokens else 0
        return dataclasses.replace(result, loss_sum=loss_sum, num_target_tokens=num_tokens)

    def accumulation(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Between the copies of a hybrid mesh, over the slower network, gradients travel once per step."""
        for module in self.forward_modules:
            if isinstance(module, FSDPModule):
                module.set_requires_all_reduce(is_last)
        return contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager:
        """Native mixed precision needs none: weights arrive in bf16."""
        if self.is_native:
            return torch.autocast(self.device.type, enabled=False)
        return super().autocast()

    def synchronise_gradients(self) -> None:
        """Add up what no shards have added: gradients of whole weights over the data ranks, and those of a cut residual
        stream, of which each tensor rank has its tokens' part."""
        for parameter in self.parameters:
            gradient = gradient_of(parameter)
            if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
                assert isinstance(parameter, DTensor)
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        whole = [parameter for parameter in self.parameters if "fsdp" not in _axes_of(parameter)]
        reduce_((local_tensor(gradient_of(parameter)) for parameter in whole), self.axes.data, dist.ReduceOp.SUM)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """One tensor after the other: the ranks that hold parts of it gather them, and rank 0 receives it."""
        mine = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        owners: dict[str, tuple[int, torch.Size]] = {}
        for rank, held in enumerate(gather_objects({name: tensor.shape for name, tensor in mine.items()})):
            for name, shape in held.items():
                owners.setdefault(name, (rank, shape))
        collected = {}
        for name, (owner, shape) in owners.items():
            whole = self._gathered(name, mine[name]) if name in mine else None
            if dist.get_rank() == 0:
                if whole is None:
                    whole = torch.empty(shape, device=self.device)
                    dist.recv(whole, src=owner)
                collected[name] = whole.to("cpu", copy=True)
            elif dist.get_rank() == owner and whole is not None:
                dist.send(whole.contiguous(), dst=0)
        return collected

    def _gathered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of a tensor in the model's own order. All ranks that hold a part call it."""
        if not isinstance(tensor, DTensor):
            return tensor
        whole, tensor_ranks = tensor.full_tensor(), self.axes.sizes.tensor
        return exchange_order(whole, tensor_ranks, 3) if C_ATTN in name and tensor_ranks > 1 else whole

    def state(self) -> state_files.State:
        """Of c_attn the pieces with their places in the model's own order, as in the files."""
        state, tensor_ranks = super().state(), self.axes.sizes.tensor
        if tensor_ranks == 1:
            return state
        return {
            section: {
                name: in_models_order(tensor, tensor_ranks)
                if C_ATTN in name and isinstance(tensor, DTensor)
                else tensor
                for name, tensor in tensors.items()
            }
            for section, tensors in state.items()
        }


def parallelize(strategy: Mesh, settings: RunSettings, model: GPT2) -> list[nn.Module]:
    """Cut a model, or the stages of a rank, over the axes of the mesh. Returns the modules that a step calls.

    In this order: tensor and context ranks first; blocks are compiled and computed again as they are then; shards last,
    as FSDP2's hooks stand around all that.
    """
    axes, parallel = strategy.axes, settings.model_parallel
    if axes.sizes.tensor > 1:
        cut_matrices_(model, axes.whole["tensor"], parallel.sequence_parallel == "on")
    if axes.sizes.context > 1:
        assert parallel.context_parallel_method is not None
        for block in model.blocks:
            block.attn.attend = functools.partial(METHODS[parallel.context_parallel_method], axes.context)
        model.positions = functools.partial(_positions_of_rank, axes.sizes.context, axes.ranks["context"])
    modules = strategy.modules_to_call(model)
    if strategy.is_sharded:
        policy = MixedPrecisionPolicy()
        if strategy.is_native:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        reshards = settings.data_parallel.reshard_after_forward == "on"
        ignored = strategy.kept_whole(model)
        for block in model.blocks:
            fully_shard(block, mesh=axes.shards, mp_policy=policy, reshard_after_forward=reshards)
        for module in modules:
            # embedding and head are one matrix: what forward ends with, backward begins with, so it stays gathered
            fully_shard(module, mesh=axes.shards, mp_policy=policy, reshard_after_forward=False, ignored_params=ignored)
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    # FSDP2's own mean would be over context ranks too. Losses are divided by the tokens of the step.
                    part.set_force_sum_reduction_for_comms(True)
                    part.set_gradient_divide_factor(1.0)
    return modules


def _axes_of(tensor: torch.Tensor) -> tuple[str, ...]:
    return tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()


def _positions_of_rank(ranks: int, rank: int, length: int, device: torch.device) -> torch.Tensor:
    return order_of_rank(length * ranks, ranks, rank, device)
