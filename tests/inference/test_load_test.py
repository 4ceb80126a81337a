"""Check loads and latency: no request lost or doubled, waiting counted, the clock where it should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from testbed.inference import latency
from testbed.inference.batching import BatchingEngine
from testbed.inference.cached_model import CachedModel
from testbed.inference.evaluated_model import REQUESTS_PER_SLOT
from testbed.inference.generate import generate
from testbed.inference.latency import latency_fields, time_in_turn
from testbed.inference.load_test import Traffic, closed_loop, load_test, open_loop, percentiles, saturation, warm_up
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

CPU = torch.device("cpu")
SHAPE = ModelShape(num_layers=1, num_heads=2, embedding_size=16, vocab_size=300, max_position_embeddings=64)
TOKENS = np.random.default_rng(0).integers(0, 300, 5000).astype(np.uint16)


@pytest.fixture(scope="module")
def model() -> GPT2:
    torch.manual_seed(0)
    return GPT2(SHAPE).eval()


class Recording(BatchingEngine):
    """Keeps the requests that it accepted."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.accepted = []

    def submit(self, request):
        super().submit(request)
        self.accepted.append(request)
        return request


def test_a_thousand_requests_through_a_bounded_queue(model):
    """All arrive within 0.05 s: each is answered once and whole or rejected, and answers are not mixed up."""
    traffic = Traffic(TOKENS, prompt_tokens=10, new_tokens=6, requests=1000, seed=3)
    engine = Recording(model, max_batch=16, max_queue=32)
    point = open_loop(engine, traffic, rate_per_s=20_000.0)
    assert point["requests"] == 1000 == point["completed"] + point["rejected"]
    assert 0 < point["rejected"] < 1000  # else the queue was not tried
    assert len(engine.accepted) == point["completed"] == len({request.id for request in engine.accepted})
    assert not engine.has_work and engine.num_free_slots == 16
    assert [each["new_tokens"] for each in point["samples"]] == [each.max_new_tokens for each in engine.accepted]
    for request in engine.accepted[::50]:
        assert request.tokens == generate(model, [request.prompt], request.max_new_tokens)[0]
    assert all(each["arrival_s"] <= each["first_token_s"] <= each["end_s"] for each in point["samples"])


def test_a_closed_loop_keeps_its_concurrency_and_loses_nothing(model):
    class Counting(Recording):
        most = 0

        def step(self):
            self.most = max(self.most, self.num_running + self.num_waiting)
            return super().step()

    traffic = Traffic(TOKENS, 10, 6, requests=1000)
    engine = Counting(model, max_batch=8, max_queue=64)
    point = closed_loop(engine, traffic, concurrency=20)
    assert engine.most == 20
    assert (point["completed"], point["rejected"], point["concurrency"]) == (1000, 0, 20)
    expected = [(len(each.prompt), each.max_new_tokens) for each in traffic.make_requests()]
    assert [(each["prompt_tokens"], each["new_tokens"]) for each in point["samples"]] == expected
    assert point["tokens_per_s"] == pytest.approx(sum(new for _, new in expected) / point["wall_s"])


class Clock:
    """A clock that a step of the engine, a model or a pause moves, and every reading by a tick."""

    TICK_S = 2**-20

    def __init__(self, monkeypatch):
        self.now_s = 0.0
        monkeypatch.setattr(latency.time, "perf_counter", self.read)
        monkeypatch.setattr(latency.time, "sleep", self.pass_s)

    def read(self) -> float:
        self.now_s += self.TICK_S
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


class Stepping(BatchingEngine):
    """Every step takes `step_s` of the clock, whatever the batch; the 20th takes `stall_s` more."""

    def __init__(self, model: GPT2, clock: Clock, step_s: float = 2**-10, stall_s: float = 0.0, **options):
        super().__init__(model, **options)
        self.clock, self.step_s, self.stall_s, self.steps = clock, step_s, stall_s, 0

    def step(self):
        self.steps += 1
        self.clock.pass_s(self.step_s + self.stall_s * (self.steps == 20))
        return super().step()


