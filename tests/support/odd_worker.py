"""Do as a rank what a test of support/ranks.py asks for: end well, raise, be killed or never end."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path


def main(folder: Path) -> None:
    (task,) = json.loads((folder / "tasks.json").read_text())
    if os.environ.get("RANK", "0") == str(task.get("rank", 0)):
        if task["does"] == "raise":
            raise ValueError("what the rank said")
        if task["does"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if task["does"] == "hang":
            time.sleep(600)
    elif "rank" in task:
        time.sleep(600)  # it waits for the other
    (folder / f"process_{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    if os.environ.get("RANK", "0") == "0":
        (folder / "results.json").write_text(json.dumps([os.environ.get("WORLD_SIZE", "1")]))
