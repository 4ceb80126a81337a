"""One meaning of communication in files of every age: the exposed part is a part, and one device has none."""

from __future__ import annotations

import pytest
from support.metrics_examples import example_metrics, save
from support.scaling_examples import report_of

from testbed.analysis.report.breakdown import breakdown
from testbed.analysis.runs.load import attribution_of, load_run
from testbed.analysis.scaling.tables import scaling_table

IN_FLIGHT_S, WITH_PACKING_S = 0.177, 0.1943


def step(communication_s: float, exposed_s: float) -> dict:
    """A step of `allreduce`: its synchronisation after backward packs gradients, and nothing overlaps."""
    parts = {"data_wait_s": 0.01, "forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.02, "idle_s": 0.005}
    return {
        "step": 6, **parts, "exposed_communication_s": exposed_s, "step_time_s": sum(parts.values()) + exposed_s,
        "communication_s": communication_s, "compute_s": 0.32, "num_collectives": 30, "collective_bytes": 4096,
    }  # fmt: skip


def metrics(ranks: int, communication_s: float, exposed_s: float, **hardware) -> dict:
    attribution = {
        "source": "trace", "timeline": "host", "collectives": [], "bound": None, "pipeline": None,
        "per_rank": [{"rank": rank, "steps": [step(communication_s, exposed_s)]} for rank in range(ranks)],
    }  # fmt: skip
    config = {"run_type": "allreduce"}
    hardware = {"world_size": ranks, **hardware}
    return example_metrics(
        world_size=ranks, run_id=f"profiled-{ranks}", instrumented=True, attribution=attribution,
        training_config=config, settings={"run_type": "allreduce", "profile": True}, hardware=hardware,
    )  # fmt: skip


def only_step(content: dict) -> dict:
    found = attribution_of(content)
    assert found is not None
    return found["per_rank"][0]["steps"][0]


@pytest.mark.parametrize(
    ("in_flight_s", "exposed_s", "whole_s"),
    [(IN_FLIGHT_S, WITH_PACKING_S, WITH_PACKING_S), (0.3, 0.1, 0.3), (0.0, 0.0, 0.0)],
)
def test_the_exposed_part_is_at_most_the_whole(in_flight_s, exposed_s, whole_s):
    found = only_step(metrics(2, in_flight_s, exposed_s))
    assert (found["communication_s"], found["exposed_communication_s"]) == (whole_s, exposed_s)


def test_one_device_has_no_communication_and_its_step_is_still_whole():
    content = metrics(1, 0.012, 0.016)
    found = only_step(content)
    assert found["communication_s"] == found["exposed_communication_s"] == 0
    assert found["idle_s"] == pytest.approx(0.005 + 0.016)
    recorded = content["attribution"]["per_rank"][0]["steps"][0]
    assert (recorded["exposed_communication_s"], recorded["idle_s"]) == (0.016, 0.005), "the file stays as it is"


def test_one_process_of_several_devices_does_communicate():
    assert only_step(metrics(1, 0.012, 0.016, num_devices=4))["exposed_communication_s"] == 0.016


def test_the_tables_of_earlier_studies_say_it_so(tmp_path):
    for ranks, times in ((1, (0.012, 0.016)), (2, (IN_FLIGHT_S, WITH_PACKING_S))):
        save(tmp_path / f"profiled_{ranks}", metrics(ranks, *times))
        plain = {"training_config": {"run_type": "allreduce"}, "settings": {"run_type": "allreduce"}}
        save(tmp_path / f"plain_{ranks}", example_metrics(world_size=ranks, run_id=f"plain-{ranks}", **plain))
    table = scaling_table(report_of(tmp_path), "003")
    assert "| 194.3, 194.3 exposed |" in table and "| 0.0, 0.0 exposed |" in table
    assert "177" not in table and "16.0 exposed" not in table


def test_the_breakdown_of_one_device_shows_none(tmp_path):
    found = breakdown([load_run(save(tmp_path, metrics(1, 0.012, 0.016)))])
    assert found is not None
    assert (found.seconds["exposed communication"], found.seconds["idle or other"]) == (0.0, pytest.approx(0.021))
