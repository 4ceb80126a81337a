"""Runs of --skip_gradient_sync beside others: their ranks train apart, so no report counts them as training."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.metrics_examples import save
from support.report_cases import load, run_metrics, write_sweep
from support.scaling_examples import report_of as scaling_report_of

from testbed.analysis.comparison.two_arms import compare_arms
from testbed.analysis.document.model import Picture, Table
from testbed.analysis.report.build import report_of
from testbed.analysis.runs.arms import group_into_arms
from testbed.analysis.runs.load import find_runs, load_run
from testbed.audit.claims import FAILS, audit

NAMES = {
    "all": "allreduce without synchronisation on 2 ranks",
    True: "allreduce without synchronisation on 2 ranks",  # as older files have it
    "alternate": "allreduce synchronised in every other step on 2 ranks",
}


def write_skipped(folder: Path, skipped: str | bool) -> None:
    """Five timed runs twice as fast as any other, and five under the profiler."""
    for number in range(1, 6):
        for is_profiled in (False, True):
            metrics = run_metrics("allreduce", 2, number, is_profiled=is_profiled)
            metrics["run_id"] = f"skipped-{number}-{is_profiled}"
            metrics["settings"]["skip_gradient_sync"] = skipped
            metrics["training_config"]["math_changes"] = ["gradients are not synchronised: this is not training"]
            metrics["instrumented"] = True
            metrics["summary"]["mean_tokens_per_sec_global"] *= 2
            save(folder / f"{is_profiled}_{number}", metrics)


@pytest.mark.parametrize("skipped", NAMES)
def test_they_enter_no_number_and_are_named_for_what_they_are(tmp_path, skipped):
    write_sweep(tmp_path, ("baseline", "allreduce"))
    before = report_of(load(tmp_path), tmp_path)
    write_skipped(tmp_path / "skipped", skipped)
    report = report_of(load(tmp_path), tmp_path)
    entries = [link for link, sources in report.sources if any("skipped" in source.file for source in sources)]
    assert {entry.name for entry in entries} == {NAMES[skipped], f"{NAMES[skipped]}, instrumented"}
    headlines = [{each.text.partition(" (")[0].rstrip(".") for each in of.headlines} for of in (before, report)]
    assert len(headlines[0]) == 3 and headlines[0] == headlines[1]
    for section in report.sections:
        if section.anchor in ("overview", "throughput", "scaling", "breakdown", "communication", "loss", "memory"):
            for block in section.blocks:
                shown = block.links if isinstance(block, Picture) else ()
                shown = [cell for row in block.rows for cell in row] if isinstance(block, Table) else shown
                assert not any(each in entries for each in shown), (section.anchor, block)
    assert {section.anchor for section in report.sections} >= {"overview", "scaling", "breakdown", "communication"}
    claims = [verdict for verdict in report.verdicts if verdict.kind != "not compared"]
    assert not any("synchronis" in verdict.sentence for verdict in claims)
    said = [caution for caution in report.cautions if caution.title == "Not synchronised"]
    assert len(said) == 1 and len(said[0].runs) == 10
    assert "left out" in said[0].text and "breakdown" in said[0].text
    instrumented = next(caution for caution in report.cautions if caution.title == "Instrumented")
    assert not set(instrumented.runs) & set(said[0].runs), "they are faster than the real ones, not slower"


def test_they_enter_no_scaling_row_comparison_or_claim(tmp_path):
    write_sweep(tmp_path, ("baseline", "allreduce"))
    before = {row["name"]: row["n"] for row in scaling_report_of(tmp_path)["arms"]}
    write_skipped(tmp_path / "skipped", "alternate")
    report = scaling_report_of(tmp_path)
    assert {row["name"]: row["n"] for row in report["arms"]} == before
    assert sum("skipped" in row["path"] for row in report["left_out"]) == 10
    arms = {arm.runs[0].path.parents[1].name: arm for arm in group_into_arms(load(tmp_path))}
    with pytest.raises(ValueError, match="synchronised in every other step on 2 ranks has no run that counts"):
        compare_arms(arms["skipped"], arms["baseline_1"])
    paths = [path.parent for path in find_runs(tmp_path / "skipped")]
    found = audit([*(path.parent for path in find_runs(tmp_path / "baseline_1")), *paths])
    said = [finding for finding in found if finding.rule == "instrumented runs"]
    assert any("not synchronised" in finding.message and finding.severity == FAILS for finding in said)


def test_the_label_of_a_run_says_it(tmp_path):
    write_skipped(tmp_path, "all")
    label = load_run(tmp_path / "False_1").full_label
    assert "INSTRUMENTED" in label and "WITHOUT SYNCHRONISATION" in label
