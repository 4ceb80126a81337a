"""The learning rate by hand, the gradient norm against numpy, clipping against its definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.settings import settings_of, stand_in

from testbed.config.schedule import decay_steps
from testbed.config.training_flags import LR_SCHEDULES
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.optim.lr_schedule import learning_rate_at
from testbed.optim.optimizer import build_optimizer, clip_gradients_, global_grad_norm


def schedule(**changes):
    marks = {"warmup_steps": 4, "lr_decay_steps": 14}
    values = {"lr_schedule": "cosine", "learning_rate": 1.0, "min_learning_rate": 0.1, "decay_share": None, **marks}
    values |= {"warmup_shape": "linear"}
    return stand_in(**{**values, **changes})


def test_learning_rate_warms_up_falls_by_a_cosine_and_stays():
    rates = [learning_rate_at(step, schedule()) for step in range(20)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4] == pytest.approx(1.0)
    assert rates[9] == pytest.approx(0.55), "half way down the cosine is half way between peak and minimum"
    assert rates[6] == pytest.approx(0.1 + 0.45 * (1 + math.cos(0.2 * math.pi))), "a straight line would be lower"
    assert rates[14:] == pytest.approx([0.1] * 6)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[3:]))


def test_a_log_warm_up_rises_by_the_logarithm_and_not_beyond_the_peak():
    rates = [learning_rate_at(step, schedule(warmup_shape="log", lr_schedule="constant")) for step in range(6)]
    assert rates == pytest.approx([0.5, math.log(3) / math.log(4), 1, 1, 1, 1])
    assert learning_rate_at(0, schedule(warmup_shape="log", warmup_steps=1)) == 1


def test_learning_rate_without_warmup_or_decay():
    assert learning_rate_at(0, schedule(warmup_steps=0)) == pytest.approx(1.0)
    assert learning_rate_at(5, schedule(warmup_steps=4, lr_decay_steps=4)) == pytest.approx(0.1)


def test_wsd_warms_up_stays_and_falls_in_a_straight_line():
    wsd = schedule(lr_schedule="wsd", warmup_steps=2, lr_decay_steps=20, decay_share=0.25, min_learning_rate=0.5)
    rates = [learning_rate_at(step, wsd) for step in range(23)]
    assert rates[:2] == pytest.approx([0.5, 1.0])
    assert rates[2:15] == [1.0] * 13, "step 15, counted from 0, is the first of the last five"
    assert rates[15:19] == pytest.approx([0.9, 0.8, 0.7, 0.6])
    assert rates[19:] == [0.5] * 4, "the last step is at the minimum"
    falls_from_the_start = schedule(lr_schedule="wsd", warmup_steps=0, lr_decay_steps=4, decay_share=1.0)
    assert [learning_rate_at(step, falls_from_the_start) for step in range(4)] == pytest.approx(
        [0.775, 0.55, 0.325, 0.1]
    )


@example(name="cosine", steps=1, warmup=0.0, share=1.0, peak=0.99999, lowest=0.390625)
@given(
    name=st.sampled_from(sorted(LR_SCHEDULES)),
    steps=st.integers(1, 5000),
    warmup=st.floats(0, 1),
    share=st.floats(0.001, 1),
    peak=st.floats(1e-6, 10),
    lowest=st.floats(0, 1),
)
def test_every_schedule_ends_where_its_page_says(name, steps, warmup, share, peak, lowest):
    floor = peak if name == "constant" else peak * lowest
    warmup_steps = min(round(warmup * steps), steps - decay_steps(steps, share) if name == "wsd" else steps - 1)
    run = schedule(
        lr_schedule=name, learning_rate=peak, min_learning_rate=floor, lr_decay_steps=steps, decay_share=share,
        warmup_steps=warmup_steps,
    )  # fmt: skip
    rates = [learning_rate_at(step, run) for step in (*range(max(0, steps - 50), steps), steps)]
    assert all(floor <= rate <= math.nextafter(peak, math.inf) for rate in rates[-2:]), "floor + (peak - floor) rounds"
    assert rates[-1] == floor, "what comes after the schedule stays at the minimum"
    falling = steps - warmup_steps
    most_above = {"wsd": 0.0, "constant": 0.0, "cosine": (math.pi / 2 / falling) ** 2 * (peak - floor)}[name]
    assert rates[-2] - floor <= most_above * (1 + 1e-6) + 1e-12 * peak
    assert name != "wsd" or rates[-2] == floor


def test_constant_stays_after_the_warm_up():
    constant = schedule(lr_schedule="constant")
    assert [learning_rate_at(step, constant) for step in (0, 3, 4, 13, 14, 99)] == pytest.approx([0.25, 1, 1, 1, 1, 1])


def test_the_schedules_defaults(token_files):
    steps = ["--max_train_steps", "20", "--epochs", "2", "--learning_rate", "0.004"]
    cosine, wsd, constant = (settings_of(token_files, *steps, "--lr_schedule", name) for name in LR_SCHEDULES)
    assert (cosine.optimizer.min_learning_rate, cosine.optimizer.decay_share) == (0.0004, None)
    assert (wsd.optimizer.min_learning_rate, wsd.optimizer.decay_share, wsd.optimizer.lr_decay_steps) == (0.0, 0.2, 20)
    assert learning_rate_at(15, wsd) == 0.004 > learning_rate_at(19, wsd) == 0
    assert (constant.optimizer.min_learning_rate, constant.optimizer.decay_share) == (0.004, None)
    assert settings_of(token_files).optimizer.lr_schedule == "cosine"


def test_a_flag_of_another_schedule_is_dropped_where_a_file_says_it(token_files, tmp_path):
    config = tmp_path / "effective_config.json"
    config.write_text('{"lr_schedule": "wsd", "decay_share": 0.3, "optimizer": "muon", "muon_momentum": 0.9}')
    files = ["--config", str(config)]
    assert settings_of(token_files, *files).optimizer.decay_share == 0.3
    changed = settings_of(token_files, *files, "--lr_schedule", "cosine", "--optimizer", "adamw")
    assert (changed.optimizer.decay_share, changed.optimizer.muon_momentum) == (None, None)


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


def test_the_factor_of_clipping_has_the_dtype_of_the_gradients(monkeypatch):
    """With another one CUDA multiplies one tensor after the other (_foreach_mul_'s slow route)."""
    parameter, seen = torch.nn.Parameter(torch.zeros(2)), []
    parameter.grad = torch.tensor([3.0, 4.0])
    monkeypatch.setattr(torch, "_foreach_mul_", lambda tensors, factor: seen.append((tensors[0].dtype, factor.dtype)))
    clip_gradients_([parameter], 1.0, global_grad_norm([parameter.grad]))
    assert seen == [(torch.float32, torch.float32)]


def test_biases_and_layer_norms_do_not_decay():
    model = GPT2(ModelShape(num_layers=1, num_heads=1, embedding_size=8, vocab_size=20, max_position_embeddings=8))
    adam = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6}
    settings = stand_in(optimizer="adamw", weight_decay=0.1, learning_rate=1e-3, **adam)
    decaying, plain = build_optimizer(model, settings).param_groups
    assert decaying["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    for group in (decaying, plain):
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)
    assert all(parameter.dim() >= 2 for parameter in decaying["params"])
    assert all(parameter.dim() == 1 for parameter in plain["params"])
    together = len(decaying["params"]) + len(plain["params"])
    assert together == len(list(model.parameters()))
