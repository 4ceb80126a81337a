#!/usr/bin/env python3
"""Make the JSON schema of training_metrics.json and the tables of docs/metrics_file.md from testbed/metrics/fields/.

python scripts/generate_metrics_schema.py            # after a field was added, removed or explained in other words
python scripts/generate_metrics_schema.py --check    # change nothing; exit code 1 where a file is not up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from testbed.config.flag_parser import FlagParser
from testbed.errors import say
from testbed.io import SOURCE, write_text
from testbed.metrics import schema

REPOSITORY = SOURCE.parent
PAGE = REPOSITORY / "docs" / "metrics_file.md"


def main() -> int:
    parser = FlagParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="say which files are not up to date, and change none")
    only_checks = parser.parse_args().check
    made = {
        schema.SCHEMA_FILE: schema.schema_text(),
        PAGE: schema.page_with_fields(PAGE.read_text(encoding="utf-8")),
    }
    old = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in old:
        if not only_checks:
            write_text(path, made[path])
        say(f"{path.relative_to(REPOSITORY)}: {'is not up to date' if only_checks else 'made again'}")
    return int(only_checks and bool(old))


if __name__ == "__main__":
    sys.exit(main())
