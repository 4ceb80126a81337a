"""Compute perplexity over a sliding window, bits per byte, and what another scheme changes in them.

The first window scores all of its targets, each later one only the last `stride`: every target is scored once, and all
but those of the first window with at least `window - stride` tokens before them. Windows run over the ends of
documents, as in training. The interval resamples windows (percentile bootstrap): it says how far the figure depends on
which windows of this file were read. Of few windows a percentile interval is too narrow (of five it covers the truth
in 85 of 100 cases, from MIN_WINDOWS on in 93 or more), so they get none. Neighbouring windows are alike, so for another
text it is too narrow. The ratio to another scheme resamples pairs, the same windows under both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from testbed.data.disk_array import DiskArray
from testbed.data.tokenizer import Tokenizer
from testbed.errors import InputError
from testbed.model.gpt2 import GPT2

NUM_RESAMPLES = 4_999
MIN_WINDOWS = 30  # fewer have no interval
LOGITS_BYTES = 256 * 2**20  # of one forward pass: small models read many windows at once, large ones do not swap
RESAMPLED_AT_ONCE = 1 << 22  # numbers; all resamples of a whole file of windows at once are gigabytes


@dataclass(frozen=True)
class TokenWindow:
    """`length` inputs from token `start` on, and as many targets, one further; the last `scored` of them count."""

    start: int
    length: int
    scored: int


def sliding_windows(num_tokens: int, window: int, stride: int, most: int | None = None) -> list[TokenWindow]:
    """Return the first `most` windows over `num_tokens` tokens, or all. The last one may score fewer targets.

    Raises:
        InputError: nothing can be scored, or the stride would leave targets out.
    """
    if num_tokens < 2:
        raise InputError(f"{num_tokens} tokens hold no target: each is predicted from those before it")
    if not 1 <= stride <= window:
        raise InputError(f"a stride of {stride} with windows of {window} tokens would leave targets out")
    num_targets = num_tokens - 1
    windows = [TokenWindow(0, min(window, num_targets), min(window, num_targets))]
    while windows[-1].start + windows[-1].length < num_targets and (most is None or len(windows) < most):
        end = windows[-1].start + windows[-1].length
        new_end = min(end + stride, num_targets)
        windows.append(TokenWindow(new_end - window, window, new_end - end))
    return windows


@torch.no_grad()
def window_nats(
    model: GPT2,
    tokens: np.ndarray | DiskArray,
    windows: Sequence[TokenWindow],
    progress: Callable[[int], Any] = lambda number: None,
    at_once: int | None = None,
) -> list[float]:
    """Return the sum of the losses of each window's scored targets, in nats. Losses are float32, sums float64.

    Args:
        tokens: (N,) ids.
        progress: called with the number of windows just read.
        at_once: windows of a forward pass at most (default: as many as LOGITS_BYTES hold).
    """
    model.eval()
    device, found = model.wte.weight.device, []
    per_row = max(window.length for window in windows) * model.shape.padded_vocab_size * 4
    most = at_once or max(1, LOGITS_BYTES // per_row)
    for batch in _batches_of_equal_length(windows, most):
        rows = np.stack([tokens[each.start : each.start + each.length + 1].astype(np.int64) for each in batch])
        ids = torch.from_numpy(rows).to(device)  # (B, T + 1)
        nats = token_nats(model, ids)
        found += [float(row[-each.scored :].sum()) for row, each in zip(nats, batch, strict=True)]
        progress(len(batch))
    return found


def token_nats(model: GPT2, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token but the first, (B, T) float64 of (B, T + 1) ids."""
    logits = model(ids[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").double().view(len(ids), -1)


def _batches_of_equal_length(windows: Sequence[TokenWindow], most: int) -> list[list[TokenWindow]]:
    """Return batches of neighbouring windows of equal length, at most `most` in each."""
    batches: list[list[TokenWindow]] = []
    for window in windows:
        if batches and len(batches[-1]) < most and batches[-1][0].length == window.length:
            batches[-1].append(window)
        else:
            batches.append([window])
    return batches


def scored_bytes(tokens: np.ndarray | DiskArray, windows: Sequence[TokenWindow], tokenizer: Tokenizer) -> int:
    """Return the bytes of text that the scored targets stand for; end-of-text stands for none."""
    lengths = tokenizer.byte_lengths()
    ends = [window.start + window.length + 1 for window in windows]
    return sum(int(lengths[tokens[end - window.scored : end]].sum()) for end, window in zip(ends, windows, strict=True))


def perplexity(nats: Sequence[float], windows: Sequence[TokenWindow], num_bytes: int | None) -> dict[str, Any]:
    """Return the `perplexity` field of a scheme in the file. ArithmeticError when a loss is not finite."""
    if not np.isfinite(nats).all():
        raise ArithmeticError("the model's losses are not finite numbers")
    scored = [window.scored for window in windows]
    low, high = _perplexity_interval(np.asarray(nats), np.asarray(scored))
    nats_per_token = sum(nats) / sum(scored)
    return {
        "value": math.exp(nats_per_token),
        "low": low,
        "high": high,
        "nats_per_token": nats_per_token,
        "bits_per_byte": None if num_bytes in (None, 0) else sum(nats) / math.log(2) / num_bytes,
        "window_nats": list(nats),
        "window_tokens": scored,
    }


def perplexity_ratio(of: dict[str, Any], against: dict[str, Any]) -> dict[str, float | None]:
    """Return a perplexity over another's, from two `perplexity` fields of the same windows."""
    scored = np.asarray(of["window_tokens"])
    difference = np.asarray(of["window_nats"]) - np.asarray(against["window_nats"])
    low, high = _perplexity_interval(difference, scored)
    return {"value": math.exp(difference.sum() / scored.sum()), "low": low, "high": high}


def _perplexity_interval(nats: np.ndarray, scored: np.ndarray) -> tuple[float | None, float | None]:
    """Return the 95 % interval of exp(sum of nats / sum of tokens) over resampled windows."""
    if len(nats) < MIN_WINDOWS:
        return None, None
    from scipy import stats  # half a second

    def statistic(nats: np.ndarray, scored: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.exp(nats.sum(axis=axis) / scored.sum(axis=axis))

    resampled = stats.bootstrap(
        (nats, scored.astype(np.float64)), statistic, paired=True, vectorized=True, n_resamples=NUM_RESAMPLES,
        method="percentile", rng=0, batch=max(1, RESAMPLED_AT_ONCE // len(nats)),
    )  # fmt: skip
    return float(resampled.confidence_interval.low), float(resampled.confidence_interval.high)
