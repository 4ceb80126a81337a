#!/usr/bin/env python3
"""Audit public tables and logs of other projects, and measure how often the audit errs on them.

    python scripts/audit_field.py                       # get the files, audit each, write findings.json
    python scripts/audit_field.py --sample 60           # print findings to review by hand, in random order
    python scripts/audit_field.py --plant 100           # change figures in copies, count the changes that are found
    python scripts/audit_field.py --clean 100           # rows found clean by hand: count the false alarms
    python scripts/audit_field.py --mutate 5000         # broken copies: count the tracebacks
    python scripts/audit_field.py --offline --folder D  # use what is in D, download nothing

docs/results/audits/material.json lists the files by repository, commit and sha256; --folder keeps them, about 100 MB.
Each is audited alone: no two files are compared. Trials go to trials.json. docs/audits shows both after
scripts/maintain/update_docs.py; the reviews are written by hand into reviews.json.
Exit code 0: done. 1: a file cannot be downloaded or written. 2: what was typed cannot be done.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import not_negative, positive
from testbed.errors import say
from testbed.io import now_utc, read_json, write_json
from testbed.program import program, recorded_command

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "docs" / "results" / "audits"


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sample", type=positive, metavar="N", help="print N findings that are to be reviewed")
    what.add_argument("--plant", type=positive, metavar="N", help="change N figures of each group of files")
    what.add_argument("--clean", type=positive, metavar="N", help="audit N rows of files listed as clean")
    what.add_argument("--mutate", type=positive, metavar="N", help="audit N broken files")
    add("--seed", type=not_negative, default=0, metavar="N", help="of what is drawn (default: %(default)s)")
    add("--folder", type=Path, default=Path("checkpoint/field"), metavar="DIR",
        help="where the files are kept (default: %(default)s)")  # fmt: skip
    add("--offline", action="store_true", help="download nothing")
    return parser.parse_args(words)


@program
def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    arguments = parse_arguments(words)
    from testbed.experiments.field_audit import page, trials
    from testbed.experiments.field_audit.examine import examine
    from testbed.experiments.field_audit.material import get_all, read_material
    from testbed.experiments.field_audit.review import in_random_order

    if arguments.sample:
        reviews = read_json(RESULTS / page.REVIEWS)
        findings = in_random_order(read_json(RESULTS / page.FINDINGS)["findings"], arguments.seed)
        for finding in findings[: arguments.sample]:
            say("\n".join(page.in_words(finding, reviews.get(finding["id"]))))
        return 0
    materials = read_material(RESULTS / page.MATERIAL)
    get_all(materials, arguments.folder, arguments.offline)
    from testbed.metrics.environment import commit

    git_commit, is_dirty = commit()
    head = {
        "timestamp_utc": now_utc(), "git_commit": git_commit, "git_dirty": is_dirty,
        "command": recorded_command("scripts/audit_field.py", words),
    }  # fmt: skip
    if trial := trials.chosen(arguments, materials):
        write_trial(RESULTS / page.TRIALS, trial | head)
        for result in trial["results"]:
            say(f"{trial['what']}, {result['material']}: {result['said']}")
        return 0
    content = examine(materials, arguments.folder)
    write_json(RESULTS / page.FINDINGS, head | content, str(RESULTS / page.FINDINGS))
    say(f"{len(content['findings'])} findings in {sum(file['read'] for file in content['files'])} files")
    return 0


def write_trial(path: Path, trial: dict[str, Any]) -> None:
    """Put a trial in the place of the last one of its kind."""
    trials = read_json(path) if path.exists() else {}
    write_json(path, trials | {trial["what"]: trial}, str(path))


if __name__ == "__main__":
    sys.exit(main())
