"""What was tried on the plain step: every alternative computes the same, and the table says what the pairs say."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from conftest import REPOSITORY, TINY_RUN, data_flags

from testbed.analysis.trials import trial_result, trials_table, two_numbers_table
from testbed.data import TrainingBatches
from testbed.flags import parse_command_line
from testbed.launch import Launch
from testbed.model import GPT2
from testbed.settings import check_run
from testbed.strategies.baseline import Baseline
from testbed.trials import TRIALS

SCRIPT = REPOSITORY / "scripts" / "measure_trials.py"
CPU = torch.device("cpu")
QUICK = sorted(set(TRIALS) - {"compiled blocks"})  # the compiler takes half a minute


@pytest.mark.parametrize("name", QUICK)
def test_an_alternative_takes_the_same_steps(token_files, name):
    """Three steps, the second and third of weights that the alternative made, and nothing of it stays behind."""
    flags = ["--global_batch_size", "4", "--micro_batch_size_per_gpu", "2", "--vocab_size", "512", *TRIALS[name].needs]
    checked = check_run(parse_command_line([*TINY_RUN, *data_flags(token_files), *flags]), Launch(0, 0, 1, 1))
    seen = []
    for is_alternative in (False, True):
        torch.manual_seed(0)
        strategy = Baseline(checked.settings, GPT2(checked.settings.shape), CPU)
        before = dict(vars(strategy)), strategy.model.forward, torch.nn.functional.scaled_dot_product_attention
        batches = TrainingBatches(checked.train_file, checked.settings, 0, CPU)
        around = TRIALS[name].alternative(strategy) if is_alternative else torch.enable_grad()
        results = []
        for step in range(3):
            with around:
                result = strategy.train_step(batches.of_step(step), 1e-3)
            results.append((result.loss_sum.item(), result.grad_norm.item()))
        seen.append(results)
        after = dict(vars(strategy)), strategy.model.forward, torch.nn.functional.scaled_dot_product_attention
        assert before == after
    for usual, other in zip(*seen, strict=True):
        assert other == pytest.approx(usual, rel=2e-5)


def run_of(pairs: list[list[float]], precision: str = "fp32") -> dict:
    return {"precision": precision, "pairs": pairs, "matrix_flops_per_s": 2e11, "copy_bytes_per_s": 1e10}


def content(**trials: dict) -> dict:
    return {"flops_per_step": 1e11, "least_bytes_per_step": 1e9, "trials": trials}


def entry(repeats: list[dict], not_measured: str | None = None) -> dict:
    return {"what": "w", "predicted": "p", "not_measured": not_measured, "repeats": repeats}


def test_a_trial_is_the_median_ratio_of_neighbours_one_number_per_process():
    """Processes of very different speed, each with one outlier: 10 % longer all the same."""
    repeats = [[[speed, 1.1 * speed], [3 * speed, 3.3 * speed], [speed, 9 * speed]] for speed in (1, 2, 4, 8, 16)]
    result = trial_result(repeats)
    assert result.ratio == pytest.approx(1.1)
    assert (result.low, result.high) == pytest.approx((1.1, 1.1))
    assert result.verdict == "slower"
    assert trial_result(repeats[:4]).verdict == "not enough repeats"
    scattered = [[[1.0, math.exp(noise)]] for noise in (-0.2, -0.1, 0.0, 0.1, 0.2)]
    assert trial_result(scattered).verdict == "no detectable difference"


def test_the_tables_name_what_was_not_measured_and_how_far_the_limits_are():
    measured, missing = entry([run_of([[1.0, 0.9]])] * 5), entry([], "no compiler")
    table = trials_table(content(a=measured, b=missing))
    assert "| a: w | p | 0.900 times as long (0.900 to 0.900) | faster | no |" in table
    assert "not measured: no compiler" in table
    numbers = two_numbers_table(content(a=measured, c=entry([run_of([[99.0, 99.0]], "bf16")])))
    assert "| 0.500 | 50% |" in numbers and "| 0.100 | 10% |" in numbers and "| 1.000 | 100% |" in numbers


def test_a_file_is_measured_and_read_again(tmp_path, token_files):
    out = tmp_path / "trials.json"
    work = [*TINY_RUN, *data_flags(token_files), "--global_batch_size", "4"]
    flags = ["--out", str(out), "--trials", "float32 norm", "--repeats", "1", "--pairs", "2"]
    done = subprocess.run([sys.executable, str(SCRIPT), *flags, "--", *work], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = json.loads(out.read_text())["trials"]["float32 norm"]["repeats"]
    assert len(run["pairs"]) == 2 and run["matrix_flops_per_s"] > 0 and run["copy_bytes_per_s"] > 0
    again = subprocess.run([sys.executable, str(SCRIPT), "--table", str(out)], capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout == done.stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--out", "x.json", "--trials", "magic"], "--trials magic: choose of unfused AdamW"),
        (["--table", "nowhere.json"], "--table nowhere.json cannot be read"),
        ([], "give --out FILE to measure, or --table FILE"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, token_files, flags, sentence):
    command = [sys.executable, str(SCRIPT), *flags, "--", *TINY_RUN, *data_flags(token_files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr
