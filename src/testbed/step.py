"""Define the input and the result of an optimizer step. No torch at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


NOT_A_TARGET = -100  # a target with this value is not a prediction to score (PyTorch's ignore_index)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that one rank sends through the model at once."""

    inputs: torch.Tensor  # (B, T) int64 token ids
    targets: torch.Tensor  # (B, T) the same shifted by one; NOT_A_TARGET where nothing is to be predicted
    num_target_tokens: int  # targets that count, known on the host so that nobody has to ask the device
    # In training, what the loss sum is divided by: the target tokens of the whole global batch / data ranks. Data ranks
    # average their gradients, so the average is that of the mean over the global batch, also where micro batches and
    # ranks have unequal numbers of targets. None in validation, which divides nothing.
    loss_divisor: float | None = None


@dataclass(frozen=True)
class StepResult:
    """Result of a rank's part of a step. Tensors stay on the device, so nothing waits inside the clock."""

    loss_sum: torch.Tensor  # 0-dim: sum of the token losses (nats) that THIS rank computed; 0 where it computes none
    num_target_tokens: int  # tokens in loss_sum
    # 0-dim: global L2 norm BEFORE clipping; None in evaluate. Squares are summed in float64; the engine of ZeRO 1 and 2
    # rounds each rank's sum to float32.
    grad_norm: torch.Tensor | None
