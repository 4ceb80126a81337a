"""Read the events of a trace one after the other, so that a file of any size takes little memory. No torch."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from testbed.errors import Failure, InputError, first_line
from testbed.io import open_regular

CHUNK = 1 << 20  # characters
LARGEST_EVENT = 1 << 24
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_DECODER = json.JSONDecoder()


@contextlib.contextmanager
def opened_trace(path: Path) -> Iterator[EventStream]:
    """Open a trace in JSON, plain or .gz.

    Raises:
        InputError: the file does not exist, or is not a trace.
        Failure: the file is damaged, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            unpacked = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            with io.TextIOWrapper(unpacked, encoding="utf-8") as source:
                yield EventStream(path, source)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise Failure(f"{path} cannot be read as a trace ({first_line(error)})") from None


class EventStream:
    """The events of a trace, to be iterated once. `head` has the keys that come before them."""

    def __init__(self, path: Path, source: TextIO):
        self._path, self._source = path, source
        self._buffer = ""
        while (found := _EVENTS.search(self._buffer)) is None:
            if len(self._buffer) > LARGEST_EVENT or not self._fill():
                raise InputError(f"{path} is not a trace of torch.profiler: it holds no traceEvents")
        self.head = self._head(self._buffer[: found.start()])
        self._place = found.end()

    def _head(self, text: str) -> dict[str, Any]:
        try:
            head = json.loads(text.rstrip().rstrip(",") + "}")
        except ValueError:
            raise InputError(
                f"{self._path} is not a trace of torch.profiler: the text before traceEvents is not JSON"
            ) from None
        return head if isinstance(head, dict) else {}

    def _fill(self) -> bool:
        more = self._source.read(CHUNK)
        self._buffer += more
        return bool(more)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (begins := self._next()) != "]":
            if begins != "{":
                raise Failure(f"{self._path} is damaged: {begins!r} stands where an event should begin")
            yield self._event()
            if self._place > CHUNK:
                self._buffer, self._place = self._buffer[self._place :], 0

    def _next(self) -> str:
        """Skip spaces and commas. Returns the next character without consuming it."""
        while True:
            while self._place < len(self._buffer):
                if self._buffer[self._place] not in " \t\r\n,":
                    return self._buffer[self._place]
                self._place += 1
            if not self._fill():
                raise Failure(f"{self._path} is damaged: it ends before its events do")

    def _event(self) -> dict[str, Any]:
        while True:
            try:
                event, self._place = _DECODER.raw_decode(self._buffer, self._place)
                return event
            except (ValueError, RecursionError) as error:
                if len(self._buffer) - self._place > LARGEST_EVENT or not self._fill():
                    raise Failure(f"{self._path} is damaged: {first_line(error)}") from None
