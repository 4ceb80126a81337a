"""What scripts/quickstart.sh starts, asked with a `python` that only notes how it was called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.programs import REPOSITORY

pytestmark = pytest.mark.launches

NOTING = """#!/usr/bin/env bash
echo "OMP_NUM_THREADS=${OMP_NUM_THREADS:-} $*" >>"$NOTED"
case "$*" in
    *device_count*) echo "$DEVICES" ;;
    *usable_cores*) echo "$CORES" ;;
esac
"""


def called(tmp_path: Path, devices: int, cores: int) -> list[str]:
    """Every call of python that the quickstart makes on such a machine, with the threads it was given."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(NOTING)
    python.chmod(0o755)
    variables = {"DEVICES": str(devices), "CORES": str(cores), "NOTED": str(tmp_path / "noted")}
    variables |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "VIRTUAL_ENV": str(tmp_path)}
    others = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "quickstart.sh")],
        env=others | variables,
        check=True,
        capture_output=True,
        timeout=60,
    )
    return (tmp_path / "noted").read_text().splitlines()


def folder_of(call: str) -> str:
    words = call.split()
    return words[words.index("--checkpoint_path") + 1]


@pytest.mark.parametrize(
    "devices, cores, threads",
    [
        (0, 2, {"baseline": "1", "baseline_all_cores": "2", "optimized": "1"}),
        (0, 16, {"baseline": "1", "baseline_all_cores": "2", "optimized": "1"}),
        (0, 1, {"baseline": "1", "optimized": "1"}),
        (4, 16, {"baseline": "", "optimized": ""}),
    ],
)
def test_the_same_cores_in_one_process_stand_beside_two_ranks(tmp_path, devices, cores, threads):
    calls = called(tmp_path, devices, cores)
    runs = [call for call in calls if "src/gpt2.py" in call]
    assert {Path(folder_of(call)).name: call.split()[0].partition("=")[2] for call in runs} == threads
    (drawn,) = [call for call in calls if "generate_charts.py" in call]
    assert drawn.split()[-len(runs) :] == [folder_of(call) for call in runs], "the table takes every run, in this order"
    work = {call.partition("--model")[2] for call in runs}
    assert len(work) == 1, "all of them do the same work"
