"""What the audit notes of single runs stands below their table."""

from __future__ import annotations

from support.metrics_examples import example_metrics, save
from support.programs import run_here

from testbed.analysis.runs.load import load_runs
from testbed.audit.notes import notes_on_single_runs


def test_single_runs_give_no_verdict_and_their_table_says_what_the_audit_notes(tmp_path):
    one, two = ({"hardware": {"cpu_threads_per_rank": threads}} for threads in (1, 2))
    metrics = (
        example_metrics(world_size=1, step_time_s=0.44, **one),
        example_metrics(world_size=1, step_time_s=0.3, **two),
        example_metrics(world_size=2, step_time_s=0.2, **one),
    )
    paths = [save(tmp_path / f"run_{number}", content) for number, content in enumerate(metrics)]
    table = run_here("generate_charts.py", "--runs", *paths, "--output-dir", tmp_path / "charts").stdout
    said = " ".join(table.split())
    assert "One run each, no verdict" in said and "quickstart.sh --repeats 5" in said
    assert "[1] and [3]: 2.20x (throughput of all devices) on 2 times the cores is more than linear" in said
    assert "[1] and [2]: cpu threads per rank 1 against 2" in said
    assert notes_on_single_runs(load_runs(paths[:1])) == [], "one run compares nothing"


def test_repeats_are_one_note(tmp_path):
    repeats = [example_metrics(run_id=f"20260101T00000{number}Z-0123456{number}") for number in (1, 2)]
    paths = [save(tmp_path / content["run_id"], content) for content in repeats]
    (note,) = notes_on_single_runs(load_runs(paths))
    assert note.startswith("Each column is one run, no verdict")
