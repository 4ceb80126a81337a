"""What was tried on the plain step: every alternative computes the same, and the table says what the pairs say."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from support.programs import REPOSITORY, TINY_RUN, data_flags

from testbed.analysis.statistics import FASTER, SLOWER
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.distributed.launch import Launch
from testbed.experiments import step_trials
from testbed.experiments.step_trials import TRIALS, Trial
from testbed.experiments.step_trials_table import trial_result, trials_table, two_numbers_table
from testbed.model.flops import least_bytes_of_step
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.strategies.baseline import Baseline
from testbed.train.batches import TrainingBatches

SCRIPT = REPOSITORY / "scripts" / "measure_trials.py"
CPU = torch.device("cpu")
SHAPE = ModelShape(num_layers=2, num_heads=2, embedding_size=32, vocab_size=300, max_position_embeddings=64)
COMPILED = ("compiled blocks", "compiled head")
EVERY = [
    *sorted(set(TRIALS) - set(COMPILED)),
    *(pytest.param(name, marks=pytest.mark.alone) for name in COMPILED),  # the compiler wants all cores
]


def operations_of(step: Callable[[], object]) -> Counter[str]:
    """What PyTorch does in a step, by name and number."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        step()
    return Counter({event.key: event.count for event in profiled.key_averages()})


@pytest.mark.parametrize("name", EVERY)
def test_an_alternative_takes_the_same_steps(token_files, name):
    """Three steps, the second and third of weights that the alternative made: by other operations to the same numbers,
    and nothing of it stays behind in the steps as they are after it."""
    if name == "chunked cross entropy" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("this torch has no LinearCrossEntropyOptions")
    flags = ["--global_batch_size", "4", "--micro_batch_size_per_gpu", "2", "--vocab_size", "512", *TRIALS[name].needs]
    checked = check_run(parse_command_line([*TINY_RUN, *data_flags(token_files), *flags]), Launch(0, 0, 1, 1))
    seen, done = [], []
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
        with around:
            done.append(operations_of(lambda s=strategy, b=batches: s.train_step(b.of_step(3), 1e-3)))
        after = dict(vars(strategy)), strategy.model.forward, torch.nn.functional.scaled_dot_product_attention
        assert before == after
        for step in (4, 5):  # the first of them may make the optimizer's moments
            done_after = operations_of(lambda s=strategy, b=batches, n=step: s.train_step(b.of_step(n), 1e-3))
        done.append(done_after)
    for usual, other in zip(*seen, strict=True):
        assert other == pytest.approx(usual, rel=2e-5)
    usual, usual_later, other, usual_after = done
    assert usual == usual_later == usual_after != other


