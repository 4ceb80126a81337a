#!/usr/bin/env python3
"""Say which rank and which cause hold a run back, what that costs, how sure it is, and what to try.

    python scripts/diagnose.py checkpoint/ddp
    python scripts/diagnose.py checkpoint/ddp --json diagnosis.json

It reads training_metrics.json, in which a run on the CPU records each rank's own time of every phase
(--watch_collectives). Of a run on CUDA it tells which rank the others wait for in collectives, if it was trained with
--watch_collectives every_step. See docs/diagnosis.md for how often it is right.

Exit code: 0 said, whatever stands out; 1 the file cannot say it, or writing failed; 2 what was typed is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.sweep_flags import parser_of
from testbed.errors import InputError, say
from testbed.io import write_json
from testbed.program import program


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, or its training_metrics.json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings")
    return parser.parse_args(words)


@program
def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    from testbed.metrics.file import read_metrics
    from testbed.run_folder import METRICS

    path = arguments.run / METRICS if arguments.run.is_dir() else arguments.run
    if not path.exists():
        raise InputError(f"{path} does not exist; RUN is the folder of a run, its --checkpoint_path")
    if arguments.json and arguments.json.exists() and arguments.json.samefile(path):
        raise InputError(f"--json {arguments.json} is the run's own file; name another")
    metrics = read_metrics(path)
    from testbed.analysis.diagnosis.diagnose import diagnose  # numpy and scipy: a second that --help does not owe
    from testbed.analysis.diagnosis.words import json_of, text_of

    diagnosis = diagnose(metrics)
    say(text_of(diagnosis))
    if arguments.json:
        write_json(arguments.json, {"schema": 1, **json_of(diagnosis)}, f"--json {arguments.json}")
    return 0 if diagnosis.unknown is None else 1


if __name__ == "__main__":
    sys.exit(main())
