"""Average tensors over ranks in buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

BUCKET_BYTES = 25 * 2**20  # as DDP's: large enough for the network's full rate, small enough to overlap


@torch.no_grad()
def average_(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace tensors by their mean over a group, bucket after bucket; one is filled or emptied while another travels.

    Args:
        tensors: plain ones, of the same shapes in the same order on every rank of the group.
    """
    if group.size() == 1:
        return
    travelling: deque[tuple[list[torch.Tensor], torch.Tensor, dist.Work]] = deque()
    for bucket in _buckets(tensors):
        # a large tensor is alone in its bucket and needs no copy
        is_flat = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0].view(-1) if is_flat else torch.cat([tensor.flatten() for tensor in bucket])
        travelling.append((bucket, flat, dist.all_reduce(flat, dist.ReduceOp.AVG, group, async_op=True)))
        if len(travelling) > 1:
            _put_back(*travelling.popleft())
    while travelling:
        _put_back(*travelling.popleft())


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group neighbours up to BUCKET_BYTES; a larger tensor is a bucket by itself."""
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if bucket and num_bytes + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def _put_back(bucket: list[torch.Tensor], flat: torch.Tensor, work: dist.Work) -> None:
    work.wait()
    if flat.data_ptr() == bucket[0].data_ptr():
        return
    averages = flat.split([tensor.numel() for tensor in bucket])
    torch._foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(averages, bucket, strict=True)])
