"""Count the bytes that tensors hold, whatever makes them."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside it make, until they are freed.

    torch.distributed._tools.MemTracker does the same by module, but refuses a second forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._counted: set[int] = set()  # addresses of storages that are alive

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._counted:
            return
        self._counted.add(address)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._let_go, address, num_bytes)

    def _let_go(self, address: int, num_bytes: int) -> None:
        self._counted.discard(address)
        self.now -= num_bytes
