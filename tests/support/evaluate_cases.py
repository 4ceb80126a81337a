"""Share cases among the tests of evaluate."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from support.programs import REPOSITORY
from testbed.checkpoint.weights import write_weights
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

PROGRAM = REPOSITORY / "scripts" / "evaluate.py"


SHAPE = ModelShape(num_layers=2, num_heads=2, embedding_size=32, vocab_size=300, max_position_embeddings=64)


BLEU_TOKENS = 16


TRAINED = 32  # the sequence length that the run's metrics name


def model_of(seed: int = 0) -> GPT2:
    """Larger weights than a fresh model's: its predictions depend on what stands before."""
    torch.manual_seed(seed)
    model = GPT2(SHAPE).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return model


def save_checkpoint(folder: Path, model: GPT2, tokenizer_file: Path | None = None) -> Path:
    """A run's folder, as far as evaluate.py looks at it."""
    text = tokenizer_file and tokenizer_file.read_text()
    write_weights(folder, model.state_dict(), model.shape, 0.0, 299, "bpe:300", text)
    (folder / "training_metrics.json").write_text(json.dumps({"training_config": {"seq_len": TRAINED}}))
    return folder
