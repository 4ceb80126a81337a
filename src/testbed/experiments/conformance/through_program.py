"""Train a tiny GPT-2 with src/gpt2.py. A worker of experiments/rank_server.py, with a task of plain.py. No torch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from testbed.analysis.runs.load import load_run
from testbed.config.check import check_command_line
from testbed.distributed import launch
from testbed.experiments.conformance import RANKS, STEPS
from testbed.experiments.made_up_tokens import TINY, as_flags
from testbed.io import SOURCE
from testbed.run_folder import METRICS, WEIGHTS

CHANNELS, ROWS = TINY["embedding_size"], TINY["global_batch_size"]
OF_ALL = {**TINY, "max_train_steps": STEPS, "compile": "off", "max_val_steps": 1, "sample_tokens": 0}


def words_of(task: dict[str, Any], folder: Path) -> list[str]:
    """Return the flags of src/gpt2.py for a task."""
    strategy = ["baseline"] if task["stage"] is None else ["optimized", "--zero_stage", str(task["stage"])]
    micro_batch = ROWS // RANKS // task["accumulation"]
    return [
        *("--run_type", *strategy, *as_flags(OF_ALL), "--overwrite", "--micro_batch_size_per_gpu", str(micro_batch)),
        *("--max_grad_norm", str(task["max_norm"]), "--precision", task["precision"], "--seed", str(42 + task["seed"])),
        *("--train_data_path", str(folder / "data/train.bin"), "--val_data_path", str(folder / "data/val.bin")),
        *("--checkpoint_path", str(folder / "run")),
    ]


def weights_of(file: Path) -> np.ndarray:
    """Return a run's weights in a row, but for the biases of keys, whose gradient is rounding alone."""
    from safetensors.numpy import load_file

    kept = []
    for name, tensor in sorted(load_file(file).items()):
        is_bias = name.endswith("c_attn.bias")
        kept.append(np.delete(tensor, slice(CHANNELS, 2 * CHANNELS)) if is_bias else tensor.ravel())
    return np.concatenate(kept)


def main(folder: Path) -> None:
    task = json.loads((folder / "tasks.json").read_text())
    sys.argv = [str(SOURCE / "gpt2.py"), *words_of(task, folder)]
    launch._BEGAN_S = time.monotonic()  # else the start would count from the import
    checked, here = check_command_line(sys.argv[1:])

    import gpt2

    if code := gpt2.main(checked, here):  # as one of several ranks, it ends this process
        sys.exit(code)


def results(folder: Path) -> tuple[list[float], list[float], np.ndarray]:
    """Return losses, norms and weights of the run in a task's folder."""
    run = load_run(folder / "run" / METRICS)
    return run.train_losses.tolist(), run.grad_norms.tolist(), weights_of(folder / "run" / WEIGHTS[0])
