"""Make the runs of a comparison with peers: each in processes of its own, and none left when it ends. No torch."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.config.settings import CheckedRun, RunSettings
from testbed.distributed.processes import Interrupted, Stop, run
from testbed.errors import Failure
from testbed.experiments.peers.nanogpt import arguments as nanogpt_arguments
from testbed.experiments.peers.nanogpt import parse_steps, write_data
from testbed.experiments.peers.plan import CEILING, OURS, PeerArm
from testbed.io import now_utc
from testbed.metrics.file import read_metrics
from testbed.run_folder import METRICS
from testbed.sweep.request import visible_devices
from testbed.sweep.runner import reason_of_failure

CEILING_REPEATS = 10
# kind of work in worker.py, and what it is told besides the work itself
WORKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("transformers", {"attention": "sdpa", "compile": False}),
    "transformers-compiled": ("transformers", {"attention": "sdpa", "compile": True}),
    "transformers-eager": ("transformers", {"attention": "eager", "compile": False}),
    "transformers-loop": ("transformers-loop", {"attention": "sdpa"}),
    "nanogpt-bf16": ("nanogpt-bf16", {}),
}


class RunFailed(Failure):
    """A run could not be measured. One sentence."""


@dataclass
class PeerRunner:
    """Hold what all runs share.

    Attributes:
        checked: the run of src/gpt2.py whose work all peers do; None until the facts are known.
        gpt2_arguments: the flags of that work, without precision and folder.
        only_ours: further flags that only our own runs get.
        program: compare_peers.py, which also runs worker.py, and `gpt2` our trainer.
        scratch: a folder of this comparison, emptied after each run.
        logs: where what each run said stays.
    """

    program: Path
    gpt2: Path
    scratch: Path
    logs: Path
    threads: int
    device: str
    stop: Stop
    timeout_s: float
    warmup_steps: int
    gpt2_arguments: Sequence[str] = ()
    only_ours: Sequence[str] = ()
    nanogpt_dir: Path | None = None
    checked: CheckedRun | None = None

    def facts(self) -> dict[str, Any]:
        """Return the machine, as a process that loads PyTorch sees it. RunFailed where it cannot."""
        return self._work("facts", "facts", {"precision": "fp32"})

    def run(self, arm: PeerArm, number: int) -> dict[str, Any]:
        """Make one run. Returns its row of peers.json.

        Raises:
            RunFailed: it ended otherwise than with a measurement.
            Interrupted: a signal came.
        """
        started_utc, started_s = now_utc(), time.perf_counter()
        name = f"{arm.peer.replace(' ', '_')}_{arm.precision}_{number}"
        try:
            if arm.peer == CEILING:
                answer = self._work("ceiling", name, {"precision": arm.precision, "repeats": CEILING_REPEATS})
                common = {"precision": arm.precision, "round": number, "started_utc": started_utc}
                return {**common, "seconds": time.perf_counter() - started_s, **answer}
            if arm.peer == OURS:
                answer = self._ours(arm, name)
            elif arm.peer == "nanogpt":
                answer = self._nanogpt(arm, name)
            else:
                kind, more = WORKERS[arm.peer]
                answer = self._work(kind, name, {**self._shared(arm.precision), **more})
        finally:
            for path in self.scratch.iterdir():  # weights and checkpoints of gigabytes
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._check(answer)
        common = {"peer": arm.peer, "precision": arm.precision, "round": number, "started_utc": started_utc}
        return {**common, "seconds": time.perf_counter() - started_s, **answer}

    def command(self, arm: PeerArm) -> list[str]:
        """Return what is run for an arm, as a person would type it, without the folders of this comparison."""
        if arm.peer == OURS:
            return ["python", os.path.relpath(self.gpt2), *self._ours_arguments(arm, Path("FOLDER"))]
        if arm.peer == "nanogpt":
            return ["python", *self._nanogpt_arguments(arm, Path("DATA"), Path("FOLDER"))]
        return ["python", os.path.relpath(self.program), "--worker", f"{arm.peer}, {arm.precision}"]

    @property
    def settings(self) -> RunSettings:
        assert self.checked is not None
        return self.checked.settings

    def _shared(self, precision: str) -> dict[str, Any]:
        return {
            "precision": precision,
            "gpt2_arguments": [*self.gpt2_arguments, "--precision", precision],
            "warmup_steps": self.warmup_steps,
            "nanogpt_dir": None if self.nanogpt_dir is None else str(self.nanogpt_dir.resolve()),
        }

    def _ours_arguments(self, arm: PeerArm, folder: Path) -> list[str]:
        work = [*self.gpt2_arguments, "--precision", arm.precision, *self.only_ours]
        return ["--run_type", "baseline", *work, "--checkpoint_path", str(folder)]

    def _ours(self, arm: PeerArm, name: str) -> dict[str, Any]:
        folder = self.scratch / "ours"
        self._launch([sys.executable, str(self.gpt2), *self._ours_arguments(arm, folder)], name, folder=folder)
        metrics = read_metrics(folder / METRICS)
        rows, measured = metrics["steps"], metrics["steps"][self.warmup_steps :]
        rate = metrics["timing"]["wall_clock_tokens_per_sec_global"]
        if not rate:
            raise RunFailed("its training_metrics.json has no wall-clock rate")
        tokens = len(measured) * self.settings.tokens_per_step
        return {
            "step_times_s": [row["step_time_s"] for row in rows],
            "losses": [row["loss"] for row in rows],
            "val_loss": metrics["evaluations"][-1]["val_loss"] if metrics["evaluations"] else None,
            "measured_loop_s": tokens / rate,
        }

    def _nanogpt_arguments(self, arm: PeerArm, data: Path, out_dir: Path) -> list[str]:
        return nanogpt_arguments(self.settings, arm.precision, self.device, data, out_dir)

    def _nanogpt(self, arm: PeerArm, name: str) -> dict[str, Any]:
        vocabulary = self.settings.shape.padded_vocab_size
        assert self.checked is not None
        data = write_data(self.scratch.resolve() / "data", self.checked.train_file, self.checked.val_file, vocabulary)
        out_dir = self.scratch.resolve() / "nanogpt"
        command = [sys.executable, "-u", *self._nanogpt_arguments(arm, data, out_dir)]
        log = self._launch(command, name, cwd=self.nanogpt_dir)
        try:
            times, losses = parse_steps(log.read_text(encoding="utf-8", errors="replace"), self.settings.last_step)
        except ValueError as error:
            raise RunFailed(str(error)) from None
        work = {**self._shared(arm.precision), "checkpoint": str(out_dir)}
        said = self._work("nanogpt-validation", f"{name}_validation", work)
        if said["num_steps"] != self.settings.last_step:
            raise RunFailed(f"nanoGPT saved weights after {said['num_steps']} steps, not {self.settings.last_step}")
        loop_s = sum(times[self.warmup_steps :])  # its lines leave nothing out between them
        return {"step_times_s": times, "losses": losses, "val_loss": said["val_loss"], "measured_loop_s": loop_s}

    def _work(self, kind: str, name: str, work: dict[str, Any]) -> dict[str, Any]:
        """Have worker.py do something, and return its answer."""
        file, out = self.scratch / "work.json", self.scratch / "answer.json"
        out.unlink(missing_ok=True)
        content = {"kind": kind, "threads": self.threads, "device": self.device, "out": str(out), **work}
        file.write_text(json.dumps(content), encoding="utf-8")
        self._launch([sys.executable, str(self.program), "--worker", str(file)], name)
        return json.loads(out.read_text(encoding="utf-8"))

    def _launch(self, command: Sequence[str], name: str, folder: Path | None = None, cwd: Path | None = None) -> Path:
        """Run a program to its end; what it says goes to a log, whose path is returned."""
        log = self.logs / f"{name}.log"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.threads),  # every peer gets the same cores
            "HF_HUB_OFFLINE": "1",  # nothing is fetched in a measurement
            "PYTHONDONTWRITEBYTECODE": "1",  # a peer's folder stays as it is
        }
        if self.device != "cpu" and environment.get("CUDA_VISIBLE_DEVICES") != "":
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices(1)[0]  # Trainer would take all that it sees
        ended = run(command, log, self.stop, self.timeout_s, env=environment, cwd=cwd)
        if ended.was_stopped:
            raise Interrupted
        if ended.was_late:
            raise RunFailed(f"it ran longer than --run_timeout_s {self.timeout_s:g} and was ended")
        if ended.exit_code != 0:
            raise RunFailed(reason_of_failure(folder or self.scratch, log, ended.exit_code))
        return log

    def _check(self, answer: dict[str, Any]) -> None:
        """RunFailed unless every step was timed and every loss is a number."""
        steps = self.settings.last_step
        if len(answer["step_times_s"]) != steps or len(answer["losses"]) != steps:
            raise RunFailed(f"it timed {len(answer['step_times_s'])} steps instead of {steps}")
        numbers = [*answer["losses"], *([] if answer["val_loss"] is None else [answer["val_loss"]])]
        if not all(map(math.isfinite, numbers)):
            raise RunFailed("its loss is not finite")
        if not all(map(math.isfinite, answer["step_times_s"])) or min(answer["step_times_s"]) <= 0:
            raise RunFailed("it reported a step that took no time")