def test_throughput_grows_with_concurrency(model, monkeypatch):
    clock, rates = Clock(monkeypatch), {}
    for concurrency in (1, 8):
        engine = Stepping(model, clock, max_batch=8)
        rates[concurrency] = closed_loop(engine, Traffic(TOKENS, 10, 12, 60), concurrency)["tokens_per_s"]
    assert 6 * rates[1] < rates[8] < 8 * rates[1]


def test_a_stall_counts_for_all_who_arrived_in_it(model, monkeypatch):
    """Half a second at 100 requests/s are 50 requests that wait 250 ms on average. Clocks that start when the loop gets
    round to submitting would see one slow request (coordinated omission)."""
    engine = Stepping(model, Clock(monkeypatch), stall_s=0.5, max_batch=16, max_queue=100)
    point = open_loop(engine, Traffic(TOKENS, 10, 2, 150), rate_per_s=100.0)
    waited = [each["end_s"] - each["arrival_s"] for each in point["samples"]]
    assert sum(latency_s > 0.1 for latency_s in waited) >= 25
    assert point["latency_s"]["p95"] > 0.3


def test_arrivals_are_poisson_and_drawn_from_the_seed(model, monkeypatch):
    clock = Clock(monkeypatch)

    def arrivals(seed: int, rate: float) -> np.ndarray:
        engine = Stepping(model, clock, max_batch=16, max_queue=1000)
        samples = open_loop(engine, Traffic(TOKENS, 4, 2, 500, seed), rate)["samples"]
        return np.array([each["arrival_s"] for each in samples])

    one, again, other, slower = arrivals(1, 2000), arrivals(1, 2000), arrivals(2, 2000), arrivals(1, 1000)
    assert (one == again).all() and (one != other).any()
    assert slower == pytest.approx(2 * one)  # the same requests at every rate
    gaps = np.diff(one)
    assert gaps.mean() == pytest.approx(1 / 2000, rel=0.15)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.15)  # as an exponential distribution has it


def closed_point(concurrency: int, tokens_per_s: float) -> dict:
    return {"concurrency": concurrency, "tokens_per_s": tokens_per_s, "completed": 100, "wall_s": 10.0}


def open_point(rate_per_s: float, waits_s: float, growth: float = 0.0, rejected: int = 0) -> dict:
    """100 requests in even distance; each takes `waits_s`, and `growth` seconds more than the one before."""
    samples = [
        {"arrival_s": number / rate_per_s, "end_s": number / rate_per_s + waits_s + growth * number}
        for number in range(100)
    ]
    return {"rate_per_s": rate_per_s, "rejected": rejected, "samples": samples}


def test_where_the_engine_saturates():
    closed = [closed_point(1, 400), closed_point(2, 700), closed_point(4, 960), closed_point(8, 1000)]
    # 10 requests/s of 0.3 s each: 3 in the engine on average; 40/s of 0.15 s: 6, and 12 where they wait for each other
    keeps_up, also, grows = open_point(10, 0.3), open_point(40, 0.15), open_point(50, 0.15, growth=0.02)
    found = saturation(closed, [keeps_up, grows, also], max_batch=8)
    assert found == {"tokens_per_s": 1000, "concurrency": 4, "rate_per_s": 40}
    found = saturation(closed, [open_point(10, 0.3, rejected=1), also], max_batch=8)
    assert found["rate_per_s"] is None  # a lower rate was too much
    assert saturation([], [grows], 8) == {"tokens_per_s": None, "concurrency": None, "rate_per_s": None}


def test_rates_come_from_the_capacity_that_closed_loops_found(model):
    saved = []
    found = load_test(
        lambda: BatchingEngine(model, max_batch=4, max_queue=2),
        Traffic(TOKENS, 6, 4, 20),
        [1, 2],
        None,
        CPU,
        save=lambda load: saved.append((len(load["closed"]), len(load["open"]))),
    )
    capacity = max(point["completed"] / point["wall_s"] for point in found["closed"])
    assert [point["rate_per_s"] / capacity for point in found["open"]] == pytest.approx(
        [0.25, 0.5, 0.75, 0.9, 1.1], rel=0.01
    )
    # layers x keys and values x slots x positions x channels x bytes
    assert found["cache_bytes"] == 1 * 2 * 4 * 64 * 16 * 4 and found["peak_allocated_bytes"] is None
    assert saved == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (2, 5)]


