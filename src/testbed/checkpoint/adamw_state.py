"""AdamW's state of a GPT-2, and torch's form of it, by numbers of parameters.

A number is a parameter's place among those that decay, matrices and embeddings, and then the others, each in the order
of the model. nanoGPT's `configure_optimizers` and this program's `parameter_groups` both make that order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from testbed.errors import InputError
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.model.tensor_archive import check_finite, is_apart

MOMENTS = ("exp_avg", "exp_avg_sq")
EMBEDDING = "wte.weight"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rates:
    """Hyperparameters of AdamW, by the names of the flags. The defaults are nanoGPT's."""

    learning_rate: float = 6e-4
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1


RATES = tuple(field.name for field in dataclasses.fields(Rates))


@dataclass(frozen=True)
class AdamWState:
    """The moments under our names and in our layout, the embedding's padded as `GPT2` has it."""

    moments: dict[str, Tensors]  # by MOMENTS
    step: int
    rates: Rates


def expected(shape: ModelShape) -> Tensors:
    """Return the model's weights without memory: names and sizes, in the model's order."""
    with torch.device("meta"):
        return GPT2(shape).state_dict()


def fitted(found: Any, key: str, ours: torch.Tensor, shape: ModelShape, need: str) -> torch.Tensor:
    """Return what a program holds of a weight in fp32 and the size that `GPT2` has it in, `ours`.

    Args:
        need: end of the sentence where it has another size, such as "its model_args need".
    """
    size = [shape.vocab_size, *ours.shape[1:]] if key == EMBEDDING else list(ours.shape)
    is_tensor = isinstance(found, torch.Tensor)
    if not is_tensor or list(found.shape) not in (size, list(ours.shape)):
        raise InputError(f"the weight {key} is {list(found.shape) if is_tensor else 'missing'}, {need} {size}")
    tensor = found.float()
    if key != EMBEDDING:
        return tensor.contiguous()
    return F.pad(tensor[: shape.vocab_size], (0, 0, 0, len(ours) - shape.vocab_size))


def unpadded(weights: Mapping[str, torch.Tensor], shape: ModelShape) -> Tensors:
    """Return tensors without the rows of the embedding that stand for no token."""
    return {key: each[: shape.vocab_size].clone() if key == EMBEDDING else each for key, each in weights.items()}


def checked_state(moments: dict[str, Tensors], steps: Iterable[Any], rates: Rates) -> AdamWState:
    """Return a state. InputError: a moment is not finite, a second moment negative, or `steps` are not one number."""
    for moment, tensors in moments.items():
        for key, tensor in tensors.items():
            check_finite(tensor, f"{moment} of {key}")
            if moment == "exp_avg_sq" and (tensor < 0).any():
                raise InputError(f"exp_avg_sq of {key} holds negative numbers, whose roots are none")
    return AdamWState(moments, _one_step(steps), rates)


def numbered(weights: Mapping[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Return the names of the parameters that decay, and those of the others: together, in the order of numbers."""
    decayed = [key for key, tensor in weights.items() if tensor.dim() >= 2]
    return decayed, [key for key, tensor in weights.items() if tensor.dim() < 2]


def as_torch(shape: ModelShape, state: AdamWState | None) -> dict[str, Any]:
    """Return a state dict for `torch.optim.AdamW.load_state_dict`. Without `state` it has no moments."""
    decayed, others = numbered(ours := expected(shape))
    rates = state.rates if state else Rates()
    decays = {"params": [ours[key] for key in decayed], "weight_decay": rates.weight_decay}
    stays = {"params": [ours[key] for key in others], "weight_decay": 0.0}
    betas = (rates.adam_beta1, rates.adam_beta2)
    optimizer = torch.optim.AdamW([decays, stays], rates.learning_rate, betas, rates.adam_eps)
    of_parameters: dict[int, Any] = {}
    if state:
        moments = {moment: unpadded(state.moments[moment], shape) for moment in MOMENTS}
        for number, key in enumerate(decayed + others):
            own = {moment: moments[moment][key] for moment in MOMENTS}
            of_parameters[number] = {"step": torch.tensor(float(state.step)), **own}
    return {**optimizer.state_dict(), "state": of_parameters}


def of_torch(content: Any, held: Iterable[str], shape: ModelShape) -> AdamWState | None:
    """Return the state in torch's form; None where no step was done.

    Args:
        content: as read from a file.
        held: the names that its program has; what it has not (biases) gets moments of zero.

    Raises:
        InputError: it is not AdamW's of this model.
    """
    of_parameters, groups = (
        content.get(key) if isinstance(content, dict) else None for key in ("state", "param_groups")
    )
    if of_parameters is None or of_parameters == {}:
        return None
    if not isinstance(of_parameters, dict) or not isinstance(groups, list) or len(groups) != 2:
        raise InputError("it has not the two groups of parameters that nanoGPT makes")
    ours, own = expected(shape), set(held)
    decayed, others = numbered({key: tensor for key, tensor in ours.items() if key in own})
    groups = [group if isinstance(group, dict) else {} for group in groups]
    numbers = [number for group in groups for number in _list_of(group.get("params"))]
    is_plain = all(type(number) is int for number in numbers)
    if not is_plain or numbers != list(range(len(own))) or len(groups[0]["params"]) != len(decayed):
        raise InputError("its groups of parameters are not those of this model")
    states: dict[str, dict] = {}
    for number, key in enumerate(decayed + others):
        state = of_parameters.get(number)
        states[key] = state if isinstance(state, dict) else {}
    moments = {
        moment: {
            key: fitted(states[key].get(moment), key, tensor, shape, f"in {moment}, this model needs")
            if key in own
            else torch.zeros(tensor.shape)
            for key, tensor in ours.items()
        }
        for moment in MOMENTS
    }
    if not is_apart(each for tensors in moments.values() for each in tensors.values()):
        raise InputError("it has one tensor as two moments")
    told = [groups[0].get("lr"), *_list_of(groups[0].get("betas")), groups[0].get("eps")]
    rates = rates_of([*told, groups[0].get("weight_decay")])
    return checked_state(moments, (state.get("step") for state in states.values()), rates)


def _list_of(found: Any) -> list:
    return list(found) if isinstance(found, list | tuple) else []


def _one_step(steps: Iterable[Any]) -> int:
    """Return how often all parameters were updated. InputError: not equally often."""
    tensors = (torch.as_tensor(step) for step in steps if isinstance(step, int | float | torch.Tensor))
    numbers = {float(tensor) if tensor.numel() == 1 else 0.0 for tensor in tensors}
    step = numbers.pop() if len(numbers) == 1 else 0.0
    if numbers or not (1 <= step < 1 << 31 and step == int(step)):
        raise InputError("its parameters do not say one number of steps that all have done")
    return int(step)


def rates_of(numbers: list[Any]) -> Rates:
    """Return lr, beta1, beta2, eps and weight decay. InputError: they are no such numbers."""
    are_numbers = all(isinstance(number, int | float) and math.isfinite(number) and number >= 0 for number in numbers)
    if not are_numbers or len(numbers) != len(RATES) or max(numbers[1:3]) >= 1:  # of betas
        raise InputError("its learning rate, betas, eps and weight decay are no such numbers")
    return Rates(*map(float, numbers))
