"""A few real lines of each log that the audit reads; README.md names their sources and licences."""

from pathlib import Path

FOLDER = Path(__file__).parent
LOGS = sorted(FOLDER.glob("*.txt"))
