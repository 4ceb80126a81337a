"""Continuous batching: nobody's tokens depend on who else is there, and nobody gets lost."""

from __future__ import annotations

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
from testbed.model.shape import ModelShape


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_join_and_leave_get_the_tokens_of_transformers(seed):
    """Random arrivals, lengths and cancellations: what is finished is the reference's, what is cancelled its head."""
    rng = random.Random(seed)
    engine = BatchingEngine(our_model(), max_batch=rng.randint(2, 8))
    coming = [GenerationRequest(prompt, rng.randint(1, NEW_TOKENS)) for prompt in random_prompts()]
    requests = list(coming)
    sizes = set()
    while coming or engine.has_work:
        for _ in range(min(len(coming), rng.choice([0, 0, 1, 3]))):
            engine.submit(coming.pop(0))
        under_way = [
            request for request in requests if request.state in ("waiting", "running") and request.id is not None
        ]
        if under_way and rng.random() < 0.1:
            assert engine.cancel(rng.choice(under_way))
        engine.step()
        sizes.add(engine.num_running)
    assert len(sizes) > 2, "the batch grew and shrank"
    states = Counter(request.state for request in requests)
    assert states["finished"] > 20 and states["cancelled"] > 0 and states.total() == NUM_PROMPTS
    for request, expected in zip(requests, expected_tokens(), strict=True):
        if request.state == "finished":
            assert request.tokens == expected[: request.max_new_tokens] and request.finish_reason == "length"
        else:
            assert request.tokens == expected[: len(request.tokens)] and request.finish_reason is None


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


def test_a_thousand_requests_none_lost_none_twice_and_the_cancelled_free_their_slots():
    rng = random.Random(0)
    torch.manual_seed(0)
    shape = ModelShape(num_layers=1, num_heads=2, embedding_size=16, vocab_size=97, max_position_embeddings=32)
    model = GPT2(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 12))] for _ in range(25)]
    alone = [written_plainly(model, prompt, 16) for prompt in prompts]
    engine = BatchingEngine(model, max_batch=8, max_queue=16, max_length=28)
    requests: list[tuple[int, GenerationRequest]] = []
    emitted: dict[int, list[int]] = {}
    refused = cancelled_running = 0
    while len(requests) < 1000 or engine.has_work:
        for _ in range(rng.choice([0, 1, 2, 9])):
            number = rng.randrange(25)
            request = GenerationRequest(prompts[number], rng.randint(1, 16))
            if len(requests) == 1000:
                break
            try:
                engine.submit(request)
                requests.append((number, request))
            except QueueFull:
                refused += 1
                assert engine.num_waiting == 16 and request.id is None
        if requests and rng.random() < 0.3:
            _, request = rng.choice(requests[-30:])
            before, state = (engine.num_free_slots, engine.num_waiting), request.state
            done = engine.cancel(request)
            freed = engine.num_free_slots - before[0], before[1] - engine.num_waiting
            assert done == (state in ("waiting", "running")) and not engine.cancel(request)
            assert freed == {"running": (1, 0), "waiting": (0, 1)}.get(state, (0, 0))
            cancelled_running += state == "running"
        could_run = min(8, engine.num_running + engine.num_waiting)
        step = engine.step()
        assert len(step) == could_run, "no slot idles while somebody waits"
        for request, token in step:
            emitted.setdefault(request.id, []).append(token)
        assert engine.num_running + engine.num_free_slots == 8 and engine.num_waiting <= 16
    assert refused > 50 and cancelled_running > 20, "the queue was full, and running requests were cancelled"
    assert [request.id for _, request in requests] == list(range(1000))
    for number, request in requests:
        assert request.state in ("finished", "cancelled")
        assert emitted.get(request.id, []) == request.tokens == alone[number][: len(request.tokens)]
        assert request.state == "cancelled" or len(request.tokens) == request.max_new_tokens
    assert engine.num_free_slots == 8 and not engine.has_work