def test_at_many_times_the_capacity_requests_do_not_start_at_once(model, monkeypatch):
    """With a large batch, too: of four times as many requests, all at once, the later half finds no slot."""
    clock = Clock(monkeypatch)

    def sustained(rate_per_s: float) -> float | None:
        engine = Stepping(model, clock, max_batch=32, max_queue=1000)
        point = open_loop(engine, Traffic(TOKENS, 10, 8, REQUESTS_PER_SLOT * 32), rate_per_s)
        return saturation([], [point], 32)["rate_per_s"]

    assert sustained(1e6) is None
    assert sustained(50.0) == 50.0


def test_warm_up_fills_the_batch_whatever_the_queue_holds(model, monkeypatch):
    """The largest batch is what a load reaches; kernels of smaller ones alone would be warm."""
    for max_queue, new_tokens in ((2, 32), (100, 2)):  # together they must be, not one after the other
        engine = BatchingEngine(model, max_batch=8, max_queue=max_queue)
        step, sizes = engine.step, []
        monkeypatch.setattr(engine, "step", lambda step=step, sizes=sizes: sizes.append(len(step())))
        warm_up(engine, Traffic(TOKENS, 10, new_tokens, 100))
        assert max(sizes) == 8 and not engine.has_work


def test_a_percentile_needs_a_sample_that_is_expected_beyond_it():
    def known(number: int) -> set[str]:
        return {name for name, value in percentiles(range(number)).items() if value is not None}

    assert [len(known(number)) for number in (0, 1, 2, 19, 20, 99, 100)] == [0, 0, 1, 1, 2, 2, 3]
    assert known(20) == {"p50", "p95"} and percentiles(range(101)) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


class Timed(nn.Module):
    """A model with a name whose calls take a given time for the prompt and for one token."""

    def __init__(
        self, cached: CachedModel, clock: Clock, name: str, prefill_s: float, token_s: float, order: list[str]
    ):
        super().__init__()
        self.cached, self.clock, self.name, self.order = cached, clock, name, order
        self.prefill_s, self.token_s = prefill_s, token_s

    def forward(self, ids, *arguments):
        if ids.shape[1] > 1:
            self.order.append(self.name)
            # The first two prompts warm up: their time must not be in the answer.
            warming = self.order.count(self.name) <= 2
            self.clock.now_s += 100 * self.prefill_s if warming else self.prefill_s
        else:
            self.clock.now_s += self.token_s
        return self.cached(ids, *arguments)


def test_prefill_and_decode_are_timed_apart_and_warm_up_is_left_out(model, monkeypatch):
    cached, clock, order = CachedModel(model).eval(), Clock(monkeypatch), []
    prompts = [TOKENS[start : start + 12].tolist() for start in range(0, 96, 12)]
    modules = {
        "plain": Timed(cached, clock, "plain", prefill_s=0.25, token_s=0.0625, order=order),
        "slow": Timed(cached, clock, "slow", prefill_s=2.0, token_s=0.5, order=order),
    }
    answers = time_in_turn(modules, SHAPE, prompts, new_tokens=6, warmup=2, device=CPU)
    for name in modules:
        assert [each.tokens for each in answers[name]] == generate(model, prompts[2:], 6)
    # every module once a round, not always in the same order
    assert all(set(order[start : start + 2]) == set(modules) for start in range(0, 16, 2))
    assert len({tuple(order[start : start + 2]) for start in range(0, 16, 2)}) == 2
    for name, module in modules.items():
        fields = latency_fields(answers[name], 12, 2)
        assert fields["repeats"] == 6 and fields["new_tokens"] == 6
        assert fields["prefill_s"] == [module.prefill_s + clock.TICK_S] * 6
        assert fields["time_to_first_token_s"] == [module.prefill_s + 2 * clock.TICK_S] * 6
        token_s = module.token_s + clock.TICK_S
        assert fields["per_token_s"] == [[token_s] * 5] * 6
        assert fields["decode_tokens_per_s"] == 1 / token_s
        assert fields["percentiles"]["per_token_s"]["p95"] == token_s
