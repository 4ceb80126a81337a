"""Check continuous batching: tokens do not depend on the neighbours, and no request is lost."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter

import pytest
import torch
from support.generation_cases import NEW_TOKENS, NUM_PROMPTS, SHAPE, expected_tokens, our_model, random_prompts

from testbed.inference.batching import BatchingEngine, GenerationRequest, QueueFull
from testbed.inference.cached_model import CachedModel
from testbed.inference.generate import generate
from testbed.inference.sampling import Sampling
from testbed.model.gpt2 import GPT2


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_join_and_leave_get_the_tokens_of_transformers(seed):
    """Random arrivals, lengths and cancellations through a short queue: no request is lost or doubled, what is finished
    is the reference's, what is cancelled its head and frees its place."""
    rng = random.Random(seed)
    engine = BatchingEngine(our_model(), max_batch=rng.randint(2, 8), max_queue=3)
    coming = [GenerationRequest(prompt, rng.randint(1, NEW_TOKENS)) for prompt in random_prompts()]
    requests, emitted, sizes, refused = list(coming), Counter(), set(), 0
    while coming or engine.has_work:
        for _ in range(min(len(coming), rng.choice([0, 0, 1, 5]))):
            try:
                engine.submit(coming[0])
            except QueueFull as error:
                assert "3 requests wait already" in str(error) and engine.num_waiting == 3 and coming[0].id is None
                refused += 1
                break
            coming.pop(0)
        under_way = [each for each in requests if each.state in ("waiting", "running") and each.id is not None]
        if under_way and rng.random() < 0.1:
            cancelled = rng.choice(under_way)
            free, waiting, state = engine.num_free_slots, engine.num_waiting, cancelled.state
            assert engine.cancel(cancelled) and not engine.cancel(cancelled)
            freed = engine.num_free_slots - free, waiting - engine.num_waiting
            assert freed == ((1, 0) if state == "running" else (0, 1))
        could_run = min(engine.max_batch, engine.num_running + engine.num_waiting)
        step = engine.step()
        assert len(step) == could_run, "no slot idles while a request waits"
        emitted.update(request.id for request, _ in step)
        sizes.add(engine.num_running)
    assert len(sizes) > 2 and refused, "the batch grew and shrank, and the queue was full"
    states = Counter(request.state for request in requests)
    assert states["finished"] > 20 and states["cancelled"] > 0 and states.total() == NUM_PROMPTS
    assert [request.id for request in requests] == list(range(NUM_PROMPTS)) and engine.num_running == 0
    for request, expected in zip(requests, expected_tokens(), strict=True):
        assert emitted[request.id] == len(request.tokens)
        number = request.max_new_tokens if request.state == "finished" else len(request.tokens)
        assert request.tokens == expected[:number]


def test_a_step_gives_every_running_request_one_token():
    engine = BatchingEngine(our_model(), max_batch=2)
    first, second, third = (engine.submit(GenerationRequest(prompt, 3)) for prompt in random_prompts(number=3))
    assert (engine.num_running, engine.num_waiting, engine.num_free_slots) == (0, 3, 2)
    assert [request for request, _ in engine.step()] == [first, second]
    assert (engine.num_running, engine.num_waiting, engine.num_free_slots) == (2, 1, 0)
    assert third.state == "waiting" and third.tokens == []
    engine.step()
    assert len(engine.step()) == 2 and first.state == second.state == "finished"
    assert (engine.num_running, engine.num_free_slots) == (0, 2)
    emitted = engine.step()
    assert emitted == [(third, third.tokens[0])]
    assert [request.id for request in (first, second, third)] == [0, 1, 2]
    while engine.has_work:
        engine.step()
    assert engine.step() == []


def test_drawn_tokens_do_not_depend_on_the_neighbours():
    """Greedy, top-k, top-p and plain draws in one batch, each as it is alone."""
    settings = [
        Sampling(0.0),
        Sampling(1.0, seed=1),
        Sampling(0.9, top_k=20, seed=2),
        Sampling(0.9, top_k=20, seed=3),
        Sampling(1.4, top_p=0.8, seed=4),
        Sampling(0.7, top_k=100, top_p=0.9, seed=5),
    ]
    engine = BatchingEngine(our_model(), max_batch=4)
    together = [
        GenerationRequest(prompt, NEW_TOKENS, settings[i % 6]) for i, prompt in enumerate(random_prompts(number=18))
    ]
    for request in together:
        engine.submit(request)
        engine.step()
    while engine.has_work:
        engine.step()
    for request in together:
        alone = generate(our_model(), [request.prompt], NEW_TOKENS, request.sampling)
        assert request.tokens == alone[0]


