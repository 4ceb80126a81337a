"""A busy machine: threads that wait for each other sleep early, and a run says that its steps scatter."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from support.metrics_examples import example_metrics, save
from support.programs import REPOSITORY
from support.settings import stand_in

from testbed.analysis.charts.training import comparison_table
from testbed.analysis.runs.load import load_run
from testbed.distributed.launch import SPINS, limit_gomp_spinning
from testbed.metrics.busy_machine import cores_used, signs_of_other_work
from testbed.metrics.recorder import RunRecorder


@pytest.mark.parametrize(
    "given, spins",
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_wait_briefly_unless_the_user_said_how(given, spins):
    with mock.patch.dict(os.environ, given, clear=True):
        limit_gomp_spinning()
        assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.launches
@pytest.mark.skipif(not torch.backends.openmp.is_available() or sys.platform != "linux", reason="no libgomp here")
def test_the_library_reads_what_a_start_sets():
    """libgomp looks once, as it is loaded: a start that sets it later sets nothing."""
    code = (
        "from testbed.config.check import check_command_line\n"
        "try: check_command_line(['--run_type', 'nothing'])\n"
        "except SystemExit: pass\n"
        "import torch"
    )
    variables = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, "OMP_DISPLAY_ENV": "verbose"},
        cwd=REPOSITORY / "src",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in said.stderr


@pytest.mark.launches
def test_what_measures_a_model_sets_it_too_before_it_loads_the_library():
    code = (
        "import os, runpy, sys\n"
        "path = sys.argv.pop()\n"
        "sys.argv = [path, '--nothing']\n"
        "try: runpy.run_path(path, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    )
    variables = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", code, str(REPOSITORY / "scripts" / "evaluate.py")]
    said = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == f"{SPINS} False\n"


@pytest.mark.parametrize(
    "above, steps, says",
    [
        *[(0.6, 20, True), (0.11, 500, True), (0.1, 500, False), (0.0, 20, False), (None, 0, False)],
        *[(0.6, 2, False), (5.0, 19, False)],
    ],
)
def test_a_run_whose_steps_scatter_says_so_at_its_end(tmp_path, above, steps, says):
    """Of two steps one is the slower one: that is not a sign of anything."""
    timing = {"step_time_p95_above_median": above, "num_measured_steps": steps}
    facts = example_metrics(training_config={"math_changes": []})
    facts["timing"] |= timing
    recorder = RunRecorder(tmp_path, stand_in(run_type="baseline"), facts, is_writer=True)
    lines = [line for line in recorder.closing_words().splitlines() if "steps scatter" in line]
    assert len(lines) == says
    assert lines == (signs_of_other_work(facts) if says else [])
    if says:
        assert f"p95 is {1 + above:.2f} times the median" in lines[0] and "perhaps from other work" in lines[0]


def of_cores(run_type: str, threads: int, *percents: float, steps: int = 40) -> dict:
    """A run whose ranks used these percents of one core each."""
    sizes = {"data": 1, "pipeline": 2 if run_type in ("pipeline", "model_parallel") else 1, "tensor": 1, "shard": 1}
    facts = example_metrics(training_config={"math_changes": [], "run_type": run_type, "mesh": sizes})
    facts["timing"] |= {"step_time_p95_above_median": 0.01, "num_measured_steps": steps}
    facts["hardware"] |= {"device_type": "cpu", "cpu_threads_per_rank": threads}
    rows = [{"rank": rank, "cpu_percent_mean": percent} for rank, percent in enumerate(percents)]
    return facts | {"utilization": {"interval_s": 1.0, "per_rank": rows}}


def test_a_steady_neighbour_slows_every_step_alike_and_is_seen_by_the_cores_that_were_left(tmp_path):
    """1.62 s a step in place of 0.32, p95 1.65: the file says 97 % of a core on two threads."""
    (sign,) = signs_of_other_work(of_cores("baseline", 2, 97.0))
    assert "it used 1.0 of its 2 cores" in sign and "quiet machine" in sign
    recorder = RunRecorder(tmp_path, stand_in(run_type="baseline"), of_cores("ddp", 1, 51.0, 52.0), is_writer=True)
    assert "it used 1.0 of its 2 cores" in recorder.closing_words()
    for quiet in (of_cores("baseline", 2, 196.0), of_cores("fsdp", 1, 76.0, 75.0), of_cores("pipeline", 1, 50.0, 60.0)):
        assert signs_of_other_work(quiet) == []
    assert signs_of_other_work(of_cores("baseline", 2, 97.0, steps=5)) == []
    assert cores_used(of_cores("ddp", 2, 150.0, 150.0)) == (3.0, 4)


def test_steps_that_fp16_skipped_are_said_at_the_end_and_in_the_table(tmp_path):
    facts = example_metrics(training_config={"math_changes": []})
    recorder = RunRecorder(tmp_path, stand_in(run_type="baseline"), facts, is_writer=True)
    assert "changed no weight" not in recorder.closing_words()
    overflow = {"is_skipped": True, "grad_norm": None}
    recorder.steps = [row | overflow if row["step"] <= 2 else row for row in facts["steps"]]
    assert f"2 of {len(recorder.steps)} steps changed no weight: overflows in fp16" in (recorder.closing_words())
    runs = [
        load_run(save(tmp_path / name, facts | {"steps": steps}))
        for name, steps in (("a", recorder.steps), ("b", facts["steps"]))
    ]
    (row,) = [line for line in comparison_table(runs).splitlines() if line.startswith("skipped steps")]
    assert row.split()[-2:] == ["2", "n/a"]
    assert "skipped steps" not in comparison_table(runs[1:])
