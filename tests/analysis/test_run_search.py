"""A run's checkpoints hold copies of its files; no program may take one for a run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from support.metrics_examples import example_metrics, save

from testbed.analysis.comparison.files import arms_from
from testbed.analysis.runs.load import find_runs
from testbed.analysis.runs.verify import verify
from testbed.audit.readers import read_reported


@pytest.fixture
def runs(tmp_path) -> Path:
    """Two runs of one configuration, each with checkpoints: whole, half written, damaged; one beside a log."""
    for number in (1, 2):
        metrics = example_metrics(run_id=f"run {number}")
        for row in metrics["steps"]:
            row["step_time_s"] += number / 1000
        save(tmp_path / f"run_{number}", metrics)
        for step in ("step_000002", ".step_000004.tmp", "step_000003.damaged"):
            inside = tmp_path / f"run_{number}" / "checkpoints" / step
            save(inside, copy.deepcopy(metrics) | {"status": "running"})
            (inside / "RUN_PREEMPTED.txt").write_text("")
            (inside / "rank0_results_epoch1.json").write_text("{}")
    return tmp_path


def test_a_checkpoint_is_no_run(runs):
    expected = [runs / f"run_{number}" for number in (1, 2)]
    assert [path.parent for path in find_runs(runs)] == expected
    assert [verdict.run_dir for verdict in verify(runs, metrics_only=True)] == expected
    assert [each.path.parent for each in read_reported([runs])] == expected
    a, b, unreadable = arms_from([runs / "run_1"], [runs / "run_2"])
    assert (len(a.runs), len(b.runs), unreadable) == (1, 1, [])


def test_runs_in_a_folder_called_checkpoints_are_runs(tmp_path):
    save(tmp_path / "checkpoints" / "baseline", example_metrics())
    save(tmp_path / "step_000001", example_metrics())
    assert [path.parent.name for path in find_runs(tmp_path)] == ["baseline", "step_000001"]