def test_what_was_submitted_or_has_ended_is_not_taken_twice():
    engine = BatchingEngine(our_model())
    request = engine.submit(GenerationRequest([1, 2], 1))
    with pytest.raises(ValueError, match="request 0 was submitted before"):
        engine.submit(request)
    engine.step()
    assert request.state == "finished" and not engine.cancel(request)
    assert not engine.cancel(GenerationRequest([1], 1)), "never submitted"


class FailsOnce(torch.nn.Module):
    """A wrapper that passes the call on, but for one time."""

    def __init__(self, module: torch.nn.Module, at: int):
        super().__init__()
        self.module, self.left, self.shape = module, at, module.shape

    def forward(self, *arguments):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of memory")
        return self.module(*arguments)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_step_that_fails_loses_nobody(at):
    """In the first prefill, in a decode step, in the prefill beside one; the same tokens, once it works again, whether
    they are drawn or the likeliest."""
    engine = BatchingEngine(FailsOnce(CachedModel(our_model()), at), max_batch=3)
    prompts = random_prompts(number=6)
    requests = [
        GenerationRequest(prompt, 2 + 3 * (i % 3), Sampling(1.0, seed=i) if i % 2 else Sampling())
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.submit(request)
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    assert failures == 1
    for request, expected in zip(requests[::2], expected_tokens()[::2], strict=False):
        assert request.tokens == expected[: request.max_new_tokens]
    for request in requests[1::2]:
        alone = generate(our_model(), [request.prompt], request.max_new_tokens, request.sampling)
        assert request.tokens == alone[0]


@pytest.mark.parametrize("not_a_number", [math.nan, math.inf])
@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0, seed=3), Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.5)])
def test_a_model_that_has_diverged_says_so(not_a_number, how):
    model = GPT2(SHAPE)
    with torch.no_grad():
        model.ln_f.bias[3] = not_a_number  # its products are +inf and -inf, which are numbers to none of the draws
    engine = BatchingEngine(model)
    request = engine.submit(GenerationRequest([1, 2, 3], 4, how))
    with pytest.raises(ArithmeticError, match="logits are not numbers"):
        engine.step()
    assert request.state == "failed" and not engine.has_work and engine.num_free_slots == engine.max_batch


class Poisons(torch.nn.Module):
    """A wrapper under which a token makes numbers overflow: the logits of its sequence, and what its slot holds."""

    def __init__(self, module: torch.nn.Module, token: int):
        super().__init__()
        self.module, self.token, self.shape = module, token, module.shape

    def forward(self, ids, cache, first_slot, lengths):
        logits = self.module(ids, cache, first_slot, lengths)
        for row in (ids == self.token).any(-1).nonzero().flatten().tolist():
            cache.data[:, :, first_slot + row] = math.nan
            logits[row] = math.nan
        return logits


@pytest.mark.parametrize("seed", range(8))
def test_a_request_that_overflows_ends_alone(seed):
    """In its prefill or while it runs, between others that run or join. What gets its slot is unharmed, and the others
    draw what they would have drawn."""
    rng, sampling = random.Random(seed), Sampling(seed % 2)
    prompts = random_prompts(seed=seed, number=8, longest=20)
    alone = generate(our_model(), prompts, 12, sampling)
    victim = rng.randrange(8)
    bad = rng.choice([token for token in (prompts[victim][-1], *alone[victim][:-1]) if token])  # 0 is padding
    engine = BatchingEngine(Poisons(CachedModel(our_model()), bad), max_batch=4)
    requests = [GenerationRequest(prompt, 12, Sampling(seed % 2, seed=n)) for n, prompt in enumerate(prompts)]
    coming = list(requests)
    while coming or engine.has_work:
        for _ in range(min(len(coming), rng.choice([0, 1, 3]))):
            engine.submit(coming.pop(0))
        with contextlib.suppress(ArithmeticError):
            engine.step()
    for request, expected in zip(requests, alone, strict=True):
        read = [*request.prompt, *expected[:-1]]  # the last token is never read
        if bad not in read:
            assert (request.state, request.tokens) == ("finished", expected)
        else:
            written = max(0, read.index(bad) + 1 - len(request.prompt))
            assert (request.state, request.tokens) == ("failed", expected[:written]) and not engine.cancel(request)
    assert requests[victim].state == "failed" and bool(engine.cache.data.isfinite().all())


def test_impossible_sizes_are_refused():
    for name, number in {"max_batch": 0, "max_queue": 0, "max_length": 0}.items():
        with pytest.raises(ValueError, match=f"{name} {number} must be at least 1"):
            BatchingEngine(our_model(), **{name: number})
    with pytest.raises(ValueError, match="max_length 97 is more than the 96 positions"):
        BatchingEngine(our_model(), max_length=97)
    engine = BatchingEngine(our_model(), max_length=10)
    with pytest.raises(ValueError, match="more than the 10 positions of a slot of the cache"):
        engine.submit(GenerationRequest([1] * 8, 3))
    engine.submit(GenerationRequest([1] * 8, 2))
