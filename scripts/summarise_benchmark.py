#!/usr/bin/env python3
"""Write summary.json into the folder of scripts/benchmark_gpu.sh, which calls this at its end.

    python scripts/summarise_benchmark.py checkpoint/benchmark_gpu --device cuda --seconds 480 --deadline_s 520

Exit code: 0, 1 a step failed or no longer fitted, two runs do not agree, or a run's file cannot be read, 2 there is
nothing to summarise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import not_negative
from testbed.errors import Failure, say
from testbed.program import program


@program
def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="what benchmark_gpu.sh wrote to")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True, help="what was measured")
    parser.add_argument("--seconds", type=not_negative, required=True, help="how long all of it took")
    parser.add_argument(
        "--deadline_s", type=not_negative, required=True, metavar="SECONDS", help="how long it might have taken"
    )
    arguments = parser.parse_args()
    from testbed.analysis.benchmark_summary import summary
    from testbed.io import write_text

    if not (arguments.folder / "steps.tsv").exists():
        raise ValueError(f"{arguments.folder} holds no steps.tsv of a benchmark")
    found = {"device": arguments.device, "seconds": arguments.seconds, "deadline_s": arguments.deadline_s}
    try:
        found |= summary(arguments.folder)
    except ValueError as error:  # the folder is right, a file in it is damaged
        raise Failure(str(error)) from None
    write_text(arguments.folder / "summary.json", json.dumps(found, indent=2) + "\n")
    print_summary(found)
    say(f"{len(found['failed'])} did not pass, {arguments.seconds} s; {arguments.folder / 'summary.json'}")
    for name in found["failed"]:
        say(f"did not pass: {name}")
    return 1 if found["failed"] else 0


def print_summary(found: dict) -> None:
    for precision, rate in found["matrix_rate"].items():
        say(f"matrix product, {precision}: {rate['flops_per_s'] / 1e12:,.2f} TFLOP/s")
    for name, run in found["runs"].items():
        if run["tokens_per_s"]:
            shares = [f"{run[key]:.1%}" if run[key] else "n/a" for key in ("mfu", "mfu_of_matrix_rate")]
            say(f"{name:28s} {run['tokens_per_s']:>12,.0f} tokens/s  MFU {shares[0]}, of the matrix rate {shares[1]}")
    for check in found["agreement"]:
        words = {True: "agrees", False: "DOES NOT AGREE", None: "not compared"}[check["holds"]]
        largest = (
            "" if check["largest_difference"] is None else f", largest difference {check['largest_difference']:.1e}"
        )
        say(f"{check['run']} with {check['reference']}: {words}{largest}")


if __name__ == "__main__":
    sys.exit(main())
