#!/usr/bin/env python3
"""Merge the traces of all ranks of a run with --profile into one timeline, which ui.perfetto.dev opens.

    python scripts/profiling/merge_traces.py checkpoint/ddp --out trace.json.gz

Each rank is a process. Its step and phases have a track of their own, and arrows join matching collectives. Clocks are
aligned by collectives; the uncertainty is printed and stored in the file. Memory does not grow with the ranks.

Exit code: 0; 1 --out cannot be written; 2 RUN holds no trace, or a file is not a trace or is damaged.
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
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    out_help = "the timeline; packed if the name ends with .gz"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=out_help)
    return parser.parse_args()


@program
def main() -> None:
    arguments = parse_arguments()
    from testbed.analysis.profiles.merged_trace import merge

    with holding_together(f"{arguments.run}: a trace"):
        text = merge(arguments.run, arguments.out)
    say(text)


if __name__ == "__main__":
    sys.exit(main())
