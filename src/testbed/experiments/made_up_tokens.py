"""Write token files for runs whose text does not matter."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from testbed.data.token_file import TokenFileWriter

NUM_TOKENS = 20_000


def write_made_up_tokens(folder: Path, vocabulary: int, num_tokens: int = NUM_TOKENS) -> None:
    """Write train.bin and val.bin, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed in (("train", 1), ("val", 2)):
        path = folder / f"{name}.bin"
        if not path.exists():
            steps = np.random.default_rng(seed).integers(1, 4, num_tokens)  # ids that follow from one another
            with TokenFileWriter(path, vocabulary, f"bpe:{vocabulary}", vocabulary - 1) as writer:
                writer.append_document(np.cumsum(steps) % (vocabulary - 1))
