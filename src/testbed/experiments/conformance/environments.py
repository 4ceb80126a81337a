"""Make a virtual environment per release of PyTorch, and on top of it one per release of DeepSpeed. No torch."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from testbed.distributed.processes import Stop, run
from testbed.errors import Failure, InputError
from testbed.io import SOURCE

# what src/gpt2.py needs besides, in the versions of requirements.txt, and DeepSpeed to be installed
BESIDES = "numpy msgspec psutil tqdm pyyaml safetensors tokenizers jinja2 scipy matplotlib requests".split()
TO_BUILD = ("setuptools<81", "wheel", "packaging", "ninja")  # older releases read pkg_resources, which 81 no longer has
OURS, DONE = "made_by_conformance", "installed.json"  # from the beginning; once all is installed
TORCH_GB, PAIR_GB = 7.0, 0.1  # PyTorch with CUDA's libraries; its build for CPUs takes 1.3
INSTALL_S = 60.0


def pins() -> list[str]:
    lines = (SOURCE.parent / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in BESIDES]


def folders(out: Path, torch: str, deepspeed: str) -> tuple[Path, Path]:
    """Return where PyTorch's environment lies, and the pair's."""
    return out / "environments" / f"torch-{torch}", out / "environments" / f"torch-{torch}-deepspeed-{deepspeed}"


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


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
    _make(base, None, [f"torch=={torch}", *pins(), *TO_BUILD], stop)
    _make(pair, base, [f"deepspeed=={deepspeed}", f"torch=={torch}"], stop)
    return python_of(pair)


def _make(folder: Path, base: Path | None, packages: Sequence[str], stop: Stop) -> None:
    """Make an environment, unless it is there; one that stands on a base sees the base's packages."""
    if (folder / DONE).exists() or stop.signal_number is not None:
        return
    remove(folder)  # of an earlier try
    folder.mkdir(parents=True)
    (folder / OURS).touch()
    log = folder.parent / f"{folder.name}.log"
    steps = [[sys.executable, "-m", "venv", str(folder)],
             [str(python_of(folder)), "-m", "pip", "install", "--disable-pip-version-check", *packages]]  # fmt: skip
    for command in steps:
        ended = run(command, log, stop, env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"})
        if ended.was_stopped:
            return
        if ended.exit_code:
            said = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
            raise Failure(f"pip cannot install {packages[0]}: {said[-1] if said else f'see {log}'}")
        if base is not None:
            place = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
            (folder / place / "base.pth").write_text(f"{(base / place).resolve()}\n", encoding="utf-8")
    (folder / DONE).write_text(json.dumps(list(packages)), encoding="utf-8")


def remove(environment: Path) -> None:
    """Delete an environment. InputError: it lies behind a link, or this program did not make it."""
    if not os.path.lexists(environment):
        return
    is_ours = (environment / OURS).is_file() or (environment / DONE).is_file()
    if environment.is_symlink() or environment.parent.is_symlink() or not is_ours:
        raise InputError(f"--out_dir: {environment} was not made by this program; move it away, or give another folder")
    shutil.rmtree(environment)
