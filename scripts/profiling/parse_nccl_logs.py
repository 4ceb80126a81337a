#!/usr/bin/env python3
"""State what a run's NCCL logs prove: transports, channels, rings and trees, algorithms, and whether ranks agree.

    python scripts/profiling/parse_nccl_logs.py checkpoint/ddp/evidence/start_1

The folder is that of one start, made with NCCL_LOGS=1 (docs/evidence.md); a single log is read too. What no line says
is listed as not known. Exit code 1: a log cannot be read or --json not be written; 2: there is no log, or those
of several starts are there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.errors import InputError, say
from testbed.io import write_json
from testbed.program import program


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, metavar="DIR", help="folder of one start's evidence, or one log")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of it to this file")
    return parser.parse_args()


@program
def main() -> None:
    arguments = parse_arguments()
    from testbed.analysis.profiles.nccl_logs import summarise, summary_text

    try:
        summary = summarise(arguments.logs)
    except FileNotFoundError as error:
        raise InputError(error) from None
    say(summary_text(summary))
    if arguments.json:
        write_json(arguments.json, summary, f"--json {arguments.json}")


if __name__ == "__main__":
    sys.exit(main())
