"""AdamW and Muon, their parameter groups, and the one gradient norm that all strategies share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from testbed.optim.muon import batches_of_a_shape, orthogonalised, scale_of

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings

BLOCKS = "h."  # what the names of the blocks' parameters begin with


def build_optimizer(model: nn.Module, settings: RunSettings) -> torch.optim.Optimizer:
    """Return the optimizer that --optimizer names. AdamW is fused, one kernel per group, on the CPU too."""
    chosen = settings.optimizer
    betas, eps = (chosen.adam_beta1, chosen.adam_beta2), chosen.adam_eps
    if chosen.name == "muon":
        # settings.precision is one rank's decision, so no two ranks orthogonalise in different dtypes; bf16 only where
        # it is fast, or where the whole run was told to be slow
        dtype = torch.bfloat16 if settings.compute.precision == "bf16" else torch.float32
        return Muon(muon_groups(model, settings), chosen.learning_rate, betas, eps, dtype)
    groups = parameter_groups(model.parameters(), chosen.weight_decay)
    return torch.optim.AdamW(groups, lr=chosen.learning_rate, betas=betas, eps=eps, fused=True)


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return groups: matrices and embeddings decay, biases and LayerNorm gains do not (Brown et al. 2020, nanoGPT)."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:  # one fused kernel takes plain or distributed tensors, not both
        groups.setdefault((parameter.dim() >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0} for (decays, _), members in groups.items()
    ]


def muon_groups(model: nn.Module, settings: RunSettings) -> list[dict[str, Any]]:
    """Return the matrices inside the blocks for Muon, then AdamW's groups of the rest, embeddings and head included."""
    chosen, takes_muon = settings.optimizer, {}
    assert chosen.muon_learning_rate is not None
    for name, parameter in model.named_parameters():
        takes_muon[name] = name.startswith(BLOCKS) and parameter.dim() == 2
    muon_group = {
        "params": [parameter for name, parameter in model.named_parameters() if takes_muon[name]],
        "weight_decay": chosen.weight_decay,
        "momentum": chosen.muon_momentum,
        "lr": chosen.muon_learning_rate,
        "lr_ratio": chosen.muon_learning_rate / chosen.learning_rate if chosen.learning_rate else 1.0,
    }
    rest = [parameter for name, parameter in model.named_parameters() if not takes_muon[name]]
    others = parameter_groups(rest, chosen.weight_decay)
    # an end of a pipeline may hold no block, and a rank of its middle nothing but blocks
    return [group for group in (muon_group, *others) if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of the coming step for every group; Muon's groups have theirs in proportion."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_ratio", 1.0)


class Muon(torch.optim.Optimizer):
    """Update groups with a "momentum" by Muon, with Nesterov's momentum as in torch.optim.Muon; the others by
    fused AdamW. One optimizer for both: checkpoints, loss scaling, hooks and engines know of one.

    Shards of a matrix (DTensor) are gathered for its orthogonalisation, which every rank that holds a part repeats.
    """

    # A loss scaler leaves out a step whose gradients overflowed by asking the host. AdamW's fused kernel decides that
    # on the device; here the matrices would move all the same.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype = torch.float32,
    ):
        """Args:
        dtype: of the orthogonalisation; weights, gradients and momentum keep theirs.
        """
        # "fused" has a loaded state's step counter put on the device of its weights
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "fused": True})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if "momentum" not in group:
                self._step_adamw(group, parameters)
                continue
            for batch in batches_of_a_shape(parameters):
                self._step_muon(group, batch)
        return loss

    def _step_muon(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Update matrices of one shape."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        weights = [local_tensor(parameter) for parameter in parameters]
        gradients = [local_tensor(gradient_of(parameter)) for parameter in parameters]
        momenta = [local_tensor(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
        whole = [_gathered(part.to(self.dtype), parameter) for part, parameter in zip(ahead, parameters, strict=True)]
        directions = [
            _part_of_this_rank(direction, parameter).to(parameter.dtype)
            for direction, parameter in zip(orthogonalised(whole, self.dtype), parameters, strict=True)
        ]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, directions, alpha=-group["lr"] * scale_of(parameters[0].shape))

    def _step_adamw(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), device=parameter.device)
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            list(parameters),
            [gradient_of(parameter) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


def _gathered(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gather the whole matrix of which `part` is what this rank holds, laid out as `like`."""
    if not isinstance(like, DTensor):
        return part
    shards = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return shards.full_tensor()


def _part_of_this_rank(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a matrix that all ranks have whole, laid out as `like`; nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a distributed tensor, sharing its memory; any other tensor is its own."""
    if not isinstance(tensor, DTensor):
        return tensor
    shards = tensor.detach()
    assert isinstance(shards, DTensor)
    return shards.to_local()


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient that backward left at a parameter."""
    assert parameter.grad is not None, "backward reached every parameter"
    return parameter.grad


def global_grad_norm(gradients: Iterable[torch.Tensor], over: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the L2 norm over all gradients, squares summed in float64, as a 0-dim float64 tensor on their device.

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
    """Return the groups over which a tensor lies in shards; none for a plain or replicated one."""
    if not isinstance(tensor, DTensor):
        return ()
    assert not any(placement.is_partial() for placement in tensor.placements), "the gradient was not reduced"
    # not is_shard(): it is false of the shards of what tensor ranks had cut before
    return tuple(
        tensor.device_mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    )


@torch.no_grad()
def clip_gradients_(parameters: Iterable[nn.Parameter], max_norm: float, grad_norm: torch.Tensor) -> None:
    """Scale gradients by max_norm / norm where the norm is larger; 0 = off. Waits for nothing on the device."""
    if max_norm > 0:
        factor = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_'s own
        # a factor of another dtype than the gradients would be multiplied one tensor after the other on CUDA
        torch._foreach_mul_([local_tensor(gradient_of(parameter)) for parameter in parameters], factor.float())
