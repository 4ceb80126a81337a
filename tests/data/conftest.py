"""Share fixtures among the tests of this room."""

from __future__ import annotations

import functools
import subprocess

import pytest
from support import programs

from testbed.data import tokenizer


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """Run a program of the root in this process, in the test's folder, without a network and tiktoken's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer, "status_of", lambda url: None)

    def run(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "no-cache"))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return programs.run_here(program, *arguments, cwd=tmp_path)

    return run


@pytest.fixture
def preprocess(run_here):
    return functools.partial(run_here, "preprocess_small.py")


@pytest.fixture
def download_here(run_here):
    return functools.partial(run_here, "download_data.py")
