"""Check what `scripts/test.sh --torch VERSION` installs and runs, with a `python` that only notes how it was called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.programs import REPOSITORY

pytestmark = pytest.mark.launches

NOTING = """#!/usr/bin/env bash
echo "$*" >>"$NOTED"
while [ $# -gt 0 ]; do
    [ "$1" != -r ] || cat "$2" >"$REQUIREMENTS"
    shift
done
"""


@pytest.fixture
def done(tmp_path: Path) -> Path:
    """A copy of the scripts, of which test.sh was run with an active environment that it must not touch."""
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    shutil.copy(REPOSITORY / "requirements.txt", tmp_path)
    binaries = tmp_path / ".venv-torch-2.11.0" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "activate").write_text(f'VIRTUAL_ENV={binaries.parent}\nPATH="{binaries}:$PATH"\n')
    (binaries / "python").write_text(NOTING)
    (binaries / "python").chmod(0o755)
    noted = {"NOTED": str(tmp_path / "noted"), "REQUIREMENTS": str(tmp_path / "installed.txt")}
    command = ["bash", str(tmp_path / "scripts" / "test.sh"), "--torch", "2.11.0", "tests/optim", "-x"]
    environment = os.environ | noted | {"VIRTUAL_ENV": "/another"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60)
    return tmp_path


def test_pip_is_asked_for_that_torch_and_for_nothing_that_contradicts_it(done):
    (install,) = [line for line in (done / "noted").read_text().splitlines() if "pip install" in line]
    assert "torch==2.11.0 -r" in install and install.endswith("-e .[test]")
    pinned = (REPOSITORY / "requirements.txt").read_text().splitlines()
    left_out = [line for line in pinned if line not in (done / "installed.txt").read_text().splitlines()]
    assert [line.partition("==")[0] for line in left_out] == ["torch", "setuptools", "-e ."]


def test_pytest_gets_the_other_arguments(done):
    ran = [line for line in (done / "noted").read_text().splitlines() if "-m pytest" in line]
    assert ran and all(line.endswith("tests/optim -x") for line in ran)
