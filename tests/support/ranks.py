"""Ranks for the tests: forked from one process that has imported PyTorch, in place of a launch that imports it in each.

A launch by torchrun costs 3 s of imports per rank and in the launcher. What is asked of a launcher itself is tested
with that launcher, by support/programs.py.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from support.programs import PROGRAM, REPOSITORY
from testbed.distributed.processes import Ended, Stop

TIMEOUT_S = 400.0  # a first start builds DeepSpeed's Adam
AUDIT_EVENT = "support.ranks"  # what tests/conftest.py takes for the start of a process
# what FSDP and DTensor would import in each rank
FOR_ALL = ["torch._dynamo", "testbed.strategies.mesh", "testbed.strategies.pipeline"]
# a word of the tasks -> what a rank would import for it, seconds long
PRELOADED = {
    "optimized": ["deepspeed.ops.adam", "deepspeed.runtime.zero.muon.muon_optimizer"],
    "--compile": ["torch._inductor.compile_fx"],
}


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
        codes = self._carry_out(worker, folder, tasks, ranks, timeout_s, grace_s=0)
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        if failed:
            # a rank that was killed for another's failure says nothing
            first = min(failed, key=lambda rank: (codes[rank] is None, rank))
            end = "did not end in time" if codes[first] is None else f"ended with {codes[first]}"
            output = "".join((folder / f"rank_{first}.{name}").read_text(errors="replace") for name in ("out", "err"))
            raise RanksFailed(f"rank {first} of {ranks} {end}: {output[-4000:]}")
        return json.loads((folder / "results.json").read_text())

    def run_program(
        self, arguments: list[str], folder: Path, ranks: int = 1, cwd: Path | None = None, plant: list | None = None,
        program: str = str(PROGRAM),
    ) -> subprocess.CompletedProcess:  # fmt: skip
        """Run gpt2.py to its end and return what a launcher would: the first exit code but 0, what all ranks said.

        Args:
            plant: for `main` of support/planted_slowdowns.py; None: no pause is planted.
            program: another one, by its path or as a module's name.
        """
        task = {"arguments": arguments, "cwd": str(cwd or folder.parent), "plant": plant, "program": program}
        worker = "support.planted_slowdowns" if plant else "support.program_worker"
        codes = self._carry_out(worker, folder, task, ranks, TIMEOUT_S, grace_s=30)
        code = next((code for code in codes if code), 1 if None in codes else 0)
        said = [
            "".join((folder / f"rank_{rank}.{name}").read_text(errors="replace") for rank in range(ranks))
            for name in ("out", "err")
        ]
        return subprocess.CompletedProcess(arguments, code, *said)

    def in_place_of_launches(self, folder: Path) -> Callable[..., Ended]:
        """Return a function for tests to put in the place of `testbed.distributed.processes.run`, without its stop."""
        numbers = itertools.count()

        def run(
            command: Sequence[str], log: Path, stop: Stop, timeout_s: float | None = None,
            typed: Sequence[str] | None = None, *_: object, cwd: Path | None = None, **options: object,
        ) -> Ended:  # fmt: skip
            started_s = time.perf_counter()
            launcher = [number for number, word in enumerate(command) if word.startswith("--nproc-per-node=")]
            words = list(command[launcher[0] + 1 if launcher else list(command).index(sys.executable) + 1 :])
            ranks = int(command[launcher[0]].partition("=")[2]) if launcher else 1
            program, *arguments = words[1:] if words[0] == "-m" else words
            place = folder / f"launch_{next(numbers)}"
            done = self.run_program(arguments, place, ranks, cwd or Path.cwd(), program=program)
            log.write_text(f"$ {shlex.join(typed or command)}\n{done.stdout}{done.stderr}")
            return Ended(done.returncode, time.perf_counter() - started_s)

        return run

    def _carry_out(
        self, worker: str, folder: Path, tasks: object, ranks: int, timeout_s: float, grace_s: float
    ) -> list[int | None]:
        sys.audit(AUDIT_EVENT, worker, ranks)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(tasks)
        (folder / "tasks.json").write_text(text)
        preload = [module for word, modules in PRELOADED.items() if f'"{word}"' in text for module in modules]
        request = {"worker": worker, "folder": str(folder), "ranks": ranks, "preload": [*FOR_ALL, *preload]}
        return self._ask({**request, "timeout_s": timeout_s, "grace_s": grace_s})

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
