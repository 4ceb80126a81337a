"""Share fixtures among the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import write_token_files


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A validation file that takes about a second, so that a signal can meet it."""
    return write_token_files(tmp_path_factory.mktemp("tokens"), val_tokens=100_000)
