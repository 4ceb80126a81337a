"""Share fixtures among the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import REPOSITORY

from testbed.planner import question

data_here = question._data_here


@pytest.fixture(autouse=True)
def no_data_in_the_repository(monkeypatch):
    """Programs run in the repository, where a quickstart may have left token files, and those have a vocabulary."""
    monkeypatch.setattr(question, "_data_here", lambda: None if Path.cwd() == REPOSITORY else data_here())
