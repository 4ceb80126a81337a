"""Call nanoGPT's own train.py and read what it prints. No torch."""

from __future__ import annotations

import hashlib
import pickle
import re
import subprocess
from pathlib import Path

from testbed.config.settings import RunSettings
from testbed.data.token_file import TokenFile
from testbed.errors import InputError

FILES = ("train.py", "model.py", "configurator.py")
CHECKPOINT = "ckpt.pt"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_STEP = re.compile(r"^iter (\d+): loss (\S+), time ([\d.]+)ms", re.MULTILINE)


def check_directory(directory: Path) -> None:
    """ValueError unless the folder holds nanoGPT's program."""
    absent = [name for name in FILES if not (directory / name).is_file()]
    if absent:
        raise InputError(
            f"--nanogpt_dir {directory} has no {absent[0]}; give the folder of a clone of nanoGPT, where train.py lies"
        )


def identity(directory: Path) -> dict[str, str | None]:
    """Return the commit, null where the folder is no clone of its own, and what its programs hash to."""
    try:
        said = subprocess.run(
            ["git", "-C", str(directory), "rev-parse", "--show-toplevel", "HEAD"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        top, commit = said.stdout.split("\n")[:2]
        found = commit if Path(top).resolve() == directory.resolve() else None  # else that of a repository around it
    except (OSError, subprocess.SubprocessError, ValueError):
        found = None
    hashes = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in FILES[:2]}
    return {"commit": found, **{f"{name}_sha256": value for name, value in hashes.items()}}


def write_data(folder: Path, train_file: TokenFile, val_file: TokenFile, vocabulary: int) -> Path:
    """Write the folder that its --dataset names: our tokens, which are flat uint16 as it wants them, and the
    vocabulary.

    Without meta.pkl it would take GPT-2's padded 50,304, whatever the tokens are; `vocabulary` is the number of rows
    that our model pads its own to, so both multiply matrices of one size.
    """
    folder.mkdir()
    for name, file in (("train", train_file), ("val", val_file)):
        (folder / f"{name}.bin").symlink_to(file.path.resolve())
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))
    return folder


def arguments(settings: RunSettings, precision: str, device_type: str, data: Path, out_dir: Path) -> list[str]:
    """Return the flags with which train.py does the work of `settings` as it runs on such a device.

    It evaluates and saves before step N when N is a multiple of eval_interval, and ends after max_iters + 1 steps. With
    both at N it leaves the weights after N steps and makes one step more, whose line is not read. Step 0 evaluates too;
    its line is warm-up.
    """
    steps = settings.last_step
    is_compiled = device_type == "cuda"  # its default; on a CPU its README says --compile=False
    values = {
        "device": device_type,
        "compile": is_compiled,
        "dtype": DTYPES[precision],
        "dataset": data,
        "out_dir": out_dir,
        "eval_interval": steps,
        "eval_iters": 1,
        "log_interval": 1,
        "max_iters": steps,
        "gradient_accumulation_steps": settings.batch.grad_accum_steps,
        "batch_size": settings.batch.micro_batch_size_per_gpu,
        "block_size": settings.data.seq_length,
        "n_layer": settings.model.num_layers,
        "n_head": settings.model.num_heads,
        "n_embd": settings.model.embedding_size,
        "dropout": settings.model.dropout,
        "bias": True,
        "learning_rate": settings.optimizer.learning_rate,
        "decay_lr": False,
        "weight_decay": settings.optimizer.weight_decay,
        "beta1": settings.optimizer.adam_beta1,
        "beta2": settings.optimizer.adam_beta2,
        "grad_clip": settings.optimizer.max_grad_norm,
    }
    return ["train.py", *(f"--{name}={value}" for name, value in values.items())]


def parse_steps(text: str, steps: int) -> tuple[list[float], list[float]]:
    """Return seconds and loss of the first `steps` optimizer steps, which train.py printed with log_interval 1.

    Raises:
        InputError: a step's line is missing, comes twice or cannot be read.
    """
    found = [(int(number), loss, float(milliseconds)) for number, loss, milliseconds in _STEP.findall(text)]
    numbers = [number for number, _, _ in found]
    if numbers[:steps] != list(range(steps)):
        at = next((place for place in range(steps) if numbers[place : place + 1] != [place]), steps)
        raise InputError(f"train.py printed no line for step {at} of {steps} where it was due")
    try:
        return [seconds / 1000 for _, _, seconds in found[:steps]], [float(loss) for _, loss, _ in found[:steps]]
    except ValueError as error:
        raise InputError(f"a loss that train.py printed is no number: {error}") from None
