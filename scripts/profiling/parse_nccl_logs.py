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

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # `testbed` lies there, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.errors import say


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, metavar="DIR", help="folder of one start's evidence, or one log")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of it to this file")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    from testbed.analysis.profiles.nccl_logs import as_json, summarise, summary_text
    from testbed.io import write_text

    try:
        summary = summarise(arguments.logs)
    except (FileNotFoundError, ValueError) as error:
        say(f"parse_nccl_logs.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        say(f"parse_nccl_logs.py: {error.filename} cannot be read: {error.strerror}", file=sys.stderr)
        return 1
    say(summary_text(summary))
    if arguments.json:
        try:
            write_text(arguments.json, as_json(summary))
        except (OSError, ValueError) as error:  # ValueError: "." is no file's name
            why = getattr(error, "strerror", None) or error
            say(f"parse_nccl_logs.py: --json {arguments.json} cannot be written: {why}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
