"""What the plain step does not do twice."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY_RUN, data_flags
from torch.utils._python_dispatch import TorchDispatchMode

from testbed.data import TrainingBatches
from testbed.flags import parse_command_line
from testbed.launch import Launch
from testbed.model import GPT2
from testbed.settings import check_run
from testbed.strategies.baseline import Baseline

CPU = torch.device("cpu")
MICRO_BATCHES = 4


class CastsOfWeights(TorchDispatchMode):
    """Counts casts to bf16 of tensors that are as large as a matrix of the model."""

    def __init__(self, model: GPT2):
        super().__init__()
        self.places = {parameter.data_ptr() for parameter in model.parameters() if parameter.dim() == 2}
        self.count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        options = options or {}
        if operator is torch.ops.aten._to_copy.default and arguments[0].data_ptr() in self.places:
            self.count += options.get("dtype") == torch.bfloat16
        return operator(*arguments, **options)


def build(token_files, keeps_casts: bool, *more: str):
    flags = ["--global_batch_size", str(MICRO_BATCHES), "--micro_batch_size_per_gpu", "1", "--max_train_steps", "3"]
    arguments = [*TINY_RUN, *data_flags(token_files), *flags, "--precision", "bf16", *more]
    checked = check_run(parse_command_line(arguments), Launch(0, 0, 1, 1))
    torch.manual_seed(0)
    strategy = Baseline(checked.settings, GPT2(checked.settings.shape, checked.settings.dropout), CPU)
    strategy.keeps_casts = keeps_casts
    return strategy, TrainingBatches(checked.train_file, checked.settings, 0, CPU)


@pytest.mark.parametrize("more", [[], ["--dropout", "0.1"], ["--activation_checkpointing", "block"]], ids=" ".join)
def test_casts_that_are_kept_change_no_bit(token_files, more):
    """Also in the second and third step: a cast must not outlive the weights that it was made of."""
    seen = []
    for keeps_casts in (True, False):
        strategy, batches = build(token_files, keeps_casts, *more)
        torch.manual_seed(1)
        steps = [strategy.train_step(batches.of_step(step), 0.01) for step in range(3)]
        seen.append(([(step.loss_sum.item(), step.grad_norm.item()) for step in steps], strategy.full_state_dict()))
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(tensor, seen[1][1][name]) for name, tensor in seen[0][1].items())


@pytest.mark.parametrize(("keeps_casts", "times"), [(True, 1), (False, MICRO_BATCHES)])
def test_a_weight_is_cast_once_per_step(token_files, keeps_casts, times):
    """Not once per micro batch. The position embedding is looked up, not multiplied."""
    strategy, batches = build(token_files, keeps_casts)
    num_multiplied = sum(parameter.dim() == 2 for parameter in strategy.parameters) - 1
    with CastsOfWeights(strategy.model) as casts:
        strategy.train_step(batches.of_step(0), 0.01)
    assert casts.count == times * num_multiplied
