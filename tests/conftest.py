"""What the tests of the trainer share: tiny token files, and gpt2.py started as a person would."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.programs import write_pair_files, write_token_files


@pytest.fixture(scope="session", autouse=True)
def quiet_environment(tmp_path_factory):
    """One thread per process, no network, and a build cache that a killed run cannot leave locked for others. Ctrl-C
    works in what tests start: a suite in the background of a script would hand down that it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path_factory.mktemp("torch_extensions"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)


@pytest.fixture
def other():
    """A process that can be stopped and killed in a rank's stead."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="session")
def token_files(tmp_path_factory) -> tuple[Path, Path]:
    """A training and a validation file; no test may change them."""
    return write_token_files(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="session")
def pair_files(tmp_path_factory) -> tuple[Path, Path]:
    """A training and a validation file of pairs; no test may change them."""
    return write_pair_files(tmp_path_factory.mktemp("pairs"))
