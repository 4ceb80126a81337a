"""Ranks for the tests: forked from one process that has imported PyTorch, in place of a launch that imports it in each.

A launch by torchrun costs 3 s of imports per rank and in the launcher. What is asked of a launcher itself is tested
with that launcher, by support/programs.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.programs import REPOSITORY

TIMEOUT_S = 400.0  # a first start builds DeepSpeed's Adam
AUDIT_EVENT = "support.ranks"  # what tests/conftest.py takes for the start of a process
# a word of the tasks -> what a rank would import for it, seconds long
PRELOADED = {"optimized": ["deepspeed", "deepspeed.ops.adam"], "--compile": ["torch._inductor.compile_fx"]}


class RanksFailed(AssertionError):
    """A rank ended with another exit code than 0, or did not end; with what it printed."""


class Ranks:
    """The process that forks them. It starts with the first request and again after it has died."""

    def __init__(self, log: Path):
        self.log, self.server = log, None

    def run(self, worker: str, folder: Path, tasks: list, ranks: int, timeout_s: float = TIMEOUT_S) -> list:
        """Let the ranks carry out the tasks, one after the other in one process group, and return rank 0's results.

        Raises:
            RanksFailed: with the output of the first rank that failed.
        """
        sys.audit(AUDIT_EVENT, worker, ranks)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(tasks)
        (folder / "tasks.json").write_text(text)
        request = {"worker": worker, "folder": str(folder), "ranks": ranks, "timeout_s": timeout_s}
        request["preload"] = [
            module for word, modules in PRELOADED.items() if f'"{word}"' in text for module in modules
        ]
        codes = self._ask(request)
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        if failed:
            # a rank that was killed for another's failure says nothing
            first = min(failed, key=lambda rank: (codes[rank] is None, rank))
            end = "did not end in time" if codes[first] is None else f"ended with {codes[first]}"
            output = (folder / f"rank_{first}.txt").read_text(errors="replace")
            raise RanksFailed(f"rank {first} of {ranks} {end}: {output[-4000:]}")
        return json.loads((folder / "results.json").read_text())

    def _ask(self, request: dict) -> list[int | None]:
        if self.server is None or self.server.poll() is not None:
            self.server = self._start()
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        answer = self.server.stdout.readline()
        if not answer:
            raise RanksFailed(f"the process that forks ranks died: {self.log.read_text()[-4000:]}")
        return json.loads(answer)

    def _start(self) -> subprocess.Popen:
        paths = os.pathsep.join(str(REPOSITORY / folder) for folder in ("src", "tests"))
        with self.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "support.rank_server"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "PYTHONPATH": paths},
            )  # fmt: skip

    def close(self) -> None:
        if self.server is not None:
            self.server.kill()  # its ranks, if any, end with it
            self.server.communicate()
