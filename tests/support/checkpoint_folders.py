"""Folders of checkpoints, whole and damaged."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from support.metrics_examples import SHA_TRAIN, SHA_VAL, example_metrics
from support.programs import TINY_RUN, data_flags
from support.settings import launch, typed
from testbed.checkpoint import resume
from testbed.checkpoint.decide import Start
from testbed.checkpoint.writer import CheckpointWriter
from testbed.metrics.recorder import RunRecorder
from testbed.run_folder import run_lock

SHA256 = {"train": SHA_TRAIN, "val": SHA_VAL}
STEPS = 10


class Weights:
    """A strategy that is one number, which says what was loaded."""

    saves_in_background, file_group = True, None

    def __init__(self, fault: Exception | None = None):
        self.number = torch.zeros(1)
        self.fault = fault
        self.background: Future = Future()
        self.loaded = ""

    def save_checkpoint(self, directory: Path, in_background: bool = False) -> Future | None:
        if self.fault is not None:
            raise self.fault
        (directory / "part").mkdir()
        torch.save(self.number, directory / "part" / "weights.pt")
        return self.background if in_background else None

    def load_checkpoint(self, directory: Path) -> None:
        self.number, self.loaded = torch.load(directory / "part" / "weights.pt", weights_only=True), "bit for bit"

    def load_full_state(self, directory: Path) -> None:
        self.number, self.loaded = torch.load(directory / "part" / "weights.pt", weights_only=True), "by name"


class Folder:
    """The folder of a made-up run: real checkpoints and metrics, but no training."""

    def __init__(self, token_files, path: Path):
        self.token_files, self.path = token_files, path
        self.checkpoints = path / "checkpoints"

    def settings(self, *flags: str, world_size: int = 1):
        arguments = [*TINY_RUN, *data_flags(self.token_files), "--checkpoint_path", str(self.path)]
        arguments += ["--max_train_steps", str(STEPS), "--timing_warmup_steps", "1", *flags]
        return typed(arguments, world_size).settings

    def recorder(self, settings, world_size: int = 1) -> RunRecorder:
        facts = example_metrics(num_steps=2, world_size=world_size, warmup_steps=1)
        facts["hardware"]["num_devices"] = world_size
        facts["training_config"] |= {"run_type": settings.training.run_type, "math_changes": [], "total_steps": STEPS}
        return RunRecorder(self.path, settings, facts, is_writer=True)

    def train(self, steps: range, saved: set[int], *flags: str, strategy=None, start=None, world_size=1) -> RunRecorder:
        """Add rows for `steps`, save after those in `saved`, and end as a killed run does: without a word."""
        settings = self.settings(*flags, world_size=world_size)
        self.path.mkdir(exist_ok=True)
        recorder = self.recorder(settings, world_size)
        if start is not None:
            resume.record(start, recorder)
        strategy = strategy or Weights()
        writer = CheckpointWriter(strategy, settings, launch(), recorder)
        recorder.begin_training(startup_s=0.0)
        for step in steps:
            strategy.number += 1
            row = example_metrics(num_steps=1, world_size=world_size)["steps"][0]
            recorder.steps.append(row | {"step": step, "is_warmup": step <= recorder.starts.resumed_step + 1})
            if step in saved:
                writer.save(step)
        recorder.write("running")
        return recorder

    def begin(self, *flags: str, sha256: dict | None = None, world_size: int = 1) -> Start:
        """Begin a start of the run, and let go of the folder at once, as if its process had ended."""
        settings = self.settings(*flags, world_size=world_size)
        try:
            return resume.begin(settings, launch(world_size), lambda: sha256 or SHA256, None)
        finally:
            run_lock.release(self.path)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.iterdir())


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def refusal(run: Folder, *flags: str, **more) -> str:
    """One sentence, and nothing is touched."""
    before = contents(run.path)
    with pytest.raises(ValueError) as caught:
        run.begin(*flags, **more)
    assert "\n" not in str(caught.value)
    assert contents(run.path) == before
    return str(caught.value)


def move_to_larger_disk(path: Path, disk: Path) -> None:
    disk.mkdir(exist_ok=True)
    shutil.move(path, disk / path.name)
    path.symlink_to(disk / path.name)
