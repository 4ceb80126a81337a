"""Measure how long a run with 10B tokens in 100 shards, files of holes with llm.c's header, needs for its first batch.

    cd tests; PYTHONPATH=../src:. python -m support.sparse_shards FOLDER

The folder needs next to no room. The first start reads all tokens, for the manifest.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

from support.settings import typed
from testbed.data.token_file import check_token_file
from testbed.train.batches import TrainingBatches

SHARDS, TOKENS = 100, 100_000_000


def make(folder: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, TOKENS
    for number in range(SHARDS):
        with (folder / f"train_{number:06d}.bin").open("wb") as file:
            file.write(header.tobytes())
            file.truncate(1024 + 2 * TOKENS)
    np.zeros(4096, "<u2").tofile(folder / "val.bin")


def start(folder: Path) -> tuple[float, float]:
    """Check flags and data, order the windows, and read the first batch. Returns seconds by the clock and of CPU."""
    start_s, cpu_s = time.perf_counter(), time.process_time()
    flags = "--model gpt2 --seq_length 1024 --global_batch_size 64 --precision fp32 --device cpu --max_val_steps 0"
    data = ["--train_data_path", str(folder / "train_*.bin"), "--val_data_path", str(folder / "val.bin")]
    checked = typed([*flags.split(), *data])
    scan = check_token_file(checked.train_file, checked.settings.shape.vocab_size)
    (first, *_) = TrainingBatches(checked.train_file, checked.settings, 0, torch.device("cpu")).of_step(0)
    assert len(checked.train_file.tokens) == SHARDS * TOKENS and scan.max_token_id == 0 and not first.inputs.any()
    return time.perf_counter() - start_s, time.process_time() - cpu_s


if __name__ == "__main__":
    where = Path(sys.argv[1])
    make(where)
    for name in ("with all tokens read", "after the manifest", "after the manifest", "after the manifest"):
        print(f"{name}: {start(where)[0]:.2f} s", flush=True)
