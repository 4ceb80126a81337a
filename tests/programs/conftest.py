"""Share fixtures among the tests of this room."""

from __future__ import annotations

import os

import pytest
from support.slurm_launcher_cases import IN_A_JOB, environment


@pytest.fixture
def in_a_job_of_our_own(tmp_path) -> dict[str, str]:
    """A job whose srun and scontrol are stand-ins: they note how they were called."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("srun", "scontrol"):
        (commands / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/called\nexit ${{STAND_IN_CODE:-0}}\n')
        (commands / name).chmod(0o755)
    one_node = {**IN_A_JOB, "SLURM_JOB_NUM_NODES": "1", "RUN_DIR": str(tmp_path / "run")}
    return environment(**one_node, PATH=f"{commands}:{os.environ['PATH']}")
