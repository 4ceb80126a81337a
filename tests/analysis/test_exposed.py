"""The cross-check of exposed communication: on made-up runs whose answer is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.metrics_examples import example_metrics, save
from support.programs import run_here

from testbed.analysis.profiles.exposed import exposed_communication, exposed_table
from testbed.analysis.runs.load import find_runs, load_run

COMPUTE_S, EXPOSED_S, LONGER_S = 0.500, 0.030, 0.020


def attribution(steps: list[int], late_s: list[float], exposed_s: float, longer_s: float) -> dict:
    """Two ranks; the second computes 10 ms less and waits for the first as long."""
    ranks = []
    for rank, early_s in enumerate((0.0, 0.010)):
        of_rank = []
        for step, late in zip(steps, late_s, strict=True):
            is_synchronised = step % 2 == 1
            computing_s = COMPUTE_S + late + (longer_s if is_synchronised else 0.0) - early_s
            rows = {"forward_s": 0.02, "backward_s": computing_s - 0.03, "optimizer_s": 0.01, "data_wait_s": 0.0}
            rows |= {"exposed_communication_s": exposed_s + early_s if is_synchronised else 0.0, "idle_s": 0.0}
            rows |= {"step_time_s": sum(rows.values()), "communication_s": exposed_s, "compute_s": computing_s}
            of_rank.append({"step": step, **rows, "num_collectives": int(is_synchronised), "collective_bytes": 4})
        ranks.append({"rank": rank, "steps": of_rank})
    found = {"source": "a test", "timeline": "host", "per_rank": ranks, "collectives": []}
    return {**found, "bound": None, "pipeline": None}


def save_runs(
    folder, repeats: int = 5, run_type: str = "ddp", misbooked: float = 0.0, lost: float = 0.0,
    noise=lambda random, count: random.normal(0, 0.001, count), **settings,
) -> None:  # fmt: skip
    """Runs that drift: each next one is slower by as much as a step exposes. allreduce takes no longer elsewhere.

    Of what is exposed the trace books the share `misbooked` as computing and the share `lost` nowhere.
    """
    random = np.random.default_rng(1)
    longer_s = LONGER_S if run_type == "ddp" else 0.0
    for repeat in range(repeats):
        for profile in (False, True):
            flags = {"run_type": run_type, "skip_gradient_sync": "alternate", "profile": profile, **settings}
            run_id = f"20260101T1200{repeat:02}Z-{int(profile)}{int(settings.get('bucket_cap_mb', 0)):07}"
            metrics = example_metrics(
                instrumented=True, settings=flags, training_config={"run_type": run_type}, run_id=run_id
            )
            measured = [row for row in metrics["steps"] if not row["is_warmup"]]
            late_s = list(repeat * EXPOSED_S + noise(random, len(measured)))
            for row, late in zip(measured, late_s, strict=True):
                extra_s = EXPOSED_S + longer_s if row["step"] % 2 == 1 else 0.0
                row["step_time_s"] = COMPUTE_S + late + extra_s
            if profile:
                steps = [row["step"] for row in measured]
                seen_s = EXPOSED_S * (1 - misbooked - lost)
                metrics["attribution"] = attribution(steps, late_s, seen_s, longer_s + misbooked * EXPOSED_S)
            save(folder / f"{profile}_{repeat}", metrics)


def table_of(folder):
    found, left_out = exposed_communication([load_run(path) for path in find_runs(folder)])
    assert left_out == []
    return found


def run_script(folder):
    return run_here("scripts/profiling/exposed_communication.py", "--dir", folder)


@pytest.mark.parametrize(("run_type", "longer_s"), [("ddp", LONGER_S), ("allreduce", 0.0)])
def test_trace_and_counterfactual_add_up(tmp_path, run_type, longer_s):
    save_runs(tmp_path, run_type=run_type)
    (row,) = table_of(tmp_path)
    assert (row.name, row.run_type, row.ranks) == (run_type, run_type, 2)
    assert row.traced.median == pytest.approx(EXPOSED_S), "of the rank that waits least, not for the slower one"
    assert row.rest.median == pytest.approx(longer_s, abs=0.002)
    assert row.counterfactual.median == pytest.approx(EXPOSED_S + longer_s, abs=0.003)
    assert row.counterfactual.high - row.counterfactual.low < 0.005, "runs that drift apart do not widen it"
    assert row.verdict == "agree"
    assert ("the sum: agree; " if run_type == "ddp" else "| agree; ") in exposed_table([row])


@pytest.mark.parametrize("run_type", ["ddp", "allreduce"])
def test_a_trace_that_loses_half_of_it_does_not_agree(tmp_path, run_type):
    save_runs(tmp_path, run_type=run_type, lost=0.5)
    assert table_of(tmp_path)[0].verdict == "do not agree"
    said = run_script(tmp_path)
    assert said.returncode == 1 and "do not agree" in said.stdout


def test_a_trace_that_books_it_as_computing_does_not_agree_where_nothing_overlaps(tmp_path):
    """Rows of a trace add up to its step, so their sum alone could never contradict one."""
    save_runs(tmp_path / "allreduce", run_type="allreduce", misbooked=0.5)
    assert table_of(tmp_path / "allreduce")[0].verdict == "do not agree"
    save_runs(tmp_path / "ddp", run_type="ddp", misbooked=0.5)
    (row,) = table_of(tmp_path / "ddp")
    assert row.verdict_in_words.startswith("the sum: agree"), "of ddp no more than the sum is claimed"


@pytest.mark.parametrize("run_type", ["ddp", "allreduce"])
def test_steps_that_scatter_more_than_they_expose_cannot_tell(tmp_path, run_type):
    """Agreement that a trace without any exposed communication would reach as well is none."""
    save_runs(tmp_path, run_type=run_type, noise=lambda random, count: random.normal(0, 0.1, count))
    assert table_of(tmp_path)[0].verdict == "cannot tell"


def test_times_with_a_long_tail_do_not_shift_the_difference(tmp_path):
    """The mean of two neighbours has another median than one step: minus 12 % of the scatter with such noise."""
    scatter_s = 0.1
    save_runs(tmp_path, repeats=60, noise=lambda random, count: random.exponential(scatter_s, count))
    (row,) = table_of(tmp_path)
    assert row.counterfactual.median == pytest.approx(EXPOSED_S + LONGER_S, abs=0.07 * scatter_s)


def _take_longer(metrics: dict) -> None:
    """Give a run step times of its own: equal ones are a copy."""
    for row in metrics["steps"]:
        row["step_time_s"] *= 1.001
        row["per_rank_step_time_s"] = [1.001 * seconds for seconds in row["per_rank_step_time_s"]]


def test_what_says_nothing_is_left_out_by_name_and_the_rest_is_still_read(tmp_path):
    save_runs(tmp_path / "a")
    copy = tmp_path / "copy"
    metrics = json.loads((tmp_path / "a" / "False_0" / "training_metrics.json").read_text())
    save(copy, metrics)
    short = json.loads((tmp_path / "a" / "True_0" / "training_metrics.json").read_text())
    short["run_id"] = "20260101T130000Z-0123abcd"
    for rank in short["attribution"]["per_rank"]:
        rank["steps"] = rank["steps"][:1]
    _take_longer(short)
    save(tmp_path / "short", short)
    short["attribution"]["per_rank"][0]["steps"] = []
    short["run_id"] = "20260101T130001Z-0123abcd"
    _take_longer(short)
    save(tmp_path / "uneven", short)
    found, left_out = exposed_communication([load_run(path) for path in find_runs(tmp_path)])
    assert [(row.step.num_runs, row.traced.num_runs) for row in found] == [(5, 5)]
    assert sorted(sentence.split(": ", 1)[1][:20] for sentence in left_out) == [
        "a copy of " + str(tmp_path)[:10], "its ranks traced dif", "no two neighbouring ",
    ]  # fmt: skip
    said = run_script(tmp_path)
    assert said.returncode == 0 and said.stderr.count("left out") == 3 and "5 + 5" in said.stdout


def test_configurations_are_not_mixed_and_a_trace_that_could_not_be_read_is_left_out(tmp_path):
    save_runs(tmp_path / "a")
    save_runs(tmp_path / "b", bucket_cap_mb=5.0)
    first, second = table_of(tmp_path)
    assert first.step.num_runs == second.step.num_runs == 5
    assert first.name != second.name and "bucket_cap_mb 5" in first.name + second.name
    for path in find_runs(tmp_path / "b"):
        metrics = json.loads(path.read_text())
        if "attribution" in metrics:
            save(path.parent, {**metrics, "attribution": None})
    found, left_out = exposed_communication([load_run(path) for path in find_runs(tmp_path)])
    assert len(found) == 1 and len(left_out) == 5


def test_few_repeats_make_no_claim(tmp_path):
    save_runs(tmp_path, repeats=3)
    assert table_of(tmp_path)[0].verdict == "not enough repeats"
    said = run_script(tmp_path)
    assert said.returncode == 0 and "not enough repeats" in said.stdout


def test_without_alternating_runs_there_is_one_sentence(tmp_path):
    save(tmp_path / "run", example_metrics())
    said = run_script(tmp_path)
    assert said.returncode == 2 and "--skip_gradient_sync alternate" in said.stderr
