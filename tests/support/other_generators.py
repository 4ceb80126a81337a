"""How fast generation is beside two others with the same weights: reading the whole prefix again for each token, and
`transformers`. Arms alternate in one process; each of their rates is one round's tokens per second.

Sequences are as long as each other, so `transformers` pays nothing for padding, and weights are random: what they say
takes as long as what trained ones would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from testbed.inference.batching import BatchingEngine, GenerationRequest
from testbed.inference.cached_model import CachedModel
from testbed.inference.generate import generate
from testbed.inference.kv_cache import KVCache
from testbed.model.gpt2 import GPT2, to_transformers
from testbed.model.shape import ModelShape

OURS, RECOMPUTED, TRANSFORMERS = "key-value cache", "prefix read again", "transformers"
WARMUP_ROUNDS = 1


@dataclass(frozen=True)
class Arms:
    """Rates of two arms in tokens/s, one per round, and the tokens that each wrote, which should be the same."""

    names: tuple[str, str]
    rates: tuple[list[float], list[float]]
    tokens: tuple[list[list[int]], list[list[int]]]


Run = Callable[[], tuple[float, list[list[int]]]]  # tokens/s, and the new tokens of each sequence


def against_recomputing(model: GPT2, prefix_tokens: int, new_tokens: int, rounds: int) -> Arms:
    """One sequence, greedy: tokens/s after a prefix that is read before the clock starts."""
    prompt = _prompts(model.shape, 1, prefix_tokens)[0]
    return _alternate(
        (OURS, RECOMPUTED), _decoding(model, prompt, new_tokens), _rereading(model, prompt, new_tokens), rounds
    )


def against_transformers(model: GPT2, batch: int, prompt_tokens: int, new_tokens: int, rounds: int) -> Arms:
    """A batch, greedy: new tokens/s of the whole call, prompts included."""
    prompts = _prompts(model.shape, batch, prompt_tokens)
    return _alternate(
        (OURS, TRANSFORMERS), _ours(model, prompts, new_tokens), _theirs(model, prompts, new_tokens), rounds
    )


def _alternate(names: tuple[str, str], ours: Run, theirs: Run, rounds: int) -> Arms:
    rates: tuple[list[float], list[float]] = ([], [])
    tokens: list[list[list[int]]] = [[], []]
    for number in range(WARMUP_ROUNDS + rounds):
        for arm in (0, 1) if number % 2 else (1, 0):  # neither always comes first
            rate, tokens[arm] = (ours, theirs)[arm]()
            if number >= WARMUP_ROUNDS:
                rates[arm].append(rate)
    return Arms(names, rates, (tokens[0], tokens[1]))


def _prompts(shape: ModelShape, number: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, shape.vocab_size, (number, length), generator=generator).tolist()


def _decoding(model: GPT2, prompt: list[int], new_tokens: int) -> Run:
    def run() -> tuple[float, list[list[int]]]:
        engine = BatchingEngine(model, max_batch=1, max_length=len(prompt) + new_tokens + 1)
        request = engine.submit(GenerationRequest(prompt, new_tokens + 1))
        engine.step()
        start_s = time.perf_counter()
        while engine.has_work:
            engine.step()  # the token is on the host: the device has finished
        return new_tokens / (time.perf_counter() - start_s), [request.tokens[1:]]

    return run


def _rereading(model: GPT2, prompt: list[int], new_tokens: int) -> Run:
    """The head at the last position alone: a forward pass for training would be slower still."""
    reader = CachedModel(model)

    @torch.inference_mode()
    def run() -> tuple[float, list[list[int]]]:
        cache = KVCache(model.shape, 1, len(prompt) + new_tokens, model.wte.weight.device, model.wte.weight.dtype)
        ids = torch.tensor([prompt], device=model.wte.weight.device)

        def read() -> None:
            nonlocal ids
            ids = torch.cat([ids, reader(ids, cache, 0, [ids.shape[1]]).argmax(-1, keepdim=True)], dim=1)
            ids[0, -1].item()

        read()
        start_s = time.perf_counter()
        for _ in range(new_tokens):
            read()
        return new_tokens / (time.perf_counter() - start_s), ids[:, len(prompt) + 1 :].tolist()

    return run


def _ours(model: GPT2, prompts: Sequence[list[int]], new_tokens: int) -> Run:
    def run() -> tuple[float, list[list[int]]]:
        start_s = time.perf_counter()
        tokens = generate(model, prompts, new_tokens, max_batch=len(prompts))
        return len(prompts) * new_tokens / (time.perf_counter() - start_s), tokens

    return run


def _theirs(model: GPT2, prompts: Sequence[list[int]], new_tokens: int) -> Run:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = model.shape
    config = GPT2Config(
        **shape.as_transformers(),
        bos_token_id=None,
        eos_token_id=None,  # nothing ends a sequence before its time
    )
    theirs: Any = GPT2LMHeadModel(config)  # its annotations refuse what its documentation shows
    theirs.load_state_dict(to_transformers(model.state_dict(), shape), strict=False)  # the tied head is stored once
    theirs.tie_weights()
    theirs.to(model.wte.weight.device, model.wte.weight.dtype).eval()

    def run() -> tuple[float, list[list[int]]]:
        start_s = time.perf_counter()
        ids = torch.tensor(prompts, device=theirs.device)
        options = {"max_new_tokens": new_tokens, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        written = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
        tokens = written[:, ids.shape[1] :].tolist()
        return len(prompts) * new_tokens / (time.perf_counter() - start_s), tokens

    return run
