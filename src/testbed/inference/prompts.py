"""Take prompts from a token file or from a file of pairs. No torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from testbed.data.disk_array import DiskArray
from testbed.data.pairs import Pair, encode_prompt, read_pairs
from testbed.data.tokenizer import Tokenizer
from testbed.errors import InputError


def draw_prompt(tokens: np.ndarray | DiskArray, length: int, random: np.random.Generator) -> list[int]:
    """Return `length` neighbouring ids from a random place of `tokens`, (N,) with N >= length."""
    start = int(random.integers(0, len(tokens) - length, endpoint=True))
    return tokens[start : start + length].tolist()


def prompts_of_pairs(
    tokenizer: Tokenizer, path: Path, max_new_tokens: int, positions: int
) -> tuple[list[Pair], list[list[int]]]:
    """Return all pairs of a pairs.jsonl with their prompts' ids, each of which leaves room for `max_new_tokens` of
    the model's `positions`.

    Raises:
        InputError: one sentence: it is not a pairs.jsonl or empty, or a prompt leaves too little room for an answer
            (with its place among the pairs).
    """
    pairs = list(read_pairs(path, "--bleu"))
    if not pairs:
        raise InputError(f"--bleu {path} holds no pairs; there is nothing to score")
    try:
        prompts = [encode_prompt(tokenizer, pair.prompt) for pair in pairs]
    except InputError as error:  # a character that the tokenizer lacks
        raise InputError(f"--bleu {path}: {error}") from None
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) + max_new_tokens > positions:
            raise InputError(
                f"--bleu {path}: the prompt of pair {number} has {len(prompt)} tokens, which with {max_new_tokens} new "
                f"ones are more than the {positions} positions of the model; ask for at most "
                f"{max(0, positions - len(prompt))} new tokens, or leave the pair out"
            )
    return pairs, prompts
