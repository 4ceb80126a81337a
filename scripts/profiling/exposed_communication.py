#!/usr/bin/env python3
"""Exposed communication in two ways that share nothing: from traces, and by leaving the synchronisation out.

    python scripts/run_scaling_benchmarks.py --out_dir checkpoint/exposed --ranks 2 --profile_runs 5 --steps 30 \\
        --run_types allreduce:skip_gradient_sync=alternate,ddp:skip_gradient_sync=alternate -- --profile_steps 20
    python scripts/profiling/exposed_communication.py --dir checkpoint/exposed

Prints a Markdown table; a run type is in it if there are runs of --skip_gradient_sync alternate, traced and not.
Exit code: 0, 1 trace and counterfactual do not agree, 2 what was typed cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.errors import InputError, say
from testbed.program import program


@program
def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, metavar="DIR", help="folder with the runs, at any depth")
    arguments = parser.parse_args()
    from testbed.analysis.profiles.exposed import DISAGREE, exposed_communication, exposed_table
    from testbed.analysis.runs.load import find_runs, load_run
    from testbed.io import not_a_folder

    if fault := not_a_folder(arguments.dir):
        raise InputError(f"--dir {arguments.dir} {fault}; give a folder with runs")
    found, left_out = exposed_communication([load_run(path) for path in find_runs(arguments.dir)])
    if not found:
        raise InputError(
            f"--dir {arguments.dir} holds no run type with complete runs of --skip_gradient_sync alternate, both with "
            "and without --profile; --help shows the sweep"
        )
    for sentence in left_out:
        say(f"exposed_communication.py: left out: {sentence}", file=sys.stderr)
    say(exposed_table(found))
    return 1 if any(row.verdict == DISAGREE for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
