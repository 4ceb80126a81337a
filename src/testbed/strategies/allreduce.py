"""Data parallelism at its plainest: one blocking all-reduce per gradient after backward. What DDP is measured
against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from testbed.model import GPT2
from testbed.strategies.baseline import Baseline

if TYPE_CHECKING:
    from testbed.settings import RunSettings


class AllReduce(Baseline):
    """Every rank holds the whole model and reads its share of the batch; nothing overlaps with backward."""

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        super().__init__(settings, model, device)
        self.data_rank = dist.get_rank()
        self.data_world_size = dist.get_world_size()

    def synchronise_gradients(self) -> None:
        if self.settings.skip_gradient_sync:
            return
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
