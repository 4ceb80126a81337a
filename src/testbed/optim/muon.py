"""Muon's direction: the momentum of a matrix, made orthogonal (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

torch.optim.Muon computes the same, one matrix after the other and always in bf16. Here matrices of one shape pass
together on a GPU, and the dtype is the caller's: a CPU that emulates bf16 takes far longer with it than with fp32.

Shapes: k matrices of m x n, m <= n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

# A quintic whose slope at zero is as large as it can be; five rounds bring singular values to between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
SMALLEST_NORM = 1e-7
# Elements of matrices that pass together: what is alive at once besides the weights. A GPU is kept waiting by one small
# product after the other; a CPU is not, and its batched products were slower in a trial (768 channels, one thread).
BATCH_ELEMENTS = {"cuda": 2**26, "cpu": 0}


def batches_of_a_shape(matrices: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield matrices that are alike up to transposition, as many at once as BATCH_ELEMENTS allows."""
    alike: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for matrix in matrices:
        alike.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
    for shape, members in alike.items():
        at_once = max(1, BATCH_ELEMENTS.get(members[0].device.type, 0) // math.prod(shape))
        for first in range(0, len(members), at_once):
            yield members[first : first + at_once]


def orthogonalised(matrices: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return for each matrix U S V^T about U V^T, by Newton-Schulz iterations in `dtype`.

    Args:
        matrices: whole ones (no shards), alike up to transposition.

    Returns:
        Matrices of the same shapes, in `dtype`.
    """
    wide = [matrix if matrix.size(0) <= matrix.size(1) else matrix.T for matrix in matrices]
    x = torch.stack([matrix.to(dtype) for matrix in wide])  # (k, m, n)
    # the Frobenius norm is an upper bound of the spectral norm, and beyond 1 the iteration diverges
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = x @ x.mT  # (k, m, m)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return [
        direction if matrix.size(0) <= matrix.size(1) else direction.T
        for matrix, direction in zip(matrices, x.unbind(), strict=True)
    ]


def scale_of(shape: torch.Size) -> float:
    """Return the factor of the learning rate with which an update's root mean square is 0.2 times the rate.

    AdamW's is about that: one learning rate and one weight decay then fit both (Liu et al. 2025, arXiv:2502.16982,
    section 2.2).
    """
    return 0.2 * math.sqrt(max(shape))
