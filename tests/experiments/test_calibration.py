"""What a calibration measures, and how its file is put together."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support.settings import launch

from testbed.distributed.launch import Launch
from testbed.distributed.processes import Stop
from testbed.experiments.calibration import calibrate as module
from testbed.experiments.calibration import operations, sizes
from testbed.experiments.calibration.calibrate import (
    PASSES,
    SPARE_S,
    CalibrationRequest,
    calibrate,
    link_of,
    medians,
    with_link,
    work_of,
)
from testbed.experiments.calibration.whole_steps import accepted_runs, time_steps
from testbed.experiments.calibration.work import FLAGS_OF_KIND, Setting, Work
from testbed.experiments.made_up_tokens import write_made_up_tokens
from testbed.memory_model.job import job_of_settings
from testbed.planner.calibration import BETWEEN, OPERATIONS, WITHIN, Calibration, Timing, read_calibration
from testbed.planner.measured_rates import Calibrated, kind_of
from testbed.planner.step_time import step_time

CPU = torch.device("cpu")
TINY = Setting(layers=2, heads=2, hidden=32, vocab=1024, seq_length=16, micro_batch=1, accumulation=4)
TINY_SIZES = dataclasses.replace(
    sizes.QUICK,
    products=((8, 4, 16),),
    attention=((1, 2, 8, 4),),
    elementwise=((4, 8),),
    logits=((4, 128),),
    copies=(64,),
)


def watch() -> operations.Stopwatch:
    return operations.Stopwatch(CPU, "fp32", ranks=1, blocks=2)


def test_every_operation_is_timed_at_the_sizes_asked_for():
    found = operations.every_operation(watch(), TINY_SIZES)
    assert {each.operation for each in found} == OPERATIONS.keys()
    assert all(each.seconds > 0 and math.isfinite(each.seconds) for each in found)
    sizes = {each.operation: each.size for each in found}
    assert (sizes["forward"], sizes["input_gradient"], sizes["weight_gradient"]) == ((8, 16, 4), (8, 4, 16), (16, 4, 8))
    assert sizes["attention_forward"] == sizes["attention_backward"] == (2, 8, 4)
    assert (sizes["cross_entropy"], sizes["copy"]) == ((2048,), (256,))


@pytest.mark.alone
def test_a_larger_product_is_timed_as_slower():
    small, large = (next(operations.products(watch(), [(size, size, size)])).seconds for size in (16, 512))
    assert large > 20 * small  # 32,768 times the work


def test_whole_steps_of_a_run_type_are_timed(tmp_path, monkeypatch):
    write_made_up_tokens(tmp_path, 1000)
    monkeypatch.setattr("testbed.experiments.calibration.whole_steps.TIMED_STEPS", 2)
    runs = accepted_runs(
        [TINY], ["baseline", "ddp"], ["--precision", "fp32", "--device", "cpu"], tmp_path, Launch(0, 0, 1, 1)
    )
    assert runs[0].settings.training.run_type == "baseline"
    (found,) = time_steps(runs[:1], CPU, WITHIN)
    assert found.steps == 2 and 0 < found.low <= found.seconds <= found.high
    assert (found.job.run_type, found.job.model.layers, found.job.accumulation) == ("baseline", 2, 4)
    assert time_steps(runs, CPU, WITHIN, deadline_s=0.0) == []


@pytest.mark.parametrize(("ranks", "kinds"), [(1, {"baseline"}), (2, FLAGS_OF_KIND.keys() - {"baseline"})])
def test_every_kind_is_calibrated_at_five_settings_or_more(tmp_path, ranks, kinds):
    write_made_up_tokens(tmp_path, 1000)
    settings = [*sizes.CPU.settings, *sizes.QUICK.settings]
    runs = accepted_runs(settings, list(FLAGS_OF_KIND), [], tmp_path, launch(ranks))
    found = [kind_of(job_of_settings(run.settings)) for run in runs]
    assert all(found.count(kind) >= 5 for kind in kinds), found


def test_two_starts_become_one_file():
    asked = CalibrationRequest(device="cpu", devices=2, precision="fp32", seconds=60, is_quick=True)
    assert asked.numbers_of_ranks == [1, 2]
    assert dataclasses.replace(asked, devices=64).numbers_of_ranks == [1, 2, 8]
    assert dataclasses.replace(asked, devices=1).numbers_of_ranks == [1]


def test_work_is_read_as_it_was_written(tmp_path):
    asked = CalibrationRequest(device="cpu", devices=2, precision="fp32", seconds=60)
    work = work_of(asked, tmp_path, 2, 10.0)
    work.write(tmp_path / "work.json")
    assert Work.read(tmp_path / "work.json") == work


def test_a_row_is_the_median_of_the_passes_that_had_time_for_it():
    product = {"operation": "forward", "size": [2, 3, 4], "ranks": 1}
    step = {"job": {"run_type": "ddp"}, "link": WITHIN, "steps": 5}
    rows = [
        {**product, "seconds": 1.0},
        {**step, "seconds": 4.0, "low": 3.0, "high": 5.0, "sent_bytes": 8.0},
        {**product, "seconds": 9.0},
        {**product, "seconds": 2.0},
        {**step, "seconds": 6.0, "low": 5.0, "high": 9.0, "sent_bytes": 8.0},
        {**product, "ranks": 2, "seconds": 7.0},
    ]
    assert medians(rows) == [
        {**product, "seconds": 2.0},
        {**step, "seconds": 5.0, "low": 3.0, "high": 9.0, "sent_bytes": 8.0},
        {**product, "ranks": 2, "seconds": 7.0},
    ]


def test_each_pass_measures_every_number_of_ranks_and_begins_with_other_steps(monkeypatch):
    """So what one pass has no time for, another has."""
    asked = CalibrationRequest(device="cpu", devices=2, precision="fp32", seconds=600)
    made: list[Work] = []

    def answer(work: Work, folder, ranks, stop) -> dict:
        made.append(work)
        return {"ranks": ranks}

    monkeypatch.setattr(module, "_answer", answer)
    monkeypatch.setattr(module, "together", lambda asked, answers, seconds: answers)
    said: list[str] = []
    with Stop() as stop:
        answers = calibrate(asked, stop, said.append)
    assert [each["ranks"] for each in answers] == [1, 2, 1, 2, 1, 2] and len(said) == 6
    assert len({work.first for work in made}) == PASSES
    of_passes = [one.seconds for one in made[1::2]]  # nothing took any time, so a pass ends in its own third
    assert of_passes == pytest.approx([200 - SPARE_S, 400 - SPARE_S, 600 - SPARE_S], abs=2)


def test_links_between_nodes_are_added_to_the_file():
    def row(link: str, size: int, seconds: float) -> Timing:
        return Timing(operation="all_reduce", link=link, ranks=2, size=(size,), seconds=seconds)

    calibration = Calibration(device=CPU, timings=(row(WITHIN, 100, 1e-5),))
    answer = {"timings": [row(BETWEEN, 100, 1e-4), row(BETWEEN, 10**6, 0.1)]}
    once = with_link(calibration, answer)
    twice = with_link(once, answer)
    assert once == twice and len(twice.timings) == 3
    assert link_of(twice, BETWEEN).bytes_per_s == pytest.approx(1e7)
    assert [each.name for each in twice.links] == [BETWEEN]


@pytest.mark.launches
@pytest.mark.slow
def test_a_machine_is_calibrated_and_planned_with(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run", ranks.in_place_of_launches(tmp_path))
    kinds = {name: FLAGS_OF_KIND[name] for name in ("baseline", "ddp", "pipeline 1f1b", "tensor")}
    monkeypatch.setattr(module, "FLAGS_OF_KIND", kinds)
    said: list[str] = []
    asked = CalibrationRequest(device="cpu", devices=2, precision="fp32", seconds=300, is_quick=True)
    with Stop() as stop:
        calibrate(asked, stop, said.append).write(tmp_path / "calibration.json")
    calibration = read_calibration(tmp_path / "calibration.json")
    assert len(said) == 2 and {each.ranks for each in calibration.timings} == {1, 2}
    made = {(kind_of(step.job), step.job.layout.devices): step.job for step in calibration.steps}
    assert made.keys() == {("baseline", 1), ("ddp", 1), ("ddp", 2), ("pipeline 1f1b", 2), ("tensor", 2)}
    assert calibration.memory["plain"] > 50e6 and calibration.machine_facts["cores"]
    for (_, number), job in made.items():
        time = step_time(job, calibration.machine(number), Calibrated(calibration))
        assert 0 < time.low <= time.seconds <= time.high < 60
