"""Time the operations of a training step one by one. All ranks call everything here together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from testbed.distributed import process_group
from testbed.experiments.calibration.sizes import Sizes
from testbed.model.gpt2 import GPT2, token_loss_sum
from testbed.model.shape import ModelShape
from testbed.optim.optimizer import clip_gradients_, global_grad_norm, gradient_of
from testbed.planner.calibration import Timing
from testbed.profiling.device_limits import DTYPES
from testbed.profiling.step_clock import synchronize

SHORTEST_S = 0.004  # of a block of calls that is timed at once
FP32 = 4  # bytes


class Stopwatch:
    """Times calls on one device; the ranks begin each measurement together, and the slowest one counts."""

    def __init__(self, device: torch.device, precision: str, ranks: int, blocks: int):
        self.device, self.precision, self.ranks, self.blocks = device, precision, ranks, blocks
        self.dtype = DTYPES[precision]

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Return the median seconds of a call, over blocks of calls that take SHORTEST_S or more."""
        self._block(call, 1)  # chooses kernels, touches memory
        calls = max(1, min(1000, round(SHORTEST_S / max(self._block(call, 1), 1e-7))))
        calls = max(process_group.gather_objects(calls))
        process_group.wait_for_everyone()
        seconds = statistics.median(self._block(call, calls) for _ in range(self.blocks)) / calls
        return max(process_group.gather_objects(seconds))

    def _block(self, call: Callable[[], object], calls: int) -> float:
        synchronize(self.device)
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(self.device)
        return time.perf_counter() - start_s

    def timing(self, operation: str, size: Sequence[float], call: Callable[[], object]) -> Timing:
        """Time a call, as an operation of that size."""
        return self.row(operation, size, self.seconds_of(call))

    def row(self, operation: str, size: Sequence[float], seconds: float) -> Timing:
        return Timing(operation=operation, size=tuple(size), seconds=seconds, ranks=self.ranks)

    def random(self, *size: int, is_leaf: bool = False) -> torch.Tensor:
        return torch.randn(size, device=self.device).to(self.dtype).requires_grad_(is_leaf)


def products(watch: Stopwatch, layers: Iterable[tuple[int, int, int]]) -> Iterator[Timing]:
    """Time a linear layer's three products by (tokens, inputs, outputs)."""
    for tokens, inputs, outputs in layers:
        x, weight, gradient = watch.random(tokens, inputs), watch.random(outputs, inputs), watch.random(tokens, outputs)
        bias = watch.random(outputs)
        yield watch.timing("forward", (tokens, outputs, inputs), partial(F.linear, x, weight, bias))
        yield watch.timing("input_gradient", (tokens, inputs, outputs), partial(torch.matmul, gradient, weight))
        yield watch.timing("weight_gradient", (outputs, inputs, tokens), partial(torch.matmul, gradient.t(), x))


def attention(watch: Stopwatch, sizes: Iterable[tuple[int, int, int, int]]) -> Iterator[Timing]:
    """Time causal attention by (batch, heads, length, head_dim)."""
    for batch, heads, length, head_dim in sizes:
        query, key, value = (watch.random(batch, heads, length, head_dim, is_leaf=True) for _ in range(3))
        forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
        size = (batch * heads, length, head_dim)
        for way, seconds in zip(("forward", "backward"), _both_ways(watch, forward, (query, key, value)), strict=True):
            yield watch.row(f"attention_{way}", size, seconds)


def _both_ways(
    watch: Stopwatch, forward: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...]
) -> tuple[float, float]:
    """Time forward alone, and forward with backward; backward is the difference, at least a tenth of forward."""
    gradient = torch.ones_like(forward())

    def step() -> None:
        torch.autograd.grad(forward(), leaves, gradient)

    forward_s, both_s = watch.seconds_of(forward), watch.seconds_of(step)
    return forward_s, max(both_s - forward_s, 0.1 * forward_s)


def elementwise(watch: Stopwatch, sizes: Iterable[tuple[int, int]]) -> Iterator[Timing]:
    """Time forward and backward of LayerNorm, GELU and a residual's sum by (rows, width)."""
    for count, width in sizes:
        # residual stream and LayerNorm stay in fp32 under autocast
        x = torch.randn(count, width, device=watch.device, requires_grad=True)
        other = torch.randn(count, width, device=watch.device, requires_grad=True)
        gain = torch.ones(width, device=watch.device, requires_grad=True)
        calls: dict[str, tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]] = {
            "layer_norm": (partial(F.layer_norm, x, (width,), gain, gain), (x, gain)),
            "gelu": (partial(F.gelu, x, approximate="tanh"), (x,)),
            "add": (partial(torch.add, x, other), (x, other)),
        }
        for kind, call in calls.items():
            yield watch.row(kind, [FP32 * count * width], sum(_both_ways(watch, *call)))


def cross_entropy(watch: Stopwatch, sizes: Iterable[tuple[int, int]]) -> Iterator[Timing]:
    """Time the loss of logits and its gradient by (tokens, vocabulary)."""
    for tokens, vocabulary in sizes:
        logits = watch.random(1, tokens, vocabulary, is_leaf=True)
        targets = torch.randint(vocabulary, (1, tokens), device=watch.device)

        def step(logits=logits, targets=targets) -> None:
            torch.autograd.grad(token_loss_sum(logits, targets), logits)

        yield watch.timing("cross_entropy", [FP32 * tokens * vocabulary], step)


def update(watch: Stopwatch, shapes: Iterable[ModelShape]) -> Iterator[Timing]:
    """Time the norm, the clipping and fused AdamW of whole models."""
    for shape in shapes:
        parameters = [torch.nn.Parameter(p.detach().to(watch.device)) for p in GPT2(shape).parameters()]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

        def step(parameters=parameters, optimizer=optimizer) -> None:
            norm = global_grad_norm(gradient_of(parameter) for parameter in parameters)
            clip_gradients_(parameters, 1.0, norm)
            optimizer.step()

        yield watch.timing("update", [sum(parameter.numel() for parameter in parameters)], step)


def copy(watch: Stopwatch, sizes: Iterable[int]) -> Iterator[Timing]:
    """Time copies within the device's memory by elements of fp32."""
    for size in sizes:
        source, target = (torch.ones(size, device=watch.device) for _ in range(2))
        yield watch.timing("copy", [FP32 * size], partial(target.copy_, source))


def small_steps(watch: Stopwatch, layers: Iterable[int]) -> Iterator[Timing]:
    """Time forward and backward of a model so small that it is all the host's work, by number of layers."""
    for number in layers:
        model = GPT2(ModelShape(number, 1, 16, 128, 16)).to(watch.device)
        tokens = torch.zeros((1, 8), dtype=torch.int64, device=watch.device)

        def step(model: Any = model, tokens: torch.Tensor = tokens) -> None:
            model(tokens, tokens).backward()

        yield watch.timing("small_step", [number], step)


def every_operation(watch: Stopwatch, sizes: Sizes) -> list[Timing]:
    """Time each of OPERATIONS."""
    return [
        *products(watch, sizes.products),
        *attention(watch, sizes.attention),
        *elementwise(watch, sizes.elementwise),
        *cross_entropy(watch, sizes.logits),
        *copy(watch, sizes.copies),
        *update(watch, sizes.shapes),
        *small_steps(watch, sizes.small_layers),
    ]
