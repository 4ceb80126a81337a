"""calibration.json: what is written is read, and the rates are the measured ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.errors import InputError
from testbed.planner.calibration import (
    AttentionTime,
    Calibration,
    Collective,
    MeasuredRates,
    Moving,
    Product,
    Update,
    WholeStep,
    read_calibration,
)
from testbed.planner.collectives import Traffic
from testbed.planner.constants import calibrated_constants, constants_of_calibration
from testbed.planner.devices import Device, Link
from testbed.planner.job import DenseModel, Job, Layout
from testbed.planner.rates import DataSheetRates
from testbed.planner.step_time import WITHIN, step_time

MODEL = DenseModel(layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=1024, vocab=1024, seq_length=128)
LOOPBACK = Link(name="loopback", latency_s=1e-4, bytes_per_s=1e9)
SLOW = Link(name="100mbit", latency_s=1e-3, bytes_per_s=12.5e6)


def job(run_type: str = "ddp", ranks: int = 2, **changes: object) -> Job:
    plain = Job(
        model=MODEL,
        layout=Layout(data=ranks),
        micro_batch=4,
        accumulation=2,
        run_type=run_type,
        precision="fp32",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def made(**changes: object) -> Calibration:
    products = [
        Product(m=m, n=n, k=k, seconds=2 * m * n * k / (5e10 / ranks), ranks=ranks)
        for ranks in (1, 2)
        for m in (128, 1024)
        for n in (256, 1024)
        for k in (256, 1024)
    ]
    plain = Calibration(
        device=Device(name="1 core", memory_bytes=4e9, peak_flops={"fp32": 1e11}, memory_bytes_per_s=1e10, kind="cpu"),
        links=(LOOPBACK, SLOW),
        products=products,
        attention=[AttentionTime(batch=4, heads=4, seq_length=128, head_dim=64, forward_s=0.01, backward_s=0.02)],
        moving=[Moving(num_bytes=1e6, seconds=2e-4), Moving(num_bytes=1e8, seconds=4e-2)],
        updates=[Update(elements=1e6, seconds=0.01)],
        collectives=[
            Collective(kind=kind, link="loopback", ranks=2, num_bytes=size, seconds=1e-3 + size / 5e8)
            for kind in ("all_reduce", "all_gather", "reduce_scatter")
            for size in (1e4, 1e6, 1e8)
        ],
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def rates(ranks: int = 1) -> MeasuredRates:
    calibration = made()
    return MeasuredRates(calibration, ranks, DataSheetRates(calibration.device))


def test_what_is_written_is_read(tmp_path: Path):
    path = tmp_path / "calibration.json"
    calibration = made(steps=(WholeStep(job=job(), link="loopback", seconds=0.5),), made={"date": "2026-11-23"})
    calibration.write(path)
    again = read_calibration(path)
    assert json.loads(path.read_text())["format"] == 1
    assert again.steps[0] == calibration.steps[0]
    assert (again.device, again.links, again.made) == (calibration.device, calibration.links, calibration.made)
    assert list(again.products) == list(calibration.products)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"format": 0}',
        '{"format": 1, "products": [{"m": 1}]}',
        '{"format": 1, "products": [{"m": 0, "n": 1, "k": 1, "seconds": 1}]}',
        '{"format": 1, "launch_s": -1}',
        '{"format": 1, "steps": [{"job": {}, "link": "", "seconds": 1}]}',
        '{"format": 1, "products": 3}',
    ],
)
def test_another_file_is_one_sentence(tmp_path: Path, content: str):
    path = tmp_path / "calibration.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"--calibrat.*make it again with scripts/plan.py --calibrate"):
        read_calibration(path)


def test_a_product_takes_what_was_measured_with_as_many_ranks_at_once():
    for ranks in (1, 2):
        seconds, operands = rates(ranks).product_seconds(512, 512, 512, job())
        assert (seconds, operands) == (pytest.approx(2 * 512**3 / (5e10 / ranks)), 0.0)
    assert rates(64).product_seconds(512, 512, 512, job())[0] == pytest.approx(2 * 512**3 / 2.5e10)


def test_both_passes_of_attention_add_up_to_what_was_measured():
    flops = 2 * 4 * 128**2 * 4 * 64
    both = sum(rates().attention_seconds(share * flops, 0.0, job()) for share in (1, 2.5))
    assert both == pytest.approx(0.03)


def test_a_precision_that_was_not_measured_is_the_data_sheets():
    sheet = DataSheetRates(made().device)
    assert rates().product_seconds(64, 64, 64, job(precision="bf16")) == sheet.product_seconds(
        64, 64, 64, job(precision="bf16")
    )


def test_a_collective_is_interpolated_and_scaled_by_what_moves():
    two, four = (Traffic(kind="all_reduce", size=1e6, ranks=ranks, messages=1.0, times=1.0) for ranks in (2, 4))
    machine = made().machine(4, "loopback")
    assert rates().traffic_seconds(two, machine) == pytest.approx(3e-3)
    assert rates().traffic_seconds(four, machine) == pytest.approx(3e-3 * 1.5)
    between = rates().traffic_seconds(replace(two, size=1e7), machine)
    assert 3e-3 < between < 1e-3 + 1e8 / 5e8
    assert rates().traffic_seconds(replace(two, size=1e9), machine) == pytest.approx(10 * (1e-3 + 0.2))


def test_a_link_that_was_not_measured_is_its_rate_with_gloos_bytes():
    machine = made().machine(2, "100mbit")
    times = [
        rates().traffic_seconds(Traffic(kind=kind, size=1e8, ranks=2), machine)
        for kind in ("reduce_scatter", "all_reduce", "all_gather")
    ]
    assert times[0] == pytest.approx(times[1])
    assert times[0] > 1.8 * times[2]
    assert times[0] > 1e8 / 12.5e6


def test_whole_steps_correct_their_run_type_and_the_others_by_the_mean():
    bare = constants_of_calibration(made())
    machine = made().machine(2, "loopback")
    plain = {name: step_time(job(name), machine, bare).seconds for name in ("ddp", "fsdp", "dp")}
    steps = [
        WholeStep(job=job(name), link="loopback", seconds=factor * plain[name])
        for name, factor in (("ddp", 2.0), ("ddp", 2.0), ("ddp", 2.0), ("fsdp", 1.2), ("fsdp", 1.2), ("fsdp", 1.2))
    ]
    constants = constants_of_calibration(made(steps=tuple(steps)))
    found = {name: step_time(job(name), machine, constants).seconds / plain[name] for name in plain}
    assert found["ddp"] == pytest.approx(2.0, rel=0.05)
    assert found["fsdp"] == pytest.approx(1.2, rel=0.05)
    assert 1.3 < found["dp"] < 1.8
    time = step_time(job(), machine, constants)
    assert time.label.startswith("calibrated")
    assert math.log(time.high / time.low) < math.log((wide := step_time(job(), machine, bare)).high / wide.low)
    assert sum(time.parts.values()) == pytest.approx(time.seconds)


def test_a_calibrated_machine_is_read_from_its_file(tmp_path: Path):
    made(steps=(WholeStep(job=job(), link="loopback", seconds=0.5),)).write(tmp_path / "calibration.json")
    constants = calibrated_constants(tmp_path / "calibration.json")
    time = step_time(job(accumulation=1), made().machine(2, "loopback"), constants)
    assert time.seconds < 0.5
    assert WITHIN in time.parts
