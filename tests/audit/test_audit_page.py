"""The page of an audit: what does not stand first, one line for all that is unknown, the rest behind --details."""

from __future__ import annotations

import re

import pytest
from support.audit_cases import v20
from support.metrics_examples import example_metrics, save, v1_metrics
from support.programs import run_here

from testbed.analysis.runs.load import load_runs
from testbed.audit.claims import audit
from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.notes import notes_on_single_runs
from testbed.audit.page import WIDTH, details, page

PROGRAM = "scripts/audit_runs.py"


def ten_arms(folder):
    """Arms of 2.0, none of equal work: each lacks the same seventeen fields, and each has another batch."""
    v20(folder / "a", world=1)
    for number in range(2, 11):
        v20(folder / f"arm{number}", world=number, batch=8 * number, wall_s=1000 / number)
    return folder


def test_a_folder_of_ten_arms_is_one_page(tmp_path):
    findings = audit([ten_arms(tmp_path)])
    text = page(findings, 10)
    lines = text.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= WIDTH
    heading = " ".join(text.partition("\n\n")[0].split())
    assert re.fullmatch(rf"Audit of 10 runs in {tmp_path}: \d+ x claim does not stand, \d+ x note", heading)
    assert text.count(str(tmp_path)) == 1
    assert len(details(findings).splitlines()) > 3 * len(lines)
    heads = [line for line in text.partition("\n\n")[2].splitlines() if line and not line.startswith(" ")]
    assert heads == ["Claims that do not stand", "What cannot be known", "Notes"]


def test_all_that_is_not_recorded_is_one_paragraph_and_precision_comes_first(tmp_path):
    save(tmp_path / "a", v1_metrics(1))
    save(tmp_path / "b", v1_metrics(4))
    text = page(audit([tmp_path]), 2)
    assert text.count("not in every file: ") == 1
    unknown = re.search(r"not in every file: (.*?)(\n\n|$)", text, re.S)[1]
    assert unknown.startswith(("global batch size", "precision", "number of ranks"))
    assert "seed" in unknown and "weight decay" in unknown
    assert "equal work cannot be shown" not in text and "equal work cannot be shown" in details(audit([tmp_path]))


def of(rule: Rule, severity: str, *messages: str, corrected: str | None = None) -> list[Finding]:
    return [Finding(rule, (f"a/run{n}.md",), message, severity, corrected) for n, message in enumerate(messages)]


@pytest.mark.parametrize(
    ("findings", "said"),
    [
        (of(Rule.INSTRUMENTED, FAILS, *["a profiler ran"] * 9), "run0.md; run1.md and 7 more: a profiler ran"),
        (of(Rule.FOLLOWS, FAILS, "data/steps differ", "figures differ"), "2 runs in a: 2 x claim does not stand"),
        (of(Rule.STEP_CLOCK, FAILS, *(f"{n} s short" for n in range(9))), "and 7 more of this rule (--details)"),
        (of(Rule.FOLLOWS, FAILS, "MFU 64 %", corrected="54 % would follow"), "does not match: 54 % would follow"),
        (of(Rule.ONE_RUN, NOTE, "n = 1") + of(Rule.THROUGHPUT, NOTE, "of one rank", corrected="5,900 tokens/s"),
         "corrected: 5,900 tokens/s Notes 1. one run proves nothing"),
    ],
)  # fmt: skip
def test_the_page_merges_counts_and_orders_findings(findings, said):
    assert said in " ".join(page(findings, len(findings)).split())
    assert all(finding.message in details(findings) for finding in findings)


def test_runs_and_files_of_tables_are_counted_apart_and_nothing_unchecked_is_said_to_be_right(tmp_path):
    runs = [save(tmp_path / "one", v1_metrics(1)), save(tmp_path / "two", v1_metrics(1))]
    table = tmp_path / "results.md"
    table.write_text("| GPUs | tokens/s | Speed-up |\n|---|---|---|\n| 1 | 10 | 1.0 |\n| 2 | 19 | 1.9 |\n", "utf-8")
    assert run_here(PROGRAM, table).stdout.startswith("nothing found in 1 file of tables\n")
    assert run_here(PROGRAM, *runs, table).stdout.startswith("Audit of 2 runs and 1 file of tables ")
    table.write_text("| GPUs | tokens/s |\n|---|---|\n| 1 | 10 |\n| 2 | 19 |\n")
    said = run_here(PROGRAM, table).stdout
    assert said.startswith("nothing could be checked in 1 file of tables\n") and "found" not in said


def test_the_page_says_how_many_figures_it_checked_and_what_it_took_columns_for(tmp_path):
    (tmp_path / "results.md").write_text(
        "| GPUs | tokens/s | Speed-up | Note |\n|---|---|---|---|\n| 1 | 10 | 1.0 | a |\n| 2 | 19 | 1.9 | b |\n"
    )
    (tmp_path / "notes.txt").write_text("hello\n")
    (tmp_path / "picture.bin").write_bytes(b"\0")
    done = run_here(PROGRAM, ".", cwd=tmp_path)
    assert done.stdout == (
        "nothing found in 1 file of tables\nread 1 table, 2 rows; 5 figures could be checked by 2 rules\n"
        "results.md:3: `GPUs` as devices, `tokens/s` as token rate, `Speed-up` as speedup; not understood: `Note`\n"
        "skipped 2 files that the audit does not read: notes.txt; picture.bin\n"
    )


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
