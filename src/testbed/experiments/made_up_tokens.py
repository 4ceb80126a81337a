"""The tiny model of runs that only try something, and token files whose text does not matter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from testbed.data.token_file import TokenFileWriter

VOCABULARY = 300  # not a multiple of 128: rows that fill the vocabulary up take part
NUM_TOKENS = 20_000
TINY: dict[str, Any] = {
    "num_layers": 2, "num_heads": 2, "embedding_size": 32, "max_position_embeddings": 64, "seq_length": 32,
    "device": "cpu", "global_batch_size": 16, "learning_rate": 0.01, "warmup_steps": 2,
}  # fmt: skip


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that give flags these values."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def write_made_up_tokens(folder: Path, vocabulary: int, num_tokens: int = NUM_TOKENS) -> None:
    """Write train.bin and val.bin, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed in (("train", 1), ("val", 2)):
        path = folder / f"{name}.bin"
        if not path.exists():
            steps = np.random.default_rng(seed).integers(1, 4, num_tokens)  # ids that follow from one another
            with TokenFileWriter(path, vocabulary, f"bpe:{vocabulary}", vocabulary - 1) as writer:
                writer.append_document(np.cumsum(steps) % (vocabulary - 1))
