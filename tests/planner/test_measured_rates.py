"""What is predicted from a calibration: factors are found again, traffic is what was counted, foreign files refused."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import random
from pathlib import Path

import pytest

from testbed.config.flags import parse_command_line
from testbed.config.mesh import options_of_run_type, spread_over_ranks
from testbed.errors import InputError
from testbed.experiments.calibration.sizes import CPU
from testbed.experiments.calibration.work import FLAGS_OF_KIND, Setting
from testbed.memory_model.devices import Device, Link, device_named
from testbed.memory_model.job import Job, job_of
from testbed.model.shape import ModelShape
from testbed.planner.calibration import (
    BETWEEN,
    COLLECTIVES,
    WITHIN,
    Calibration,
    Timing,
    WholeStep,
    check_machine,
    read_calibration,
)
from testbed.planner.collectives import Traffic, data_traffic, pipeline_traffic, tensor_traffic
from testbed.planner.machines import as_measured, machine_here, machine_of
from testbed.planner.measured_rates import (
    GROUPS,
    Calibrated,
    MeasuredRates,
    constants_here,
    interval_of,
    kind_of,
    ranks_at_work,
)
from testbed.planner.step_time import step_parts, step_time

FLOPS, BANDWIDTH, LINK = 40e9, 8e9, 1.5e9  # of the made-up machine
MESSAGE_S = 4e-5
SETTING = Setting(layers=4, heads=4, hidden=128, vocab=8192, seq_length=128, micro_batch=3, accumulation=4)
HERE = {"cpu": "made up", "cores": 2, "torch": "9.9"}


def made_up() -> Calibration:
    """Return a machine with two ranks whose operations follow simple laws."""
    layers = [(m, a * c, b * c) for m in (128, 1024) for c in (64, 256) for a, b in ((1, 3), (1, 1), (1, 4), (4, 1))]
    orders = {"forward": (0, 2, 1), "input_gradient": (0, 1, 2), "weight_gradient": (2, 1, 0)}
    elements = (1e4, 1e5, 1e7)
    laws = [
        *(
            (f"attention_{way}", (4, t, 32), s)
            for t in (64, 256)
            for way, s in (("forward", t * t / 8e7), ("backward", 1e-9))
        ),
        *((kind, (4 * n,), 1e-5 + 20 * n / BANDWIDTH) for n in elements for kind in ("layer_norm", "gelu", "add")),
        *(("cross_entropy", (4 * n,), 1e-5 + 20 * n / BANDWIDTH) for n in elements),
        *(("update", (n,), 40 * n / BANDWIDTH) for n in elements),
        ("small_step", (1,), 1e-3),
        ("small_step", (5,), 4e-3),
    ]
    timings = [
        Timing(
            operation=role,
            size=tuple(size[place] for place in order),
            ranks=ranks,
            seconds=2 * math.prod(size) / FLOPS * ranks**0.1,
        )
        for ranks in (1, 2)
        for size in layers
        for role, order in orders.items()
    ]
    timings += [Timing(operation=name, size=size, seconds=seconds) for name, size, seconds in laws]
    timings += [
        Timing(operation=kind, link=WITHIN, ranks=2, size=(n,), seconds=MESSAGE_S + n / LINK)
        for n in (1e3, 1e6, 1e8)
        for kind in COLLECTIVES
    ]
    link = Link(name=WITHIN, latency_s=MESSAGE_S, bytes_per_s=LINK)
    device = Device(name="made up", memory_bytes=8e9, peak_flops={"fp32": 1e11}, memory_bytes_per_s=1e10)
    return Calibration(device=device, timings=tuple(timings), links=(link,), machine_facts=HERE)


def job_of_kind(setting: Setting, kind: str, ranks: int) -> Job:
    """Return the run that gpt2.py would make of a setting. InputError where it would make none."""
    asked = parse_command_line([*setting.arguments(kind, Path(), 1), "--precision", "fp32", "--compile", "off"])
    settled, mesh = spread_over_ranks({**asked.values, **options_of_run_type(asked.values, asked.explicit)}, ranks)
    shape = ModelShape(setting.layers, setting.heads, setting.hidden, setting.vocab, setting.seq_length)
    return job_of(settled, mesh, shape, made_up().machine(ranks))


def with_steps(factors: dict[str, float], fixed_kind: str = "baseline") -> Calibration:
    """Add whole steps of every run type that take `factors` times their groups."""
    calibration = made_up()
    steps = []
    for kind, ranks, setting in itertools.product(FLAGS_OF_KIND, (1, 2), CPU.settings):
        if (kind == fixed_kind) == (ranks == 1):
            with contextlib.suppress(InputError):  # too few micro batches for a schedule
                job = job_of_kind(setting, kind, ranks)
                seconds = with_factors(calibration, factors, job)
                steps.append(WholeStep(job=job, link=WITHIN, seconds=seconds))
    return dataclasses.replace(calibration, steps=tuple(steps))


def with_factors(calibration: Calibration, factors: dict[str, float], job: Job) -> float:
    """Return the seconds of a step whose groups of parts take so many times what was measured."""
    rates = MeasuredRates(calibration, ranks_at_work(job), factors)
    parts, idle, _ = step_parts(job, calibration.machine(job.layout.devices), rates)
    return sum(parts.values()) + idle


TRUE = {"compute": 1.25, "elementwise": 1.4, "optimizer": 0.9, "host": 1.5, "communication": 1.3}


def test_factors_of_whole_steps_carry_over_to_other_sizes():
    calibration = with_steps(TRUE)
    constants = Calibrated(calibration)
    for kind in FLAGS_OF_KIND:
        ranks = 1 if kind == "baseline" else 2
        machine, job = calibration.machine(ranks), job_of_kind(SETTING, kind, ranks)
        expected = with_factors(calibration, TRUE, job)
        found = step_time(job, machine, constants)
        assert found.seconds == pytest.approx(expected, rel=0.04), kind
        assert found.low <= found.seconds <= found.high
        assert sum(found.parts.values()) == pytest.approx(found.seconds)
        assert found.label.startswith("calibrated")


def test_the_interval_widens_with_the_errors_of_steps_left_out():
    calibration = with_steps(TRUE)
    draw = random.Random(0)
    noisy = [
        dataclasses.replace(step, seconds=step.seconds * math.exp(draw.gauss(0, 0.17))) for step in calibration.steps
    ]
    low, high = interval_of(Calibrated(calibration).errors)
    low_noisy, high_noisy = interval_of(Calibrated(dataclasses.replace(calibration, steps=tuple(noisy))).errors)
    assert low_noisy < 0.9 < low and high < 1.1 < high_noisy


# Bytes that both ranks sent in a step of nano with 2 layers, 2 sequences of 128 tokens, 8,192 tokens, by the counters
# of the loopback of a network namespace of its own (sent_bytes of a calibration in `unshare -n`). Pipelines: 4 micro
# batches.
COUNTED = {
    "allreduce": 11_778_074,
    "ddp": 11_710_462,
    "fsdp": 19_162_351,
    "optimized 0": 11_768_060,
    "optimized 1": 17_566_088,
    "optimized 2": 17_565_950,
    "optimized 3": 17_602_743,
    "model_parallel": 8_666_286,
    "pipeline gpipe": 9_454_728,
    "pipeline 1f1b": 9_454_464,
    "pipeline interleaved_1f1b": 11_559_640,
    "pipeline zero_bubble": 2_108_882,
    "tensor": 2_665_688,
}


def sent_by_both(job: Job) -> float:
    """Return the bytes that two ranks send in a step over gloo."""
    blocks = job.model.layers / job.layout.pipeline
    passes = [*tensor_traffic(job, blocks), *(one for one in pipeline_traffic(job) if one.window)]
    in_a_step = [*data_traffic(job), *(one for one in pipeline_traffic(job) if not one.window)]
    sent = sum(job.accumulation * one.times * one.moved("gloo") for one in passes)
    return 2 * (sent + sum(one.times * one.moved("gloo") for one in in_a_step))


@pytest.mark.parametrize("kind", COUNTED)
def test_traffic_is_what_was_counted_on_the_interface(kind):
    micro_batches = 4 if kind.startswith("pipeline") else 1
    setting = Setting(
        layers=2, heads=4, hidden=128, vocab=8192, seq_length=128, micro_batch=2, accumulation=micro_batches
    )
    assert sent_by_both(job_of_kind(setting, kind, 2)) == pytest.approx(COUNTED[kind], rel=0.02)


def test_zero_3_gathers_large_tensors_once_in_a_micro_batch_and_small_ones_once_in_a_step():
    """Counted as COUNTED: two layers of width 256, 4,096 tokens, four micro batches of 4 sequences of 64 tokens."""
    setting = Setting(layers=2, heads=8, hidden=256, vocab=4096, seq_length=64, micro_batch=4, accumulation=4)
    assert sent_by_both(job_of_kind(setting, "optimized 3", 2)) == pytest.approx(125.41e6, rel=0.03)


def test_a_slow_link_makes_wait_for_the_rest():
    calibration = made_up()
    rates = MeasuredRates(calibration, 2, dict.fromkeys(GROUPS, 1.0))
    message = Traffic(kind="all_reduce", size=8e6, ranks=2, window=0.0)
    assert rates.traffic_seconds(message, calibration.machine(2)) == (pytest.approx(MESSAGE_S + 8e6 / LINK), 0)
    link = Link(name="slow", latency_s=0.0, bytes_per_s=1e7 / (1448 / 1514))
    slow = dataclasses.replace(calibration.machine(2), per_node=1, between_nodes=link)
    work_s, wait_s = rates.traffic_seconds(message, slow)
    assert work_s + wait_s == pytest.approx(0.8)


def test_only_what_travels_in_the_background_is_hidden_on_a_cpu_and_all_of_it_on_a_gpu_with_streams():
    message = Traffic(kind="all_reduce", size=8e6, ranks=2)
    behind = dataclasses.replace(message, in_background=True)
    rates = MeasuredRates(made_up(), 2, dict.fromkeys(GROUPS, 1.0))
    assert (rates.window(message), rates.window(behind)) == (0, 1)
    streams = dataclasses.replace(made_up(), backend="nccl", overlap=0.7)
    rates = MeasuredRates(streams, 2, dict.fromkeys(GROUPS, 1.0))
    assert rates.window(message) == rates.window(behind) == 0.7
    work_s, wait_s = rates.traffic_seconds(message, streams.machine(2))
    assert work_s == 0 and wait_s == pytest.approx(MESSAGE_S + 8e6 / LINK)


def test_a_file_is_read_as_it_was_written(tmp_path):
    calibration = with_steps(TRUE)
    calibration.write(tmp_path / "calibration.json")
    assert read_calibration(tmp_path / "calibration.json") == calibration
    constants = constants_here(tmp_path / "calibration.json", HERE)
    job = job_of_kind(SETTING, "ddp", 2)
    first = step_time(job, calibration.machine(2), Calibrated(calibration))
    assert step_time(job, calibration.machine(2), constants).seconds == pytest.approx(first.seconds)


@pytest.mark.parametrize(("name", "value"), [("cpu", "another"), ("cores", 64), ("torch", "1.0")])
def test_a_foreign_calibration_is_refused(tmp_path, name, value):
    made_up().write(tmp_path / "calibration.json")
    with pytest.raises(InputError, match=r"another .*--calibrate"):
        constants_here(tmp_path / "calibration.json", {**HERE, name: value})
    check_machine(made_up(), HERE, tmp_path)


def test_a_file_of_another_format_or_without_a_table_is_refused(tmp_path):
    path = tmp_path / "calibration.json"
    made_up().write(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format": 0}))
    with pytest.raises(InputError, match="format is 0"):
        read_calibration(path)
    path.write_text(json.dumps({**content, "timings": [{"size": 1}]}))
    with pytest.raises(InputError, match="calibrate"):
        read_calibration(path)
    with_a_step = with_steps(TRUE)
    with pytest.raises(InputError, match="no layer_norm"):
        Calibrated(
            dataclasses.replace(
                with_a_step, timings=[one for one in with_a_step.timings if one.operation != "layer_norm"]
            )
        )


def test_without_whole_steps_the_parts_are_added_up_with_a_wide_interval():
    time = step_time(job_of_kind(SETTING, "ddp", 2), made_up().machine(2), Calibrated(made_up()))
    assert time.high / time.low > 1.5 and time.seconds == pytest.approx(sum(time.parts.values()))


def test_kinds_are_those_of_the_flags():
    jobs = [job_of_kind(SETTING, kind, 1 if kind == "baseline" else 2) for kind in FLAGS_OF_KIND]
    assert [kind_of(job) for job in jobs] == list(FLAGS_OF_KIND)
    assert set(GROUPS) == set(TRUE)


def test_each_message_takes_the_link_that_its_ranks_cross():
    calibration = with_steps(TRUE)
    slow = Link(name="slow", latency_s=0.0, bytes_per_s=12.5e6)
    job = job_of_kind(SETTING, "tensor", 2)
    job = dataclasses.replace(job, layout=dataclasses.replace(job.layout, data=2))
    machine = dataclasses.replace(calibration.machine(4), per_node=2, between_nodes=slow)
    parts = step_time(job, machine, Calibrated(calibration)).parts
    gradients = 4 * job.model.parameters / 2
    assert parts["exposed communication between nodes"] == pytest.approx(gradients / 12.5e6, rel=0.1)
    assert 0 < parts["exposed communication within a node"] < 0.1


def test_a_calibration_replaces_guesses_of_a_cpu_and_leaves_a_gpu_its_data_sheet(monkeypatch):
    monkeypatch.setattr("testbed.planner.machines._gpus_here", list)
    measured = dataclasses.replace(made_up(), memory={"plain": 2e8, "deepspeed": 3e8})
    guessed = machine_here(2, None, None)
    machine = as_measured(guessed, measured)
    assert machine.device.context_bytes == 3e8 and machine.within_node == measured.links[0]
    assert machine.device.peak_flops == measured.device.peak_flops
    assert machine.device.memory_bytes == guessed.device.memory_bytes
    sheet = machine_of(device_named("h100-sxm"), 8, None, None)
    gpu = as_measured(sheet, measured)
    assert gpu.device.context_bytes == 3e8
    assert dataclasses.replace(gpu.device, context_bytes=sheet.device.context_bytes) == sheet.device
    assert as_measured(sheet, None) is sheet


def test_links_that_nodes_measured_together_replace_the_rate_of_the_network():
    measured = made_up()
    slow = Link(name=BETWEEN, latency_s=1.0, bytes_per_s=1e6)
    rows = [dataclasses.replace(row, link=BETWEEN, seconds=1.0) for row in measured.timings if row.link]
    measured = dataclasses.replace(
        measured, links=(*measured.links, slow), timings=(*measured.timings, *rows), backend="nccl"
    )
    machine = as_measured(machine_of(device_named("h100-sxm"), 16, None, "400gbit"), measured)
    assert machine.between_nodes == slow
    rates = MeasuredRates(measured, 2, dict.fromkeys(GROUPS, 1.0))
    crossing = Traffic(kind="all_reduce", size=8e6, ranks=2, stride=8)
    assert rates.traffic_seconds(crossing, machine) == (0, pytest.approx(1.0))


def test_shards_stay_in_a_node_and_their_copies_meet_once_a_step():
    """Four ranks on two nodes of two: what crosses is an all-reduce of each rank's half of the gradients."""
    setting = Setting(layers=2, heads=4, hidden=128, vocab=8192, seq_length=128, micro_batch=2, accumulation=3)
    job = job_of_kind(setting, "fsdp", 4)
    machine = dataclasses.replace(made_up().machine(4), per_node=2)
    whole = data_traffic(job)
    assert all(each.crosses_nodes(machine) for each in whole)
    shards = data_traffic(dataclasses.replace(job, layout=dataclasses.replace(job.layout, shard=2)))
    (crossing,) = [each for each in shards if each.crosses_nodes(machine)]
    assert (crossing.kind, crossing.ranks, crossing.times) == ("all_reduce", 2, 1)
    assert crossing.size == pytest.approx(4 * job.model.parameters / 2)
    assert len(shards) == len(whole) + 1


@pytest.mark.parametrize(("errors", "left_out"), [(19, 0), (39, 1), (59, 2)])
def test_the_interval_leaves_one_error_in_twenty_out_at_each_end(errors, left_out):
    """Of n errors the k-th from each end, k = 0.05 (n + 1): a new step lies between them in 90 % of cases."""
    most = errors // 2
    low, high = interval_of([place / 1000 for place in range(-most, most + 1)])
    assert (math.log(low), math.log(high)) == pytest.approx(((left_out - most) / 1000, (most - left_out) / 1000))
