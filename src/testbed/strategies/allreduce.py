"""Data parallelism at its plainest: one blocking all-reduce per gradient after backward. What DDP is measured
against."""

from __future__ import annotations

import torch.distributed as dist

from testbed.strategies.replicated import Replicated


class AllReduce(Replicated):
    """Every rank holds the whole model and reads its share of the batch; nothing overlaps with backward."""

    def synchronise_gradients(self) -> None:
        if self.is_synchronised:
            for parameter in self.parameters:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
