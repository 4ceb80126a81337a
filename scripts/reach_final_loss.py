#!/usr/bin/env python3
"""How much sooner one configuration is where another one ends: seed by seed, to the loss at which that run ended.

    python scripts/reach_final_loss.py muon/ --of adamw/ --names Muon AdamW

Both sides are folders of runs that validated on the way (--eval_every), with the same seeds. Prints a Markdown table:
where each run of --of ended, after how many steps the other's run of that seed had the same validation loss, and which
share of the tokens and of the time that took. What differs beside the recipe (machine, threads, commit) is said below.
Exit code: 0, 1 a run never got there, 2 what was typed cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # `testbed` lies there, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.errors import say


def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="A", help="runs of the configuration it is about")
    parser.add_argument(
        "--of", type=Path, nargs="+", required=True, metavar="B", help="runs whose last loss is to reach"
    )
    parser.add_argument("--names", nargs=2, default=("A", "B"), metavar=("A", "B"), help="what the table calls them")
    arguments = parser.parse_args()
    from testbed.analysis.comparison.confounders import confounders
    from testbed.analysis.comparison.files import arms_from
    from testbed.analysis.scaling.final_loss import final_loss_table, pairs_of_seeds

    try:
        a, b, unreadable = arms_from(arguments.runs, arguments.of)
        if unreadable:
            raise ValueError(unreadable[0])
        for arm in (a, b):
            if left_out := [run for run in arm.runs if run not in arm.measured_runs]:
                raise ValueError(
                    f"{left_out[0].path} is not complete, or instrumented; name the folders of the other runs alone"
                )
        pairs = pairs_of_seeds(a.runs, b.runs)
    except ValueError as error:
        say(f"reach_final_loss.py: error: {error}", file=sys.stderr)
        return 2
    say(final_loss_table(pairs, *arguments.names))
    for found in confounders(a.runs, b.runs):
        say(f"Differs beside the recipe: {found.what}, {found.against}.")
    return 1 if any(pair.reached is None for pair in pairs) else 0


if __name__ == "__main__":
    sys.exit(main())
