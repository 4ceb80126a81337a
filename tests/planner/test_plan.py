"""A plan: its order, its sums, its file, its picture, and what it says to bad input."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
from support.programs import REPOSITORY, VOCABULARY, run_here, write_token_files

from testbed.analysis.plan.picture import plan_figure
from testbed.analysis.plan.tables import plan_text
from testbed.errors import InputError
from testbed.memory_model.devices import device_named
from testbed.memory_model.job import DenseModel, Job, Layout
from testbed.memory_model.memory import fits, memory_of
from testbed.model.flops import flops_per_token_palm
from testbed.model.shape import MODEL_SIZES
from testbed.planner.candidates import possible
from testbed.planner.machines import machine_of
from testbed.planner.plan import (
    GIVEN_UP,
    SAME,
    Budget,
    PlannedRun,
    as_fast,
    best_of_each,
    headline,
    plan,
    plan_record,
    roomy_bytes,
)
from testbed.planner.question import OTHER_MODELS, numbers_of_sweep, question
from testbed.planner.step_time import StepTime, published_constants, step_time

PLAN = "scripts/plan.py"
NODE = machine_of(device_named("h100-sxm"), 8, None, None)
XL = ["--model", "gpt2-xl", "--gpu", "h100-sxm"]
GPT2 = DenseModel.of_gpt2(MODEL_SIZES["gpt2"], 1024)
CONSTANTS = published_constants()


def candidates(*asked) -> list[Job]:
    return possible(*asked)[0]


@pytest.fixture(scope="module")
def runs() -> list[PlannedRun]:
    jobs = candidates(MODEL_SIZES["gpt2-xl"], 1024, 512, NODE)
    return plan(jobs, NODE, CONSTANTS)


def test_of_those_that_the_estimate_does_not_tell_apart_the_simplest_is_taken(runs):
    alike = as_fast(runs)
    assert all(run.time.seconds <= GIVEN_UP * min(each.time.seconds for each in runs) for run in alike)
    fastest = min((run for run in runs if run.fits and not run.is_tight), key=lambda run: run.time.seconds)
    assert runs[0] in alike and fastest in alike and len({run.job.run_type for run in alike}) > 1
    assert runs[0].job.run_type == "optimized" and fastest.job.run_type == "fsdp"
    roomy = [run for run in alike if not run.is_near_full]
    assert runs[0] in roomy and len(roomy) < len(alike)
    equals = [run for run in roomy if run.simplicity <= runs[0].simplicity]
    as_quick = [run for run in equals if run.time.seconds <= SAME * min(each.time.seconds for each in equals)]
    assert runs[0] in as_quick and all(runs[0].needs_bytes <= run.needs_bytes for run in as_quick)
    order = [simplicity_of(run_type, **layout) for run_type, layout in (
        ("baseline", {}), ("ddp", {"data": 8}), ("allreduce", {"data": 8}), ("optimized", {"data": 8, "zero_stage": 1}),
        ("optimized", {"data": 8, "zero_stage": 3}), ("fsdp", {"data": 8, "zero_stage": 3}), ("tensor", {"tensor": 8}),
        ("pipeline", {"pipeline": 8}),
    )]  # fmt: skip
    assert order == sorted(order)


def test_the_first_run_may_be_as_fast_as_the_fastest_of_every_strategy():
    """Also where another micro batch of its own strategy, which has no row, is the fastest of all."""
    seven = dataclasses.replace(NODE, devices=7)
    each = best_of_each(plan(candidates(MODEL_SIZES["gpt2-large"], 1024, 512, seven), seven, CONSTANTS))
    assert all(run.ratio_to(each[0])[2] >= 1 for run in each if run.fits) and each[0] in as_fast(each)


def test_the_simplest_is_not_taken_where_it_is_predicted_much_slower():
    """Its ratio to the fastest may be 1, for collectives are known badly."""

    def run(run_type: str, **parts: float) -> PlannedRun:
        job = Job(model=GPT2, layout=Layout(data=8), micro_batch=1, accumulation=8, run_type=run_type)
        named = {name.replace("_", " "): seconds for name, seconds in parts.items()}
        time = StepTime(named, sum(parts.values()), 0.1, 10.0, "made up")
        return PlannedRun(job=job, machine=NODE, memory=memory_of(job), time=time)

    fastest = run("fsdp", matrix_products=1.0)
    simple = run("ddp", matrix_products=0.53, exposed_communication_between_nodes=0.6)
    assert simple.ratio_to(fastest)[1] < 1 < GIVEN_UP < simple.ratio_to(fastest)[0]
    assert as_fast([fastest, simple]) == [fastest]


def simplicity_of(run_type: str, **layout: int):
    job = Job(model=GPT2, layout=Layout(**layout), micro_batch=1, accumulation=8, run_type=run_type)
    return PlannedRun(job=job, machine=NODE, memory=memory_of(job), time=step_time(job, NODE, CONSTANTS)).simplicity


def test_a_ratio_is_known_better_than_its_times_and_swapping_inverts_it(runs):
    """What two runs share cancels: one of the same parts is off by what the formulas forget alone."""
    one, other = runs[0], next(run for run in runs if run.job.layout.pipeline > 1 and run.fits)
    for first, second in ((one, other), (one, runs[1])):
        ratio, low, high = first.ratio_to(second)
        back, back_low, back_high = second.ratio_to(first)
        assert (1 / back, 1 / back_high, 1 / back_low) == pytest.approx((ratio, low, high))
        assert high / low < first.time.high / first.time.low
    assert one.ratio_to(one) == (1.0, 1.0, 1.0)
    slower = dataclasses.replace(one, time=dataclasses.replace(one.time, seconds=1.1 * one.time.seconds))
    assert slower.ratio_to(one)[1] > 1


def test_what_costs_the_most_is_told_from_the_ideal():
    """7 stages idle for longer than they compute too slowly; recomputing is told apart from slow kernels."""

    def costs(**values) -> str:
        job = Job(model=GPT2, **{"micro_batch": 1, "accumulation": 8, **values})
        machine = dataclasses.replace(NODE, devices=job.layout.devices)
        return PlannedRun(
            job=job, machine=machine, memory=memory_of(job), time=step_time(job, machine, CONSTANTS)
        ).limited_by

    pipeline = {"run_type": "pipeline", "layout": Layout(pipeline=8), "schedule": "gpipe"}
    assert costs(**pipeline, accumulation=4) == "bubble"
    large = {"run_type": "baseline", "layout": Layout(), "micro_batch": 16, "accumulation": 4, "compiled": True}
    assert costs(**large) == "kernels below peak"
    assert costs(**large | {"micro_batch": 1, "accumulation": 64}) == "memory traffic"  # weights are cast 64 times
    # the last of 7 stages has the head, a quarter of GPT-2's work
    seven = pipeline | {"layout": Layout(pipeline=7), "compiled": True, "micro_batch": 4}
    assert costs(**seven, accumulation=128) == "uneven stages"


def test_nothing_recomputes_that_has_room_without_and_what_is_tight_hides_nothing(runs):
    for run in runs:
        if run.fits and run.job.recompute != "none":
            without = dataclasses.replace(run.job, recompute="none")
            memory = memory_of(without)
            assert not fits(memory, NODE.device) or roomy_bytes(memory, NODE.device) > NODE.device.memory_bytes
    assert any(run.job.recompute != "none" for run in runs if run.fits)
    done = run_here(PLAN, "--model", "gpt2-xl", "--gpu", "4090", "--gpus", 64, "--run_type", "fsdp")
    assert "micro batch 8 x 1, recompute blocks: needs 10.8 of 23.5 GiB" in done.stdout  # without: 23.6, and 1 x 8


def test_kinds_of_memory_add_up_to_what_is_needed(runs):
    for run in runs[::25]:
        assert sum(run.memory_by_kind.values()) == pytest.approx(run.needs_bytes)
        assert run.spare_bytes == pytest.approx(NODE.device.memory_bytes - run.needs_bytes)
        assert run.is_tight == (run.fits and run.spare_bytes < 0) and (run.fits or run.spare_bytes < 0)


def test_days_cost_and_mfu_are_arithmetic_on_the_step(runs):
    run = runs[0]
    budget = Budget(tokens=1e10, price=3.0)
    steps = math.ceil(1e10 / (512 * 1024))
    assert budget.days(run) == pytest.approx(steps * run.time.seconds / 86400)
    assert budget.cost(run) == pytest.approx(steps * run.time.seconds / 3600 * 8 * 3.0)
    failing = Budget(tokens=1e10, price=3.0, mtbf_hours=10.0)
    assert failing.days(run) == pytest.approx(budget.days(run) / failing.goodput(run))
    assert 0.5 < failing.goodput(run) < 1
    flops = 512 * 1024 * flops_per_token_palm(MODEL_SIZES["gpt2-xl"], 1024)  # the MFU of a run's own metrics
    assert run.mfu == pytest.approx(flops / run.time.seconds / (8 * 989.4e12), rel=0.002)


def test_failures_of_a_machine_are_those_of_all_its_nodes_and_a_checkpoint_takes_its_size(runs):
    big = dataclasses.replace(runs[0], machine=dataclasses.replace(NODE, devices=128))
    failures = Budget(mtbf_hours=160.0).failures(big)
    assert failures.between_s == pytest.approx(10 * 3600)
    weights_and_moments = 12 * runs[0].job.model.parameters
    assert runs[0].checkpoint_bytes == weights_and_moments
    assert failures.save_s == pytest.approx(weights_and_moments / 1e9 / (128 / NODE.per_node)), "each node its part"
    assert Budget(mtbf_hours=160.0, save_s=7.0).failures(big).save_s == 7
    muon = dataclasses.replace(runs[0], job=dataclasses.replace(runs[0].job, optimizer="muon"))
    assert 8 * runs[0].job.model.parameters < muon.checkpoint_bytes < weights_and_moments


def test_the_host_memory_of_offloading_is_deepspeed_s_own_estimate():
    """Its estimate_zero3_model_states_mem_needs of the same model on as many GPUs."""
    estimate = pytest.importorskip("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs
    model = DenseModel.of_gpt2(MODEL_SIZES["gpt2-xl"], 1024)
    for devices, offload in itertools.product((1, 8, 32), ("optimizer", "parameters")):
        layout = Layout(data=devices, zero_stage=3, shard=devices)
        job = Job(model=model, layout=layout, micro_batch=1, accumulation=1, run_type="optimized", offload=offload)
        there = dataclasses.replace(NODE, devices=devices)
        run = PlannedRun(job=job, machine=there, memory=memory_of(job), time=step_time(job, there, CONSTANTS))
        expected, _, _ = estimate(
            model.parameters, 0, min(devices, 8), -(-devices // 8), True, offload == "parameters", zero_init=False
        )
        assert run.host_bytes == pytest.approx(expected)


def test_the_picture_numbers_only_what_has_room_and_keeps_one_order_of_parts(runs):
    """Bars of a tenth of the device's memory have no room for numbers; a head that the first row lacks is not last."""
    each = [run for run in best_of_each(runs) if run.job.layout.pipeline > 1][:3]
    device = dataclasses.replace(NODE.device, memory_bytes=20 * each[0].needs_bytes)
    small = [dataclasses.replace(run, machine=dataclasses.replace(NODE, device=device)) for run in each]
    without = {name: took for name, took in each[0].time.parts.items() if name != "head"}
    small[0] = dataclasses.replace(small[0], time=dataclasses.replace(small[0].time, parts=without))
    above, below = plan_figure(small, "a title", ["a note"]).axes[-2:]
    inside = [text.get_text() for text in above.texts if "GiB" not in text.get_text()]
    assert inside == [f"the device has {device.memory_bytes / 2**30:.1f}"]
    parts = below.get_legend_handles_labels()[1]
    assert parts.index("head") < parts.index("bubble")
    columns = next(line for line in plan_text(small, Budget(), {}, ()).splitlines() if " head " in line)
    assert columns.index("head") < columns.index("bubble")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("gpus=8,16,...,128", [8, 16, 32, 64, 128]), ("gpus=8, 16, 24", [8, 16, 24]), ("gpus=1,6", [1, 6])],
)
def test_dots_of_a_sweep_go_on_by_factor(text, numbers):
    assert numbers_of_sweep(text) == numbers


