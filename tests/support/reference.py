"""transformers' GPT-2 as the reference of ours."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from testbed.model.shape import ModelShape

SHAPE = ModelShape(num_layers=3, num_heads=4, embedding_size=48, vocab_size=301, max_position_embeddings=40)


def reference_model(shape: ModelShape = SHAPE) -> GPT2LMHeadModel:
    torch.manual_seed(7)
    config = GPT2Config(
        **shape.as_transformers(),
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def some_tokens(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SHAPE.vocab_size, (2, 20), generator=generator)
