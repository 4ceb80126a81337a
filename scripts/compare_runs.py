#!/usr/bin/env python3
"""Say whether one configuration trains faster than another, and how sure that is.

    python scripts/compare_runs.py sweeps/strong/ddp_2ranks_batch32 --against sweeps/strong/allreduce_2ranks_batch32
    python scripts/compare_runs.py new/run_*/training_metrics.json --against old/run_* --json comparison.json

Each side is the repeats of one configuration: training_metrics.json files, or folders that are searched at any depth.
The result is the ratio of median throughputs, one number per run, with a 95 % bootstrap interval. An interval that
contains 1 reads "no detectable difference"; fewer than 5 runs on a side make no claim. Printed as well: whether A and B
are shown to be equal within --equivalent, the difference that this number of runs would have detected, step times,
memory, and the losses (a faster run that learns worse is not faster).
Runs that are instrumented or did not finish are named and not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import percentage
from testbed.errors import InputError, say
from testbed.io import write_json
from testbed.program import program, recorded_command


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = FlagParser(
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
                        help="compare unequal work too, and count a side's instrumented runs where it has no others; "
                        "every verdict then begins with NOT EQUAL WORK and the fields that differ, or with "
                        "INSTRUMENTED (default: refuse, exit code 2)")  # fmt: skip
    parser.add_argument("--equivalent", type=percentage, default=0.02, metavar="PERCENT",
                        help="difference that does not matter: two one-sided tests say whether A and B are equal "
                        "within it, which no detectable difference alone does not say (default: 2%%)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help="also write the comparison, with each run's values, path and commit")  # fmt: skip
    found = parser.parse_args(arguments)
    if found.equivalent == 0:
        raise InputError("--equivalent 0 shows nothing: no runs are equal within nothing; give a percentage such as 2%")
    return found


@program
def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    from testbed.analysis.comparison.files import arms_from, unreadable_text

    a, b, unreadable = arms_from(arguments.runs, arguments.against)
    if arguments.json and (arguments.json.is_dir() or not arguments.json.absolute().parent.is_dir()):
        raise InputError(f"--json {arguments.json} must be a file in a folder that exists")
    from testbed.analysis.comparison.document import comparison_text, json_of, unequal_work
    from testbed.analysis.comparison.two_arms import compare_arms  # numpy and scipy: a second that --help does not owe

    comparison = compare_arms(a, b, names=("A", "B"), allow_instrumented=arguments.allow_mismatch)
    if comparison.mismatches and not arguments.allow_mismatch:
        fields = "\n".join(f"  {part}" for part in unequal_work(comparison))
        raise InputError(
            "A and B did not do equal work, or their files do not show that they did, so their throughputs do not "
            f"compare:\n{fields}\nCompare runs of equal work, or label the result with --allow-mismatch."
        )
    say(comparison_text(comparison, arguments.equivalent))
    for warning in [*unreadable_text(unreadable), *comparison.warnings]:
        say(f"Warning: {warning}", file=sys.stderr)
    if arguments.json:
        command = recorded_command(__file__, [str(word) for word in (sys.argv[1:] if words is None else words)])
        record = {"schema": 1, "command_line": command, **json_of(comparison, arguments.equivalent)}
        write_json(arguments.json, record, f"--json {arguments.json}")
        say(f"\nSaved the comparison to {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
