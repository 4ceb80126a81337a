"""Fingerprints of tensors, which do not depend on how a tensor is cut over ranks or micro batches.

A fingerprint is a sum over elements, each times a random number of its row and one of its column in the whole tensor.
So fingerprints of pieces add up to that of the whole, and fingerprints of contributions to that of their sum. The
difference of two fingerprints is about as large as the norm of the difference of the two tensors.

Rows are counted in bins, so that a difference has a place: a part of a matrix's rows, or some positions of a sequence.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from testbed.experiments.divergence.sides import FIRST

PROJECTIONS = 3
NUMBERS = FIRST + PROJECTIONS
MOST_BINS = 64
ROWS, COLUMNS = 0, 1


@functools.cache
def _coefficients(axis: int, length: int) -> torch.Tensor:
    """Return (PROJECTIONS, length) float64; those of a shorter length are the first ones of a longer."""
    drawn = [np.random.default_rng([axis, number]).standard_normal(length) for number in range(PROJECTIONS)]
    return torch.from_numpy(np.stack(drawn))


def coefficients(axis: int, indices: torch.Tensor) -> torch.Tensor:
    """Return (PROJECTIONS, n) float64 for n indices along an axis of the whole tensor."""
    longest = 1 << max(6, int(indices.max()).bit_length()) if indices.numel() else 64
    return _coefficients(axis, longest)[:, indices.cpu()].to(indices.device)


def bins_of(length: int) -> int:
    """Return the number of bins of an axis."""
    return min(MOST_BINS, length)


@torch.no_grad()
def fingerprint(tensor: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, length: int) -> np.ndarray:
    """Return the fingerprint of a piece of a tensor.

    Args:
        tensor: (..., n rows, m columns); each of the leading places gets a fingerprint of its own.
        rows: (n,) int64, places of the piece's rows in the whole tensor.
        columns: (m,) int64, likewise.
        length: rows of the whole tensor.

    Returns:
        (..., bins, NUMBERS) float64.
    """
    x = tensor.detach().double()
    bins, of_row = bins_of(length), rows * bins_of(length) // length
    a, b = coefficients(ROWS, rows), coefficients(COLUMNS, columns)
    projected = (x @ b.T) * a.T  # (..., n, PROJECTIONS)
    numbers = torch.cat([x.sum(-1, keepdim=True), x.square().sum(-1, keepdim=True), projected], -1)
    found = torch.zeros(*numbers.shape[:-2], bins, NUMBERS, dtype=torch.float64, device=x.device)
    return found.index_add_(-2, of_row, numbers).cpu().numpy()
