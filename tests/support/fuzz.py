"""How a fuzz is run: many draws, each in a clock, its inputs hashed before and after, its outcome counted.

Every fault of a fuzz is kept with the first input that showed it, one per place in the code, so that one run of the
test tells all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import resource
import runpy
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from testbed.config.check import start
from testbed.config.settings import CheckedRun

LONGEST_S = 20.0
LONGEST_SENTENCE = 1500
MEMORY_BYTES = 4 << 30  # that a reader may take beyond what the process has: a damaged size must not fill the machine
READ, REFUSED = "read", "refused"
ran: dict[str, Counter] = {}  # fuzz -> outcome -> cases


class Refused(Exception):
    """The program said one sentence and ended with exit code 1 or 2."""


class TookTooLong(Exception):
    """The case did not end."""


@contextlib.contextmanager
def in_time(seconds: float = LONGEST_S) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TookTooLong(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """A program may set handlers of its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Whoever asks for gigabytes gets MemoryError, which no program expects."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def content_of(folder: Path) -> dict[str, str]:
    """Every name below `folder`: the hash of a file, what a link points to, or that it is a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            state = f"link to {path.readlink()}"
        else:
            state = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        found[path.relative_to(folder).as_posix()] = state
    return found


def check_sentence(sentence: str) -> None:
    """One line that can be printed and read."""
    assert sentence.strip(), "it said nothing"
    assert len(sentence.splitlines()) == 1, f"more than one line: {sentence[:400]!r}"
    assert len(sentence) < LONGEST_SENTENCE, f"{len(sentence)} characters: {sentence[:200]!r}"
    assert "Traceback" not in sentence
    sentence.encode("utf-8")


def run_in_process(program: Path, *arguments: object) -> str:
    """Run a program's main in this process and return what it printed.

    Raises:
        Refused: exit code 1 or 2 and one sentence; argparse's usage may stand before it.
    """
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        kept_signals(),
        mock.patch.object(sys, "argv", [str(program), *map(str, arguments)]),
        mock.patch.object(sys, "path", list(sys.path)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    if code == 0:
        return out.getvalue()
    return refused(code, out.getvalue(), err.getvalue(), program.name)


def refused(code: object, out: str, err: str, name: str) -> str:
    """Raise Refused with the sentence, or return the output of a program whose verdict is exit code 1."""
    assert code in (1, 2), f"exit code {code}: {err[-300:]}"
    sentences = err[err.rfind(f"{name}: error:") :] if err.startswith("usage:") else err
    lines = [line for line in sentences.splitlines() if not line.startswith(("Warning: ", f"{name}: left out"))]
    if lines and "did not do equal work" in lines[0]:  # it lists in what
        lines = lines[:1]
    if code == 1 and out:
        assert "Traceback" not in err
        return out
    check_sentence("\n".join(lines))
    raise Refused(lines[0])


def gpt2_accepts(words: list[str], ranks: int | None = 1) -> CheckedRun:
    """The run that src/gpt2.py would make of a command line on so many ranks; None: as many as the environment says.

    Raises:
        Refused: it says one sentence and ends with exit code 2.
    """
    out, err = io.StringIO(), io.StringIO()
    launcher = {} if ranks is None else {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with (
        kept_signals(),
        mock.patch.dict(os.environ, launcher),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            checked, _ = start(words)
            return checked
        except SystemExit as end:
            code = end.code or 0
    if code == 0:
        raise Refused("--help")
    assert code == 2, f"exit code {code}"
    sentence = err.getvalue().rstrip("\n")
    check_sentence(sentence)
    raise Refused(sentence)


class Fuzz:
    """Cases of one kind and what became of them."""

    def __init__(self, name: str, folder: Path | None = None, names_file: str | None = None) -> None:
        self.name, self.folder, self.names_file = name, folder, names_file
        self.counts = ran.setdefault(name, Counter())
        self.faults: dict[str, str] = {}

    def case(self, action: Callable[[], object], shown: Callable[[], str], allowed: tuple[type, ...]) -> None:
        """Run `action` once. It returns, or raises one of exactly `allowed` with one sentence."""
        before = content_of(self.folder) if self.folder else {}
        try:
            with in_time():
                try:
                    action()
                    outcome = READ
                except allowed as error:
                    outcome = REFUSED
                    assert type(error) in allowed, f"{type(error).__name__} is no sentence of ours: {error}"
                    check_sentence(str(error))
                    assert self.names_file is None or self.names_file in str(error), f"no file is named: {error}"
            assert (content_of(self.folder) if self.folder else {}) == before, "a file was changed"
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # a panic of a Rust library is no Exception
            outcome = "FAULT"
            last = traceback.extract_tb(fault.__traceback__)
            ours = [frame for frame in last if "testbed" in frame.filename] or last
            place = f"{type(fault).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
            key = place if not isinstance(fault, AssertionError) else f"{place}: {str(fault)[:40]}"
            self.faults.setdefault(key, f"{str(fault)[:300]}\n      input: {shown()[:400]}")
        self.counts[outcome] += 1

    def check(self, least_read: float = 0.0, least_refused: float = 0.0) -> None:
        """Fail with every fault; also when nearly all cases had one outcome, for such a fuzz tests one line."""
        told = "\n".join(f"  {place}: {words}" for place, words in self.faults.items())
        assert not self.faults, f"{self.name}: {len(self.faults)} kinds of faults in {self.counts.total()}\n{told}"
        total = self.counts.total()
        assert self.counts[READ] >= least_read * total, (self.name, self.counts)
        assert self.counts[REFUSED] >= least_refused * total, (self.name, self.counts)


def draw_many(strategy: Any, number: int, one_case: Callable[[Any], None]) -> None:
    """`number` draws, the same on every machine; a fault is collected by the case, so nothing is shrunk."""

    @settings(max_examples=number, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def test(value: Any) -> None:
        one_case(value)

    with bounded_memory():
        test()


def say_how_many(capsys: Any, names: list[str], at_least: int) -> None:
    """Print the counts of these fuzzes. Where all of them ran, they must be `at_least` cases; else it is skipped."""
    told = {name: ran[name] for name in names if name in ran}
    total = sum(counts.total() for counts in told.values())
    with capsys.disabled():
        for name, counts in told.items():
            print(f"\n  {counts.total():>5} {name}: " + ", ".join(f"{n} {what}" for what, n in counts.items()), end="")
        print(f"\n  {total:>5} cases\n", end="", flush=True)
    if missing := sorted(set(names) - set(told)):
        pytest.skip(f"not counted: {', '.join(missing)} did not run")
    assert total >= at_least


def bad_places(folder: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """What can stand in the place of a file, and how it comes there."""

    def put_folder(path: Path) -> None:
        path.mkdir()

    def put_circle(path: Path) -> None:
        path.symlink_to(path.name)

    def put_broken_link(path: Path) -> None:
        path.symlink_to(folder / "nowhere")

    def put_empty(path: Path) -> None:
        path.write_bytes(b"")

    def put_a_byte(path: Path) -> None:
        path.write_bytes(b"\x00")

    yield from {
        "nothing": lambda path: None,
        "a folder": put_folder,
        "a link to itself": put_circle,
        "a link to nowhere": put_broken_link,
        "an empty file": put_empty,
        "one byte": put_a_byte,
    }.items()
