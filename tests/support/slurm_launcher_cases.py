"""Share cases among the tests of slurm launcher."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from support.programs import REPOSITORY
from testbed.config.flags import parse_command_line

SCRIPTS = REPOSITORY / "scripts" / "slurm"


CALLERS = sorted(path.name for path in SCRIPTS.iterdir() if path.suffix in (".slurm", ".sbatch"))


IN_A_JOB = {
    "SLURM_JOB_ID": "123456", "SLURM_JOB_NAME": "my job/1", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_ON_NODE": "8",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2),6", "SLURM_JOB_NODELIST": "n[1-3]", "MASTER_ADDR": "n1",
}  # fmt: skip


RULED_OUT = re.compile(
    "SLURM|SBATCH_|RUN_|NSYS|EVIDENCE_|NCCL_|MASTER_|OMP_NUM|GPT2_|GRAD_|MICRO_|RANKS_|LAUNCHER|PYTHON$|SITE_"
)


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not RULED_OUT.match(name)}
    kept = {name: value for name, value in kept.items() if name not in ("GIT_COMMIT", "DIST_DEBUG", "TORCHRUN_LOGS")}
    return {**kept, "PYTHON": sys.executable, **changes}


def ask(script: Path | str, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    command = ["bash", str(SCRIPTS / script), "--dry_run", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**variables), timeout=30)


class Plan:
    """What a dry run printed, read as a shell would."""

    def __init__(self, script: Path | str, *flags: str, **variables: str):
        done = ask(script, *flags, **variables)
        assert done.returncode == 0, done.stderr
        self.said = done.stdout
        lines = [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]
        assert {line[0] for line in lines} <= {"cd", "export", "mkdir", "srun", "env"}, "all else is a comment"
        self.check, self.step = [line for line in lines if line[0] == "srun"]
        self.finish = [line for line in lines if line[0] == "env"]
        self.made = next(line for line in lines if line[0] == "mkdir")[2:]
        self.exported = dict(word.split("=", 1) for line in lines if line[0] == "export" for word in line[1:])
        self.flags = self.step[self.step.index("src/gpt2.py") + 1 :]
        self.values = parse_command_line(self.flags).values

    def of(self, name: str) -> str:
        """The value of a flag of srun or torchrun."""
        return next(word.split("=", 1)[1] for word in self.step if word.startswith(f"--{name}="))


def start(variables: dict[str, str]) -> subprocess.CompletedProcess:
    command = ["bash", str(SCRIPTS / "launch.sh"), str(SCRIPTS / "train_b64_g2.slurm")]
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=30)
