"""The report sets what was planned against what was measured, and says where a plan is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.programs import REPOSITORY

from testbed.analysis.document import terminal
from testbed.analysis.document.model import Section, Table
from testbed.analysis.report.breakdown import Breakdown
from testbed.analysis.report.predictions import Judged, _where_wrong, predictions
from testbed.analysis.runs.entries import subject_of
from testbed.analysis.runs.load import Run, load_run
from testbed.errors import InputError
from testbed.memory_model.memory import memory_of
from testbed.planner.machines import cpu_core, machine_of
from testbed.planner.plan import PlannedRun
from testbed.planner.recorded import job_of_record, prediction_for
from testbed.planner.step_time import StepTime

SWEEP = REPOSITORY / "docs" / "results" / "sweep"
CELLS = ("ddp_2ranks_batch32", "fsdp_2ranks_batch32")


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Two configurations of a real sweep."""
    for cell in CELLS:
        shutil.copytree(SWEEP / cell / "run_1", tmp_path / cell / "run_1")
    return tmp_path


def runs_of(sweep: Path) -> list[Run]:
    return [load_run(sweep / cell / "run_1") for cell in CELLS]


@pytest.fixture
def planned(monkeypatch) -> Callable[[float], None]:
    """Return what predicts a step of so many seconds of every run, 10 % either way."""

    def of(seconds: float) -> None:
        def prediction(record, path) -> PlannedRun:
            time = StepTime({"matrix products": seconds}, seconds, 0.9 * seconds, 1.1 * seconds, "calibrated by a test")
            job = job_of_record(record)
            there = machine_of(cpu_core(2), 2, 2, None)
            return PlannedRun(job=job, machine=there, memory=memory_of(job), time=time)

        monkeypatch.setattr("testbed.analysis.report.predictions.prediction_for", prediction)

    return of


def table_of(section: Section) -> Table:
    return next(block for block in section.blocks if isinstance(block, Table))


def verdicts(section: Section) -> list[str]:
    table = table_of(section)
    return [row[list(table.columns).index("the plan")] for row in table.rows]


def text_of(section: Section) -> str:
    lines = [line for block in section.blocks if isinstance(block, Table) for line in terminal.table_lines(block)]
    return "\n".join([*lines, *(block for block in section.blocks if isinstance(block, str))])


def test_runs_of_the_results_are_read_as_the_jobs_that_they_were():
    for path in sorted(SWEEP.glob("*/run_1")):
        run = load_run(path)
        job, config = job_of_record(run.record), run.section("training_config")
        assert job is not None
        mesh = config["mesh"]
        assert (job.run_type, job.layout.data) == (config["run_type"], mesh["data"])
        assert (job.micro_batch, job.accumulation) == (config["micro_batch_size_per_gpu"], config["grad_accum_steps"])
        assert (job.precision, job.on_cpu, job.compiled) == (config["precision"], True, False)
        assert job.model.layers == config["num_layers"] and job.model.vocab == 8192


def test_a_run_on_a_cpu_without_calibration_has_no_prediction(sweep):
    assert predictions(subject_of(runs_of(sweep))) is None


def test_a_plan_that_holds_is_said_to_hold(sweep, planned):
    runs = runs_of(sweep)[:1]
    planned(runs[0].step_time_median_s)
    section = predictions(subject_of(runs))
    said = text_of(section)
    assert verdicts(section) == ["holds"] and "than planned" not in said
    assert "calibrated by a test" in table_of(section).note


def test_a_plan_that_is_wrong_is_said_to_be(sweep, planned):
    runs = runs_of(sweep)
    planned(2 * max(run.step_time_median_s for run in runs))
    section = predictions(subject_of(runs))
    said = text_of(section)
    assert verdicts(section) == ["is wrong", "is wrong"]
    assert said.count("is faster than planned") == 2 and said.count("--profile") == 2


def test_the_part_that_is_furthest_off_is_named(sweep):
    (entry, *_) = subject_of(runs_of(sweep)).measured
    parts = {"matrix products": 0.08, "exposed communication within a node": 0.01, "host": 0.01}
    time = StepTime(parts, 0.1, 0.09, 0.11, "calibrated by a test")
    job = job_of_record(entry.example.record)
    found = PlannedRun(job=job, machine=machine_of(cpu_core(2), 2, 2, None), memory=memory_of(job), time=time)
    measured = Breakdown("a trace", True, {"forward": 0.04, "backward": 0.05, "exposed communication": 0.11})
    said = _where_wrong(Judged(entry, found, 0.2, None, measured))
    assert "Furthest off is exposed communication: 10.00 ms were planned" in said and "110.0 ms" in said


def test_a_gpu_of_a_data_sheet_is_estimated_from_the_run_s_own_settings(sweep):
    record = json.loads((sweep / CELLS[0] / "run_1" / "training_metrics.json").read_text())
    record["hardware"] |= {"device_type": "cuda", "gpu_name": "NVIDIA A100-SXM4-80GB"}
    prediction = prediction_for(record, sweep / CELLS[0] / "run_1" / "training_metrics.json")
    time = prediction.time
    assert time.low < time.seconds < time.high and "uncalibrated" in time.label
    record["hardware"]["gpu_name"] = "Abacus 3000"
    assert prediction_for(record, sweep / "training_metrics.json") is None


def test_a_broken_calibration_is_named(sweep):
    (sweep / "calibration.json").write_text("{}")
    with pytest.raises(InputError, match=r"calibration\.json"):
        predictions(subject_of(runs_of(sweep)))
