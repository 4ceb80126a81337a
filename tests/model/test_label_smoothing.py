"""The smoothed loss of padded logits is PyTorch's of the logits without padding."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from testbed.model.gpt2 import GPT2, loss_sum
from testbed.model.shape import ModelShape
from testbed.step import NOT_A_TARGET

SHAPE = ModelShape(1, 2, 16, 101, 32)  # 27 of 128 rows are padding


def case() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    logits = 3 * torch.randn(2, 7, SHAPE.padded_vocab_size, dtype=torch.float64).float()
    logits[..., SHAPE.vocab_size :] = -math.inf
    targets = torch.randint(SHAPE.vocab_size, (2, 7))
    targets[0, :3] = NOT_A_TARGET
    return logits.requires_grad_(), targets


@pytest.mark.parametrize("smoothing", [0.0, 0.05, 0.2, 0.9])
def test_loss_and_gradient_are_those_of_torch_without_padding(smoothing):
    logits, targets = case()
    mine = loss_sum(logits, targets, SHAPE.vocab_size, smoothing)
    gradient = torch.autograd.grad(mine, logits)[0]
    real = logits.detach()[..., : SHAPE.vocab_size].double().requires_grad_()
    expected = F.cross_entropy(
        real.flatten(0, 1), targets.flatten(), ignore_index=NOT_A_TARGET, reduction="sum", label_smoothing=smoothing
    )
    expected_gradient = torch.autograd.grad(expected, real)[0]
    assert mine.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient[..., : SHAPE.vocab_size].double(), expected_gradient, rtol=1e-5, atol=1e-7)
    assert gradient[..., SHAPE.vocab_size :].count_nonzero() == 0


def test_the_model_smooths_in_training_alone():
    torch.manual_seed(0)
    model, tokens = GPT2(SHAPE), torch.randint(SHAPE.vocab_size, (2, 8))
    plain = model(tokens, tokens)
    model.label_smoothing = 0.2
    expected = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum", label_smoothing=0.2)
    assert model(tokens, tokens).item() == pytest.approx(expected.item(), rel=1e-6) != plain.item()
    assert model.eval()(tokens, tokens) == plain
