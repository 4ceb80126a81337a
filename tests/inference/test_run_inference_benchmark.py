"""--run_inference_benchmark: what a run measures at its end, and the pictures that seed 000's command makes of it."""

from __future__ import annotations

import os
import statistics
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.charts_cases import EVERY_CHART, INFERENCE_CHART, text_of
from support.metrics_examples import example_metrics, inference_fields, save, v1_metrics
from support.programs import REPOSITORY, TINY_RUN, data_flags, run_program
from support.settings import stand_in

from testbed.analysis.charts import training
from testbed.analysis.runs.arms import group_into_arms
from testbed.analysis.runs.load import load_run, load_runs
from testbed.distributed.launch import usable_cores
from testbed.inference import after_training
from testbed.metrics.file import check_metrics, read_metrics
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

WORK = ["--global_batch_size", "4", "--max_train_steps", "3", "--timing_warmup_steps", "1", "--sample_tokens", "0"]
WORK += ["--max_position_embeddings", "128", "--max_val_steps", "1", "--run_inference_benchmark"]


@pytest.fixture(scope="module")
def pair(ranks, token_files, tmp_path_factory):
    """One baseline and one optimized run, as seed 000 had them."""
    folder = tmp_path_factory.mktemp("pair")
    for run_type, number in {"baseline": 1, "optimized": 2}.items():
        flags = ["--run_type", run_type, *TINY_RUN, *WORK, *data_flags(token_files)]
        flags += ["--checkpoint_path", str(folder / run_type)]
        done = ranks.run_program(flags, folder / f"ranks of {run_type}", number)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("generation: 100 greedy tokens in ") == 1
    return folder


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.parametrize("run_type", ["baseline", "optimized"])
def test_a_run_measures_the_generation_of_its_own_weights(pair, token_files, run_type):
    """The new ids are those that transformers writes with the exported weights after the same prompt."""
    from transformers import GPT2LMHeadModel

    metrics = read_metrics(pair / run_type / "training_metrics.json")
    found = metrics["inference"]
    assert found["prompt_ids"] == np.fromfile(token_files[0], dtype="<u2")[:16].tolist()
    model = GPT2LMHeadModel.from_pretrained(pair / run_type).eval()
    prompt = torch.tensor([found["prompt_ids"]])
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=100, min_new_tokens=100, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert found["new_ids"] == written[0, 16:].tolist()
    assert (found["module"], found["precision"], found["batch_size"]) == ("plain", "fp32", 1)
    assert found["uses_cache"] is True and found["new_tokens"] == 100
    assert found["threads"] == usable_cores()  # also with two ranks, of which each trained with its share
    assert metrics["status"] == "complete" and metrics["settings"]["run_inference_benchmark"] is True
    first_s, whole_s = found["time_to_first_token_s"], found["latency_s"]
    assert len(whole_s) == after_training.REPEATS and all(a < b for a, b in zip(first_s, whole_s, strict=True))
    assert metrics["inference_latency"] == statistics.median(whole_s)  # the names of v1
    assert metrics["inference_throughput"] == pytest.approx(100 / metrics["inference_latency"])


