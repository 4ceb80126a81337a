#!/usr/bin/env python3
"""Summarise the profile of a run, from Nsight Systems or torch.profiler, into profiles/profile_summary.json.

    python scripts/profiling/parse_nsys_stats.py --run_dir checkpoint/ddp

It reads profiles/nsys_stats*.txt (nsys stats), *.csv (nsys stats --format csv) and, from a run with --profile,
profiler_logs/rank*.pt.trace.json; see docs/profiling.md. Exit code 1: a file does not read, and nothing was written;
2: there is no profile, or a flag is wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.errors import Failure, InputError, say
from testbed.program import program


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", type=Path, required=True, metavar="DIR", help="folder of the run")
    steps_help = "optimizer steps in the profile (default: its train/step ranges, else training_metrics.json)"
    parser.add_argument("--optimizer_steps", type=positive, metavar="STEPS", help=steps_help)
    ranks_help = "ranks in the profile (default: counted, or the ranks of one machine for each trace)"
    parser.add_argument("--ranks_in_profile", type=positive, metavar="RANKS", help=ranks_help)
    arguments = parser.parse_args()
    if not arguments.run_dir.is_dir():
        parser.error(f"--run_dir {arguments.run_dir} is not a folder")
    return arguments


@program
def main() -> None:
    arguments = parse_arguments()
    from testbed.analysis.profiles.summary import summary_text, write_summary

    try:
        path, summary = write_summary(arguments.run_dir, arguments.optimizer_steps, arguments.ranks_in_profile)
    except FileNotFoundError as error:
        raise InputError(error) from None
    except ValueError as error:  # the folder is right, a file in it is damaged
        raise Failure(str(error)) from None
    say(f"Wrote {path}\n\n{summary_text(summary)}")


if __name__ == "__main__":
    sys.exit(main())