@torch.no_grad()
def written_plainly(model: GPT2, prompt: list[int], number: int) -> list[int]:
    """The whole prefix read again for each token, alone."""
    ids = list(prompt)
    for _ in range(number):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_full_queue_refuses_and_takes_again():
    engine = BatchingEngine(our_model(), max_batch=1, max_queue=2)
    for prompt in random_prompts(number=2):
        engine.submit(GenerationRequest(prompt, 2))
    late = GenerationRequest([1, 2], 2)
    with pytest.raises(QueueFull, match="2 requests wait already"):
        engine.submit(late)
    engine.step()
    assert engine.submit(late) is late and late.id == 2


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
        self.module, self.left = module, at

    def forward(self, *arguments):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of memory")
        return self.module(*arguments)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_step_that_fails_loses_nobody(at):
    """In the first prefill, in a decode step, in the prefill beside one; the same tokens, once it works again, whether
    they are drawn or the likeliest."""
    engine = BatchingEngine(FailsOnce(CachedModel(our_model()), at), max_batch=3, shape=SHAPE)
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
        self.module, self.token = module, token

    def forward(self, ids, cache, first_slot, lengths):
        logits = self.module(ids, cache, first_slot, lengths)
        for row in (ids == self.token).any(-1).nonzero().flatten().tolist():
            cache.data[:, :, first_slot + row] = math.nan
            logits[row] = math.nan
        return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_request_that_overflows_ends_alone(place, temperature):
    """First, between and after others, in their prefill or beside their decode steps. Who gets its slot is unharmed,
    and the others draw what they would have drawn."""
    prompts = [[token for token in prompt if token != 300] or [1] for prompt in random_prompts(number=6, longest=20)]
    alone = generate(our_model(), prompts, 6, Sampling(temperature))
    assert not any(300 in tokens for tokens in alone)
    for before in (0, place):  # requests that run already when it comes
        engine = BatchingEngine(Poisons(CachedModel(our_model()), token=300), max_batch=4, shape=SHAPE)
        good = [GenerationRequest(prompt, 6, Sampling(temperature, seed=seed)) for seed, prompt in enumerate(prompts)]
        poisoned = GenerationRequest([5] * 40 + [300], 6)
        for request in good[:before]:
            engine.submit(request)
        if before:
            engine.step()
        for request in [*good[before:place], poisoned, *good[place:]]:
            engine.submit(request)
        failures = 0
        while engine.has_work:
            try:
                engine.step()
            except ArithmeticError:
                failures += 1
        assert failures == 1 and poisoned.state == "failed" and poisoned.tokens == []
        assert not engine.cancel(poisoned), "it had ended"
        assert [request.tokens for request in good] == alone
        assert bool(engine.cache.data.isfinite().all())


def test_requests_that_overflow_while_they_run_leave_their_slots_to_others():
    """A token of theirs does it, two in one step. Whoever moves into their slots, or comes new, is unharmed."""
    prompts = random_prompts(number=6, longest=20)
    prompts[3] = prompts[1]
    alone = generate(our_model(), prompts, 12)
    others = [*prompts, *(tokens for tokens in alone if tokens != alone[1])]
    bad = next(token for token in alone[1] if not any(token in other for other in others))
    engine = BatchingEngine(Poisons(CachedModel(our_model()), bad), max_batch=4, shape=SHAPE)
    requests = [engine.submit(GenerationRequest(prompt, 12)) for prompt in prompts]
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except ArithmeticError:
            failures += 1
    assert failures == 1
    for number, request in enumerate(requests):
        is_bad = number in (1, 3)
        assert request.state == ("failed" if is_bad else "finished")
        assert request.tokens == (alone[1][: alone[1].index(bad) + 1] if is_bad else alone[number])


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"max_batch": 0}, "max_batch 0"),
        ({"max_queue": 0}, "max_queue 0"),
        ({"max_length": 0}, "max_length 0"),
        ({"max_length": 97}, "max_length 97 is more than the 96 positions"),
    ],
)
def test_impossible_engines_are_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        BatchingEngine(our_model(), **sizes)


def test_a_smaller_cache_refuses_what_does_not_fit_into_a_slot():
    engine = BatchingEngine(our_model(), max_length=10)
    with pytest.raises(ValueError, match="more than the 10 positions of a slot of the cache"):
        engine.submit(GenerationRequest([1] * 8, 3))
    engine.submit(GenerationRequest([1] * 8, 2))
