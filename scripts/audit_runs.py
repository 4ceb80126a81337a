#!/usr/bin/env python3
"""Answer a claim about training speed, ours or others': it stands, it does not stand, or the files cannot tell.

    python scripts/audit_runs.py checkpoint/baseline checkpoint/optimized --claim 2.9   # or folders of repeats
    python scripts/audit_runs.py README.md --a DDP --b ZeRO-2 --claim 2.9                # two rows of a table
    python scripts/audit_runs.py results/sweep                              # every arm of a sweep, by its protocol
    python scripts/audit_runs.py README.md results.csv their_logs           # what files contradict

The page of a claim has the ratio in question, each condition of both sides (same, differs, unknown), and the reasons.
That of other files has the claims that do not stand, corrected figures, what cannot be known, and what was read.
docs/audit.md lists the files that are read, and the rules.
Exit code 0: the claim stands, or no claim of the files falls. 1: a claim does not stand, or --json cannot be written.
2: a file or a name is wrong. 3: the files cannot tell whether the claim stands.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.errors import InputError, say
from testbed.io import write_json
from testbed.program import program


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of a file is empty")
    return Path(text)


def ratio(text: str) -> float:
    """Return the ratio that was typed: 2.9, 2.9x or 2,9."""
    if re.search(r",\d{3}(?!\d)", text):
        raise argparse.ArgumentTypeError(f"{text} may be thousands or thousandths: write it without a comma")
    return float(text.strip().lower().rstrip("x\N{MULTIPLICATION SIGN}").replace(",", "."))


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=_path, nargs="*", metavar="FILE", help="files of runs, or folders that hold them")
    parser.add_argument("--baseline", type=Path, metavar="FILE",
                        help="what all others are compared with (default: the first; in a folder of several, its "
                        "baseline on the fewest ranks)")  # fmt: skip
    parser.add_argument("--claim", type=ratio, metavar="RATIO",
                        help="how many times as fast the second is said to be: 2.9")  # fmt: skip
    parser.add_argument(
        "--a", metavar="NAME", help="what is compared with: a row of the table, by a cell or words of it, or a file"
    )
    parser.add_argument("--b", metavar="NAME", help="what is said to be faster, likewise")
    parser.add_argument("--details", action="store_true", help="print every finding in full behind the summary")
    parser.add_argument("--columns", action="append", default=[], metavar="QUANTITY=HEADING,...",
                        help="what the columns of a table in Markdown or CSV are, where their headings do not say it: "
                        "'devices=#GPUs,length=2048' (a wrong quantity is answered with the list)")  # fmt: skip
    parser.add_argument("--json", type=_path, metavar="FILE", help="write the findings to FILE too")
    arguments = parser.parse_args()
    if not arguments.files and arguments.baseline is None and arguments.a and arguments.b:
        arguments.files, arguments.a, arguments.b = [Path(arguments.a), Path(arguments.b)], None, None
    if not arguments.files:
        parser.error("FILE is missing: give a table, or two files or folders of runs")
    return arguments


@program
def main() -> int:
    arguments = parse_arguments()
    from testbed.audit import claims
    from testbed.audit.answer import EXIT_CODES
    from testbed.audit.claim_page import answer_in_json, claim_page
    from testbed.audit.page import details, page
    from testbed.audit.tables.read import columns_named

    columns = columns_named(arguments.columns) if arguments.columns else None
    if arguments.claim is not None and not 0 < arguments.claim < math.inf:
        raise InputError(f"--claim {arguments.claim:g}: a ratio is above 0, such as 2.9")
    answered = None
    if arguments.baseline is not None and (arguments.claim or arguments.a or arguments.b):
        raise InputError(
            "--baseline is for folders and several files; of a claim the first is what the second is against"
        )
    if arguments.baseline is None:
        answered = claims.answered(arguments.files, arguments.claim, (arguments.a, arguments.b), columns)
    if answered is not None:
        say(claim_page(answered))
        if arguments.details:
            say(f"\n{details(answered.findings)}")
        if arguments.json:
            write_json(arguments.json, answer_in_json(answered), f"--json {arguments.json}")
        return EXIT_CODES[answered.verdict]
    if arguments.claim is not None:
        raise InputError("--claim is about two things: give two files or folders of runs, or --a and --b for two rows")
    findings, num_runs, num_tables, checked = claims.audit_and_count(arguments.files, arguments.baseline, columns)
    say(page(findings, num_runs, num_tables, checked))
    if arguments.details:
        say(f"\n{details(findings)}")
    if arguments.json:
        content = {"findings": [asdict(finding) for finding in findings]}
        write_json(arguments.json, content, f"--json {arguments.json}")
    return 1 if any(finding.severity == claims.FAILS for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
