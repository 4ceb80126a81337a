"""What the tests of generation share: a random GPT-2, the same in transformers, and what that one writes."""

from __future__ import annotations

import functools
import random

import torch

from support.reference import reference_model
from testbed.model.gpt2 import GPT2, from_transformers
from testbed.model.shape import ModelShape

SHAPE = ModelShape(num_layers=3, num_heads=4, embedding_size=48, vocab_size=301, max_position_embeddings=96)
NEW_TOKENS = 16
NUM_PROMPTS = 50


@functools.cache
def reference():
    """Weights so large that every layer takes part in the choice: with GPT-2's own it repeats the last token."""
    model = reference_model(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@functools.cache
def our_model() -> GPT2:
    model = GPT2(SHAPE).eval()
    model.load_state_dict(from_transformers(reference().state_dict(), SHAPE))
    return model


def random_prompts(seed: int = 0, number: int = NUM_PROMPTS, longest: int = 60) -> list[list[int]]:
    """Of all lengths from one token on."""
    rng = random.Random(seed)
    return [[rng.randrange(SHAPE.vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(number)]


def theirs(prompt: list[int], new_tokens: int, **options) -> list[int]:
    """New ids of transformers' greedy generate for one prompt."""
    ids = torch.tensor([prompt])
    written = reference().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, **options
    )
    return written[0, len(prompt) :].tolist()


@functools.cache
def expected_tokens() -> list[list[int]]:
    """What transformers writes after each of `random_prompts()`."""
    return [theirs(prompt, NEW_TOKENS) for prompt in random_prompts()]
