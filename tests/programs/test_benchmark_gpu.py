"""scripts/more/benchmark_gpu.py on the CPU, in real runs: one, one on two ranks, and their agreement."""

from __future__ import annotations

import pytest
from support.programs import run_here

from testbed.experiments import kept_runs


@pytest.mark.launches
@pytest.mark.slow
def test_two_runs_agree_and_are_not_made_again(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(kept_runs, "run", ranks.in_place_of_launches(tmp_path / "launches"))
    words = ["--device", "cpu", "--only", "^allreduce$", "--out_dir", tmp_path / "out"]
    first, second = (run_here("scripts/more/benchmark_gpu.py", *words) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr
    assert "[1/2] fp32: complete\n[2/2] allreduce: complete" in first.stdout and "[1/2]" not in second.stdout
    (row,) = [line.split() for line in second.stdout.splitlines() if line.startswith("allreduce ")]
    assert row[1] == "2" and row[-1] == "(fp32)" and "agrees" in row
    for name in ("fp32", "allreduce"):
        assert (tmp_path / "out" / "runs" / name / "RUN_COMPLETE.txt").exists()
