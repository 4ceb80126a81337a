"""Prompts out of a token file. No torch."""

from __future__ import annotations

import numpy as np


def draw_prompt(tokens: np.ndarray, length: int, random: np.random.Generator) -> list[int]:
    """`length` neighbouring ids from a random place of `tokens`, (N,) with N >= length."""
    start = int(random.integers(0, len(tokens) - length, endpoint=True))
    return tokens[start : start + length].tolist()
