"""Import PyTorch once and fork every rank that is asked for: a rank is there at once, and always fresh.

Usage: python -m support.rank_server. Each line on stdin is a request, a JSON object with
    worker      the module whose `main(folder)` each rank calls
    folder      where the rank reads its task and writes its result; it prints into rank_N.out and rank_N.err there
    ranks       the number of ranks
    preload     further modules to import before the fork
    timeout_s   after this time the ranks are killed
    grace_s     after the first failure the other ranks have this long to end by themselves
Each line on stdout is the answer: the exit codes of the ranks, null where a rank was killed for the timeout.
A rank that dies takes the others of its request with it, and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from testbed.distributed.rendezvous import free_port

END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl
LOOK_EVERY_S = 0.02


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)


def be_rank(request: dict, rank: int, port: int) -> None:
    """Run the worker in this process, which was forked for it, and end the process."""
    end_with_parent()
    folder, code = Path(request["folder"]), 1
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"rank_{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    if request["ranks"] > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"], "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in place.items()}, MASTER_ADDR="127.0.0.1")
        os.environ["LOCAL_WORLD_SIZE"] = str(request["ranks"])
    try:
        importlib.import_module(request["worker"]).main(folder)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the parent learns of it by the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(processes: list[int], timeout_s: float, grace_s: float) -> list[int | None]:
    """Wait until all have ended; a while after the first failure, or at the timeout, kill what is left."""
    codes: dict[int, int | None] = {}
    killed_at = time.monotonic() + timeout_s
    while len(codes) < len(processes):
        for process in (each for each in processes if each not in codes):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
                if codes[process] != 0:
                    killed_at = min(killed_at, time.monotonic() + grace_s)
        if time.monotonic() > killed_at:
            for process in (each for each in processes if each not in codes):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                codes[process] = None
        time.sleep(LOOK_EVERY_S)
    return [codes[process] for process in processes]


def serve() -> None:
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an imported library prints is not an answer
    for line in sys.stdin:
        request = json.loads(line)
        for module in (request["worker"], *request["preload"]):
            with contextlib.suppress(Exception):  # a rank that needs it fails with it, and says why
                importlib.import_module(module)
        gc.freeze()  # what is imported lives on: no rank need look at it, or copy its memory, to collect garbage
        port, processes = free_port(), []
        for rank in range(request["ranks"]):
            process = os.fork()
            if process == 0:
                be_rank(request, rank, port)
            processes.append(process)
        answers.write(json.dumps(wait_for(processes, request["timeout_s"], request["grace_s"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
