"""Stands in for src/gpt2.py in the tests of the fault drill: two ranks that keep their word, or break it as planted.

No PyTorch: a step is a few milliseconds, the weights are a hash of all steps. STAND_IN_FLAW names what it does wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/, as this file is started by itself

import numpy as np
from safetensors.numpy import save_file

from support.metrics_examples import example_metrics
from testbed.io import replacing, write_text
from testbed.metrics.file import write_metrics

STEP_S = 0.03
FLAW = os.environ.get("STAND_IN_FLAW", "")
SEGMENTS: list[dict] = []  # of this start and of those before it
NEEDED = ("weights.bin", "more.bin", "manifest.json")


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--checkpoint_path", "--max_train_steps", "--save_every", "--collective_timeout"):
        parser.add_argument(name, required=True)
    flags, _ = parser.parse_known_args()
    directory, rank = Path(flags.checkpoint_path), int(os.environ["RANK"])
    stop: list[int] = []
    for number in () if FLAW == "dies_of_a_signal" else (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: stop.append(received))
    if rank == 0:
        print("starting: loading PyTorch, checking the data ...", flush=True)
    partner = Partner(directory, rank, float(flags.collective_timeout))
    if not partner.meets():
        return partner.end(1)
    if rank == 0:
        print(f"steps 1 to {flags.max_train_steps}; files in {directory}", flush=True)
        return train(directory, int(flags.max_train_steps), int(flags.save_every), stop, partner)
    while partner.look() or FLAW == "hangs":
        if stop:
            (directory / ".asked").touch()
        time.sleep(0.005)
    return partner.exit_code


class Partner:
    """Each rank touches a file of its own; one that is not touched for long is stuck. A dead one is known at once."""

    def __init__(self, directory: Path, rank: int, timeout_s: float):
        start = os.environ["MASTER_PORT"]  # every start has its own
        self.mine, self.other = (directory / f".alive{each}.{start}" for each in (rank, 1 - rank))
        self.pid_file = directory / f".pid{1 - rank}.{start}"
        with contextlib.suppress(OSError), replacing(directory / f".pid{rank}.{start}") as temporary:
            temporary.write_text(str(os.getpid()))
        self.timeout_s = timeout_s
        self.seen_s = time.time()
        self.exit_code = 1

    def look(self) -> bool:
        """Whether to go on: the other rank is there and has not ended."""
        self.mine.touch()
        is_dead, text = self._is_dead(), ""
        with contextlib.suppress(OSError):
            text = self.other.read_text()
            self.seen_s = max(self.seen_s, self.other.stat().st_mtime)
        if text:
            self.exit_code = int(text)
            return False
        return not is_dead and time.time() - self.seen_s < self.timeout_s

    def meets(self) -> bool:
        """Wait for the other rank to begin, as ranks do that join a group."""
        limit_s = 100 * self.timeout_s if FLAW == "waits_for_the_dead" else self.timeout_s
        while not (is_there := self.pid_file.exists()) and time.time() - self.seen_s < limit_s:
            time.sleep(0.005)
        self.seen_s = time.time()
        return is_there

    def _is_dead(self) -> bool:
        try:
            os.kill(int(self.pid_file.read_text()), 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False

    def end(self, exit_code: int) -> int:
        with contextlib.suppress(OSError):  # a full disk: then the other rank finds out by waiting
            self.mine.write_text(str(exit_code))
        return exit_code


def train(directory: Path, num_steps: int, save_every: int, stop: list[int], partner: Partner) -> int:
    if (directory / "RUN_COMPLETE.txt").exists():
        sweep(directory)
        return partner.end(0)
    sweep(directory)
    losses, weights, done = resume(directory)
    SEGMENTS.extend([*earlier_segments(directory), segment(done)])
    if FLAW == "fails_once" and done:
        return partner.end(1)
    time.sleep(0.2)
    try:
        for step in range(done + 1, num_steps + 1):
            time.sleep(STEP_S)
            weights = hashlib.sha256(weights + bytes([step])).digest()
            losses.append(1 + weights[0] / 256)
            asked = bool(stop) or (directory / ".asked").exists()
            write(directory, losses, "running")
            if step % save_every == 0 or asked:
                save(directory, step, weights, losses)
            if asked:
                write_text(directory / "RUN_PREEMPTED.txt", "preempted\n")
                return partner.end(143)
            if not partner.look():
                print("rank 0 failed: rank 1 is gone", flush=True)
                return partner.end(1)
        save_file({"weights": np.frombuffer(weights, np.uint8)}, directory / "model.safetensors")
        write(directory, losses, "complete")
        write_text(directory / "RUN_COMPLETE.txt", "complete\n")
    except OSError as error:
        print(f"rank 0 failed: {error}", flush=True)
        for half in directory.glob("checkpoints/.step_*"):
            shutil.rmtree(half)
        return partner.end(1)
    misbehave(directory)
    return partner.end(0)


def sweep(directory: Path) -> None:
    for name in ("RUN_PREEMPTED.txt", "RUN_FAILED.txt", ".asked"):
        (directory / name).unlink(missing_ok=True)
    if FLAW != "leaves_halves":
        for half in [*directory.glob(".*.tmp"), *directory.glob("checkpoints/.step_*")]:
            shutil.rmtree(half) if half.is_dir() else half.unlink()


def segment(done: int) -> dict:
    named = {"started_utc": "2026-01-01T00:00:00Z", "first_step": done + 1, "last_step": None, "resumed_from": None}
    named |= {"world_size": 2, "run_type": "ddp", "ended": None, "setting_changes": [], "random_numbers": "continued"}
    return named | {"lost_steps": 0, "lost_s": 0.0, "wall_time_s": 1.0}


def earlier_segments(directory: Path) -> list[dict]:
    try:
        return json.loads((directory / "training_metrics.json").read_text())["segments"]
    except (OSError, ValueError, KeyError):
        return []


def resume(directory: Path) -> tuple[list[float], bytes, int]:
    folders = sorted(directory.glob("checkpoints/step_*"), reverse=True)
    for folder in {"begins_at_step_1": [], "goes_on_from_an_older": folders[1:]}.get(FLAW, folders):
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            for name in NEEDED[:2]:
                if FLAW != "trusts_the_disk":
                    assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == manifest[name]
            step, weights = manifest["step"], (folder / "weights.bin").read_bytes()[:32]
        except (OSError, ValueError, KeyError, TypeError, AssertionError):
            print(f"--resume: {folder.name} is damaged and skipped", flush=True)
            shutil.rmtree(folder)
            continue
        return manifest["losses"], weights[::-1] if FLAW == "forgets" else weights, step
    return [], bytes(32), 0


def save(directory: Path, step: int, weights: bytes, losses: list[float]) -> None:
    temporary = directory / f"checkpoints/.step_{step:06d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    content = {"weights.bin": weights * 1000, "more.bin": bytes(200_000)}
    for name, data in content.items():
        (temporary / name).write_bytes(data)
        time.sleep(0.1)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    (temporary / "manifest.json").write_text(json.dumps({**hashes, "step": step, "losses": losses}))
    final = temporary.with_name(f"step_{step:06d}")
    shutil.rmtree(final, ignore_errors=True)
    temporary.replace(final)
    for old in sorted(directory.glob("checkpoints/step_*"))[:-2]:
        shutil.rmtree(old)


def write(directory: Path, losses: list[float], status: str) -> None:
    """A valid metrics file with these losses; quickly, because it is written after every step."""
    metrics = example_metrics(num_steps=len(losses), world_size=2, status=status, segments=SEGMENTS)
    for row, loss in zip(metrics["steps"], losses, strict=True):
        row["loss"] = loss
    if FLAW == "loses_a_row" and len(losses) > 3:
        del metrics["steps"][1]
    if status == "complete":
        write_metrics(directory / "training_metrics.json", metrics)
    else:
        metrics.update(completion=None)
        with replacing(directory / "training_metrics.json") as temporary:
            temporary.write_text(json.dumps(metrics))


def misbehave(directory: Path) -> None:
    if FLAW == "leaves_a_process":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    if FLAW == "leaves_a_lock":
        (Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "some_extension").mkdir(exist_ok=True)
        (Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "some_extension" / "lock").touch()


if __name__ == "__main__":
    sys.exit(main())
