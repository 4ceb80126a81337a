"""Add a strategy with one file and one line: --help lists it and the agreement test trains it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from support.programs import REPOSITORY

FILE = '''"""Gradients summed in one flat vector, then divided."""

import torch
import torch.distributed as dist

from testbed.strategies.baseline import Baseline


class FlatSum(Baseline):
    def __init__(self, settings, model, device):
        super().__init__(settings, model, device)
        self.data_rank, self.data_world_size = dist.get_rank(), dist.get_world_size()

    def synchronise_gradients(self):
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        dist.all_reduce(flat)
        flat /= self.data_world_size
        for parameter, part in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
'''
LINE = """    "flat_sum": StrategyEntry(
        module="flat_sum",
        class_name="FlatSum",
        summary="one vector, summed and divided",
        devices="per_rank",
        engine="torch",
        keeps="whole",
        sends="at_end",
        state_layout="replicated",
        equals_baseline=True,
        differs_because=None,
        refuses={"matmul fp8": NO_FP8},
        gloo_on_cuda=True,
        micro_batch="given",
        compiles_with=(),
        options={},
    ),
"""


@pytest.mark.launches
@pytest.mark.slow
def test_a_file_and_a_line_make_a_strategy_that_agrees(tmp_path):
    for name in ("src", "tests", "docs"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "src/testbed/strategies/flat_sum.py").write_text(FILE)
    registry = tmp_path / "src/testbed/config/run_types.py"
    begin = "STRATEGIES = {\n"
    registry.write_text(registry.read_text().replace(begin, begin + LINE))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=400
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    assert "flat_sum = one vector, summed and divided" in " ".join(run("src/gpt2.py", "--help").split())
    tests = ["strategies/test_strategies_agree.py", "checkpoint/test_resume.py", "docs/test_house.py"]
    words = "flat_sum or room or circle or belongs"
    said = run("-m", "pytest", "-v", *(f"tests/{name}" for name in [*tests, "config/test_parallelism.py"]), "-k", words)
    passed = [line for line in said.splitlines() if "PASSED" in line and "flat_sum" in line.partition("[")[2]]
    named = [sum(name in line for line in passed) for name in tests[:2]]
    assert named == [4, 2], "of text and of pairs, no waits in either, resumed, and from another's state"
