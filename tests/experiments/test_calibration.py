"""What a calibration measures, and how its file is put together."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

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
from testbed.experiments.calibration.whole_steps import check_setting, time_steps
from testbed.experiments.calibration.work import BETWEEN, FLAGS_OF_KIND, WITHIN, Setting, Work
from testbed.experiments.made_up_tokens import write_made_up_tokens
from testbed.planner.calibration import Calibration, Collective, read_calibration
from testbed.planner.constants import constants_of_calibration
from testbed.planner.step_time import step_time

CPU = torch.device("cpu")
TINY = Setting(layers=2, heads=2, hidden=32, vocab=1024, seq_length=16, micro_batch=1, accumulation=4)


def watch() -> operations.Stopwatch:
    return operations.Stopwatch(CPU, "fp32", ranks=1, blocks=2)


def test_every_operation_is_timed_at_the_sizes_asked_for():
    products = operations.products(watch(), [(8, 4, 16)])
    assert {(each.role, each.m, each.n, each.k) for each in products} == {
        ("forward", 8, 16, 4),
        ("input_gradient", 8, 4, 16),
        ("weight_gradient", 16, 4, 8),
    }
    (attention,) = operations.attention(watch(), [(1, 2, 8, 4)])
    assert (attention.seq_length, attention.head_dim) == (8, 4)
    found = [
        *products,
        *(each for kind in ("layer_norm", "gelu", "add") for each in operations.elementwise(watch(), kind, [(4, 8)])),
        *operations.cross_entropy(watch(), [(4, 128)]),
        *operations.copy(watch(), [64]),
        *operations.update(watch(), sizes.QUICK.shapes[:1]),
        *operations.small_steps(watch(), [1]),
    ]
    assert all(each.seconds > 0 and math.isfinite(each.seconds) for each in found)
    assert [each.num_bytes for each in found if getattr(each, "kind", "") in ("cross_entropy", "copy")] == [2048, 256]


@pytest.mark.alone
def test_a_larger_product_is_timed_as_slower():
    small, large = (operations.products(watch(), [(size, size, size)])[0].seconds for size in (16, 512))
    assert large > 20 * small  # 32,768 times the work


def test_whole_steps_of_a_run_type_are_timed(tmp_path):
    write_made_up_tokens(tmp_path, 1000)
    common = {"data": tmp_path, "precision": "fp32", "steps": 2, "link": WITHIN}
    (found,) = time_steps([("baseline", TINY)], Launch(0, 0, 1, 1), CPU, common)
    assert found.steps == 2 and 0 < found.low <= found.seconds <= found.high
    assert (found.job.run_type, found.job.model.layers, found.job.accumulation) == ("baseline", 2, 4)
    assert time_steps([("baseline", TINY)], Launch(0, 0, 1, 1), CPU, common, deadline_s=0.0) == []


@pytest.mark.parametrize("kind", FLAGS_OF_KIND)
def test_every_calibrated_setting_is_one_that_gpt2_accepts(tmp_path, kind):
    write_made_up_tokens(tmp_path, 1000)
    ranks = 1 if kind == "baseline" else 2
    settings = [Setting(**each) for each in (*sizes.SETTINGS["cpu"], *sizes.QUICK_SETTINGS)]
    reasons = [check_setting(kind, setting, ranks, tmp_path) for setting in settings]
    assert sum(reason is None for reason in reasons) >= 5, reasons


def test_two_starts_become_one_file():
    asked = CalibrationRequest(device="cpu", devices=2, precision="fp32", seconds=60, is_quick=True)
    assert asked.numbers_of_ranks == [1, 2]
    assert dataclasses.replace(asked, devices=64).numbers_of_ranks == [1, 2, 8]
    assert dataclasses.replace(asked, devices=1).numbers_of_ranks == [1]


def test_work_is_read_as_it_was_written(tmp_path):
    asked = CalibrationRequest(device="cpu", devices=2, precision="fp32", seconds=60)
    work = work_of(asked, tmp_path, 2, 10.0)
    work.write(tmp_path / "work.json")
    read = Work.read(tmp_path / "work.json")
    assert json.dumps(dataclasses.asdict(read)) == json.dumps(dataclasses.asdict(work))
    assert not work_of(asked, tmp_path, 1, 10.0).message_bytes


def test_a_row_is_the_median_of_the_passes_that_had_time_for_it():
    product = {"m": 2, "n": 3, "k": 4, "ranks": 1}
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
    def row(link: str, size: int, seconds: float) -> Collective:
        return Collective(kind="all_reduce", link=link, ranks=2, num_bytes=size, seconds=seconds)

    calibration = Calibration(collectives=[row(WITHIN, 100, 1e-5)])
    answer = {"collectives": [row(BETWEEN, 100, 1e-4), row(BETWEEN, 10**6, 0.1)]}
    once = with_link(calibration, answer)
    twice = with_link(once, answer)
    assert once == twice and len(twice.collectives) == 3
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
    assert len(said) == 2 and {each.ranks for each in calibration.products} == {1, 2}
    made = {(step.job.run_type, step.job.layout.devices) for step in calibration.steps}
    assert made == {("baseline", 1), ("ddp", 1), ("ddp", 2), ("pipeline", 2), ("tensor", 2)}
    assert calibration.memory["plain"] > 50e6 and calibration.machine_facts["cores"]
    for ranks, kind in ((1, "baseline"), (2, "ddp"), (2, "tensor")):
        time = step_time(
            TINY.job(kind, ranks, "fp32"), calibration.machine(ranks), constants_of_calibration(calibration)
        )
        assert 0 < time.low <= time.seconds <= time.high < 60
