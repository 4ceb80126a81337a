"""Be one rank of gpt2.py, or of another program, in a process that has imported PyTorch before."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

from testbed.distributed import launch


def main(folder: Path) -> None:
    task = json.loads((folder / "tasks.json").read_text())
    os.chdir(task["cwd"])
    program = task["program"]
    sys.argv = [program, *task["arguments"]]
    launch._BEGAN_S = time.monotonic()  # else the start would count from the import
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__")
