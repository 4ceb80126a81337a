"""Base of the strategies whose ranks all hold the whole model and read different shares of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from testbed.model.gpt2 import GPT2
from testbed.step import MicroBatch, StepResult
from testbed.strategies.baseline import Baseline

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings


class Replicated(Baseline):
    """Gradients are averaged over all ranks, except in the steps that --skip_gradient_sync leaves alone."""

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        super().__init__(settings, model, device)
        self.data_rank = dist.get_rank()
        self.data_world_size = dist.get_world_size()
        self.num_started_steps = 0  # of this start; after a resume the optimizer's own counters go on

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        self.num_started_steps += 1
        return super().train_step(micro_batches, learning_rate)

    @property
    def is_synchronised(self) -> bool:
        """Return whether this step averages gradients. `alternate` leaves out every even step, so that steps with and
        without share a run: its memory layout, its minute and its neighbours on the machine."""
        skipped = self.settings.data_parallel.skip_gradient_sync
        return not skipped or (skipped == "alternate" and self.num_started_steps % 2 == 1)
