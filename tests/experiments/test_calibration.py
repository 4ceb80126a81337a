"""What a calibration measures, how its file is put together, and the study of its predictions."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math

import pytest
import torch
from support.programs import REPOSITORY

from testbed.distributed.launch import Launch
from testbed.distributed.processes import Stop
from testbed.errors import InputError
from testbed.experiments.calibration import memory_study, operations, sizes
from testbed.experiments.calibration.calibrate import Asked, calibrate, link_of, with_link, work_of
from testbed.experiments.calibration.study import (
    QUICK_WORKS,
    UNLIMITED,
    WORKS,
    arms_of,
    cells_of,
    lab_link,
    machine_of,
    settings_by_name,
)
from testbed.experiments.calibration.study import Asked as AskedStudy
from testbed.experiments.calibration.study_file import STUDY_FILE, choices, error_of, results
from testbed.experiments.calibration.study_tables import blocks, draw
from testbed.experiments.calibration.whole_steps import check_setting, time_steps
from testbed.experiments.calibration.work import BETWEEN, FLAGS_OF_KIND, WITHIN, Setting, Work
from testbed.experiments.made_up_tokens import write_made_up_tokens
from testbed.planner.calibration import Calibration, Collective, read_calibration
from testbed.planner.constants import constants_of_calibration
from testbed.planner.step_time import step_time

CPU = torch.device("cpu")
MIB = 2**20
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
    (found,) = time_steps([("baseline", TINY)], Launch(0, 0, 1, 1), CPU, common, rounds=2)
    assert found.steps == 4 and 0 < found.low <= found.seconds <= found.high
    assert (found.job.run_type, found.job.model.layers, found.job.accumulation) == ("baseline", 2, 4)
    assert time_steps([("baseline", TINY)], Launch(0, 0, 1, 1), CPU, common, rounds=1, deadline_s=0.0) == []


@pytest.mark.parametrize("kind", FLAGS_OF_KIND)
def test_every_calibrated_setting_is_one_that_gpt2_accepts(tmp_path, kind):
    write_made_up_tokens(tmp_path, 1000)
    ranks = 1 if kind == "baseline" else 2
    settings = [Setting(**each) for each in (*sizes.SETTINGS["cpu"], *sizes.QUICK_SETTINGS)]
    reasons = [check_setting(kind, setting, ranks, tmp_path) for setting in settings]
    assert sum(reason is None for reason in reasons) >= 5, reasons


def test_two_starts_become_one_file():
    asked = Asked(device="cpu", devices=2, precision="fp32", seconds=60, is_quick=True)
    assert asked.numbers_of_ranks == [1, 2]
    assert dataclasses.replace(asked, devices=64).numbers_of_ranks == [1, 2, 8]
    assert dataclasses.replace(asked, devices=1).numbers_of_ranks == [1]


def test_work_is_read_as_it_was_written(tmp_path):
    asked = Asked(device="cpu", devices=2, precision="fp32", seconds=60)
    work = work_of(asked, tmp_path, 2, 10.0)
    work.write(tmp_path / "work.json")
    read = Work.read(tmp_path / "work.json")
    assert json.dumps(dataclasses.asdict(read)) == json.dumps(dataclasses.asdict(work))
    assert not work_of(asked, tmp_path, 1, 10.0).message_bytes


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
def test_a_machine_is_calibrated_and_planned_with(tmp_path, monkeypatch):
    from testbed.experiments.calibration import calibrate as module

    kinds = {name: FLAGS_OF_KIND[name] for name in ("baseline", "ddp", "pipeline 1f1b", "tensor")}
    monkeypatch.setattr(module, "FLAGS_OF_KIND", kinds)
    said: list[str] = []
    asked = Asked(device="cpu", devices=2, precision="fp32", seconds=300, is_quick=True)
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


def asked_study(folder, **changes) -> AskedStudy:
    values = {
        "works": WORKS,
        "kinds": tuple(FLAGS_OF_KIND),
        "links": (UNLIMITED, "100mbit"),
        "repeats": 1,
        "steps": 8,
        "warmup_steps": 3,
        "folder": str(folder),
        "program": "src/gpt2.py",
        "network": "scripts/lab/network.py",
    }
    return AskedStudy(**{**values, **changes})


def test_the_study_runs_every_run_type_of_a_cpu_at_sizes_of_no_calibration(tmp_path):
    (tmp_path / "data").mkdir()
    write_made_up_tokens(tmp_path / "data", 1000)
    asked = asked_study(tmp_path)
    cells, arms = cells_of(asked), arms_of(asked)
    assert len(settings_by_name(cells)) == len(arms)
    assert len(cells) == len(arms) == 4 * (8 + 13 + 13)
    assert len({cell.folder for cell in cells}) == len(cells)
    assert len({arm.of_set for arm in arms}) == 12
    calibrated = {Setting(**each) for each in sizes.SETTINGS["cpu"]}
    assert not calibrated & {arm.work.setting(arm.kind, arm.ranks) for arm in arms}
    for arm in arms:  # the same batch for all runs that compete
        assert arm.job("fp32").global_batch == arm.work.batch
    with pytest.raises(InputError, match="cannot run"):
        odd = dataclasses.replace(QUICK_WORKS[0], heads=1)
        settings_by_name(cells_of(asked_study(tmp_path, works=(odd,))))


def test_the_study_of_memory_runs_every_run_type_on_one_two_and_four_ranks(tmp_path):
    (tmp_path / "data").mkdir()
    write_made_up_tokens(tmp_path / "data", 1000)
    asked = memory_study.of_memory(asked_study(tmp_path))
    cells = cells_of(asked)
    assert len(settings_by_name(cells)) == len(cells) == 8 + 13 + 13
    assert {cell.ranks for cell in cells} == {1, 2, 4}
    assert all(memory_study.RETURNED in cell.command for cell in cells)


def test_the_table_of_memory_counts_what_is_large_enough():
    rows = [
        {"kind": "ddp", "ranks": 2, "measured_bytes": 1000 * MIB, "predicted_bytes": 1050 * MIB},
        {"kind": "fsdp", "ranks": 2, "measured_bytes": 800 * MIB, "predicted_bytes": 1000 * MIB},
        {"kind": "tensor", "ranks": 4, "measured_bytes": 100 * MIB, "predicted_bytes": 300 * MIB},
    ]
    found = memory_study.results({"rows": rows})
    assert (found["rows"], found["within"], found["worst"]) == (2, 1, pytest.approx(0.25))
    head = {name: content()[name] for name in ("git_commits", "hardware", "env")}
    table = memory_study.memory_table({"rows": rows, "results": found, "command_line": "x", **head})
    assert "| ddp | 2 | 1,000 | 1,050 | +5.0% |" in table and "+200.0% (small)" in table


def test_a_slow_link_of_the_study_has_the_lab_s_rate_and_bucket():
    link = lab_link("100mbit")
    assert link.bytes_per_s == 12.5e6 and 0 < link.burst_bytes < 1e6
    arm = next(arm for arm in arms_of(asked_study("x")) if arm.link == "100mbit")
    machine = machine_of(arm, Calibration())
    assert machine.link_of(2) == link and machine.devices == 2


def row(kind: str, predicted: float, *measured: float, work: str = "w", link: str = UNLIMITED) -> dict:
    bounds = {"low_s": 0.9 * predicted, "high_s": 1.1 * predicted}
    parts = {"matrix products": predicted}
    place = {"work": work, "kind": kind, "ranks": 2, "link": link}
    return {**place, "measured_s": list(measured), "predicted_s": predicted, **bounds, "parts": parts}


def content() -> dict:
    rows = [
        row("ddp", 0.105, 0.1, 0.1, 0.11),
        row("fsdp", 0.2, 0.21),
        row("tensor", 0.3, 0.15),
        row("ddp", 0.7, 0.8, link="100mbit"),
        row("pipeline 1f1b", 0.75, 0.5, link="100mbit"),
    ]
    return {
        **STUDY_FILE.head("python scripts/planner_study.py"),
        "steps": 8,
        "warmup_steps": 3,
        "git_commits": ["abc"],
        "calibration": {"seconds": 10, "whole_steps": 4},
        "hardware": {"cpu_name": "a CPU", "cpu_cores_visible": 2},
        "env": {"torch_version": "9.9"},
        "rows": rows,
        "not_measured": {},
    }


def test_results_are_errors_coverage_and_the_choice_of_each_set():
    found = results(content())
    assert error_of(content()["rows"][0]) == pytest.approx(0.05)
    assert found["errors"]["all"]["median"] == pytest.approx(0.125)
    assert found["errors"]["tensor"]["median"] == pytest.approx(1.0)
    assert found["covered"] == pytest.approx(2 / 5)
    near, far = choices(content())
    assert (near["chosen"], near["best"], near["loss"]) == ("ddp", "ddp", 0.0)
    assert (far["chosen"], far["best"]) == ("ddp", "pipeline 1f1b") and far["loss"] == pytest.approx(0.6)
    assert found["chosen_well"] == 1


def test_a_study_is_written_read_and_drawn(tmp_path):
    STUDY_FILE.write(tmp_path / STUDY_FILE.name, content())
    read = STUDY_FILE.read(tmp_path)
    tables = blocks(read)
    assert (
        "| w | ddp | 2 | unlimited | 100.0 | 105.0 [94.5, 115.5] | +5.0% | matrix products |"
        in tables["planner predictions"]
    )
    assert "1 of 2 sets" in tables["planner study"]
    assert draw(read, tmp_path).stat().st_size > 10_000


def test_the_program_says_what_is_wrong(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("planner_study", REPOSITORY / "scripts" / "planner_study.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(InputError, match="after the 3 of warm-up"):
        module.asked_for(module.parse_arguments(["--steps", "4"]))
    with pytest.raises(InputError, match="is not one of"):
        module.asked_for(module.parse_arguments(["--kinds", "ddq"]))
    with pytest.raises(InputError, match="unlimited"):
        module.asked_for(module.parse_arguments(["--links", "fast"]))
    quick = module.asked_for(module.parse_arguments(["--quick"]))
    assert quick.works == QUICK_WORKS and quick.links == (UNLIMITED,)


def test_a_page_is_made_of_a_study(tmp_path):
    spec = importlib.util.spec_from_file_location("planner_study", REPOSITORY / "scripts" / "planner_study.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    STUDY_FILE.write(tmp_path / STUDY_FILE.name, content())
    page = tmp_path / "README.md"
    for _ in range(2):  # made, then filled again
        assert module.show(module.parse_arguments(["--tables", str(tmp_path), "--into", str(page)])) == 0
    assert page.read_text().count("| w | ddp | 2 | unlimited |") == 1
