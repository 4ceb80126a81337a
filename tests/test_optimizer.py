"""The learning rate by hand, the gradient norm against numpy, clipping against its definition."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from testbed.model import GPT2
from testbed.model_shape import ModelShape
from testbed.optimizer import build_adamw, clip_gradients_, global_grad_norm, learning_rate_at


def schedule(**changes):
    values = {"learning_rate": 1.0, "min_learning_rate": 0.1, "warmup_steps": 4, "lr_decay_steps": 14}
    return SimpleNamespace(**{**values, **changes})


def test_learning_rate_warms_up_falls_by_a_cosine_and_stays():
    rates = [learning_rate_at(step, schedule()) for step in range(20)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4] == pytest.approx(1.0)
    assert rates[9] == pytest.approx(0.55), "half way down the cosine is half way between peak and minimum"
    assert rates[6] == pytest.approx(0.1 + 0.45 * (1 + math.cos(0.2 * math.pi))), "a straight line would be lower"
    assert rates[14:] == pytest.approx([0.1] * 6)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[3:]))


def test_learning_rate_without_warmup_or_decay():
    assert learning_rate_at(0, schedule(warmup_steps=0)) == pytest.approx(1.0)
    assert learning_rate_at(5, schedule(warmup_steps=4, lr_decay_steps=4)) == pytest.approx(0.1)


def test_grad_norm_sums_squares_in_float64():
    """Two million equal float32 squares: summed in float32 they are off by more than the tolerance here."""
    gradients = [torch.full((1_000_000,), 1e-3), torch.full((1_000_003,), 3e-3), torch.randn(7)]
    expected = np.sqrt(sum((gradient.numpy().astype(np.float64) ** 2).sum() for gradient in gradients))
    norm = global_grad_norm(gradients)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("max_norm", "expected"), [(1.0, 1.0), (100.0, 5.0), (0.0, 5.0)])
def test_clipping_scales_to_the_limit_and_only_down(max_norm, expected):
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    clip_gradients_(parameters, max_norm, global_grad_norm(parameter.grad for parameter in parameters))
    assert global_grad_norm(parameter.grad for parameter in parameters).item() == pytest.approx(expected, rel=1e-5)


def test_biases_and_layer_norms_do_not_decay():
    model = GPT2(ModelShape(num_layers=1, num_heads=1, embedding_size=8, vocab_size=20, max_position_embeddings=8))
    settings = SimpleNamespace(weight_decay=0.1, learning_rate=1e-3, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)
    decaying, plain = build_adamw(model, settings).param_groups
    assert decaying["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    for group in (decaying, plain):
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)
    assert all(parameter.dim() >= 2 for parameter in decaying["params"])
    assert all(parameter.dim() == 1 for parameter in plain["params"])
    together = len(decaying["params"]) + len(plain["params"])
    assert together == len(list(model.parameters()))
