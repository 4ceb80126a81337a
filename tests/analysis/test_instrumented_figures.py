"""Instrumented runs: which are, and the labelled figures that --allow-mismatch gives of them."""

from __future__ import annotations

import json

import pytest
from support.audit_cases import BREAKDOWN, v20
from support.foreign_examples import arm
from support.metrics_examples import save
from support.programs import run_here
from support.scaling_examples import arm_of, metrics_of, report_of, write_arm

from testbed.analysis.comparison.two_arms import NOT_COMPARED, compare_arms
from testbed.analysis.runs.arms import group_into_arms
from testbed.analysis.runs.load import load_run
from testbed.analysis.scaling.tables import scaling_table
from testbed.analysis.statistics import FASTER
from testbed.audit.claims import audit

TABLE, COMPARE = "scripts/more/generate_scaling_table.py", "scripts/compare_runs.py"
NO_DEEPSPEED = {"training_config": {"deepspeed_enabled": False}}
LABEL = "DeepSpeed's wall_clock_breakdown"


def broken_down(folder, world=2, seconds=1000.0, **overrides):
    return v20(folder, world=world, wall_s=seconds / world, deepspeed_config=BREAKDOWN, **overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"training_config": {"deepspeed_enabled": True}}, True),
        ({}, True),  # an early file does not say, and its command asks for DeepSpeed
        (NO_DEEPSPEED, None),
        ({"command_line": "python src/gpt2.py --run_type baseline"}, None),
    ],
)
def test_a_file_of_deepspeeds_settings_slows_no_run_without_deepspeed(tmp_path, overrides, expected):
    assert load_run(broken_down(tmp_path / "a", **overrides)).instrumented is expected
    found = [f for f in audit([tmp_path / "a", v20(tmp_path / "b", world=4)]) if f.rule == "instrumented runs"]
    assert bool(found) is bool(expected)


def test_the_table_gives_a_labelled_figure_where_nothing_else_was_measured(tmp_path):
    broken_down(tmp_path / "both" / "one", 1, **NO_DEEPSPEED)
    broken_down(tmp_path / "both" / "two")
    refused = run_here(TABLE, "--dir", tmp_path / "both")
    assert "1 run is left out, instrumented" in refused.stdout and "--allow-mismatch" in refused.stdout
    allowed = run_here(TABLE, "--dir", tmp_path / "both", "--allow-mismatch")
    assert allowed.returncode == 0
    assert "2.00x (UNEQUAL WORK, INSTRUMENTED)" in allowed.stdout
    assert f"instruments is {LABEL}, the reference's none" in allowed.stdout
    alone = run_here(TABLE, "--dir", tmp_path / "both" / "two")
    assert alone.returncode == 2 and "--allow-mismatch gives its figure, labelled" in alone.stderr


def test_instrumented_runs_never_join_plain_repeats(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000)
    write_arm(tmp_path, "ddp", 2, 1800)
    save(tmp_path / "profiled", metrics_of("ddp", 2, 5.0, instrumented=True, settings={"profile": True}))
    save(tmp_path / "only", metrics_of("fsdp", 2, 900.0, instrumented=True, settings={"profile": True}))
    report = report_of(tmp_path, allow_mismatch=True)
    assert arm_of(report, "ddp", 2)["n"] == 5 and arm_of(report, "ddp", 2)["mismatches"] == []
    assert arm_of(report, "fsdp", 2)["speedup"]["ratio"] == pytest.approx(0.9)
    assert [item["field"] for item in report["mismatches"]] == ["instruments"]
    assert "0.90x (INSTRUMENTED)" in scaling_table(report)
    fits = {row["strategy"]: row["fits"]["amdahl"]["serial_fraction"] for row in report["strategies"]}
    assert fits["fsdp"] is None and fits["ddp"] is not None
    plain = report_of(tmp_path)
    assert plain["status"] == "ok" and len(plain["arms"]) == 2
    reasons = [item["reason"] for item in plain["left_out"]]
    assert sum("--allow-mismatch" in reason for reason in reasons) == 1 and len(reasons) == 2


def test_compare_runs_labels_instrumented_sides(tmp_path):
    sides = broken_down(tmp_path / "a"), "--against", broken_down(tmp_path / "b", seconds=1200.0)
    refused = run_here(COMPARE, *sides)
    assert refused.returncode == 2 and f"it is instrumented ({LABEL}); compare_runs.py --allow" in refused.stderr
    allowed = run_here(COMPARE, *sides, "--allow-mismatch", "--json", tmp_path / "out.json")
    assert allowed.returncode == 0
    said = " ".join(allowed.stdout.split())
    assert f"Verdict: INSTRUMENTED: A by {LABEL}; B by {LABEL}. NOT EQUAL WORK: not recorded on both sides: " in said
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["ratio"]["ratio"] == pytest.approx(1.2) and record["instrumented"] == [
        f"A by {LABEL}", f"B by {LABEL}",
    ]  # fmt: skip
    plain = run_here(COMPARE, v20(tmp_path / "c", world=2), "--against", tmp_path / "b", "--allow-mismatch")
    assert f"INSTRUMENTED: B by {LABEL}." in " ".join(plain.stdout.split())


def test_instrumented_runs_of_equal_work_give_no_verdict(tmp_path):
    """Five repeats that a profiler slowed are a figure, and no claim on what is faster."""
    for name, seconds in (("slow", 0.2), ("fast", 0.1)):
        arm(tmp_path / name, step_time_s=seconds, instrumented=True, settings={"profile": True})
    done = run_here(COMPARE, tmp_path / "slow", "--against", tmp_path / "fast", "--allow-mismatch")
    assert done.returncode == 0 and "INSTRUMENTED: " in done.stdout
    plain = [group_into_arms([load_run(path) for path in arm(tmp_path / name, step_time_s=seconds)])[0]
             for name, seconds in (("plain", 0.2), ("plain_fast", 0.1))]  # fmt: skip
    marked = [group_into_arms([load_run(path) for path in (tmp_path / name).iterdir()])[0] for name in ("slow", "fast")]
    assert compare_arms(*plain[::-1]).kind == FASTER
    assert compare_arms(*marked[::-1], allow_instrumented=True).kind == NOT_COMPARED
