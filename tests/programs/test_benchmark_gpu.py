"""scripts/more/benchmark_gpu.py on the CPU, in real processes: a run, one on two ranks, and their agreement."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.programs import REPOSITORY

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # DeepSpeed in a test before leaves some of them


@pytest.mark.launches
@pytest.mark.slow
def test_two_runs_agree_and_are_not_made_again(tmp_path, monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "scripts/more/benchmark_gpu.py", "--device", "cpu", "--only", "^allreduce$"]
    command += ["--out_dir", str(tmp_path / "out")]
    first, second = (subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr
    assert "[1/2] fp32: complete\n[2/2] allreduce: complete" in first.stdout and "[1/2]" not in second.stdout
    (row,) = [line.split() for line in second.stdout.splitlines() if line.startswith("allreduce ")]
    assert row[1] == "2" and row[-1] == "(fp32)" and "agrees" in row
    for name in ("fp32", "allreduce"):
        assert (tmp_path / "out" / "runs" / name / "RUN_COMPLETE.txt").exists()
