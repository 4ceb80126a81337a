"""exit() called from inside training is a failure of the run, whatever its code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.endings import ending_of


@pytest.mark.parametrize("code", [0, None, 3])
def test_an_exit_of_a_library_ends_the_run_as_failed(token_files, code, monkeypatch):
    ending, marked = ending_of(token_files), []
    ending.signals = SimpleNamespace(agreed=0, number=0, defer=lambda: None)
    ending.checkpoints = None
    monkeypatch.setattr(ending, "mark_failed", lambda reason, **_: marked.append(reason))
    monkeypatch.setattr(ending, "_leave", lambda code: code)
    with ending:
        raise SystemExit(code)
    assert ending.exit_code == 1
    assert marked == [f"RuntimeError: something called exit({code!r}) before the run's end"]
