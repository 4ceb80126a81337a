"""Time the operations of a training step one by one. All ranks call everything here together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional as F

from testbed.distributed import process_group
from testbed.model.gpt2 import GPT2, token_loss_sum
from testbed.model.shape import ModelShape
from testbed.optim.optimizer import clip_gradients_, global_grad_norm, gradient_of
from testbed.profiling.device_limits import DTYPES
from testbed.profiling.step_clock import synchronize

SHORTEST_S = 0.004  # of a block of calls that is timed at once
BLOCKS = 7
Row = dict[str, float]


class Stopwatch:
    """Times calls on one device; the ranks begin each measurement together, and the slowest one counts."""

    def __init__(self, device: torch.device, precision: str, blocks: int = BLOCKS):
        self.device, self.dtype, self.blocks = device, DTYPES[precision], blocks

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

    def random(self, *size: int, is_leaf: bool = False) -> torch.Tensor:
        return torch.randn(size, device=self.device).to(self.dtype).requires_grad_(is_leaf)


def products(watch: Stopwatch, layers: Iterable[tuple[int, int, int]]) -> list[Row]:
    """Time a linear layer's three products by (tokens, inputs, outputs)."""
    rows = []
    for tokens, inputs, outputs in layers:
        x, weight, gradient = watch.random(tokens, inputs), watch.random(outputs, inputs), watch.random(tokens, outputs)
        bias = watch.random(outputs)
        rows.append(
            {
                "tokens": tokens,
                "inputs": inputs,
                "outputs": outputs,
                "forward_s": watch.seconds_of(lambda x=x, w=weight, b=bias: F.linear(x, w, b)),
                "input_gradient_s": watch.seconds_of(lambda g=gradient, w=weight: g @ w),
                "weight_gradient_s": watch.seconds_of(lambda g=gradient, x=x: g.t() @ x),
            }
        )
    return rows


def attention(watch: Stopwatch, sizes: Iterable[tuple[int, int, int, int]]) -> list[Row]:
    """Time causal attention by (batch, heads, length, head_dim)."""
    rows = []
    for size in sizes:
        batch, heads, length, head_dim = size
        query, key, value = (watch.random(*size, is_leaf=True) for _ in range(3))

        def forward(q=query, k=key, v=value) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        names = {"batch": batch, "heads": heads, "length": length, "head_dim": head_dim}
        rows.append({**names, **_both_ways(watch, forward, (query, key, value))})
    return rows


def _both_ways(watch: Stopwatch, forward: Callable[[], torch.Tensor], leaves: tuple[torch.Tensor, ...]) -> Row:
    """Time forward alone, and forward with backward; backward is the difference."""
    gradient = torch.ones_like(forward())

    def step() -> None:
        torch.autograd.grad(forward(), leaves, gradient)

    forward_s, both_s = watch.seconds_of(forward), watch.seconds_of(step)
    return {"forward_s": forward_s, "backward_s": max(both_s - forward_s, 0.0)}


def elementwise(watch: Stopwatch, kind: str, sizes: Iterable[tuple[int, int]]) -> list[Row]:
    """Time forward and backward of "layer_norm", "gelu" or "add" by (rows, width)."""
    rows = []
    for count, width in sizes:
        # residual stream and LayerNorm stay in fp32 under autocast
        x = torch.randn(count, width, device=watch.device, requires_grad=True)
        other = torch.randn(count, width, device=watch.device, requires_grad=True)
        gain = torch.ones(width, device=watch.device, requires_grad=True)
        calls: dict[str, tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]] = {
            "layer_norm": (lambda x=x, gain=gain: F.layer_norm(x, (x.shape[1],), gain, gain), (x, gain)),
            "gelu": (lambda x=x: F.gelu(x, approximate="tanh"), (x,)),
            "add": (lambda x=x, other=other: x + other, (x, other)),
        }
        both = _both_ways(watch, *calls[kind])
        rows.append({"elements": count * width, "seconds": both["forward_s"] + both["backward_s"]})
    return rows


def cross_entropy(watch: Stopwatch, sizes: Iterable[tuple[int, int]]) -> list[Row]:
    """Time the loss of logits and its gradient by (tokens, vocabulary)."""
    rows = []
    for tokens, vocabulary in sizes:
        logits = watch.random(1, tokens, vocabulary, is_leaf=True)
        targets = torch.randint(vocabulary, (1, tokens), device=watch.device)

        def step(logits=logits, targets=targets) -> None:
            torch.autograd.grad(token_loss_sum(logits, targets), logits)

        rows.append({"elements": tokens * vocabulary, "seconds": watch.seconds_of(step)})
    return rows


def update(watch: Stopwatch, shapes: Iterable[ModelShape]) -> list[Row]:
    """Time the norm, the clipping and fused AdamW of whole models."""
    rows = []
    for shape in shapes:
        parameters = [torch.nn.Parameter(p.detach().to(watch.device)) for p in GPT2(shape).parameters()]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

        def step(parameters=parameters, optimizer=optimizer) -> None:
            norm = global_grad_norm(gradient_of(parameter) for parameter in parameters)
            clip_gradients_(parameters, 1.0, norm)
            optimizer.step()

        rows.append({"parameters": sum(p.numel() for p in parameters), "seconds": watch.seconds_of(step)})
    return rows


def copy(watch: Stopwatch, sizes: Iterable[int]) -> list[Row]:
    """Time copies within the device's memory by elements of fp32."""
    rows = []
    for size in sizes:
        source, target = (torch.ones(size, device=watch.device) for _ in range(2))
        rows.append({"elements": size, "seconds": watch.seconds_of(lambda s=source, t=target: t.copy_(s))})
    return rows


def small_steps(watch: Stopwatch, layers: Iterable[int]) -> list[Row]:
    """Time forward and backward of a model so small that it is all the host's work, by number of layers."""
    rows = []
    for number in layers:
        model = GPT2(ModelShape(number, 1, 16, 128, 16)).to(watch.device)
        tokens = torch.zeros((1, 8), dtype=torch.int64, device=watch.device)

        def step(model: Any = model, tokens: torch.Tensor = tokens) -> None:
            model(tokens, tokens).backward()

        rows.append({"layers": number, "seconds": watch.seconds_of(step)})
    return rows
