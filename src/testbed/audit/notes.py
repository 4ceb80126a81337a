"""Write the notes of a table of single runs: that it gives no verdict, and what the audit finds in it."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.analysis.runs.arms import group_into_arms
from testbed.analysis.runs.load import Run
from testbed.audit.claims import audit_runs
from testbed.audit.finding import FAILS, Rule
from testbed.audit.reported import from_run

NO_VERDICT = (
    "no verdict: a ratio shows what these runs did. Five interleaved repeats of each give a verdict: "
    "scripts/quickstart.sh --repeats 5, or scripts/run_scaling_benchmarks.py."
)
# by `comparability.warnings`, and by the sentence above
SAID_ELSEWHERE = {Rule.EQUAL_WORK, Rule.INSTRUMENTED, Rule.ONE_RUN}


def notes_on_single_runs(runs: Sequence[Run]) -> list[str]:
    """Return the sentences that belong below a table of these runs; none where it compares nothing."""
    if len(runs) < 2:
        return []
    if len(group_into_arms(runs)) < len(runs):  # the audit names arms then, and their verdicts stand below the table
        return [f"Each column is one run, {NO_VERDICT}"]
    number_of = {str(run.path): f"[{number}]" for number, run in enumerate(runs, start=1)}
    notes = [f"One run each, {NO_VERDICT}"]
    for finding in audit_runs([from_run(run) for run in runs]):
        is_about_the_record = finding.rule == Rule.TRACEABLE and finding.severity != FAILS
        if finding.rule not in SAID_ELSEWHERE and not is_about_the_record:
            which = " and ".join(number_of.get(name, name) for name in finding.runs)
            corrected = f" ({finding.corrected})" if finding.corrected else ""
            notes.append(f"{which}: {finding.message}{corrected}.")
    return notes
