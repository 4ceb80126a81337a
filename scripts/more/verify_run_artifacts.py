#!/usr/bin/env python3
"""Check the files of every run below a folder, at any depth, and the cells of every sweep.json there.

    python scripts/more/verify_run_artifacts.py --dir SWEEP
    python scripts/more/verify_run_artifacts.py --dir docs/results/run_types --metrics-only

Prints one tab-separated line per run: run_dir, status, world_size, expected ranks, reason. A cell that the sweep calls
not applicable is listed and is not a failure. Exit code 1 when a run fails a check, 2 when there is no run below DIR.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.errors import counted, say
from testbed.program import program


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, metavar="DIR", help="folder of a sweep or of runs")
    parser.add_argument("--metrics-only", action="store_true",
                        help="check training_metrics.json alone; marks, logs and the launcher's record may be absent, "
                        "as in published results")  # fmt: skip
    return parser.parse_args()


@program
def main() -> int:
    arguments = parse_arguments()
    from testbed.analysis.runs.verify import as_tsv, verify

    verdicts = verify(arguments.dir, arguments.metrics_only)
    say(as_tsv(verdicts), flush=True)
    failures = sum(verdict.is_failure for verdict in verdicts)
    passed = f"Verification passed: {counted(len(verdicts), 'run')}."
    say(f"Verification failed: {failures} of {counted(len(verdicts), 'run')}." if failures else passed, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
