"""Run a fuzz: many draws, each under a clock and with bounded memory, its inputs hashed before and after.

Every fault is kept with the first input that showed it, one per place in the code, so that one run of a test tells all
of them. The draws are the same on every machine. The hypothesis profile "all", which `bash scripts/test.sh --all` sets,
draws the whole number; without it a fuzz draws a fifth.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import stat
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, given, settings

from support.mutations import broken_json
from support.programs import kept_signals, run_here
from testbed.config.check import check_command_line
from testbed.config.settings import CheckedRun
from testbed.errors import InputError
from testbed.io import NotAFile

LONGEST_S = 20.0
LONGEST_SENTENCE = 1500
MEMORY_BYTES = 4 << 30  # that a reader may take beyond what the process has: a damaged size must not fill the machine
READ, REFUSED, FAULT = "read", "refused", "fault"
LEAST_SHARE = 0.02  # of the draws that an outcome must have: a fuzz that is always refused tests one line
EVERY_DAY = 5  # one draw in this many
LARGEST_HASHED = 1 << 30
OS_ERRORS = (FileNotFoundError, IsADirectoryError, OSError, NotAFile)  # what opening a file raises


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
def bounded_memory() -> Iterator[None]:
    """Raise MemoryError, which no program expects, where gigabytes are asked for."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def content_of(folder: Path) -> dict[str, str]:
    """Every name below `folder`: the hash of a file, what a link points to, or what else it is."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found_there = path.lstat()
        if path.is_symlink():
            state = f"link to {path.readlink()}"
        elif not path.is_file() or found_there.st_size > LARGEST_HASHED:
            state = f"{stat.filemode(found_there.st_mode)}, {found_there.st_size} bytes"
        else:
            state = hashlib.sha256(path.read_bytes()).hexdigest()
        found[path.relative_to(folder).as_posix()] = state
    return found


def check_sentence(sentence: str) -> None:
    """One line that can be printed and read."""
    assert sentence.strip(), "it said nothing"
    assert len(sentence.splitlines()) == 1, f"more than one line: {sentence[:400]!r}"
    assert len(sentence) < LONGEST_SENTENCE, f"{len(sentence)} characters: {sentence[:200]!r}"
    assert "Traceback" not in sentence
    sentence.encode("utf-8")


def run_in_process(program: Path | str, *arguments: object) -> str:
    """Return what a program printed, run in this process.

    Raises:
        Refused: exit code 1 or 2 and one sentence; argparse's usage may stand before it.
    """
    done = run_here(program, *arguments, cwd=Path.cwd())
    return refused(done.returncode, done.stdout, done.stderr, Path(program).name) if done.returncode else done.stdout


def refused(code: object, out: str, err: str, name: str) -> str:
    """Raise Refused with the sentence, or return the output of one whose verdict is exit code 1 or 3."""
    assert code in (1, 2) or (code == 3 and out and not err), f"exit code {code}: {err[-300:]}"
    if code == 3:
        return out
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
    """Return the run that src/gpt2.py would make of a command line; `ranks` None: as many as the environment says.

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
            checked, _ = check_command_line(words)
            return checked
        except SystemExit as end:
            code = end.code or 0
    if code == 0:
        raise Refused("--help")
    assert code == 2, f"exit code {code}"
    sentence = err.getvalue().rstrip("\n")
    check_sentence(sentence)
    raise Refused(sentence)


def draws_all() -> bool:
    return settings.get_current_profile_name() == "all"