@pytest.mark.launches
@pytest.mark.slow
def test_seed_000_s_command_draws_both_of_its_pictures(pair, tmp_path):
    """And nothing in them suggests a difference where none was detected."""
    program = [sys.executable, str(REPOSITORY / "generate_charts.py")]
    files = [str(pair / run_type / "training_metrics.json") for run_type in ("baseline", "optimized")]
    program += ["--baseline-json", files[0], "--optimized-json", files[1]]
    done = run_program(program, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")})
    assert done.returncode == 0, done.stderr
    written = {path.name for path in (tmp_path / "docs/charts").glob("*.png")}
    assert written == EVERY_CHART | {INFERENCE_CHART}
    runs = load_runs([pair / "baseline", pair / "optimized"])
    row = next(line for line in done.stdout.splitlines() if line.startswith("generated tokens/s, batch 1"))
    assert row.split()[-2:] == [f"{run.inference_tokens_per_s:,.1f}" for run in runs]
    figure = training.inference_figure(runs)
    assert len(figure.axes) == 1, "the same was measured in both"
    threads = f"{usable_cores()} thread{'s' * (usable_cores() > 1)}"
    assert f"key-value cache, fp32, plain module, {threads}: median of 7 after warm-up" in text_of(figure)
    assert "One run each: no interval" in text_of(figure)


def with_inference(latencies_s: list[float], **overrides) -> dict:
    """A 2.1 file with a benchmark of these repeats."""
    return example_metrics(**inference_fields(latencies_s), **overrides)


NOISE = [1.00, 1.02, 0.98, 1.01, 0.99, 1.03, 0.97]
OPTIMIZED = {"training_config": {"run_type": "optimized", "deepspeed_enabled": True, "zero_stage": 1}}


@pytest.mark.parametrize(
    ("second_s", "title"),
    [
        (NOISE[::-1], "Inference performance: no detectable difference between two runs"),
        ([each * 1.005 for each in NOISE], "Inference performance: no detectable difference between two runs"),
        ([each * 1.25 for each in NOISE], "Inference: optimized ZeRO-1 slower than baseline, 0.80x (one run each)"),
        ([each / 2 for each in NOISE], "Inference: optimized ZeRO-1 faster than baseline, 2.00x (one run each)"),
    ],
    ids=["the same", "within noise", "slower", "faster"],
)
def test_the_title_says_what_two_runs_show_and_no_more(tmp_path, second_s, title):
    files = with_inference(NOISE), with_inference(second_s, **OPTIMIZED)
    runs = load_runs([save(tmp_path / str(number), content) for number, content in enumerate(files)])
    figure = training.inference_figure(runs)
    assert figure.texts[0].get_text() == title
    text = text_of(figure)
    assert ("slower" in text, "faster" in text) == ("slower" in title, "faster" in title)
    assert "their spread says nothing of another start" in text
    (axis,) = figure.axes
    dots = [[x for x, _ in each.get_offsets()] for each in axis.collections]
    assert dots == [pytest.approx([100 / each for each in repeats]) for repeats in (NOISE, second_s)]
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([run.inference_tokens_per_s for run in runs])


def test_what_v1_measured_keeps_a_panel_of_its_own(tmp_path):
    files = [with_inference(NOISE), v1_metrics(1), v1_metrics(4)]
    runs = load_runs([save(tmp_path / str(number), content) for number, content in enumerate(files)])
    figure = training.inference_figure(runs)
    assert len(figure.axes) == 2 and "do not compare" in text_of(figure)
    assert figure.texts[0].get_text() == "Inference performance"
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert "key-value cache" in titles[0] and "no key-value cache, no warm-up, measured once" in titles[1]
    table = training.comparison_table(runs)
    row = next(line for line in table.splitlines() if line.startswith("generated tokens/s"))
    assert row.count("no cache") == 2 and f"{runs[0].inference_tokens_per_s:,.1f}   " in row
    v1 = training.inference_figure(runs[1:])
    assert v1.texts[0].get_text() == "Inference: 2 slower than 1, 0.83x (one run each)"  # named by their folders


def test_repeats_of_a_configuration_are_one_bar(tmp_path):
    """One number per run is one repeat; runs with and without the benchmark are the same configuration."""
    for number in range(5):
        settings = {"run_inference_benchmark": True}
        save(tmp_path / f"a{number}", with_inference([each * (1 + number / 100) for each in NOISE], settings=settings))
    save(tmp_path / "a5", example_metrics())
    runs = [load_run(tmp_path / f"a{number}") for number in range(6)]
    assert len(group_into_arms(runs)) == 1
    figure = training.plot_results({"a": runs}, "inference")
    assert "(n = 5)" in text_of(figure)


def test_files_without_the_benchmark_read_as_before_and_say_nothing_of_inference(tmp_path):
    run = load_run(save(tmp_path, example_metrics()))
    assert (run.inference_tokens_per_s, run.inference_repeats_tokens_per_s) == (None, ())
    assert training.inference_figure([run]) is None
    assert "generated" not in training.comparison_table([run])
    check_metrics(example_metrics(inference=None, inference_latency=None, inference_throughput=None))


def test_rank_0_measures_with_all_cores_and_gives_them_back(monkeypatch):
    """Else a run with two ranks would be compared with one rank on twice as many threads."""
    seen, share = [], torch.get_num_threads()
    monkeypatch.setattr(after_training, "usable_cores", lambda: 3)

    def time_in_turn(*_):
        seen.append(torch.get_num_threads())
        answer = SimpleNamespace(tokens=[1], latency_s=1.0, time_to_first_token_s=0.5)
        return {"plain": [answer] * after_training.REPEATS}

    monkeypatch.setattr(after_training, "time_in_turn", time_in_turn)
    shape = ModelShape(num_layers=1, num_heads=1, embedding_size=8, vocab_size=16, max_position_embeddings=8)
    settings = stand_in(shape=shape, precision="fp32")
    found = after_training._measure(GPT2(shape).state_dict(), settings, [1], torch.device("cpu"))
    assert seen == [3] and found["threads"] == 3
    assert torch.get_num_threads() == share


def test_runs_of_other_threads_do_not_compare(tmp_path):
    """On a CPU; on a GPU the threads are not what generates."""
    for kind, panels in (("cpu", 2), ("cuda", 1)):
        runs = []
        for threads in (1, 2):
            content = with_inference(NOISE, hardware={"device_type": kind})
            content["inference"]["threads"] = threads
            runs.append(load_run(save(tmp_path / f"{kind}{threads}", content)))
        assert len({run.inference_meaning for run in runs}) == panels
        assert len(training.inference_figure(runs).axes) == panels
    assert "plain module, 1 thread: median of 7" in load_run(tmp_path / "cpu1").inference_meaning
    old = with_inference(NOISE)  # a file from before the field
    del old["inference"]["threads"]
    assert "plain module: median of 7" in load_run(save(tmp_path / "old", old)).inference_meaning


def test_a_model_that_does_not_fit_beside_its_training_costs_the_number_not_the_run(monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(after_training, "_measure", out_of_memory)
    tokens = SimpleNamespace(tokens=np.arange(100))
    found, line = after_training.benchmark_generation({}, None, tokens, torch.device("cpu"))
    assert found is None and line.startswith("no inference benchmark: the whole model does not fit onto cpu")
