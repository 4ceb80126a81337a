"""Share fixtures among the tests of this room."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_data_here(tmp_path, monkeypatch):
    """Plan in a folder without token files: those that a quickstart has left in the repository have a vocabulary."""
    monkeypatch.chdir(tmp_path)
