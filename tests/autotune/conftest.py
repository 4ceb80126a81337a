"""Share fixtures among the tests of this room."""

from __future__ import annotations

import pytest
from support.settings import settings_of


@pytest.fixture
def settings(token_files):
    """Of a run that leaves the micro batch to the program."""
    return settings_of(token_files, "--micro_batch_size_per_gpu", "auto")
