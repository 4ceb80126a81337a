"""Fixtures of the tests of checkpoints and of a run's folder."""

from __future__ import annotations

import pytest
from support.checkpoint_folders import Folder

from testbed.run_folder import run_lock


@pytest.fixture
def one_process(monkeypatch):
    """A made-up launch of two ranks is one process here: only rank 0 and its words are looked at."""
    monkeypatch.setattr(run_lock, "LOCK_WAIT_S", 0.3)


@pytest.fixture
def run(token_files, tmp_path) -> Folder:
    """Killed after step 5, with checkpoints of steps 2 and 4."""
    folder = Folder(token_files, tmp_path / "run")
    folder.train(range(1, 6), {2, 4})
    return folder
