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
def copy(tmp_path: Path) -> Path:
    """A folder with the scripts and what they read."""
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    return tmp_path


@pytest.mark.launches
def test_pip_is_asked_for_that_torch_alone_and_pytest_gets_the_other_arguments(copy):
    """With an active environment that must not be touched."""
    binaries = copy / ".venv-torch-2.11.0" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "activate").write_text(f'VIRTUAL_ENV={binaries.parent}\nPATH="{binaries}:$PATH"\n')
    (binaries / "python").write_text(NOTING)
    (binaries / "python").chmod(0o755)
    noted = {"NOTED": str(copy / "noted"), "REQUIREMENTS": str(copy / "installed.txt"), "VIRTUAL_ENV": "/another"}
    command = ["bash", str(copy / "scripts" / "test.sh"), "--torch", "2.11.0", "tests/optim", "-x"]
    subprocess.run(command, env=os.environ | noted, check=True, capture_output=True, timeout=60)
    called = (copy / "noted").read_text().splitlines()
    (install,) = [line for line in called if "pip install" in line]
    assert "torch==2.11.0 -r" in install and install.endswith("-e .[test]")
    pinned = (REPOSITORY / "requirements.txt").read_text().splitlines()
    left_out = [line for line in pinned if line not in (copy / "installed.txt").read_text().splitlines()]
    assert [line.partition("==")[0] for line in left_out] == ["torch", "setuptools", "-e ."]
    ran = [line for line in called if "-m pytest" in line]
    assert ran and all(line.endswith("tests/optim -x") for line in ran)


@pytest.mark.launches
@pytest.mark.parametrize("version", ["2.10.0", "../../x", None])
def test_a_version_that_runs_refuse_or_that_is_none_is_refused_before_anything_is_made(copy, version):
    before = sorted(copy.iterdir())
    command = ["bash", str(copy / "scripts" / "test.sh"), "--torch", *([] if version is None else [version])]
    # without an interpreter, an environment cannot be made
    refused = subprocess.run(
        command, env=os.environ | {"PYTHON": "false"}, capture_output=True, text=True, timeout=60, check=False
    )
    oldest = ".".join(map(str, OLDEST_TORCH))
    said = f"--torch '{version or ''}' is not a version of three numbers from {oldest} on; give one such as {oldest}.0"
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", said + "\n")
    assert sorted(copy.iterdir()) == before


def test_the_guide_names_the_oldest_and_the_pinned_version():
    guide = (REPOSITORY / "docs" / "strategies.md").read_text(encoding="utf-8").partition("## Versions of PyTorch")[2]
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)", (REPOSITORY / "requirements.txt").read_text(), re.MULTILINE)
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f"pins PyTorch {pinned}." in guide and f"The oldest that works is {oldest}," in guide
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"torch>={oldest}" in project["optional-dependencies"]["train"]
