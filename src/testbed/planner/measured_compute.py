"""Add up what the operations of a step take by a calibration: products, attention, elementwise, head, update. No torch.

Times between measured sizes are interpolated where they are smooth: rates (work per second) over the logarithm of the
sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from testbed.errors import InputError
from testbed.memory_model.job import Job
from testbed.planner.calibration import Calibration

FP32 = 4
ELEMENTWISE_FORWARD = 1 / 3  # of both passes, an estimate by the tensors read and written
FORWARD, BACKWARD = ("forward",), ("input_gradient", "weight_gradient")
Entry = TypeVar("Entry")


class Tables:
    """A calibration's tables for a number of ranks that work at once: that number, or the nearest one."""

    def __init__(self, calibration: Calibration, ranks: int) -> None:
        self.host_runs_ahead = calibration.device.kind == "cuda"
        self.products = _at(calibration.products, ranks)
        self.attention = _at(calibration.attention, ranks)
        self.small_steps = sorted(_at(calibration.small_steps, ranks), key=lambda step: step.layers)
        self.updates = sorted((each.elements, each.seconds) for each in _at(calibration.updates, ranks))
        self.moving: dict[str, list[tuple[float, float]]] = {}
        for each in sorted(_at(calibration.moving, ranks), key=lambda each: each.num_bytes):
            self.moving.setdefault(each.kind, []).append((each.num_bytes, each.seconds))
        tables = {"products": self.products, "attention": self.attention, "updates": self.updates}
        tables |= {kind: self.moving.get(kind, []) for kind in ("layer_norm", "gelu", "add", "cross_entropy")}
        if empty := [name for name, rows in {**tables, "small_steps": self.small_steps}.items() if not rows]:
            raise InputError(f"the calibration has no {empty[0]}; make it again with scripts/plan.py --calibrate")

    def layer_s(self, tokens: float, inputs: float, outputs: float, roles: Sequence[str]) -> float:
        """Return the seconds of a linear layer in some of its products."""
        sizes = {
            "forward": (tokens, outputs, inputs),
            "input_gradient": (tokens, inputs, outputs),
            "weight_gradient": (outputs, inputs, tokens),
        }
        work = tokens * inputs * outputs
        total = 0.0
        for role in roles:
            rows = [((p.m, p.n, p.k), p.m * p.n * p.k / p.seconds) for p in self.products if p.role == role]
            total += work / interpolated(rows, sizes[role])
        return total

    def attention_s(self, heads: float, length: float, head_dim: float, forwards: float) -> float:
        """Return the seconds of causal attention of so many heads of all sequences, backward once."""
        work = length**2 * head_dim  # of one head: batch and heads are repetitions
        total = 0.0
        for factor, name in ((forwards, "forward_s"), (1.0, "backward_s")):
            rows = [
                ((a.seq_length, a.head_dim), a.batch * a.heads * a.seq_length**2 * a.head_dim / getattr(a, name))
                for a in self.attention
            ]
            total += factor * heads * work / interpolated(rows, (length, head_dim))
        return total

    def moving_s(self, kind: str, elements: float) -> float:
        """Return the seconds of an elementwise kernel on so many numbers."""
        return along(self.moving[kind], FP32 * elements)

    def host_s(self) -> tuple[float, float]:
        """Return what a pass costs the host, however small it is: seconds for each block, and for the rest."""
        few, many = self.small_steps[0], self.small_steps[-1]
        of_block = max(many.seconds - few.seconds, 0.0) / max(many.layers - few.layers, 1)
        return of_block, max(few.seconds - few.layers * of_block, 0.0)


def _at(entries: Sequence[Entry], ranks: int) -> list[Entry]:
    """Return the entries measured with that many ranks at once, or with the nearest number."""
    numbers = {one.ranks for one in entries}  # type: ignore[attr-defined]
    nearest = min(numbers, key=lambda number: (abs(math.log(number / ranks)), number), default=0)
    return [one for one in entries if one.ranks == nearest]  # type: ignore[attr-defined]


def interpolated(known: Sequence[tuple[tuple[float, ...], float]], size: tuple[float, ...]) -> float:
    """Return a rate at a size: the mean of logarithms, weighed by 1 / distance^4 of the sizes' logarithms."""
    weights = values = 0.0
    for at, value in known:
        distance = sum(math.log(one / max(other, 1e-9)) ** 2 for one, other in zip(at, size, strict=True))
        weight = (distance + 1e-6) ** -2
        weights += weight
        values += weight * math.log(value)
    return math.exp(values / weights)


def along(known: Sequence[tuple[float, float]], size: float) -> float:
    """Return seconds at a size on the line through measured (size, seconds); in proportion beyond the last.

    Below the first it is the first's: a call costs something however little it does.
    """
    if size <= known[0][0]:
        return known[0][1]
    for (low, low_s), (high, high_s) in itertools.pairwise(known):
        if size <= high:
            return low_s + (size - low) / (high - low) * (high_s - low_s)
    return known[-1][1] * size / known[-1][0]


def block_parts(job: Job, tables: Tables) -> Mapping[str, float]:
    """Return the seconds of one block, forward and backward, for one micro batch."""
    model, tensor = job.model, job.layout.tensor
    tokens = job.micro_batch * model.seq_length / job.layout.context
    forwards = 1.0 + (job.recompute_share if job.recompute == "full" else 0.0)
    mixed, ffn = model.heads * model.head_dim / tensor, model.ffn / tensor
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim / tensor
    up = 2 if model.mlp == "swiglu" else 1
    layers = [(model.hidden, qkv, 1), (mixed, model.hidden, 1), (model.hidden, ffn, up), (ffn, model.hidden, 1)]
    products = sum(
        count * (forwards * tables.layer_s(tokens, a, b, FORWARD) + tables.layer_s(tokens, a, b, BACKWARD))
        for a, b, count in layers
    )
    wide = tokens * model.hidden / (tensor if job.layout.sequence_parallel else 1)
    elementwise = 2 * tables.moving_s("layer_norm", wide) + 2 * tables.moving_s("add", wide)
    elementwise += tables.moving_s("gelu", tokens * ffn)
    heads = job.micro_batch * model.heads / tensor
    return {
        "matrix products": products,
        "attention": tables.attention_s(heads, model.seq_length, model.head_dim, forwards),
        "elementwise": elementwise * (1 + (forwards - 1) * ELEMENTWISE_FORWARD),
    }


def head_s(job: Job, tables: Tables) -> float:
    """Return the seconds of the head and the loss for one micro batch, both ways."""
    tokens = job.micro_batch * job.model.seq_length / job.layout.context
    vocab = job.model.vocab / job.layout.tensor
    products = tables.layer_s(tokens, job.model.hidden, vocab, FORWARD + BACKWARD)
    return products + tables.moving_s("cross_entropy", tokens * vocab)


def embedding_s(job: Job, tables: Tables) -> float:
    """Return the seconds of the embedding and the final LayerNorm, about those of as many additions."""
    wide = job.micro_batch * job.model.seq_length * job.model.hidden
    return tables.moving_s("add", wide) + tables.moving_s("layer_norm", wide)
