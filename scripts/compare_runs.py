#!/usr/bin/env python3
"""Say whether one configuration trains faster than another, and how sure that is.

    python scripts/compare_runs.py sweeps/strong/ddp_2ranks_batch32 --against sweeps/strong/allreduce_2ranks_batch32
    python scripts/compare_runs.py new/run_*/training_metrics.json --against old/run_* --json comparison.json

Each side is the repeats of one configuration: training_metrics.json files, or folders that are searched at any depth.
The result is the ratio of median throughputs, one number per run, with a 95 % bootstrap interval. An interval that
contains 1 reads "no detectable difference"; fewer than 5 runs on a side make no claim. Beside it stand the difference
that so many runs would have detected, step times, memory, and the losses: a faster run that learns worse is not faster.
Runs that are instrumented or did not finish are named and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from testbed.config.flag_parser import FlagParser
from testbed.errors import say

PROGRAM = "compare_runs.py"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = FlagParser(
        prog=PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit code 0: compared, whatever the verdict; 2: what was typed is wrong, or the work is not equal; "
        "1: writing failed.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="A",
                        help="runs of the configuration that the verdict is about")  # fmt: skip
    parser.add_argument("--against", type=Path, nargs="+", required=True, metavar="B",
                        help="runs of the configuration it is compared with")  # fmt: skip
    parser.add_argument("--allow-mismatch", action="store_true",
                        help="compare unequal work too; every verdict then begins with NOT EQUAL WORK and the fields "
                        "that differ (default: refuse, exit code 2)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help="also write the comparison, with each run's values, path and commit")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from testbed.analysis.comparison.document import comparison_text
    from testbed.analysis.comparison.files import arms_from, unreadable_text
    from testbed.analysis.comparison.two_arms import compare_arms  # numpy and scipy: a second that --help does not owe

    try:
        a, b, unreadable = arms_from(options.runs, options.against)
        comparison = compare_arms(a, b, names=("A", "B"))
        if options.json and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
            raise ValueError(f"--json {options.json} must be a file in a folder that exists")
    except ValueError as error:
        return refuse(str(error))
    if comparison.mismatches and not options.allow_mismatch:
        fields = "\n".join(f"  {mismatch}" for mismatch in comparison.mismatches)
        return refuse(
            "A and B did not do equal work, or their files do not show that they did, so their throughputs do not "
            f"compare:\n{fields}\nCompare runs of equal work, or label the result with --allow-mismatch."
        )
    say(comparison_text(comparison))
    for warning in [*unreadable_text(unreadable), *comparison.warnings]:
        say(f"Warning: {warning}", file=sys.stderr)
    if options.json:
        return write_json(options.json, comparison.as_json(), arguments)
    return 0


def refuse(sentence: str) -> int:
    say(f"{PROGRAM}: error: {sentence}", file=sys.stderr)
    return 2


def write_json(path: Path, record: dict, arguments: Sequence[str] | None) -> int:
    from testbed.io import write_text

    # the record is for others to read, and should not name a home
    program = os.path.relpath(__file__)
    command = " ".join(["python", program, *map(str, sys.argv[1:] if arguments is None else arguments)])
    try:
        write_text(path, json.dumps({"schema": 1, "command_line": command, **record}, indent=1) + "\n")
    except OSError as error:
        say(f"{PROGRAM}: error: {path} could not be written: {error}", file=sys.stderr)
        return 1
    say(f"\nSaved the comparison to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
