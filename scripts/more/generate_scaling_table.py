#!/usr/bin/env python3
"""Markdown table of a scaling study: throughput, speed-up and efficiency with 95 % intervals and verdict.

    python scripts/more/generate_scaling_table.py --dir SWEEP                  # every run below SWEEP
    python scripts/more/generate_scaling_table.py --dir SWEEP --table 001      # columns of an earlier study's table

Exit code 1 when runs did unequal work (each field is named, and there is no speed-up), 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.errors import InputError, say
from testbed.program import program

LAYOUTS = {
    "001": "time and speed-up; compute and communication",
    "002": "time, tokens/s and speed-up",
    "003": "throughput, communication, utilization, memory, scalability",
    "004": "two variants, A against B, with ratio and verdict",
}


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, metavar="DIR",
                        help="folder of a sweep: runs at any depth below it")  # fmt: skip
    parser.add_argument("--protocol", choices=("strong", "weak", "time_to_loss"),
                        help="what is held fixed (default: what sweep.json says, else strong)")  # fmt: skip
    parser.add_argument("--target_val_loss", type=float, metavar="LOSS",
                        help="for time_to_loss (default: what sweep.json says)")  # fmt: skip
    parser.add_argument("--table", choices=tuple(LAYOUTS), help="; ".join(f"{k}: {v}" for k, v in LAYOUTS.items()))
    parser.add_argument("--variants", nargs=2, metavar=("A", "B"), help="strategies that --table 004 compares")
    parser.add_argument("--allow-mismatch", action="store_true",
                        help="give speed-ups between unequal work too, and of instrumented runs where a configuration "
                        "has no others, labelled as such")  # fmt: skip
    return parser.parse_args()


@program
def main() -> int:
    arguments = parse_arguments()
    from testbed.analysis.scaling.report import report_on_directory
    from testbed.analysis.scaling.tables import scaling_table

    report = report_on_directory(arguments.dir, arguments.protocol, arguments.target_val_loss, arguments.allow_mismatch)
    if arguments.variants and arguments.table != "004":
        raise InputError("--variants is for --table 004")
    say(scaling_table(report, arguments.table, arguments.variants))
    return 1 if report["status"] == "invalid_comparison" else 0


if __name__ == "__main__":
    sys.exit(main())