NO_LISTS = ["8,16", "gpus=8,16,...,40", "gpus=8,8,...,64", "gpus=8,...,64", "gpus=16,8", "gpus=0", "gpus=²,8"]
TOO_MANY = ["gpus=8,16,...,999999999", f"gpus=8,16,...,{10**30}", "gpus=8,99999999", f"gpus=1,{'9' * 5000}"]


@pytest.mark.parametrize("text", NO_LISTS + TOO_MANY)
def test_a_sweep_that_is_no_list_is_refused(text):
    with pytest.raises(InputError, match="--sweep"):
        numbers_of_sweep(text)


def test_the_program_prints_a_sentence_tables_and_commands(tmp_path):
    files = ["--json", tmp_path / "plan.json", "--picture", tmp_path / "plan.png"]
    done = run_here(PLAN, *XL, "--gpus", 8, "--tokens", "10B", "--price_per_gpu_hour", 3, "--mtbf_hours", 100, *files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Best: ") and "(uncalibrated" in done.stdout.splitlines()[1]
    for words in ("costs most", "compiled", "ratio to 1", "optimizer", "goodput: Daly 2006", "not possible: tensor"):
        assert words in done.stdout
    assert "\n1  " in done.stdout and "src/gpt2.py --run_type" in done.stdout
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["runs"][0]["fits"] and content["runs"][0]["days"] > 0
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_the_model_that_is_planned_is_the_one_that_the_command_trains(tmp_path):
    """Without --vocab_size src/gpt2.py takes the vocabulary of the data, so the plan does too."""
    words = ["--model", "nano", "--here", "--gpus", 1]
    here = run_here(PLAN, *words, "--json", "none.json", cwd=tmp_path)
    assert here.returncode == 0 and "Vocabulary 50,257 (GPT-2's, for no data is here)." in here.stdout.splitlines()[0]
    write_token_files(tmp_path, suffix="_small")
    done = run_here(PLAN, *words, "--json", "plan.json", cwd=tmp_path)
    assert f"Vocabulary {VOCABULARY} (of train_small.bin)." in done.stdout.splitlines()[0], done.stderr
    plans = [json.loads((tmp_path / name).read_text())["runs"][0] for name in ("none.json", "plan.json")]
    assert [run["job"]["model"]["vocab"] for run in plans] == [50304, 384]
    assert all("--vocab_size" not in run["command"] for run in plans)
    given = run_here(PLAN, *words, "--vocab_size", 1000, cwd=tmp_path)
    assert "Vocabulary 1,000 (as given)." in given.stdout.splitlines()[0] and "--vocab_size 1000" in given.stdout
    (tmp_path / "train_small.json").write_text("{}")
    broken = run_here(PLAN, *words, cwd=tmp_path)
    assert broken.returncode == 2 and "the sidecar train_small.json has format_version" in broken.stderr


def test_the_fastest_and_the_cheapest_of_several_kinds_and_numbers_are_said():
    words = ["--model", "gpt2", "--gpu", "a100-80,h100-sxm", "--price_per_gpu_hour", "1,9", "--tokens", "100B"]
    done = run_here(PLAN, *words, "--sweep", "gpus=8,16", "--deadline", "15h")
    assert done.returncode == 0, done.stderr
    _, _, fastest, cheapest, in_time, _, head, *rows = done.stdout.splitlines()
    assert fastest.startswith("Fastest: 16 x h100-sxm") and cheapest.startswith("Cheapest: 8 x a100-80gb")
    assert in_time.startswith("Cheapest within --deadline 15 hours: 16 x a100-80gb") and "device" in head
    assert [tuple(row.split()[:2]) for row in rows] == [
        *[("a100-80gb", number) for number in ("8", "16")],
        *[("h100-sxm", number) for number in ("8", "16")],
    ]
    unpriced = [word for word in words if word not in ("--price_per_gpu_hour", "1,9")]
    done = run_here(PLAN, *unpriced, "--deadline", "1m")
    assert "None of these is done within --deadline 60 seconds" in done.stdout and "Cheapest" not in done.stdout


def test_another_model_is_planned_and_has_no_command():
    done = run_here(PLAN, "--model", "llama3-8b", "--gpu", "h100-sxm", "--gpus", 64, "--tokens", "1B")
    assert done.returncode == 0, done.stderr
    assert "512 x 8,192 tokens" in done.stdout and "Vocabulary 128,256 (the model's)" in done.stdout
    assert "src/gpt2.py trains GPT-2 alone" in done.stdout and "--run_type" not in done.stdout
    asked = question(
        {"num_heads": 8, "kv_heads": 2, "ffn": 5000, "gated": True, "num_layers": 6, "embedding_size": 512},
        NODE, Budget(), CONSTANTS,
    )  # fmt: skip
    model = asked.other
    assert (model.kv_heads, model.ffn, model.gated, model.tied, model.layers) == (2, 5000, True, False, 6)
    jobs = [run.job for run in asked.runs[0]]
    assert {job.model for job in jobs} == {model} and {job.layout.tensor for job in jobs} == {1, 2}
    gpt2 = question({}, NODE, Budget(), CONSTANTS)
    untied = question({"untied": True}, NODE, Budget(), CONSTANTS)
    assert gpt2.other is None and not untied.other.tied and not untied.other.gated


def test_sizes_of_other_models_are_those_of_their_papers():
    """Parameters as their authors count them, in billions."""
    counted = {"llama2-7b": 6.74, "llama2-13b": 13.02, "llama2-70b": 68.98, "mistral-7b": 7.24}
    counted |= {"llama3-8b": 8.03, "llama3-70b": 70.55, "llama3-405b": 405.85}
    for name, billions in counted.items():
        assert DenseModel(**OTHER_MODELS[name]).parameters / 1e9 == pytest.approx(billions, rel=1e-3), name
    assert counted.keys() == OTHER_MODELS.keys()


BAD = {
    "tokens in words": (["--gpu", "t4", "--tokens", "many"], "is not a number of tokens"),
    "a deadline in words": (["--gpu", "t4", "--tokens", "1B", "--deadline", "soon"], "write 3d, 36h or 90m"),
    "a deadline of nothing": (["--gpu", "t4", "--deadline", "3d"], "give --tokens"),
    "a price too many": (["--gpu", "t4,l4", "--tokens", "1B", "--price_per_gpu_hour", "1,2,3"], "3 prices"),
    "a check of two kinds": (["--gpu", "t4,l4", "--check"], "give one"),
    "a check of another model": (["--model", "llama3-8b", "--check"], "another model"),
    "a file of two kinds": (["--gpu", "t4,l4", "--json", "x.json"], "--json with --gpu t4,l4"),
    "heads that cannot share": (["--gpu", "t4", "--kv_heads", 5], "--kv_heads 5"),
    "a device with a slip": (["--gpu", "h100-smx"], "near it: h100"),
    "no device": ([], "--gpu is missing"),
    "two machines": (["--gpu", "t4", "--here"], "--here"),
    "a link of 0": (["--gpu", "t4", "--gpus", 16, "--network", "0gbit"], "above 0"),
    "half a node": (["--gpu", "t4", "--gpus", 12], "give 8 or 16"),
    "a run type that does not go": (["--gpu", "t4", "--run_type", "baseline"], "runs on one device"),
    "a picture of a check": (["--check", "--picture", "x.png"], "--picture with --check"),
    "the price of nothing": (["--gpu", "t4", "--price_per_gpu_hour", 3], "give --tokens"),
    "predictions to nowhere": (["--predict", "rows.json"], "--out"),
    "more devices than there are": (["--gpu", "t4", "--gpus", 10**11], "at most 1,048,576 devices"),
    "a calibration and a device": (
        ["--gpu", "t4", "--calibration", "README.md"],
        "is of this machine, and --gpu t4 of",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(name):
    words, said = BAD[name]
    done = run_here(PLAN, *words)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr


@pytest.mark.launches
@pytest.mark.slow
def test_check_builds_every_strategy_for_many_ranks(tmp_path):
    """In a process of its own, as forked ranks begin with its main module."""
    from support.programs import run_program

    command = ["python", str(REPOSITORY / PLAN), "--check", "--gpus", "256", "--num_layers", "4"]
    done = run_program(command, timeout_s=600, cwd=Path(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("would start") >= 10 and "would fail" not in done.stdout


def test_a_run_that_failures_never_let_end_is_said_and_written(runs):
    budget = Budget(tokens=1e10, price=3.0, mtbf_hours=1e-3)
    assert "10B tokens are never reached" in headline(runs[:1], budget)
    (run,) = plan_record(runs[:1], budget, (), "plan.py")["runs"]
    assert run["goodput"] == 0 and run["days"] is None and run["cost"] is None
