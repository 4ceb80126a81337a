"""Faults for scripts/first_divergence.py, planted from outside: those of planted_bugs.py and more, with their places."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from support.planted_bugs import PLANTED_BUGS, patch

FAULTS: dict[str, Callable[[], object]] = {}


@contextlib.contextmanager
def planting(fault: str | None) -> Iterator[None]:
    """Around a side that shall have the fault; None: a sound one."""
    if fault is not None:
        (PLANTED_BUGS | FAULTS)[fault]()
    try:
        yield
    finally:
        mock.patch.stopall()
