"""DeepSpeed: data parallelism that shards optimizer state (ZeRO 1), gradients (2) and weights (3) over the ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from testbed.deepspeed_config import effective_config, read_deepspeed_file
from testbed.model import GPT2
from testbed.optimizer import build_adamw, clip_gradients_, global_grad_norm
from testbed.step import MicroBatch, StepResult

if TYPE_CHECKING:
    from testbed.settings import RunSettings

CHECKPOINT_TAG = "deepspeed"


class DeepSpeedZero:
    """`deepspeed.initialize` around the same model and the same AdamW as the baseline's.

    DeepSpeed divides by the accumulation and averages over the ranks itself, so each micro batch brings its mean loss.
    """

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        deepspeed = _import_deepspeed(device)
        self.settings = settings
        self.device = device
        self.data_rank = dist.get_rank()
        self.data_world_size = dist.get_world_size()
        model = model.to(device)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=build_adamw(model, settings),
            config=effective_config(read_deepspeed_file(Path(settings.deepspeed_config)), settings),
            dist_init_required=False,
        )
        self._gathered_parameters = deepspeed.zero.GatheredParameters

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        self.engine.train()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        loss_sum = torch.zeros((), device=self.device)
        grad_norm = None
        for micro_batch in micro_batches:
            micro_loss_sum = self.engine(micro_batch.inputs, micro_batch.targets)
            self.engine.backward(micro_loss_sum / micro_batch.num_target_tokens)
            loss_sum += micro_loss_sum.detach()
            if self.settings.zero_stage == 0 and self.engine.is_gradient_accumulation_boundary():
                grad_norm = self._clip_averaged_gradients()
            self.engine.step()
        if grad_norm is None:
            norm = self.engine.get_global_grad_norm()
            grad_norm = torch.as_tensor(norm, dtype=torch.float64, device=self.device)
        return StepResult(loss_sum, sum(micro_batch.num_target_tokens for micro_batch in micro_batches), grad_norm)

    def _clip_averaged_gradients(self) -> torch.Tensor:
        """Stage 0 keeps plain gradients, averaged over the ranks by now, and reports no norm: ours is used to clip."""
        parameters = list(self.engine.module.parameters())
        grad_norm = global_grad_norm(parameter.grad for parameter in parameters)
        clip_gradients_(parameters, self.settings.max_grad_norm, grad_norm)
        return grad_norm

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self.engine.eval()
        loss_sum = torch.zeros((), device=self.device)
        for micro_batch in micro_batches:
            loss_sum += self.engine(micro_batch.inputs, micro_batch.targets)
        return StepResult(loss_sum, sum(micro_batch.num_target_tokens for micro_batch in micro_batches), None)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        weights = {}
        for name, parameter in self.engine.module.named_parameters():
            # one at a time: rank 0 never holds more than the model itself
            is_sharded = self.settings.zero_stage == 3
            with self._gathered_parameters([parameter]) if is_sharded else contextlib.nullcontext():
                if dist.get_rank() == 0:
                    weights[name] = parameter.detach().to("cpu", torch.float32, copy=True)
        return weights

    def save_checkpoint(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory), tag=CHECKPOINT_TAG)

    def load_checkpoint(self, directory: Path) -> None:
        path, _ = self.engine.load_checkpoint(str(directory), tag=CHECKPOINT_TAG)
        if path is None:
            raise ValueError(f"DeepSpeed found no checkpoint in {directory}")

    def close(self) -> None:
        self.engine.destroy()


def _import_deepspeed(device: torch.device):
    """Import DeepSpeed for this device, without its banner and without a build that training does not need."""
    os.environ["DS_ACCELERATOR"] = device.type
    # its own call of a function that PyTorch 2.13 renamed; nothing a user could do about
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*", category=FutureWarning)
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    if device.type == "cpu":
        # Start-up would compile a shared-memory all-reduce for inference: 30 to 100 s, and a build that was killed
        # leaves a lock that makes every later start hang. Training uses gloo.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed
