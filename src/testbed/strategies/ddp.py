"""DistributedDataParallel: gradients are averaged in buckets while backward still computes the next ones."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from testbed.model.gpt2 import GPT2
from testbed.step import MicroBatch
from testbed.strategies.replicated import Replicated

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings


class DDP(Replicated):
    """Every rank holds the whole model; one reduction per step, with the last micro batch."""

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        super().__init__(settings, model, device)
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*deprecated")  # its new name came with 2.13
        self.forward_module = DistributedDataParallel(
            self.model,
            bucket_cap_mb=settings.data_parallel.bucket_cap_mb,
            gradient_as_bucket_view=True,  # no second copy of the gradients
            broadcast_buffers=False,  # the one buffer is a constant
        )
        if settings.data_parallel.gradient_compression == "bf16":
            self.forward_module.register_comm_hook(None, average_in_bf16)

    def accumulation(self, is_last: bool) -> contextlib.AbstractContextManager:
        if not (is_last and self.is_synchronised):
            assert isinstance(self.forward_module, DistributedDataParallel)
            return self.forward_module.no_sync()
        # Backward comes last to what was made first: with casts kept from the first micro batch all matrices' gradients
        # would be there only at its very end, and nothing would be averaged meanwhile. So this one casts again.
        torch.clear_autocast_cache()
        return contextlib.nullcontext()

    def load_checkpoint(self, directory: Path) -> None:
        super().load_checkpoint(directory)
        self._settle_buckets()

    def _settle_buckets(self) -> None:
        """Go through one backward pass, so that the first step finds the buckets as every later one does.

        DDP lays its buckets out again after the first backward pass, in the order in which the gradients were ready. A
        sum over three ranks or more depends on where in its bucket a number lies, so a run that resumed with DDP's
        first layout would not be bitwise identical to an uninterrupted one. The pass is a step's last micro batch in
        all but its tokens: same shapes, so nothing is compiled for it alone; the random state stays.
        """
        shape = self.settings.batch.micro_batch_size_per_gpu, self.settings.data.seq_length
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.train()
        with torch.random.fork_rng(devices), self.accumulation(is_last=True):
            self.loss_sum(MicroBatch(tokens, tokens, tokens.numel())).backward()
        self.optimizer.zero_grad(set_to_none=True)


def average_in_bf16(group, bucket):  # DDP compares annotations with its types, and here they would be strings
    """Average a bucket in half its bytes. PyTorch's bf16_compress_hook does the same, but not on the CPU.

    Args:
        group: what was registered with the hook; None: all ranks.
        bucket: a dist.GradBucket.

    Returns:
        A future of the bucket's averaged gradients.
    """
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(dist.get_world_size(group))
    travelling = dist.all_reduce(compressed, group=group, async_op=True).get_future()
    return travelling.then(lambda arrived: buffer.copy_(arrived.value()[0]))
