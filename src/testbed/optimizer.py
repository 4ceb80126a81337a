"""AdamW, its parameter groups, the learning rate of a step, and the one gradient norm that all strategies share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from testbed.settings import RunSettings


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices and embeddings decay; biases and LayerNorm gains do not (Brown et al. 2020, as nanoGPT does)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_adamw(model: nn.Module, settings: RunSettings) -> torch.optim.AdamW:
    """AdamW in PyTorch's fused form, one kernel per group, on the CPU too."""
    return torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        fused=True,
    )


def learning_rate_at(step: int, settings: RunSettings) -> float:
    """Learning rate of optimizer step `step`, counted from 0: linear warm-up, cosine to the minimum, then flat.

    The first step already moves (rate / warm-up steps), the last warm-up step has the full rate.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    after_warmup = settings.lr_decay_steps - settings.warmup_steps
    progress = min(1.0, (step - settings.warmup_steps) / after_warmup) if after_warmup > 0 else 1.0
    falling = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_learning_rate + falling * (settings.learning_rate - settings.min_learning_rate)


def global_grad_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all gradients, squares summed in float64, as a 0-dim float64 tensor on their device.

    In float32 the sum over 124M squares is off by 3e-5 and depends on its order, which differs between strategies.
    """
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_gradients_(parameters: list[nn.Parameter], max_norm: float, grad_norm: torch.Tensor) -> None:
    """Scale gradients by max_norm / norm where the norm is larger; 0 = off. Waits for nothing on the device."""
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, grad_norm)
