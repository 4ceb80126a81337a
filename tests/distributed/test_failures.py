"""One rank failed, so all raise."""

from __future__ import annotations

import pickle

import pytest

from testbed.checkpoint.folders import CheckpointFailed
from testbed.distributed import process_group
from testbed.run_folder.run_lock import FolderGone


@pytest.fixture
def of_ranks(monkeypatch):
    """Let the other ranks send these errors, as they come through a collective."""

    def with_errors(*errors: Exception | None) -> None:
        sent = pickle.loads(pickle.dumps(errors))
        monkeypatch.setattr(process_group, "gather_objects", lambda mine: [mine, *sent])

    return with_errors


def test_where_no_rank_failed_none_raises(of_ranks):
    of_ranks(None, None)
    process_group.raise_on_any_rank(None)


def test_the_lowest_failed_rank_is_the_one_that_all_raise(of_ranks):
    of_ranks(None, CheckpointFailed("rank 2: full"), CheckpointFailed("rank 3: full"))
    with pytest.raises(CheckpointFailed, match="rank 2: full"):
        process_group.raise_on_any_rank(None)


def test_an_error_that_explains_the_others_goes_first(of_ranks):
    of_ranks(CheckpointFailed("rank 1: no such file"), FolderGone("renamed"))
    cause = OSError("mine")
    with pytest.raises(FolderGone, match="renamed") as caught:
        process_group.raise_on_any_rank(CheckpointFailed("rank 0: no such file"), cause, first=FolderGone)
    assert caught.value.__cause__ is cause
