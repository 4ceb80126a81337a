"""Check what scripts/quickstart.sh starts, with a `python` that only notes how it was called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.programs import REPOSITORY

pytestmark = pytest.mark.launches

NOTING = """#!/usr/bin/env bash
echo "OMP_NUM_THREADS=${OMP_NUM_THREADS:-} $*" >>"$NOTED"
echo "${CUDA_VISIBLE_DEVICES:-all} $*" >>"$NOTED.devices"
case "$*" in
    *device_count*) echo "$DEVICES" ;;
    *usable_cores*) echo "$CORES" ;;
esac
"""


def called(tmp_path: Path, devices: int, cores: int, *arguments: str, visible: str = "") -> list[str]:
    """Return every call of python that the quickstart makes on such a machine, with the threads it was given.

    The script runs in a copy of scripts/, because with --repeats it clears the folder of its runs.
    """
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(NOTING)
    python.chmod(0o755)
    variables = {"DEVICES": str(devices), "CORES": str(cores), "NOTED": str(tmp_path / "noted")}
    variables |= {"CUDA_VISIBLE_DEVICES": visible}
    variables |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "VIRTUAL_ENV": str(tmp_path)}
    others = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    subprocess.run(
        ["bash", str(tmp_path / "scripts" / "quickstart.sh"), *arguments],
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


@pytest.mark.parametrize(
    ("visible", "first", "launcher"),
    [
        ("", "0", "deepspeed.launcher.runner"),
        ("2,3", "2", "torch.distributed.run"),
        ("MIG-4f7d2c34-05a2-5c39", "MIG-4f7d2c34-05a2-5c39", "torch.distributed.run"),
    ],
)
def test_devices_are_those_that_are_visible(tmp_path, visible, first, launcher):
    """DeepSpeed's launcher numbers devices from 0, whatever CUDA_VISIBLE_DEVICES says."""
    called(tmp_path, 2, 4, visible=visible)
    noted = (tmp_path / "noted.devices").read_text().splitlines()
    baseline, optimized = (call for call in noted if "src/gpt2.py" in call)
    assert baseline.split()[0] == first
    assert optimized.split()[0] == (visible or "all") and launcher in optimized


@pytest.mark.parametrize(
    "devices, arms", [(0, ["baseline", "baseline_all_cores", "optimized"]), (2, ["baseline", "optimized"])]
)
def test_repeats_are_interleaved_and_end_with_a_verdict(tmp_path, devices, arms):
    left = tmp_path / "checkpoint" / "quickstart_repeats" / "baseline" / "run_9"
    left.mkdir(parents=True)
    calls = called(tmp_path, devices, 2, "--repeats", "5")
    folders = [Path(folder_of(call)).parts[-2:] for call in calls if "src/gpt2.py" in call]
    rounds = [folders[start : start + len(arms)] for start in range(0, len(folders), len(arms))]
    assert [{repeat for _, repeat in each} for each in rounds] == [{f"run_{number}"} for number in range(1, 6)]
    assert all(sorted(arm for arm, _ in each) == arms for each in rounds), "each round runs every arm once"
    assert {each[0][0] for each in rounds} == set(arms), "each arm is the first of some round"
    verdicts = [call.split("compare_runs.py ")[1].split() for call in calls if "compare_runs.py" in call]
    root = "checkpoint/quickstart_repeats"
    assert verdicts == [[f"{root}/optimized", "--against", f"{root}/{arm}"] for arm in arms[:-1]]
    assert not left.exists(), "a repeat of an earlier call is not counted"


@pytest.mark.parametrize("arguments", [["--repeats"], ["--repeats", "0"], ["--steps", "5"]])
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(arguments):
    done = subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "quickstart.sh"), *arguments], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert f"'{' '.join(arguments)}' is not --repeats N" in done.stderr


def test_help_prints_the_two_commands_and_starts_nothing(tmp_path):
    script = tmp_path / "quickstart.sh"
    shutil.copy(REPOSITORY / "scripts" / "quickstart.sh", script)  # without environment.sh it can start nothing
    done = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bash scripts/quickstart.sh --repeats 5" in done.stdout and "repeats=1" not in done.stdout
