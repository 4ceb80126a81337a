"""Time one request at a time: prefill and decode apart, several modules in turn.

Greedy, with the key-value cache. The prefill is the forward pass over the prompt; the first token is there when it has
been chosen and the host holds it; a further token takes from one token on the host to the next. Every repeat has a
prompt of its own, the same for all modules, and the order of the modules changes from repeat to repeat, so that a
machine that slows down slows down all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from testbed.inference.kv_cache import KVCache
from testbed.inference.load_test import percentiles
from testbed.model.shape import ModelShape
from testbed.profiling.step_clock import synchronize


@dataclass(frozen=True)
class Answer:
    """The tokens that a module wrote after a prompt, and when. Seconds."""

    tokens: list[int]
    prefill_s: float
    time_to_first_token_s: float
    per_token_s: list[float]  # of each token after the first

    @property
    def latency_s(self) -> float:
        """From the prompt to the last token."""
        return self.time_to_first_token_s + sum(self.per_token_s)

    @property
    def decode_tokens_per_s(self) -> float:
        return len(self.per_token_s) / sum(self.per_token_s)


@torch.inference_mode()
def time_answer(
    module: nn.Module, cache: KVCache, prompt: Sequence[int], new_tokens: int, device: torch.device
) -> Answer:
    """Time the greedy answer of a CachedModel, or of a wrapper that passes its call on, to one prompt.

    Args:
        cache: with one slot or more, of the module's precision.
        new_tokens: at least 2, so that there is something to decode.
    """
    synchronize(device)
    start_s = time.perf_counter()
    logits = module(torch.tensor([prompt], device=device), cache, 0, [len(prompt)])
    synchronize(device)
    prefill_s = time.perf_counter() - start_s
    tokens = [int(logits.argmax(-1))]  # the host has waited for it
    moments = [time.perf_counter()]
    for length in range(len(prompt) + 1, len(prompt) + new_tokens):
        logits = module(torch.tensor([tokens[-1:]], device=device), cache, 0, [length])
        tokens.append(int(logits.argmax(-1)))
        moments.append(time.perf_counter())
    return Answer(tokens, prefill_s, moments[0] - start_s, np.diff(moments).tolist())


def time_in_turn(
    modules: Mapping[str, nn.Module],
    shape: ModelShape,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    warmup: int,
    device: torch.device,
    progress: Callable[[int], Any] = lambda number: None,
) -> dict[str, list[Answer]]:
    """Return every module's answer to every prompt but the first `warmup`, which are answered and forgotten.

    Args:
        modules: CachedModels, or wrappers that pass their call on, by name.
        prompts: all of the same length.
    """
    length = max(map(len, prompts)) + new_tokens
    caches = {
        name: KVCache(shape, 1, length, device, next(module.parameters()).dtype) for name, module in modules.items()
    }
    answers: dict[str, list[Answer]] = {name: [] for name in modules}
    random = np.random.default_rng(0)
    for number, prompt in enumerate(prompts):
        for name in random.permutation(list(modules)).tolist():
            answer = time_answer(modules[name], caches[name], prompt, new_tokens, device)
            if number >= warmup:
                answers[name].append(answer)
            progress(1)
    return answers


def latency_fields(answers: Sequence[Answer], prompt_tokens: int, warmup: int) -> dict[str, Any]:
    """Return the `latency` field of a scheme in inference_metrics.json."""
    prefill_s = [answer.prefill_s for answer in answers]
    first_s = [answer.time_to_first_token_s for answer in answers]
    per_token_s = [answer.per_token_s for answer in answers]
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(answers[0].tokens),
        "warmup": warmup,
        "repeats": len(answers),
        "prefill_s": prefill_s,
        "time_to_first_token_s": first_s,
        "per_token_s": per_token_s,
        "percentiles": {
            "prefill_s": percentiles(prefill_s),
            "time_to_first_token_s": percentiles(first_s),
            "per_token_s": percentiles([time_s for times_s in per_token_s for time_s in times_s]),
        },
        "prefill_tokens_per_s": prompt_tokens / float(np.median(prefill_s)),
        "decode_tokens_per_s": float(np.median([answer.decode_tokens_per_s for answer in answers])),
    }
