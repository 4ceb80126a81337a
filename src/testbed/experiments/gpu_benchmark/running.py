"""Run the steps of the benchmark one after another, each in processes of its own. No torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.distributed.launch import usable_cores
from testbed.distributed.processes import Ended, Stop, run
from testbed.errors import InputError, say
from testbed.experiments.gpu_benchmark.record import DONE, FAILED, INTERRUPTED, LATE, STEPS_FILE
from testbed.experiments.gpu_benchmark.steps import PYTHON, Step
from testbed.io import SOURCE, now_utc, write_text

# A step ends after this many times its estimate, and SPARE_S. A CPU is often busy with other work as well.
LIMIT = {"cuda": 2, "cpu": 8}
SPARE_S = 30
COMPILED = "compiled"  # folder of what the compiler made, and of a mark for each name in COLD_S


def environment_of_steps(folder: Path, device: str) -> dict[str, str]:
    """Return the environment of every step: no network, this checkout's code, one cache of the compiler for all.

    Args:
        folder: the benchmark's; its `site` holds what was installed from wheels.
    """
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH"), str(folder / "site")]))
    made = folder / COMPILED
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TORCH_EXTENSIONS_DIR": "extensions"}
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    return (
        {name: str(made / place) for name, place in caches.items()}
        | threads
        | {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    )


@dataclass
class Runner:
    """Runs steps and keeps steps.json up to date.

    Attributes:
        content: of steps.json.
        ends_s: time.monotonic() at which the last step must have ended; None: no deadline.
    """

    folder: Path
    content: dict[str, Any]
    stop: Stop
    environment: Mapping[str, str]
    ends_s: float | None = None
    failed: set[str] = field(default_factory=set)

    def run_all(self, steps: Sequence[Step]) -> None:
        """Run the steps; return early on a signal. OSError from the disk."""
        rows = {row["name"]: row for row in self.content["steps"]}
        self.write()
        for step in steps:
            row = rows[step.name]
            self._run(step, row)
            self.write()
            seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f} s"
            say(f"{step.name:28s} {row['status']:11s} {seconds:>6s}  {row['reason'] or ''}".rstrip(), flush=True)
            if self.stop.signal_number is not None:
                return

    def write(self) -> None:
        STEPS_FILE.write(self.folder / STEPS_FILE.name, self.content)

    def _run(self, step: Step, row: dict[str, Any]) -> None:
        estimate_s = step.estimate_s(self._warm())
        left_s = float("inf") if self.ends_s is None else self.ends_s - time.monotonic()
        row.update(status=FAILED, seconds=None, exit_code=None, machine=self.content["machine"], started_utc=now_utc())
        broken = [name for name, _ in step.needs if name in self.failed]
        if broken:
            row.update(reason=f"it reads what {broken[0]} did not make")
            self.failed.add(step.name)
            return
        if estimate_s > left_s:
            row.update(status=LATE, reason=f"its {estimate_s} s no longer fit; the same call goes on with it")
            self.failed.add(step.name)
            return
        limit_s = min(LIMIT[self.content["device"]] * step.estimate_s() + SPARE_S, left_s)
        ended = self._launch(step, limit_s)
        row.update(seconds=round(ended.seconds, 1), exit_code=ended.exit_code)
        if ended.was_stopped:
            row.update(status=INTERRUPTED, reason="interrupted; the same call goes on with it")
        elif ended.was_late:
            row.update(reason=f"ended at its limit of {limit_s:.0f} s, see logs/{step.name}.log")
        elif ended.exit_code:
            row.update(reason=f"see logs/{step.name}.log")
        else:
            row.update(status=DONE, reason=None)
            for name in step.cold:
                (self.folder / COMPILED / f"{name}.warm").touch()
        if row["status"] != DONE:
            self.failed.add(step.name)

    def _launch(self, step: Step, limit_s: float) -> Ended:
        for name in ("logs", "runs", COMPILED):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        made = self.folder / "runs" / step.name
        if made.is_dir():  # of an earlier try, which --resume would go on from
            shutil.rmtree(made)
        if step.input is not None:
            name, text = step.input
            write_text(self.folder / name, text)
        command = [sys.executable if word == PYTHON else word for word in step.command]
        log = self.folder / "logs" / f"{step.name}.log"
        return run(command, log, self.stop, limit_s, typed=step.command, env=dict(self.environment), cwd=SOURCE.parent)

    def _warm(self) -> set[str]:
        return {path.stem for path in (self.folder / COMPILED).glob("*.warm")}


def look_at(environment: Mapping[str, str], device: str) -> dict[str, Any]:
    """Return torch's version, the number of CUDA devices and the name of the first, from a process of its own.

    Raises:
        InputError: PyTorch cannot be loaded, or finds no CUDA device where one is to be measured.
    """
    code = (
        "import json, torch; number = torch.cuda.device_count(); "
        "print(json.dumps([torch.__version__, number, torch.cuda.get_device_name(0) if number else None]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(
            f"PyTorch cannot be loaded by {sys.executable}: {(done.stderr.strip() or '?').splitlines()[-1]}"
        )
    version, gpus, name = json.loads(done.stdout.strip().splitlines()[-1])
    if device == "cuda" and not gpus:
        raise InputError("PyTorch finds no CUDA device here; --device cpu (or DEVICE=cpu) shows that everything runs")
    if device == "cpu":
        gpus, name = 0, f"CPU ({usable_cores()} cores)"
    return {"torch_version": version, "gpus": gpus, "name": name}
