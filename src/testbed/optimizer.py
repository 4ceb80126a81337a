"""AdamW, its parameter groups, the learning rate of a step, and the one gradient norm that all strategies share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from testbed.settings import RunSettings


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices and embeddings decay; biases and LayerNorm gains do not (Brown et al. 2020, as nanoGPT does)."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():  # one fused kernel takes plain or distributed tensors, not both
        groups.setdefault((parameter.dim() >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0} for (decays, _), members in groups.items()
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


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a distributed tensor, sharing its memory; any other tensor is its own."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def global_grad_norm(gradients: Iterable[torch.Tensor], over: dist.ProcessGroup | None = None) -> torch.Tensor:
    """L2 norm over all gradients, squares summed in float64, as a 0-dim float64 tensor on their device.

    In float32 the sum over 124M squares is off by 3e-5 and depends on its order, which differs between strategies.

    Args:
        gradients: plain, or distributed in shards; shards are summed over the ranks that hold the others.
        over: ranks that hold further parameters (pipeline stages); all of them call.
    """
    by_layout: dict[tuple, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_layout.setdefault(_groups_of_shards(gradient), []).append(local_tensor(gradient))
    total = torch.zeros(())
    for groups, shards in by_layout.items():
        square = torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float64)).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        total = square + total
    if over is not None:
        dist.all_reduce(total, group=over)
    return total.sqrt()


def _groups_of_shards(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which a tensor lies in shards; none for a plain or replicated one."""
    if not isinstance(tensor, DTensor):
        return ()
    assert not any(placement.is_partial() for placement in tensor.placements), "the gradient was not reduced"
    return tuple(
        tensor.device_mesh.get_group(axis) for axis, placement in enumerate(tensor.placements) if placement.is_shard()
    )


@torch.no_grad()
def clip_gradients_(parameters: Iterable[nn.Parameter], max_norm: float, grad_norm: torch.Tensor) -> None:
    """Scale gradients by max_norm / norm where the norm is larger; 0 = off. Waits for nothing on the device."""
    if max_norm > 0:
        factor = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_'s own
        torch._foreach_mul_([local_tensor(parameter.grad) for parameter in parameters], factor)
