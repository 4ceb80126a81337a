"""DistributedDataParallel: gradients are averaged in buckets while backward still computes the next ones."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from testbed.model import GPT2
from testbed.strategies.replicated import Replicated

if TYPE_CHECKING:
    from testbed.settings import RunSettings


class DDP(Replicated):
    """Every rank holds the whole model; one reduction per step, with the last micro batch."""

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        super().__init__(settings, model, device)
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*deprecated")  # its new name came with 2.13
        self.wrapped = DistributedDataParallel(
            self.model,
            bucket_cap_mb=settings.bucket_cap_mb,
            gradient_as_bucket_view=True,  # no second copy of the gradients
            broadcast_buffers=False,  # the one buffer is a constant
        )
        if settings.gradient_compression == "bf16":
            self.wrapped.register_comm_hook(None, average_in_bf16)

    def accumulation(self, is_last: bool) -> contextlib.AbstractContextManager:
        if not (is_last and self.is_synchronised):
            return self.wrapped.no_sync()
        # Backward comes last to what was made first: with casts kept from the first micro batch all matrices' gradients
        # would be there only at its very end, and nothing would be averaged meanwhile. So this one casts anew.
        torch.clear_autocast_cache()
        return contextlib.nullcontext()


def average_in_bf16(group, bucket):  # DDP compares annotations with its types, and here they would be strings
    """Half the bytes of a bucket travel. PyTorch's own bf16_compress_hook does the same, but not on the CPU.

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
