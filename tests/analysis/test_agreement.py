"""Losses of several strategies in one table: only of equal work, with the distance from the first run."""

from __future__ import annotations

import pytest
from support.metrics_examples import example_metrics

from testbed.analysis.charts.agreement import agreement_table, differences_of
from testbed.analysis.runs.load import load_runs
from testbed.metrics.file import write_metrics


@pytest.fixture
def runs_with(tmp_path):
    """Runs whose losses lie so far above those of the first, and with these changes of the configuration."""

    def build(*shifts: float, **config):
        paths = []
        for number, shift in enumerate((0.0, *shifts)):
            metrics = example_metrics()
            for row in metrics["steps"]:
                row["loss"] += shift
            metrics["training_config"].update(config if number else {}, run_type=["baseline", "ddp", "fsdp"][number])
            paths.append(tmp_path / str(number))
            paths[-1].mkdir()
            write_metrics(paths[-1] / "training_metrics.json", metrics)
        return load_runs(paths)

    return build


def test_the_difference_is_that_of_each_step(runs_with):
    first, second = differences_of(runs_with(0.25, -0.5))
    assert first == pytest.approx([0.25] * 20) and second == pytest.approx([0.5] * 20)


def test_the_table_names_the_largest(runs_with):
    lines = agreement_table(runs_with(0.25)).splitlines()
    assert "(the reference)" in lines[2] and "baseline" in lines[2]
    assert "2.5e-01" in lines[3] and "ddp" in lines[3]


def test_the_table_names_the_first_step_that_is_too_far(runs_with):
    near, far = runs_with(1e-6, 0.0)[1:]
    assert "| none of 20 |" in agreement_table([far, near]).splitlines()[3]
    far.grad_norms[6] += 2e-5
    (line,) = agreement_table([near, far]).splitlines()[3:]
    assert "| 1.0e-06 | 2.0e-05 | 7 |" in line


def test_unequal_work_is_not_compared(runs_with):
    with pytest.raises(ValueError, match="did not do equal work: seed"):
        agreement_table(runs_with(0.0, seed=4))
