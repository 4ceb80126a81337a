"""The device mesh as PyTorch's groups, and a rank's place on it."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from testbed.distributed.mesh import MeshSizes


class Axes:
    """The device mesh, and this rank's place on it. Tensor ranks are neighbours; then come context ranks, shards,
    copies and stages.

    Attributes:
        whole: with the axes "pipeline", "replicate", "fsdp" and "tensor". "fsdp" has the shards, which lie on context
            ranks too; without shards it has the context ranks.
        shards: what `fully_shard` takes: "replicate" and "fsdp", or the latter alone.
        data_rank: which share of the global batch this rank reads.
        ranks: this rank's number on each axis that has one.
    """

    def __init__(self, sizes: MeshSizes, device: torch.device):
        inner = sizes.shard if sizes.shard > 1 else sizes.context
        shape = (sizes.pipeline, sizes.replicate, inner, sizes.tensor)
        self._shares = inner // sizes.context  # of the batch, in one group of shards
        self.sizes = sizes
        self.whole = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "replicate", "fsdp", "tensor"))
        self.shards = self.whole["replicate", "fsdp"] if sizes.replicate > 1 else self.whole["fsdp"]
        coordinate = self.whole.get_coordinate()
        assert coordinate is not None, "every rank is on the mesh"
        pipeline, replicate, fsdp, tensor = coordinate
        share, context = divmod(fsdp, sizes.context)
        self.data_rank = replicate * self._shares + share
        self.ranks = {"pipeline": pipeline, "tensor": tensor, "context": context}

    @functools.cached_property
    def pipeline(self) -> dist.ProcessGroup:
        return self.whole.get_group("pipeline")

    @functools.cached_property
    def context(self) -> dist.ProcessGroup:
        """The ranks that share a sequence. All ranks of the world read this at the same place, as it makes groups."""
        if self._shares == 1:
            return self.whole.get_group("fsdp")
        inner = self.whole["fsdp"]._unflatten(0, (self._shares, self.sizes.context), ("share", "context"))
        return inner.get_group("context")

    @functools.cached_property
    def data(self) -> dist.ProcessGroup:
        """The ranks that compute gradients of the same weights: of other sequences, or other parts of them. All ranks
        of the world read this at the same place, as it may make groups."""
        if self.sizes.replicate == 1:
            return self.whole.get_group("fsdp")
        if self._shares * self.sizes.context == 1:
            return self.whole.get_group("replicate")
        return self.whole["replicate", "fsdp"]._flatten("data").get_group()
