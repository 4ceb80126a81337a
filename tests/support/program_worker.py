"""Be one rank of gpt2.py, in a process that has imported PyTorch before."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

from support.programs import PROGRAM
from testbed.distributed import launch


def main(folder: Path) -> None:
    task = json.loads((folder / "tasks.json").read_text())
    os.chdir(task["cwd"])
    sys.argv = [str(PROGRAM), *task["arguments"]]
    launch._BEGAN_S = time.monotonic()  # else the start would count from the import
    runpy.run_path(str(PROGRAM), run_name="__main__")
