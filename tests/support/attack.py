"""Read a hostile file and look for what it did: programs started, files written, no end."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from support.fuzz import check_sentence, in_time
from testbed.distributed.process_group import root_cause

LONGEST_S = 10.0

# audit events of starting a program, changing the disk or connecting
FORBIDDEN = {
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn", "subprocess.Popen", "pty.spawn"),
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("shutil.copyfile", "shutil.copytree", "shutil.move", "shutil.rmtree", "socket.connect", "socket.bind"),
    *("sqlite3.enable_load_extension", "sqlite3.load_extension", "ctypes.dlopen", "os.putenv", "webbrowser.open"),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
seen: list[str] | None = None  # None: no case runs


def audit(event: str, arguments: tuple) -> None:
    if seen is None:
        return
    if event in FORBIDDEN or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
        seen.append(f"{event} {arguments!r:.200}")


sys.addaudithook(audit)


class Drill:
    """Cases of one reader. `check` tells all faults together."""

    def __init__(self, tmp_path: Path) -> None:
        self.given, self.outside = tmp_path / "given", tmp_path / "outside"
        self.given.mkdir()
        self.outside.mkdir()
        self.canary = self.outside / "canary"
        self.faults: list[str] = []
        self.outcomes: Counter = Counter()

    def case(self, what: str, read: Callable[[], object], errors: tuple[type, ...], must_refuse: bool = False) -> None:
        global seen
        before, outcome, fault = sorted(self.outside.iterdir()), "read", None
        seen = events = []
        try:
            with in_time(LONGEST_S):
                read()
        except errors as error:
            outcome = "refused"
            try:
                check_sentence(root_cause(error) if isinstance(error, CheckpointException) else str(error))
            except (AssertionError, UnicodeError) as wrong:
                fault = f"no sentence: {wrong}"
        except Exception as error:
            outcome, fault = "FAULT", f"{type(error).__name__}: {error!s:.300}"
        finally:
            seen = None
        if events:
            fault = f"it did {events}"
        elif sorted(self.outside.iterdir()) != before:
            fault = "files were changed"
        elif must_refuse and outcome == "read":
            fault = "it was not refused"
        self.outcomes[outcome] += 1
        if fault is not None:
            self.faults.append(f"{what}: {fault}")

    def check(self, least_refused: int) -> None:
        told = "\n".join(f"  {fault[:600]}" for fault in self.faults[:20])
        assert not self.faults, f"{len(self.faults)} of {self.outcomes.total()}, {dict(self.outcomes)}\n{told}"
        assert self.outcomes["refused"] >= least_refused, self.outcomes
