"""The order of things in the training loop, with parts that only note that they were called."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from support.settings import stand_in

import gpt2
from testbed.distributed.signals import RunStopped
from testbed.train.ending import RunPreempted


class Noted:
    """A run of four steps that saves after step 2 and validates after steps 2 and 4. It notes each call."""

    def __init__(self, monkeypatch, stop_at: int = 0, attention: str = "auto"):
        self.calls: list[str] = []
        note = self.calls.append
        self.settings = stand_in(
            last_step=4, precision="fp32", eval_only=False, skip_gradient_sync=None, attention=attention
        )
        self.first_step, self.owes_validation, self.device, self.is_out_of_patience = 0, False, None, False
        self.strategy = SimpleNamespace(train_step=lambda micro_batches, learning_rate: note("step"))
        self.batches = SimpleNamespace(of_step=lambda step: None)
        self.clock = contextlib.nullcontext()
        self.clock.data_wait = lambda read, step: read(step)
        self.report = SimpleNamespace(
            begin_training=lambda startup_s: None,
            profiled=contextlib.nullcontext,
            step=lambda step, world, learning_rate, clock: note(f"report {step}"),
        )
        self.signals = SimpleNamespace(
            number=0, defer=lambda: None, agree=lambda number: number, as_exception=lambda: RunStopped("stopped", 143)
        )
        self.checkpoints = SimpleNamespace(save=lambda step: note(f"save {step}"), wait=lambda: note("wait"))
        self.saves_after, self.validates_after = lambda step: step == 2, lambda step: step in (2, 4)
        worlds = iter(range(1, 5))
        monkeypatch.setattr(gpt2, "gather_step", lambda *_: SimpleNamespace(stop=15 * (next(worlds) == stop_at)))
        monkeypatch.setattr(gpt2, "raise_if_diverged", lambda *_: None)
        monkeypatch.setattr(gpt2, "learning_rate_at", lambda *_: 1.0)
        monkeypatch.setattr(gpt2, "validate", lambda run, step: note(f"validate {step}") or 0)
        monkeypatch.setattr(gpt2, "finish", lambda run: note("finish"))


def test_a_run_out_of_patience_does_no_further_step(monkeypatch):
    run = Noted(monkeypatch)
    run.stop_early = lambda step: run.calls.append(f"ends after {step}")

    def validate(run, step):
        run.is_out_of_patience = True
        return 0

    monkeypatch.setattr(gpt2, "validate", validate)
    gpt2.train(run)
    assert run.calls == ["step", "report 1", "step", "report 2", "save 2", "ends after 2", "finish"]


def test_a_step_is_reported_then_saved_then_validated(monkeypatch):
    run = Noted(monkeypatch)
    gpt2.train(run)
    assert run.calls == [
        *("step", "report 1"),
        *("step", "report 2", "save 2", "validate 2"),
        *("step", "report 3"),
        *("step", "report 4", "validate 4", "finish"),
    ]


@pytest.mark.parametrize("stop_at", [1, 2])
def test_a_run_that_is_stopped_saves_the_step_and_does_nothing_else(monkeypatch, stop_at):
    run = Noted(monkeypatch, stop_at)
    with pytest.raises(RunPreempted):
        gpt2.train(run)
    assert run.calls[-3:] == [f"report {stop_at}", f"save {stop_at}", "wait"]
    assert len(run.calls) == 2 * stop_at + 2, "each step, its report, and the checkpoint once"


def test_ranks_that_train_apart_save_nothing(monkeypatch):
    run = Noted(monkeypatch, stop_at=1)
    run.settings.data_parallel.skip_gradient_sync = "all"
    with pytest.raises(RunStopped):
        gpt2.train(run)
    assert run.calls == ["step", "report 1"]


def test_a_validation_that_an_earlier_start_was_stopped_in_comes_first(monkeypatch):
    run = Noted(monkeypatch)
    run.first_step, run.owes_validation = 2, True
    gpt2.train(run)
    assert run.calls[:2] == ["validate 2", "step"]


@pytest.mark.parametrize(("attention", "allowed"), [("auto", [True, True]), ("math", [False, True])])
def test_steps_and_validations_see_the_run_s_attention_kernel_alone(monkeypatch, attention, allowed):
    """And what follows sees PyTorch's choice: sampling, on a CPU or with a mask, may not have the run's kernel."""
    run, seen = Noted(monkeypatch, attention=attention), {}

    def look(name: str) -> None:
        seen[name] = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()]

    run.strategy.train_step = lambda micro_batches, learning_rate: look("step")
    run.owes_validation = True
    monkeypatch.setattr(gpt2, "validate", lambda run, step: look(f"validation {step}") or 0)
    monkeypatch.setattr(gpt2, "finish", lambda run: look("finish"))
    gpt2.train(run)
    assert seen == dict.fromkeys(("validation 0", "step", "validation 2", "validation 4"), allowed) | {
        "finish": [True, True]
    }
