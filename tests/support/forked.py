"""Start gpt2.py in processes that have PyTorch already, so that a test can signal, stop and kill them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

from support.programs import PROGRAM
from support.ranks import AUDIT_EVENT
from testbed.distributed import launch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "testbed.train.run", "testbed.strategies.ddp", "support.forked"])


class Forked:
    """A process as subprocess.Popen has it: forked from one that has imported PyTorch."""

    def __init__(self, arguments: list[str], variables: dict[str, str], output: Path):
        """Args: variables: of the environment; what BEFORE holds is run first, to plant something."""
        sys.audit(AUDIT_EVENT, "gpt2.py", 1)
        task = arguments, {**os.environ, **variables}, str(Path.cwd()), str(output)
        self._process = CONTEXT.Process(target=be_program, args=task, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self._process.join(0)
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("gpt2.py", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def be_program(arguments: list[str], variables: dict[str, str], folder: str, output: str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    sys.argv = [str(PROGRAM), *arguments]
    exec(variables.get("BEFORE", ""), {})
    launch._BEGAN_S = time.monotonic()  # else the start would count from the import
    runpy.run_path(str(PROGRAM), run_name="__main__")
