"""Send many requests at once through a BatchingEngine: closed loop, open loop, and where the engine saturates.

Closed loop: `concurrency` users; each sends the next request when the last one is answered. It finds the
throughput, and hides waiting: a slow engine is asked more slowly.
Open loop: requests arrive when they arrive (Poisson), whatever the engine does. All arrival times are drawn before, and
latency counts from the drawn time, not from when the loop came round to submitting: a stall delays all requests
that arrived in it, and all count (no coordinated omission). What the bounded queue refuses is counted as rejected,
never retried.

A request's prompt is a piece of the data, half to all of `prompt_tokens` long, and it asks for half to all of
`new_tokens`: with equal lengths, all that began together would end together, and nothing would join a running batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from testbed.data.disk_array import DiskArray
from testbed.inference.batching import BatchingEngine, GenerationRequest, QueueFull
from testbed.inference.prompts import draw_prompt
from testbed.profiling.device_limits import peak_memory
from testbed.profiling.step_clock import synchronize

PERCENTILES = (50, 95, 99)
SATURATED_AT = 0.95  # of the best throughput
SHARES_OF_CAPACITY = (0.25, 0.5, 0.75, 0.9, 1.1)  # the rates of an open loop where none were given


@dataclass(frozen=True)
class Traffic:
    """Kind of requests: the same seed makes the same requests in the same order, at every rate and concurrency."""

    tokens: np.ndarray | DiskArray  # to cut prompts from
    prompt_tokens: int  # of the longest prompt
    new_tokens: int  # of the longest answer
    requests: int
    seed: int = 0

    def make_requests(self) -> list[GenerationRequest]:
        random = np.random.default_rng(self.seed)
        made = []
        for _ in range(self.requests):
            prompt = draw_prompt(self.tokens, int(_half_to_all(self.prompt_tokens, random)), random)
            made.append(GenerationRequest(prompt=prompt, max_new_tokens=int(_half_to_all(self.new_tokens, random))))
        return made


def _half_to_all(number: int, random: np.random.Generator) -> int:
    return int(random.integers(-(-number // 2), number, endpoint=True))


def warm_up(engine: BatchingEngine, traffic: Traffic) -> None:
    """Answer a full batch and forget it: kernels are chosen for all its sizes, all slots of the cache are touched."""
    coming = traffic.make_requests()[: engine.max_batch][::-1]
    while coming or engine.has_work:
        for _ in range(min(len(coming), engine.max_queue - engine.num_waiting)):
            engine.submit(coming.pop())
        engine.step()


def closed_loop(
    engine: BatchingEngine, traffic: Traffic, concurrency: int, progress: Callable[[int], Any] = lambda number: None
) -> dict[str, Any]:
    """Answer all requests with `concurrency` of them in the engine at a time; a POINT of inference_metrics.json."""
    watch = _Watch(engine, progress)
    waiting = traffic.make_requests()[::-1]
    watch.start()
    while waiting or engine.has_work:
        while waiting and watch.num_unfinished < concurrency:
            request = waiting.pop()
            watch.submit(request, watch.now())
        watch.step()
    return {"concurrency": concurrency, **watch.point()}


def open_loop(
    engine: BatchingEngine, traffic: Traffic, rate_per_s: float, progress: Callable[[int], Any] = lambda number: None
) -> dict[str, Any]:
    """Submit each request at its drawn time, `rate_per_s` of them a second on average; a POINT."""
    watch = _Watch(engine, progress)
    gaps = np.random.default_rng([traffic.seed, 1]).exponential(1 / rate_per_s, traffic.requests)
    coming = list(zip(np.cumsum(gaps).tolist(), traffic.make_requests(), strict=True))[::-1]
    watch.start()
    while coming or engine.has_work:
        while coming and coming[-1][0] <= watch.now():
            arrival_s, request = coming.pop()
            watch.submit(request, arrival_s)
        if engine.has_work:
            watch.step()
        elif coming:
            time.sleep(max(0.0, coming[-1][0] - watch.now()))
    return {"rate_per_s": rate_per_s, **watch.point()}


class _Watch:
    """Submit and step, and keep when each request arrived, got its first token and its last. Seconds from start."""

    def __init__(self, engine: BatchingEngine, progress: Callable[[int], Any]):
        self.engine, self.progress = engine, progress
        self.samples: dict[GenerationRequest, dict[str, Any]] = {}  # in the order of arrival
        self.num_rejected = 0
        self.num_unfinished = 0
        self._start_s = 0.0

    def start(self) -> None:
        self._start_s = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start_s

    def submit(self, request: GenerationRequest, arrival_s: float) -> None:
        try:
            self.engine.submit(request)
        except QueueFull:
            self.num_rejected += 1
            self.progress(1)
            return
        self.num_unfinished += 1
        self.samples[request] = {
            "arrival_s": arrival_s, "first_token_s": None, "end_s": None, "prompt_tokens": len(request.prompt),
            "new_tokens": 0,
        }  # fmt: skip

    def step(self) -> None:
        emitted = self.engine.step()  # its tokens are on the host, so the device has finished them
        now_s = self.now()
        for request, _ in emitted:
            sample = self.samples[request]
            sample["new_tokens"] += 1
            if sample["first_token_s"] is None:
                sample["first_token_s"] = now_s
            if request.state == "finished" and sample["new_tokens"] == len(request.tokens):
                sample["end_s"] = now_s
                self.num_unfinished -= 1
                self.progress(1)

    def point(self) -> dict[str, Any]:
        """Return the POINT of a loop, of which every accepted request must have been answered."""
        samples = list(self.samples.values())
        assert self.num_unfinished == 0 and all(sample["end_s"] is not None for sample in samples)
        wall_s = max((sample["end_s"] for sample in samples), default=0.0)
        new_tokens = sum(sample["new_tokens"] for sample in samples)
        return {
            "requests": len(samples) + self.num_rejected,
            "completed": len(samples),
            "rejected": self.num_rejected,
            "wall_s": wall_s,
            "tokens_per_s": new_tokens / wall_s if wall_s else 0.0,
            "latency_s": percentiles([sample["end_s"] - sample["arrival_s"] for sample in samples]),
            "time_to_first_token_s": percentiles([each["first_token_s"] - each["arrival_s"] for each in samples]),
            "samples": samples,
        }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return p50, p95 and p99. None where less than one value is expected beyond it (p95 of fewer than 20, p99 of
    fewer than 100): that would be the largest of them, under another name."""
    known = [percent for percent in PERCENTILES if len(values) * (100 - percent) >= 100]
    found = dict(zip(known, np.percentile(values, known).tolist(), strict=True)) if known else {}
    return {f"p{percent}": found.get(percent) for percent in PERCENTILES}


