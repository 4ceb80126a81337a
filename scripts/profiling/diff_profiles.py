#!/usr/bin/env python3
"""Show what changed from one profile to another, per rank and optimizer step: ranges, kernels, calls, collectives.

    python scripts/profiling/diff_profiles.py checkpoint/before checkpoint/after

Both are folders of runs that parse_nsys_stats.py summarised, or their profile_summary.json. What differs between the
runs is named; single profiles carry no verdict. Exit code 2: a file does not read, or the two have nothing in common.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.errors import say
from testbed.io import holding_together
from testbed.program import program


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A", help="folder of a run, or a profile_summary.json")
    parser.add_argument("b", type=Path, metavar="B", help="the one it is compared with")
    return parser.parse_args()


@program
def main() -> None:
    arguments = parse_arguments()
    from testbed.analysis.profiles.diff import diff, diff_text, read_summary

    a, b = read_summary(arguments.a), read_summary(arguments.b)
    with holding_together(f"{arguments.a} or {arguments.b}"):
        text = diff_text(diff(a, b))
    say(text)


if __name__ == "__main__":
    sys.exit(main())
