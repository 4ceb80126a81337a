"""Keep keys and values of the tokens that were read, allocated once.

Shapes: L layers, S slots, H heads, M positions of a slot, D channels of a head. A slot is the place of one sequence.
"""

from __future__ import annotations

import torch

from testbed.model.shape import ModelShape


class KVCache:
    """A preallocated cache. The caller knows how far each slot is filled (`CachedModel`, `BatchingEngine`).

    `data` is (L, 2, S, H, M, D): keys, then values. What lies beyond a sequence's length means nothing, but must be
    finite: attention gives it the weight zero, and zero times NaN is NaN. So when a sequence's logits are not
    numbers, its slot is cleared before another sequence gets it.
    """

    def __init__(
        self, shape: ModelShape, num_slots: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ):
        sizes = (shape.num_layers, 2, num_slots, shape.num_heads, max_length, shape.embedding_size // shape.num_heads)
        self.data = torch.zeros(sizes, device=device, dtype=dtype)
        self.num_slots, self.max_length = num_slots, max_length

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot into another."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def clear_slot(self, slot: int) -> None:
        """Fill a slot with zeros."""
        self.data[:, :, slot].zero_()