def rates_around_capacity(closed: Sequence[dict[str, Any]]) -> list[float]:
    """Return requests per second at SHARES_OF_CAPACITY of the best that a closed loop completed."""
    capacity = max(point["completed"] / point["wall_s"] for point in closed)
    return [float(f"{capacity * share:.3g}") for share in SHARES_OF_CAPACITY]


def saturation(closed: Sequence[dict[str, Any]], opened: Sequence[dict[str, Any]], max_batch: int) -> dict[str, Any]:
    """Return where more load brings nothing more.

    tokens_per_s: the best throughput of the closed loops. concurrency: the smallest that reached SATURATED_AT of it.
    rate_per_s: the highest rate, all lower ones included, at which most requests start at once: nothing was rejected,
    and those that arrived in the second half found, in the median, fewer than `max_batch` others unfinished, so a slot
    was free. Above capacity the queue grows from beginning to end; that this can be seen takes several times
    `max_batch` requests (evaluated_model.REQUESTS_PER_SLOT), for fewer would fill the batch and be over. None: at no
    rate.
    """
    best = max((point["tokens_per_s"] for point in closed), default=None)
    least = SATURATED_AT * (best or 0)
    enough = [point["concurrency"] for point in closed if point["tokens_per_s"] >= least]
    sustained = None
    for point in sorted(opened, key=lambda point: point["rate_per_s"]):
        if point["rejected"] or not _start_at_once(point["samples"], max_batch):
            break
        sustained = point["rate_per_s"]
    return {"tokens_per_s": best, "concurrency": min(enough, default=None), "rate_per_s": sustained}


def _start_at_once(samples: Sequence[dict[str, Any]], max_batch: int) -> bool:
    arrivals = np.array([sample["arrival_s"] for sample in samples])
    ends = np.array([sample["end_s"] for sample in samples])
    later = arrivals[len(arrivals) // 2 :]
    found = [int(((arrivals < moment) & (ends > moment)).sum()) for moment in later]
    return bool(np.median(found) < max_batch)


def load_test(
    make_engine: Callable[[], BatchingEngine],
    traffic: Traffic,
    concurrencies: Sequence[int],
    rates: Sequence[float] | None,
    device: torch.device,
    progress: Callable[[int], Any] = lambda number: None,
    save: Callable[[dict[str, Any]], Any] = lambda load: None,
) -> dict[str, Any]:
    """Run closed loops, then open ones, each on an engine of its own. Return the measured fields of `load` in the file.

    Args:
        rates: requests per second; None: around the capacity that the closed loops found, none where `concurrencies`
            are empty.
        save: called with what there is after each loop.
    """
    found: dict[str, Any] = {"cache_bytes": None, "peak_allocated_bytes": None, "closed": [], "open": []}
    found["saturation"] = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def run(kind: str, loop: Callable[..., dict[str, Any]], load: float) -> None:
        engine = make_engine()
        warm_up(engine, traffic)
        synchronize(device)
        found[kind].append(loop(engine, traffic, load, progress))
        found["cache_bytes"] = engine.cache.num_bytes
        found["peak_allocated_bytes"] = peak_memory(device)["peak_allocated_bytes"]
        found["saturation"] = saturation(found["closed"], found["open"], max_batch=engine.max_batch)
        save(found)

    for concurrency in concurrencies:
        run("closed", closed_loop, concurrency)
    if rates is None:
        rates = rates_around_capacity(found["closed"]) if found["closed"] else []
    for rate in rates:
        run("open", open_loop, rate)
    return found
