"""What collecting evidence costs: the file of scripts/profiling/measure_evidence.py, checked, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.analysis.statistics import NOT_ENOUGH, Ratio, compare
from testbed.io import check_schema, read_checked

SCHEMA_VERSION = 1
OVERHEAD_FILE = "evidence_overhead.json"
PLAIN, EVIDENCE = "plain", "evidence"


def check_overhead(content: dict[str, Any]) -> None:
    """Raise ValueError, one sentence, unless `content` is such a file."""
    check_schema(content, "experiments/evidence_overhead.schema.json")


def read_overhead(path: Path) -> dict[str, Any]:
    """The file; ValueError, one sentence that names the file and the fault."""
    return read_checked(path, check_overhead)


def overhead(content: dict[str, Any]) -> Ratio:
    """Throughput with evidence over throughput without, one number per run; below 1 it costs time."""
    rates = {arm: [run["tokens_per_s"] for run in content["runs"] if run["arm"] == arm] for arm in (EVIDENCE, PLAIN)}
    return compare(rates[EVIDENCE], rates[PLAIN])


def loss_difference(content: dict[str, Any]) -> float:
    """How far apart the final training losses of all runs lie. They do the same work: 0 is expected."""
    losses = [run["final_train_loss"] for run in content["runs"]]
    return max(losses) - min(losses)


def overhead_table(content: dict[str, Any]) -> str:
    """The table of docs/evidence.md."""
    ratio, work = overhead(content), content["work"]
    interval = "too few runs" if ratio.verdict == NOT_ENOUGH else f"{ratio.low:.3f} to {ratio.high:.3f}"
    traces = [run["evidence_bytes"] for run in content["runs"] if run["arm"] == EVIDENCE]
    rows = [
        ("toggles that were on", ", ".join(content["toggles"])),
        ("work", f"{work['run_type']}, {work['ranks']} ranks, {work['model_size']}, {work['steps']} steps of "
                 f"{work['global_batch_size']} x {work['seq_length']} tokens"),
        ("runs", f"{ratio.n_a} with, {ratio.n_b} without, in turns"),
        ("throughput with / without", f"{ratio.ratio:.3f}"),
        ("95 % interval", interval),
        ("verdict", ratio.verdict if ratio.verdict == NOT_ENOUGH else f"with evidence: {ratio.verdict}"),
        ("final losses differ by", f"{loss_difference(content):g}"),
        ("files of a run with evidence", f"{max(traces, default=0) / 1000:,.0f} kB"),
    ]  # fmt: skip
    rows += [(f"not measured: {name}", reason) for name, reason in content["not_measured"].items()]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
