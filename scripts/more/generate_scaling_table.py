#!/usr/bin/env python3
"""Markdown table of a scaling study: throughput, speed-up and efficiency with 95 % intervals and verdict.

    python scripts/more/generate_scaling_table.py --dir SWEEP                  # every run below SWEEP
    python scripts/more/generate_scaling_table.py --report SWEEP/scaling_report.json
    python scripts/more/generate_scaling_table.py --gpu1 FILE --gpu2 FILE --gpu4 FILE
    python scripts/more/generate_scaling_table.py --dir SWEEP --table 001      # columns of an earlier study's table

Exit code 1 when runs did unequal work (each field is named, and there is no speed-up), 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.errors import InputError, counted, say
from testbed.program import program

LAYOUTS = {
    "001": "time and speed-up; compute and communication",
    "002": "time, tokens/s and speed-up",
    "003": "throughput, communication, utilization, memory, scalability",
    "004": "two variants, A against B, with ratio and verdict",
}


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_argument_group("what to read (one of --dir, --report, --gpu1 ...)")
    source.add_argument("--dir", type=Path, metavar="DIR", help="folder of a sweep: runs at any depth below it")
    source.add_argument("--report", type=Path, metavar="FILE.json", help="a scaling_report.json")
    for ranks in (1, 2, 4):
        source.add_argument(f"--gpu{ranks}", type=Path, metavar="FILE.json",
                            help=f"training_metrics.json of the run on {counted(ranks, 'GPU')} or ranks")  # fmt: skip
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
    from testbed.analysis.scaling.tables import scaling_table
    from testbed.io import holding_together

    report = read_report(arguments)
    if arguments.variants and arguments.table != "004":
        raise InputError("--variants is for --table 004")
    with holding_together(f"--report {arguments.report}") if arguments.report else contextlib.nullcontext():
        table = scaling_table(report, arguments.table, arguments.variants)
    say(table)
    return 1 if report["status"] == "invalid_comparison" else 0


def read_report(arguments: argparse.Namespace) -> dict:
    """The report that the flags ask for."""
    from testbed.analysis.scaling.report import read_report_file, report_on_directory, report_on_files

    files = {ranks: path for ranks in (1, 2, 4) if (path := getattr(arguments, f"gpu{ranks}"))}
    if sum(map(bool, (arguments.dir, arguments.report, files))) != 1:
        raise InputError("give one of --dir DIR, --report FILE.json, or --gpu1 FILE --gpu2 FILE --gpu4 FILE")
    settings = (arguments.protocol, arguments.target_val_loss, arguments.allow_mismatch)
    if arguments.report:
        if any(settings):
            raise InputError("--report is read as it is; --protocol, --target_val_loss, --allow-mismatch go with --dir")
        return read_report_file(arguments.report)
    if arguments.dir:
        return report_on_directory(arguments.dir, *settings)
    if 1 not in files or len(files) < 2:
        raise InputError("--gpu1 FILE and at least one of --gpu2 FILE, --gpu4 FILE go together")
    return report_on_files(files, *settings)


if __name__ == "__main__":
    sys.exit(main())
