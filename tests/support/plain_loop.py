"""Train a model as nanoGPT's loop does, on batches that follow from the number of the step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

LENGTH, VOCABULARY = 16, 300


def batch(step: int, rows: int = 4) -> torch.Tensor:
    """Return (rows, LENGTH + 1) token ids, the same for every call with the same step."""
    return torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def losses_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    of_step: Callable[[int], torch.Tensor] = batch,
) -> list[float]:
    """Forward, backward, clip at 1, step."""
    losses = []
    for step in steps:
        tokens = of_step(step)
        loss = model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses
