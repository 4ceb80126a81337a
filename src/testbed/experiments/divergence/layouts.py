"""Where in the whole model's tensors the pieces of a rank lie."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from testbed.checkpoint.adamw_state import expected
from testbed.experiments.divergence.projections import fingerprint
from testbed.model.shape import ModelShape
from testbed.optim.optimizer import local_tensor
from testbed.strategies.tensor import exchange_order

C_ATTN = "attn.c_attn"


@functools.cache
def whole_shapes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return rows and columns of each parameter of the model; a vector has one column."""
    return {name: (tensor.shape[0], tensor[0].numel()) for name, tensor in expected(shape).items()}


def print_of(name: str, tensor: torch.Tensor, shape: ModelShape) -> tuple[str, np.ndarray]:
    """Return the fingerprint of a rank's piece of a parameter, or of its gradient.

    The tensor ranks cut first, query, key and value each by itself; then shards cut the rows of what they hold.

    Returns:
        The part, which differs between pieces that differ, also between the summands of a sum ("": no elements), and
        (bins, NUMBERS).
    """
    num_rows, num_columns = whole_shapes(shape)[name]
    rows, columns, summands = torch.arange(num_rows), torch.arange(num_columns), []
    for axis, ranks, rank, place in sorted(_cuts(tensor), key=lambda cut: cut[0] != "tensor"):
        if place is None:  # each rank of this axis has a summand
            summands.append(f"{axis}{rank}")
        elif place == 1 and num_columns > 1:
            columns = _chunk(columns, ranks, rank)
        else:
            if axis == "tensor" and C_ATTN in name:
                rows = exchange_order(rows, 3, ranks)
            rows = _chunk(rows, ranks, rank)
    local = local_tensor(tensor.detach())
    local = local.reshape(len(local), -1) if local.numel() else local.new_zeros(0, len(columns))
    rows = rows[: len(local)].to(local.device)  # transformers has no rows that fill the vocabulary up
    if name.endswith("c_attn.bias"):
        # The bias of keys shifts all scores of a query, which changes no softmax: its gradient is rounding alone.
        is_key = (rows >= shape.embedding_size) & (rows < 2 * shape.embedding_size)
        local = local.masked_fill(is_key.unsqueeze(-1), 0.0)
    where = f"{int(rows[0])}-{int(rows[-1])},{int(columns[0])}-{int(columns[-1])}" if len(rows) else ""
    return ":".join([where, *summands]), fingerprint(local, rows, columns.to(local.device), num_rows)


def _cuts(tensor: torch.Tensor) -> list[tuple[str, int, int, int | None]]:
    """Return axis, its ranks, this one, and the dimension that it cuts (None: it has summands) of each cut."""
    if not isinstance(tensor, DTensor):
        return []
    mesh, found = tensor.device_mesh, []
    for number, placement in enumerate(tensor.placements):
        axis = (mesh.mesh_dim_names or ())[number]
        # not is_shard(): it is false of the shards of what tensor ranks had cut before
        if not placement.is_replicate():
            place = None if placement.is_partial() else placement.dim  # type: ignore[attr-defined]
            found.append((axis, mesh.size(number), mesh.get_local_rank(number), place))
    return found


def _chunk(indices: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """Return a rank's piece; the last ones are shorter, or empty."""
    length = -(-len(indices) // ranks)
    return indices[min(rank * length, len(indices)) : (rank + 1) * length]


def positions_of(length: int, ranks: int, rank: int) -> torch.Tensor:
    """Return the positions of a context rank: of 2 x ranks chunks the one with its number, from both ends.

    Written out here, as strategies/context.py is what the fingerprints look at.
    """
    chunks = torch.arange(length).chunk(2 * ranks)
    return chunks[0] if ranks == 1 and len(chunks) == 1 else torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
