#!/usr/bin/env python3
"""Audit measurements, our own and others': what the files contradict, which rule it breaks, and the corrected figure.

    python scripts/audit_runs.py checkpoint/baseline checkpoint/optimized   # every run against the first
    python scripts/audit_runs.py results/sweep                              # arms of a sweep, by its protocol
    python scripts/audit_runs.py their/1gpu.json their/4gpu.json --json findings.json

Reads training_metrics.json 1 and 2.0 to 2.2, timing logs (an epoch's "timing breakdown"),
rank<r>_results_epoch<e>.json, wandb logs and CSV exports, scaling_report.json, and tables in Markdown or CSV.
docs/audit.md lists the rules.
Exit code 0: no claim falls (notes may be printed). 1: a claim does not stand, or --json cannot be written. 2: a file
cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.errors import say
from testbed.io import write_json
from testbed.program import program

if TYPE_CHECKING:
    from testbed.analysis.audit.claims import Finding


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="files of runs, or folders that hold them")
    parser.add_argument("--baseline", type=Path, metavar="FILE",
                        help="what all others are compared with (default: the first; in a folder of several, its "
                        "baseline on the fewest ranks)")  # fmt: skip
    parser.add_argument("--columns", action="append", default=[], metavar="QUANTITY=HEADING,...",
                        help="what the columns of a table in Markdown or CSV are, where their headings do not say it: "
                        "'devices=#GPUs,length=2048' (a wrong quantity is answered with the list)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE too")
    return parser.parse_args()


@program
def main() -> int:
    arguments = parse_arguments()
    from testbed.analysis.audit import claims
    from testbed.analysis.audit.tables.read import columns_named
    from testbed.analysis.document.words import counted

    columns = columns_named(arguments.columns) if arguments.columns else None
    findings, num_runs = claims.audit_and_count(arguments.files, arguments.baseline, columns)
    failed = [finding for finding in findings if finding.severity == claims.FAILS]
    runs = counted(num_runs, "run")
    if findings:
        say(report(findings))
        say(f"{runs}: {len(failed)} x {claims.FAILS}, {len(findings) - len(failed)} x {claims.NOTE}")
    else:
        say(f"nothing found in {runs}")
    if arguments.json:
        content = {"findings": [asdict(finding) for finding in findings]}
        write_json(arguments.json, content, f"--json {arguments.json}")
    return 1 if failed else 0


def report(findings: Sequence[Finding]) -> str:
    """Return a paragraph per finding: severity and rule, the runs, what is wrong, and the figure instead."""
    lines = []
    for finding in findings:
        runs = "; ".join(shortened(run) for run in finding.runs[:4])
        more = f" and {len(finding.runs) - 4} more" if len(finding.runs) > 4 else ""
        lines.append(f"{finding.severity.upper()}: {finding.rule}")
        lines += textwrap.wrap(
            f"{runs}{more}", 110, initial_indent="  ", subsequent_indent="  ", break_long_words=False
        )
        lines += textwrap.wrap(finding.message, 110, initial_indent="  ", subsequent_indent="  ")
        if finding.corrected:
            lines += textwrap.wrap(
                f"corrected: {finding.corrected}", 110, initial_indent="  ", subsequent_indent="    "
            )
        lines.append("")
    return "\n".join(lines)


def shortened(run: str) -> str:
    """Return the folder of a training_metrics.json, as a path from here where that is shorter."""
    name = run.removesuffix("/training_metrics.json")
    return os.path.relpath(name) if Path(name).is_relative_to(Path.cwd()) else name


if __name__ == "__main__":
    sys.exit(main())