def test_pairs_take_turns_and_the_first_ones_are_left_out(token_files, monkeypatch):
    """Which column is which, who begins, and that what warms up is in no pair."""
    order: list[bool] = []
    is_within: list[bool] = []
    now = [0.0]  # of a clock by which a step as it is takes 1 s, one with the alternative 100, and each pair 1 s more

    class Strategy:
        def __init__(self, *arguments: object):
            pass

        def train_step(self, *arguments: object) -> None:
            now.append(now[-1] + (100 if is_within else 1) + len(order) // 2)
            order.append(bool(is_within))

    @contextlib.contextmanager
    def alternative():
        is_within.append(True)
        yield
        is_within.clear()

    monkeypatch.setattr(step_trials, "Baseline", Strategy)
    monkeypatch.setattr(step_trials, "GPT2", lambda *arguments: None)
    monkeypatch.setattr(step_trials, "time", SimpleNamespace(perf_counter=lambda: now[-1]))
    checked = check_run(parse_command_line([*TINY_RUN, *data_flags(token_files)]), Launch(0, 0, 1, 1))
    trial = Trial("w", "p", lambda strategy: step_trials._Reentrant(alternative), kept="no")
    pairs = step_trials.times_of_pairs(checked, CPU, trial, 4)
    assert len(order) == 2 * (step_trials.WARMUP_PAIRS + 4)
    assert pairs == [(1 + pair, 100 + pair) for pair in range(step_trials.WARMUP_PAIRS, step_trials.WARMUP_PAIRS + 4)]
    assert [order[2 * pair] for pair in range(step_trials.WARMUP_PAIRS, step_trials.WARMUP_PAIRS + 4)] == [
        False,
        True,
    ] * 2
    assert all(order[2 * pair] != order[2 * pair + 1] for pair in range(len(order) // 2))


def run_of(pairs: list[list[float]], precision: str = "fp32") -> dict:
    return {"precision": precision, "pairs": pairs, "matrix_flops_per_s": 2e11, "copy_bytes_per_s": 1e10}


def content(**trials: dict) -> dict:
    flops = {"causal_flops_per_step": 1e11, "palm_flops_per_step": 1.5e11, "least_bytes_per_step": 1e9}
    return {"precision": "fp32", **flops, "trials": trials}


def entry(repeats: list[dict], not_measured: str | None = None) -> dict:
    return {"what": "w", "predicted": "p", "kept": "no: k", "not_measured": not_measured, "repeats": repeats}


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
    assert "| a: w | p | 0.900 times as long (0.900 to 0.900) | faster | no: k |" in table
    assert "| b: w | p | not measured: no compiler | | no: k |" in table
    others = entry([run_of([[99.0, 99.0]], "bf16")] * 9)  # more of them, and still not the step as it is
    numbers = two_numbers_table(content(a=measured, c=others))
    assert "| 0.500 | 50% |" in numbers and "| 0.100 | 10% |" in numbers and "| 1.000 | 100% |" in numbers
    assert "a step in fp32" in numbers and "(6N + 12LCT per token): 75.0%." in numbers
    assert two_numbers_table(content(c=others)) == ""


def test_the_least_traffic_of_a_step_by_hand():
    """One weight, one token: fp32 reads it twice per micro batch, bf16 casts it once and reads half as much."""
    weights = SHAPE.num_parameters
    channels = 15 * 2 * 32 + 384  # two layers, and the logits of the padded vocabulary
    fp32, bf16 = (least_bytes_of_step(SHAPE, 8, 1, precision) for precision in ("fp32", "bf16"))
    assert fp32 == weights * (2 * 4 + 4 + 4 + 28) + 8 * channels * 4 * 4
    assert bf16 == weights * (4 + 2 + 2 * 2 + 4 + 4 + 28) + 8 * channels * 4 * 2
    assert least_bytes_of_step(SHAPE, 8, 3, "fp32") - fp32 == weights * 2 * (2 * 4 + 8)
    assert least_bytes_of_step(SHAPE, 8, 3, "bf16") - bf16 == weights * 2 * (2 * 2 + 8)


def test_what_this_torch_or_device_cannot_do_is_not_measured(token_files, monkeypatch):
    chunked, casts = TRIALS["chunked cross entropy"], TRIALS["casts per micro batch"]
    flags = [*TINY_RUN, *data_flags(token_files)]
    aligned, padded = (
        check_run(parse_command_line([*flags, "--vocab_size", size]), Launch(0, 0, 1, 1)).settings
        for size in ("512", "300")
    )
    monkeypatch.setattr(torch.nn, "LinearCrossEntropyOptions", object, raising=False)
    assert chunked.why_not(aligned, CPU) is None
    assert "--vocab_size 300 is filled up to 384 rows" in chunked.why_not(padded, CPU)
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions")
    assert "has no LinearCrossEntropyOptions" in chunked.why_not(aligned, CPU)
    monkeypatch.setattr(step_trials, "is_bf16_faster", lambda device: False)
    assert "does not multiply bf16 faster" in casts.why_not(aligned, CPU)

    def no_compiler(*arguments: object) -> None:
        raise RuntimeError("no C compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", no_compiler)
    for name in COMPILED:
        assert TRIALS[name].why_not(aligned, CPU) == "the compiler does not work here (RuntimeError: no C compiler)"
    assert all(trial.kept for trial in TRIALS.values()) and TRIALS["float32 norm"].why_not(padded, CPU) is None


def test_the_tables_on_the_page_are_what_the_file_says():
    """Until there is a file, the page says so, and holds no table of its own."""
    page = (REPOSITORY / "docs" / "performance.md").read_text()
    file = REPOSITORY / "docs" / "results" / "performance" / "trials.json"
    if not file.exists():
        assert "follow with `docs/results/performance/trials.json`" in page and "times as long" not in page
        return
    measured = json.loads(file.read_text())
    assert trials_table(measured) in page and two_numbers_table(measured) in page and not measured["git_dirty"]
    assert measured["trials"].keys() == TRIALS.keys() and measured["warmup_pairs"] == step_trials.WARMUP_PAIRS
    assert "follow with `docs/results/performance/trials.json`" not in page


def test_what_the_page_concludes_of_the_trials_is_what_their_verdicts_say():
    page = " ".join((REPOSITORY / "docs" / "performance.md").read_text().split())
    measured = json.loads((REPOSITORY / "docs" / "results" / "performance" / "trials.json").read_text())
    found = {
        name: trial_result([run["pairs"] for run in trial["repeats"]])
        for name, trial in measured["trials"].items()
        if not trial["not_measured"]
    }
    slower = {name for name, result in found.items() if result.verdict == SLOWER}
    assert not [name for name, result in found.items() if result.verdict == FASTER] and len(found) == 7
    assert "No alternative is found faster. Two are slower: AdamW unfused, by some per cent" in page
    assert slower == {"unfused AdamW", "chunked cross entropy"} and found["chunked cross entropy"].low > 3
    runs = [run for trial in measured["trials"].values() for run in trial["repeats"]]
    step_s = median(pair[0] for run in runs for pair in run["pairs"])
    rates = [median(run[name] for run in runs) for name in ("matrix_flops_per_s", "copy_bytes_per_s")]
    assert "two thirds of its time" in page and "alone would be an eighth of it" in page
    assert measured["causal_flops_per_step"] / rates[0] / step_s == pytest.approx(2 / 3, abs=0.02)
    assert measured["least_bytes_per_step"] / rates[1] / step_s == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.launches
@pytest.mark.slow
def test_a_file_is_measured_and_read_again(tmp_path, token_files):
    out = tmp_path / "trials.json"
    work = [*TINY_RUN, *data_flags(token_files), "--global_batch_size", "4"]
    flags = ["--out", str(out), "--trials", "float32 norm,chunked cross entropy", "--repeats", "1", "--pairs", "2"]
    done = subprocess.run([sys.executable, str(SCRIPT), *flags, "--", *work], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(out.read_text())
    (run,) = measured["trials"]["float32 norm"]["repeats"]
    assert measured["trials"]["chunked cross entropy"]["repeats"] == []  # the vocabulary of 300 is padded, or old torch
    assert measured["trials"]["chunked cross entropy"]["not_measured"] in done.stdout
    assert measured["precision"] == run["precision"] == "fp32"
    assert len(run["pairs"]) == 2 and run["matrix_flops_per_s"] > 0 and run["copy_bytes_per_s"] > 0
    again = subprocess.run([sys.executable, str(SCRIPT), "--table", str(out)], capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout == done.stdout


@pytest.mark.launches
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--out", "x.json", "--trials", "magic"], "--trials magic: choose of unfused AdamW"),
        (["--table", "nowhere.json"], "--table nowhere.json does not exist"),
        ([], "give --out FILE to measure, or --table FILE"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, token_files, flags, sentence):
    command = [sys.executable, str(SCRIPT), *flags, "--", *TINY_RUN, *data_flags(token_files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr
