"""torch.nn.DataParallel: one process copies the model to every device in each pass. Kept because people still use
it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from testbed.model.gpt2 import GPT2
from testbed.step import MicroBatch, StepResult
from testbed.strategies.baseline import Baseline

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings


class DataParallel(Baseline):
    """As many micro batches pass at once as there are devices, one on each."""

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        super().__init__(settings, model, device)
        self.num_devices = max(1, torch.cuda.device_count()) if device.type == "cuda" else 1
        self.forward_module = nn.DataParallel(_InPrecision(self))
        # each device returns its loss sum, a number; DataParallel says that it makes a vector of them
        warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")

    def loss_sum(self, micro_batch: MicroBatch) -> torch.Tensor:
        return super().loss_sum(micro_batch).sum()

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        return super().train_step(self._side_by_side(micro_batches), learning_rate)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        return super().evaluate(self._side_by_side(micro_batches))

    def _side_by_side(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Join every `num_devices` micro batches, which DataParallel cuts apart again."""
        groups = [micro_batches[i : i + self.num_devices] for i in range(0, len(micro_batches), self.num_devices)]
        return [
            MicroBatch(
                torch.cat([part.inputs for part in group]),
                torch.cat([part.targets for part in group]),
                sum(part.num_target_tokens for part in group),
                group[0].loss_divisor,
            )
            for group in groups
        ]


class _InPrecision(nn.Module):
    """Enters autocast in the thread of each device: DataParallel's threads know that it is on, but not its type, and
    would compute in fp16."""

    def __init__(self, strategy: DataParallel):
        super().__init__()
        self.model = strategy.model
        self.autocast = strategy.autocast

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            return self.model(inputs, targets)
