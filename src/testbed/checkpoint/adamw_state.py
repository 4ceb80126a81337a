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
from testbed.model.tensor_archive import check_finite

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
    """Return copies without the rows of the embedding that stand for no token, each in memory of its own."""
    return {key: (each[: shape.vocab_size] if key == EMBEDDING else each).clone() for key, each in weights.items()}


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
    of_parameters = content.get("state") if isinstance(content, dict) else None
    if of_parameters is None or of_parameters == {}:
        return None
    ours, own = expected(shape), set(held)
    decayed, others = numbered({key: tensor for key, tensor in ours.items() if key in own})
    try:
        groups = content["param_groups"]
        if [len(group["params"]) for group in groups] != [len(decayed), len(others)]:
            raise InputError("its groups of parameters are not the two that nanoGPT makes of this model")
        numbers = [number for group in groups for number in group["params"]]
        states = {key: of_parameters[number] for key, number in zip(decayed + others, numbers, strict=True)}
        moments = {
            moment: {
                key: fitted(states[key].get(moment), key, tensor, shape, f"in {moment}, this model needs")
                if key in own
                else torch.zeros(tensor.shape)
                for key, tensor in ours.items()
            }
            for moment in MOMENTS
        }
        rates = rates_of([groups[0]["lr"], *groups[0]["betas"], groups[0]["eps"], groups[0]["weight_decay"]])
        return checked_state(moments, [state["step"] for state in states.values()], rates)
    except (ArithmeticError, AttributeError, LookupError, TypeError):
        raise InputError("it is not AdamW's of this model") from None


def _one_step(steps: Iterable[Any]) -> int:
    """Return how often all parameters were updated. InputError: not equally often."""
    try:
        (step,) = {float(step) for step in steps}
        if 1 <= step < 1 << 31 and step == int(step):
            return int(step)
    except (ArithmeticError, RuntimeError, TypeError, ValueError):  # no numbers; not one
        pass
    raise InputError("its parameters do not say one number of steps that all have done")


def rates_of(numbers: list[Any]) -> Rates:
    """Return lr, beta1, beta2, eps and weight decay. InputError: they are no such numbers."""
    are_numbers = all(isinstance(number, int | float) and math.isfinite(number) and number >= 0 for number in numbers)
    if not are_numbers or len(numbers) != len(RATES) or max(numbers[1:3]) >= 1:  # of betas
        raise InputError("its learning rate, betas, eps and weight decay are no such numbers")
    return Rates(*map(float, numbers))
