"""Generate: token ids in, new token ids out, on top of the batching engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import nn

from testbed.inference.batching import BatchingEngine, GenerationRequest, shape_of
from testbed.inference.sampling import GREEDY, Sampling

DEFAULT_BATCH = 8  # sequences at a time: GPT-2 124M with all its positions needs 0.6 GB of cache for them in fp32


def generate(
    model: nn.Module,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_id: int | None = None,
    max_batch: int | None = None,
) -> list[list[int]]:
    """Continue prompts of any lengths, `max_batch` at a time (default: DEFAULT_BATCH).

    Args:
        model: a GPT2 or a CachedModel.
        sampling: prompt i is drawn with `seed + i`, so equal prompts are continued differently.
        stop_id: the token that ends a sequence, usually end-of-text; it is the last of the returned ids then.

    Returns:
        The new token ids of each prompt.

    Raises:
        InputError: an empty prompt, one that is too long or holds an id that the model does not know; a setting out of
            its range.
    """
    if not prompts:
        return []
    requests = [
        GenerationRequest(prompt, max_new_tokens, dataclasses.replace(sampling, seed=sampling.seed + number), stop_id)
        for number, prompt in enumerate(prompts)
    ]
    batch = min(len(prompts), DEFAULT_BATCH if max_batch is None else max_batch)
    engine = _engine_for(model, requests, batch)
    while engine.has_work:
        engine.step()
    return [request.tokens for request in requests]


def stream(
    model: nn.Module,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_id: int | None = None,
) -> Iterator[int]:
    """Yield the tokens of `generate` for one prompt, each as soon as it is there. Errors come at the call."""
    request = GenerationRequest(prompt, max_new_tokens, sampling, stop_id)
    engine = _engine_for(model, [request], 1)
    return (token for step in iter(engine.step, []) for _, token in step)


def _engine_for(model: nn.Module, requests: Sequence[GenerationRequest], max_batch: int) -> BatchingEngine:
    """Return an engine with all requests in its queue, and no more cache than they need."""
    longest = max(len(request.prompt) for request in requests) + requests[0].max_new_tokens
    positions = shape_of(model).max_position_embeddings
    engine = BatchingEngine(
        model, max_batch=max_batch, max_queue=len(requests), max_length=max(1, min(longest, positions))
    )
    for request in requests:
        engine.submit(request)
    return engine
