"""End a program as a shell expects it: one sentence for what went wrong, and an exit code.

    0          done; `main` may return another code for what it found
    1          it failed: OSError, ArithmeticError, Failure
    2          what was typed cannot be done: InputError, and all that the parser refuses
    130, 143   ended by Ctrl-C, by SIGTERM

Any other exception, another ValueError too, is a mistake in the code: its traceback is shown, and the code is 1.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from testbed.errors import Failure, InputError, one_line, say_if_read

FAILED, MISTYPED, INTERRUPTED, STOPPED = 1, 2, 130, 143
CHECKOUT = Path(__file__).resolve().parents[2]


def name_missing_packages() -> None:
    """Let a program of this checkout that lacks a package end with one sentence in place of a traceback.

    Works before any package is imported, so with a Python that has none.
    """
    started = getattr(sys.modules["__main__"], "__file__", None)
    if started is not None and Path(started).resolve().is_relative_to(CHECKOUT):
        sys.excepthook = _name_missing_package


def _name_missing_package(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in ("", "testbed"):
        sys.__excepthook__(kind, error, trace)
        return
    refuse(
        Path(sys.argv[0]).name,
        f"no module named {package} in {sys.executable}: activate the project's environment (. .venv/bin/activate), "
        "make it with bash scripts/quickstart.sh, or run pip install -r requirements.txt",
        FAILED,
    )


def program(main: Callable[..., int | None]) -> Callable[..., int]:
    """Decorate the `main` of a program: it returns an exit code, whatever happens in it."""
    name = Path(main.__code__.co_filename).name

    @functools.wraps(main)
    def run(*arguments: object) -> int:
        try:
            with _sigterm_as_interrupt():
                code = main(*arguments)
                sys.stdout.flush()  # a reader that has gone is noticed here, not at the interpreter's own end
            return code or 0
        except KeyboardInterrupt as stop:
            say_if_read(f"\n{name}: interrupted")
            return STOPPED if stop.args else INTERRUPTED
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        except InputError as error:
            return refuse(name, sentence_of(error), MISTYPED)
        except (OSError, ArithmeticError, Failure) as error:
            return refuse(name, sentence_of(error), FAILED)

    return run


def sentence_of(error: Exception) -> str:
    """Return what an error says, an OSError without its number."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return one_line(str(error)) if isinstance(error, OSError) else str(error)


def refuse(name: str, sentence: object, code: int) -> int:
    """Say why program `name` ends with `code`, and return the code."""
    say_if_read(f"{name}: error: {sentence}")
    return code


def recorded_command(file: str, words: Sequence[str], passed_on: Sequence[str] = ()) -> str:
    """Return the command line of program `file` for a record: its own paths relative, for a record should not name a
    home folder, and `passed_on`, which follows `--`, as it was typed."""
    own = []
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        own.append(f"{flag}{equals}{os.path.relpath(value) if Path(value).is_absolute() else value}")
    return shlex.join(["python", os.path.relpath(file), *own, *(["--", *passed_on] if passed_on else [])])


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, through the clauses that remove or keep partial files."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    earlier = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
