#!/usr/bin/env python3
"""Write src/testbed/planner/published_score.json: how well the planner predicts the published runs that it did not see.

    python scripts/maintain/update_planner.py    # 10 s; after devices.json, a formula, a deviation or a row changed

The width of every interval comes from that file, and the table of docs/planner.md (scripts/maintain/update_docs.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.errors import say
from testbed.io import write_json
from testbed.planner.rows import OWN_COPY
from testbed.planner.score import score_file
from testbed.planner.step_time import SCORE_FILE
from testbed.program import program


@program
def main() -> None:
    text, result = score_file(OWN_COPY)
    write_json(SCORE_FILE, result, str(SCORE_FILE))
    say(text)


if __name__ == "__main__":
    sys.exit(main())
