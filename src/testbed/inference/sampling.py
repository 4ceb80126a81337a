"""Choose the next token from the logits: the likeliest one, or one drawn by temperature, top-k and top-p.

In this order, as in `transformers`: divide by the temperature, keep the k likeliest, keep of these the fewest whose
probabilities reach p, draw from what is left.

Shapes: R sequences, V vocabulary, K <= V candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from testbed.errors import InputError

if TYPE_CHECKING:
    import torch


NOT_A_TOKEN = -1  # where a sequence's logits are not numbers
LOWEST_TEMPERATURE = 1e-10  # what is lower is drawn as this, greedily in effect; float32 would divide by zero


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice of tokens. temperature 0 is greedy, and then nothing else matters. None: no such limit.

    Raises:
        InputError: a value out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature {self.temperature} must be 0, which is greedy, or a number above 0")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k {self.top_k} must be at least 1; leave it out to draw from all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p} must be above 0 and at most 1; leave it out to draw from all tokens")


GREEDY = Sampling()


def candidates(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what may be drawn: (R, K) probabilities, zero where top-p leaves a token out and not always adding up to
    1 then; and (R, K) token ids, the likeliest first, or None where each column is the token of its number.

    Args:
        logits: (R, V) of any floating type.
        sampling: with a temperature above 0.
    """
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, LOWEST_TEMPERATURE)
    top_p = sampling.top_p
    if top_p is not None and top_p >= 1:
        top_p = None  # rounded sums reach 1 before the last token
    if sampling.top_k is None and top_p is None:
        return logits.softmax(-1), None
    if sampling.top_k is None or sampling.top_k >= logits.shape[-1]:
        logits, token_ids = logits.sort(descending=True)
    else:
        logits, token_ids = logits.topk(sampling.top_k)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        likelier = probabilities.cumsum(-1) - probabilities  # of all candidates before this one
        probabilities = probabilities.masked_fill(likelier >= top_p, 0.0)
    return probabilities, token_ids


def next_tokens(logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> torch.Tensor:
    """Return the next token of each sequence; NOT_A_TOKEN where its logits hold NaN or +inf.

    Nothing here waits for the device.

    A sequence's token depends on its own row, settings and random number alone, whatever the other rows are.

    Args:
        logits: (R, V).
        samplings: of each sequence.
        uniforms: a random number from [0, 1) for each sequence, unused where it is greedy.

    Returns:
        (R,) int64 on the device of the logits.
    """
    import torch  # here, so that a program can check its settings without waiting for it

    highest, tokens = logits.max(-1)
    alike: dict[tuple, list[int]] = {}  # rows with the same settings are drawn together
    for row, sampling in enumerate(samplings):
        if sampling.temperature > 0:
            alike.setdefault((sampling.temperature, sampling.top_k, sampling.top_p), []).append(row)
    for rows in alike.values():
        if len(rows) == len(samplings):
            tokens = _draw(logits, samplings[0], uniforms)
        else:
            index = torch.tensor(rows).to(logits.device, non_blocking=True)
            tokens[index] = _draw(logits[index], samplings[rows[0]], [uniforms[row] for row in rows])
    return tokens.masked_fill(~highest.isfinite(), NOT_A_TOKEN)


def _draw(logits: torch.Tensor, sampling: Sampling, uniforms: Sequence[float]) -> torch.Tensor:
    """Return the token at which the sum of the probabilities passes the random number, for each of (R, V) logits."""
    import torch

    probabilities, token_ids = candidates(logits, sampling)
    # float64: the sum of 50,257 float32 numbers is wrong by more than the rarest tokens' probability
    below = probabilities.cumsum(-1, dtype=torch.float64)
    drawn = torch.tensor(uniforms, dtype=torch.float64).to(logits.device, non_blocking=True).unsqueeze(1)
    drawn = torch.searchsorted(below, drawn * below[:, -1:], right=True).clamp_(max=below.shape[-1] - 1)
    return (drawn if token_ids is None else token_ids.gather(1, drawn)).squeeze(1)
