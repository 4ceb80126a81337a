"""Share fixtures among the tests of this room."""

from __future__ import annotations

import functools
import subprocess
import sys
from types import ModuleType

import pytest

import download_data
import preprocess_small
from testbed.data import tokenizer


@pytest.fixture
def run_here(tmp_path, monkeypatch, capfd):
    """Run a program of the root in this process, in the test's folder, without a network and tiktoken's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer, "status_of", lambda url: None)

    def run(program: ModuleType, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "no-cache"))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [program.__file__, *map(str, arguments)])
        try:
            code = program.main()
        except SystemExit as end:  # a mistake that the parser sees
            code = end.code
        return subprocess.CompletedProcess(sys.argv, code, *capfd.readouterr())

    return run


@pytest.fixture
def preprocess(run_here):
    return functools.partial(run_here, preprocess_small)


@pytest.fixture
def download_here(run_here):
    return functools.partial(run_here, download_data)
