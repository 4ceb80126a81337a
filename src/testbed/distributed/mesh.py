"""Sizes of the device mesh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis of the device mesh; data x pipeline x tensor is the world size."""

    data: int = 1  # shares of the global batch
    pipeline: int = 1  # ranks that hold one copy of the layers together
    tensor: int = 1  # ranks that hold one copy of each matrix together
    shard: int = 1  # of the data ranks, how many share one copy of the weights (fsdp)

    @property
    def replicate(self) -> int:
        """Copies of the weights among the data ranks."""
        return self.data // self.shard

    @property
    def num_ranks(self) -> int:
        return self.data * self.pipeline * self.tensor

    def flags(self) -> dict[str, int]:
        """Return the sizes under the names of the flags that fix them."""
        return {"shard_size": self.shard, "pipeline_stages": self.pipeline, "tensor_parallel_size": self.tensor}

    def __str__(self) -> str:
        hybrid = f" (replicate={self.replicate} x shard={self.shard})" if self.shard > 1 else ""
        return f"mesh data={self.data}{hybrid} pipeline={self.pipeline} tensor={self.tensor}"
