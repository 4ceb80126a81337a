"""Sizes of the device mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis of the device mesh; data x pipeline x tensor x context is the world size."""

    data: int = 1  # shares of the global batch
    pipeline: int = 1  # ranks that hold one copy of the layers together
    tensor: int = 1  # ranks that hold one copy of each matrix together
    shard: int = 1  # of the data and context ranks, how many share one copy of the weights: 1, or context x a divisor
    context: int = 1  # ranks that share each sequence

    @property
    def replicate(self) -> int:
        """Copies of the weights, or of their shards, among the data ranks; context ranks without shards hold more."""
        return self.data * self.context // self.shard if self.shard > 1 else self.data

    @property
    def num_ranks(self) -> int:
        return self.data * self.pipeline * self.tensor * self.context

    def flags(self) -> dict[str, int]:
        """Return the sizes under the names of the flags that fix them."""
        return {
            "shard_size": self.shard,
            "pipeline_stages": self.pipeline,
            "tensor_parallel_size": self.tensor,
            "context_parallel_size": self.context,
        }

    def axes_of(self, ranks: Sequence[int]) -> str:
        """Return the axes along which these ranks of a group differ, such as "shards x context"; "": of one rank.

        Tensor ranks are neighbours; then come context ranks, shards, copies and stages.
        """
        shards = max(self.shard // self.context, 1)
        sizes = {"tensor": self.tensor, "context": self.context, "shards": shards}
        sizes |= {"copies": self.data // shards, "stages": self.pipeline}
        found, unit = [], 1
        for name, size in sizes.items():
            if len({rank // unit % size for rank in ranks}) > 1:
                found.append(name)
            unit *= size
        return " x ".join(reversed(found))

    def __str__(self) -> str:
        hybrid = f" (replicate={self.replicate} x shard={self.shard})" if self.shard > 1 else ""
        context = f" context={self.context}" if self.context > 1 else ""
        return f"mesh data={self.data}{hybrid} pipeline={self.pipeline} tensor={self.tensor}{context}"
