"""Plain PyTorch on one device: what every other strategy must agree with, and be compared to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from testbed.model import GPT2
from testbed.optimizer import build_adamw, clip_gradients_, global_grad_norm
from testbed.step import MicroBatch, StepResult

if TYPE_CHECKING:
    from testbed.settings import RunSettings

STATE_FILE = "state.pt"
AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Baseline:
    """fp32 weights and optimizer state; with bf16 or fp16 the matrix products run in it (autocast)."""

    data_rank = 0
    data_world_size = 1

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        self.settings = settings
        self.model = model.to(device)
        self.device = device
        self.parameters = list(self.model.parameters())
        self.optimizer = build_adamw(self.model, settings)
        # fp16 gradients underflow: scale the loss up, and skip the step when that overflows
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")

    def _loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        # a cast weight is used once per forward pass, except the head: caching casts would only hold memory
        dtype = AUTOCAST_DTYPE.get(self.settings.precision, torch.bfloat16)
        enabled = self.settings.precision != "fp32"
        with torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=False):
            return self.model(micro_batch.inputs, micro_batch.targets)

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        self.model.train()
        num_tokens = sum(micro_batch.num_target_tokens for micro_batch in micro_batches)
        loss_sum = torch.zeros((), device=self.device)
        for micro_batch in micro_batches:
            micro_loss_sum = self._loss_sum(micro_batch)
            self.scaler.scale(micro_loss_sum / num_tokens).backward()
            loss_sum += micro_loss_sum.detach()
        self.scaler.unscale_(self.optimizer)
        grad_norm = global_grad_norm(parameter.grad for parameter in self.parameters)
        clip_gradients_(self.parameters, self.settings.max_grad_norm, grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss_sum, num_tokens, grad_norm)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self.model.eval()
        loss_sum = torch.zeros((), device=self.device)
        for micro_batch in micro_batches:
            loss_sum += self._loss_sum(micro_batch)
        return StepResult(loss_sum, sum(micro_batch.num_target_tokens for micro_batch in micro_batches), None)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}

    def save_checkpoint(self, directory: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        torch.save(state, directory / STATE_FILE)

    def load_checkpoint(self, directory: Path) -> None:
        state = torch.load(directory / STATE_FILE, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        pass