class Fuzz:
    """Cases of one kind and what became of them.

    `allowed`: what a case may raise, with one sentence. `folder`: left as it is by each case. `names_file`: a word that
    the sentence must have.
    """

    def __init__(
        self, name: str, allowed: tuple[type, ...], folder: Path | None = None, names_file: str | None = None
    ) -> None:
        self.name, self.allowed, self.folder, self.names_file = name, allowed, folder, names_file
        self.counts: Counter[str] = Counter()
        self.faults: dict[str, str] = {}

    def draw(self, strategy: Any, number: int, one_case: Callable[[Any], None]) -> None:
        """Call `one_case` with this number of draws, or a fifth; it calls `case`. Nothing is shrunk."""
        drawn = number if draws_all() else max(10, number // EVERY_DAY)

        @settings(max_examples=drawn, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(strategy)
        def test(value: Any) -> None:
            one_case(value)

        with bounded_memory():
            test()

    def case(self, action: Callable[[], object], shown: object) -> None:
        """Run `action` once. It returns, or raises one of exactly `allowed` with one sentence."""
        before = content_of(self.folder) if self.folder else {}
        try:
            with in_time():
                try:
                    action()
                    outcome = READ
                except self.allowed as error:
                    outcome = REFUSED
                    assert type(error) in self.allowed, f"{type(error).__name__} is not a sentence of ours: {error}"
                    check_sentence(str(error))
                    assert self.names_file is None or self.names_file in str(error), f"no file is named: {error}"
            assert (content_of(self.folder) if self.folder else {}) == before, "a file was changed"
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # a panic of a Rust library is not an Exception
            outcome = FAULT
            self._keep(fault, shown)
        self.counts[outcome] += 1

    def _keep(self, fault: BaseException, shown: object) -> None:
        frames = traceback.extract_tb(fault.__traceback__)
        ours = [frame for frame in frames if "testbed" in frame.filename] or frames
        place = f"{type(fault).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
        key = place if not isinstance(fault, AssertionError) else f"{place}: {str(fault)[:40]}"
        self.faults.setdefault(key, f"{str(fault)[:300]}\n      input: {repr(shown)[:400]}")

    def check(self, *outcomes: str) -> None:
        """Fail with every fault; where all was drawn, also when one of these outcomes is too rare."""
        told = "\n".join(f"  {place}: {words}" for place, words in self.faults.items())
        assert not self.faults, f"{self.name}: {len(self.faults)} kinds of faults in {self.counts.total()}\n{told}"
        assert self.counts.total(), f"{self.name}: nothing was drawn"
        if draws_all():
            assert all(self.counts[each] >= LEAST_SHARE * self.counts.total() for each in outcomes), self.counts


@dataclass
class Reader:
    """A file and what reads it.

    Attributes:
        prepare: puts whole files into a folder.
        subject: the one of them that is broken.
        read: does with the folder what the program does with it, not only parse.
        broken: makes the strategy from the file's whole content.
        errors: what may be raised, with one sentence.
        os_errors: what also may, where something else stands in the file's place; the program says it in a sentence.
        is_named: the sentence must name the file; not where its values are held to the rules of flags.
        outcomes: those that must not be rare; a file under a hash is always refused.
        in_pieces: it is read as far as it goes. No size is too large, and a disk that fails does not say where.
    """

    prepare: Callable[[Path], object]
    subject: str
    read: Callable[[Path], object]
    broken: Callable[[bytes], Any] = lambda content: broken_json(json.loads(content))
    errors: tuple[type, ...] = (InputError,)
    os_errors: tuple[type, ...] = ()
    is_named: bool = True
    outcomes: tuple[str, ...] = (READ, REFUSED)
    in_pieces: bool = False


DRAWS = 90  # of each file that is read


def break_in_every_way(name: str, reader: Reader, folder: Path) -> None:
    """Check that the reader takes each broken file or refuses it in one sentence, and leaves all files as they are."""
    folder.mkdir()
    reader.prepare(folder)
    subject = folder / reader.subject
    reader.read(folder)  # the whole file is read
    fuzz = Fuzz(name, reader.errors, folder, subject.name if reader.is_named else None)

    def one_file(content: bytes) -> None:
        subject.write_bytes(content)
        fuzz.case(lambda: reader.read(folder), content)

    fuzz.draw(reader.broken(subject.read_bytes()), DRAWS, one_file)
    fuzz.allowed += reader.os_errors
    for place, put in BAD_PLACES.items():
        if reader.in_pieces and place in ("a giant", "a link to /proc/self/mem"):
            continue
        remove(subject)
        put(subject)
        fuzz.case(lambda: reader.read(folder), place)
    fuzz.check(*reader.outcomes)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def bind(path: Path) -> None:
    with contextlib.chdir(path.parent):  # the name of a socket is short
        socket.socket(socket.AF_UNIX).bind(path.name)


def make_giant(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)  # of holes


# what can stand in the place of a file: a FIFO is waited for, a device has no end
BAD_PLACES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "an empty file": lambda path: path.write_bytes(b""),
    "one byte": lambda path: path.write_bytes(b"\x00"),
    "a FIFO": os.mkfifo,
    "a socket": bind,
    "a giant": make_giant,
    **{
        f"a link to {there}": partial(Path.symlink_to, target=there)
        for there in ("/dev/zero", "/dev/tty", "/proc/self/mem")
    },
}
