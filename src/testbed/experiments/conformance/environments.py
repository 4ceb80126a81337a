"""Make a virtual environment per release of PyTorch, and on top of it one per release of DeepSpeed. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from testbed.distributed.processes import Stop, run
from testbed.errors import Failure
from testbed.io import SOURCE

# what DeepSpeed is built with: older releases read pkg_resources, which setuptools 81 no longer has
BESIDES = ("numpy", "setuptools<81", "wheel", "packaging", "ninja")
DONE = "installed.txt"  # once all is installed
TORCH_GB, PAIR_GB = 7.0, 0.1  # PyTorch with CUDA's libraries; its build for CPUs takes 1.3
INSTALL_S = 60.0


def folders(out: Path, torch: str, deepspeed: str) -> tuple[Path, Path]:
    """Return where PyTorch's environment lies, and the pair's."""
    return out / "environments" / f"torch-{torch}", out / "environments" / f"torch-{torch}-deepspeed-{deepspeed}"


def missing(out: Path, pairs: Sequence[tuple[str, str]]) -> list[Path]:
    """Return the environments of these pairs of PyTorch and DeepSpeed that are to be made."""
    wanted = dict.fromkeys(folder for pair in pairs for folder in folders(out, *pair))
    return [folder for folder in wanted if not (folder / DONE).exists()]


def gigabytes(environments: Sequence[Path]) -> float:
    """Return the most that these environments take."""
    return sum(PAIR_GB if "deepspeed" in folder.name else TORCH_GB for folder in environments)


def make(out: Path, torch: str, deepspeed: str, stop: Stop) -> Path:
    """Make what is missing for a pair, and return its Python. Failure where pip cannot install a release."""
    base, pair = folders(out, torch, deepspeed)
    _make(base, None, [f"torch=={torch}", *BESIDES], stop)
    _make(pair, base, [f"deepspeed=={deepspeed}", f"torch=={torch}"], stop)
    return pair / "bin" / "python"


def variables() -> dict[str, str]:
    """Return the environment variables of the runs of a pair."""
    own = {"PYTHONPATH": str(SOURCE), "PYTHONSAFEPATH": "1"}  # -m would look in the current folder first
    return {**os.environ, **own, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def _make(folder: Path, base: Path | None, packages: Sequence[str], stop: Stop) -> None:
    """Make an environment, unless it is there; one that stands on a base sees the base's packages."""
    if (folder / DONE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{folder.name}.log"
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],  # of an earlier try
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *packages],
    ):
        ended = run(command, log, stop, env=environment)
        if ended.was_stopped:
            return
        if ended.exit_code:
            said = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
            raise Failure(f"{packages[0]} cannot be installed: {said[-1] if said else f'see {log}'}")
        if base is not None:
            place = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
            (folder / place / "base.pth").write_text(f"{(base / place).resolve()}\n", encoding="utf-8")
    (folder / DONE).write_text("\n".join(packages), encoding="utf-8")
