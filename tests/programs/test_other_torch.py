"""Check what `scripts/test.sh --torch VERSION` installs and runs, with a `python` that only notes how it was called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from support.programs import REPOSITORY

from testbed.config.check import OLDEST_TORCH

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


@pytest.mark.launches
def test_pip_is_asked_for_that_torch_and_for_nothing_that_contradicts_it(done):
    (install,) = [line for line in (done / "noted").read_text().splitlines() if "pip install" in line]
    assert "torch==2.11.0 -r" in install and install.endswith("-e .[test]")
    pinned = (REPOSITORY / "requirements.txt").read_text().splitlines()
    left_out = [line for line in pinned if line not in (done / "installed.txt").read_text().splitlines()]
    assert [line.partition("==")[0] for line in left_out] == ["torch", "setuptools", "-e ."]


@pytest.mark.launches
def test_pytest_gets_the_other_arguments(done):
    ran = [line for line in (done / "noted").read_text().splitlines() if "-m pytest" in line]
    assert ran and all(line.endswith("tests/optim -x") for line in ran)


def test_the_guide_names_the_oldest_and_the_pinned_version():
    guide = (REPOSITORY / "docs" / "strategies.md").read_text(encoding="utf-8").partition("## Versions of PyTorch")[2]
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)", (REPOSITORY / "requirements.txt").read_text(), re.MULTILINE)
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f"pins PyTorch {pinned}." in guide and f"The oldest that works is {oldest}," in guide
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={oldest}" in project["optional-dependencies"]["train"]
