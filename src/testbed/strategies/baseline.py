"""Plain PyTorch on one device: what every other strategy must agree with, and be compared to.

The other PyTorch strategies are this one with something added: each overrides the few methods that it changes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from testbed.config.run_types import STRATEGIES
from testbed.model.gpt2 import GPT2
from testbed.optim.optimizer import (
    build_optimizer,
    clip_gradients_,
    global_grad_norm,
    gradient_of,
    local_tensor,
    set_learning_rate,
)
from testbed.profiling.step_clock import phase
from testbed.step import MicroBatch, StepResult
from testbed.strategies import state_files

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings


AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Baseline:
    """fp32 weights and optimizer state; with bf16 or fp16 the matrix products run in it (autocast).

    Attributes:
        model: what this rank holds of the model; its parameters are what the optimizer updates.
        forward_module: the module that forward calls; a strategy that wraps the model puts the wrapper here.
        summed_over: ranks over which gradients of other sequences are added up, not averaged.
        keeps_casts: whether weights that were cast for a micro batch are kept for the next ones of the step. Not where
            backward computes again: it casts again too, and else no more than a block's casts would be alive.
    """

    data_rank = 0
    data_world_size = 1
    summed_over = 1
    saves_in_background = True
    keeps_casts = True

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        self.settings = settings
        self.device = device
        self.model = model.to(device)
        self.forward_module: nn.Module = self.model
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(self.model, settings)
        # fp16 gradients underflow: scale the loss up, and skip the step when that overflows
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.compute.precision == "fp16")
        self.keeps_casts = self.keeps_casts and settings.compute.activation_checkpointing == "none"

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        self.model.train()
        num_tokens = sum(micro_batch.num_target_tokens for micro_batch in micro_batches)
        loss_sum = torch.zeros((), device=self.device)
        with self.casts_kept(len(micro_batches)):
            for number, micro_batch in enumerate(micro_batches, start=1):
                with self.accumulation(is_last=number == len(micro_batches)):
                    with phase("forward"):
                        micro_loss_sum = self.loss_sum(micro_batch)
                        assert micro_batch.loss_divisor is not None, "a micro batch to train on"
                    with phase("backward"):
                        divisor = micro_batch.loss_divisor * self.summed_over
                        self.scaler.scale(micro_loss_sum / divisor).backward()
                loss_sum += micro_loss_sum.detach()
        with phase("synchronise"):
            self.synchronise_gradients()
        with phase("optimizer"):
            grad_norm = self.update(learning_rate)
        return StepResult(loss_sum, num_tokens, grad_norm)

    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the sum of the token losses of one forward pass."""
        with self.autocast():
            return self.forward_module(micro_batch.inputs, micro_batch.targets)

    def autocast(self) -> contextlib.AbstractContextManager:
        """Run the matrix products of a forward pass in the run's precision."""
        dtype = AUTOCAST_DTYPE.get(self.settings.compute.precision, torch.bfloat16)
        enabled = self.settings.compute.precision != "fp32"
        return torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=self.keeps_casts)

    def casts_kept(self, num_micro_batches: int) -> contextlib.AbstractContextManager:
        """Keep weights cast to the run's precision for all micro batches of a step.

        autocast keeps its casts until the outermost context ends. This one only extends the cache's lifetime. The
        casts stay through backward, and so do gradients in their precision: 2 + 2 bytes per parameter. Compiled blocks
        cast inside their graph, once per micro batch, and keep nothing here (AOTAutograd).
        """
        if num_micro_batches == 1 or not self.keeps_casts:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, enabled=False)

    def accumulation(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Enclose the passes of a micro batch. A strategy says here whether its gradients are synchronised."""
        return contextlib.nullcontext()

    def synchronise_gradients(self) -> None:
        """Make the gradients those of the global batch, after the last backward pass."""

    def grad_norm(self) -> torch.Tensor:
        """Return the global L2 norm of the synchronised gradients, on every rank."""
        return global_grad_norm(gradient_of(parameter) for parameter in self.parameters)

    def update(self, learning_rate: float) -> torch.Tensor:
        """Clip and apply the synchronised gradients. Returns their norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.grad_norm()
        clip_gradients_(self.parameters, self.settings.optimizer.max_grad_norm, grad_norm)
        set_learning_rate(self.optimizer, learning_rate)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self.model.eval()
        loss_sum = torch.zeros((), device=self.device)
        for micro_batch in micro_batches:
            loss_sum += self.loss_sum(micro_batch)
        return StepResult(loss_sum, sum(micro_batch.num_target_tokens for micro_batch in micro_batches), None)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Replicated weights are rank 0's own, once they are known to be equal."""
        if not self.settings.data_parallel.skip_gradient_sync:
            state_files.check_replicated({"model": self.model.state_dict()})
        if dist.is_initialized() and dist.get_rank() > 0:
            return {}
        return {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}

    def save_checkpoint(self, directory: Path, in_background: bool = False) -> Future | None:
        """Write this rank's part. What is replicated is compared, and written once."""
        state = self.state()
        if not self._is_per_rank:
            state_files.check_replicated(state)
        copy = self.host_copy if in_background else None
        return state_files.save(self._as_filed(state), directory, self.file_group, copy)

    def load_checkpoint(self, directory: Path) -> None:
        state = self.state()
        state_files.load(self._as_filed(state), directory, self.file_group)  # into the weights and moments themselves
        state_files.put_scaler_back(self.scaler, state)

    @property
    def _is_per_rank(self) -> bool:
        return STRATEGIES[self.settings.training.run_type].state_layout == "per_rank"

    def _as_filed(self, state: state_files.State) -> state_files.State:
        """Return the state under the names that it has in the files."""
        return state_files.of_rank(state, dist.get_rank()) if self._is_per_rank else state

    @functools.cached_property
    def file_group(self) -> dist.ProcessGroup | None:
        return state_files.file_group()

    @functools.cached_property
    def host_copy(self) -> state_files.HostCopy:
        """Return the copy of the state that is written in the background."""
        return state_files.HostCopy()

    def load_full_state(self, directory: Path) -> None:
        """Read it as `load_checkpoint` does: by name and in the whole model's shapes. Never a rank's own."""
        state = self.state()
        state_files.load(state, directory, self.file_group)
        state_files.put_scaler_back(self.scaler, state)

    def state(self) -> state_files.State:
        """Return what this rank holds of the state, by the names and in the shapes of the whole model."""
        return state_files.state_of(self.model, self.optimizer, self.scaler)

    def model_states(self) -> dict[str, list[torch.Tensor]]:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        held: dict[str, list[Any]] = {"parameters": [*self.parameters], "gradients": gradients, "optimizer": moments}
        return {kind: [local_tensor(tensor) for tensor in tensors] for kind, tensors in held.items()}

    def close(self) -> None:
        pass
