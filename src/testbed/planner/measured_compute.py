"""Add up what the operations of a step take by a calibration: products, attention, elementwise, head, update. No torch.

Times between measured sizes are interpolated where they are smooth: rates (work per second) over the logarithm of the
sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from testbed.planner.calibration import ComputeTimes, Row
from testbed.planner.job import Job

NEARNESS = 4  # power of the distance by which a measured size counts less
GRADIENT_COSTS = 2  # matrix products of backward for one of forward


def interpolated(rows: Sequence[Row], sizes: Sequence[str], at: Sequence[float], work: float, of: str) -> float:
    """Return seconds at sizes between the measured ones: `work` over a mean of their rates, the near ones counting most.

    Args:
        sizes: names of the sizes in a row, whose product is its work.
        at: the sizes that are asked for.
        work: their product.
        of: the name of the seconds in a row.
    """
    log_rate = total = 0.0
    for row in rows:
        squares = sum(math.log(max(wanted, 1e-9) / row[name]) ** 2 for name, wanted in zip(sizes, at, strict=True))
        weight = 1.0 / (squares + 1e-6) ** (NEARNESS / 2)
        log_rate += weight * math.log(math.prod(row[name] for name in sizes) / max(row[of], 1e-12))
        total += weight
    return work / math.exp(log_rate / total)


def along(rows: Sequence[Row], size: str, at: float, of: str = "seconds") -> float:
    """Return seconds at a size on the line through the measured points; in proportion beyond the last.

    Below the first it is the first's: a call costs something however little it does.
    """
    rows = sorted(rows, key=lambda row: row[size])
    if at <= rows[0][size]:
        return rows[0][of]
    for low, high in zip(rows, rows[1:], strict=False):
        if at <= high[size]:
            share = (at - low[size]) / (high[size] - low[size])
            return low[of] + share * (high[of] - low[of])
    return rows[-1][of] * at / rows[-1][size]


def product_s(times: ComputeTimes, tokens: float, inputs: float, outputs: float, passes: Sequence[str]) -> float:
    """Return the seconds of a linear layer in some of its passes: forward_s, input_gradient_s, weight_gradient_s."""
    at = (tokens, inputs, outputs)
    return sum(
        interpolated(times.products, ("tokens", "inputs", "outputs"), at, math.prod(at), name) for name in passes
    )


FORWARD, BACKWARD = ("forward_s",), ("input_gradient_s", "weight_gradient_s")


def block_parts(job: Job, times: ComputeTimes) -> Mapping[str, float]:
    """Return the seconds of one block, forward and backward, for one micro batch."""
    model, tensor = job.model, job.layout.tensor
    tokens = job.micro_batch * model.seq_length / job.layout.context
    again = (job.recompute_share if job.recompute == "full" else 0.0) + 1.0  # forward passes
    attention_width, ffn = model.heads * model.head_dim / tensor, model.ffn / tensor
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim / tensor
    up = 2 if model.mlp == "swiglu" else 1
    layers = [(model.hidden, qkv, 1), (attention_width, model.hidden, 1), (model.hidden, ffn, up), (ffn, model.hidden, 1)]
    products = sum(
        count * (again * product_s(times, tokens, a, b, FORWARD) + product_s(times, tokens, a, b, BACKWARD))
        for a, b, count in layers
    )
    batch, heads = job.micro_batch, model.heads / tensor
    size = (model.seq_length, model.head_dim)
    work = batch * heads * math.prod(size)
    # a row's rate by length and head size: batch and heads are repetitions of one head
    of_one = [
        {**row, "forward_s": row["forward_s"] / (row["batch"] * row["heads"]),
         "backward_s": row["backward_s"] / (row["batch"] * row["heads"])}
        for row in times.attention
    ]  # fmt: skip
    attention = sum(
        factor * interpolated(of_one, ("length", "head_dim"), size, work, name)
        for name, factor in (("forward_s", again), ("backward_s", 1.0))
    )
    wide = tokens * model.hidden / (tensor if job.layout.sequence_parallel else 1)
    elementwise = 2 * along(times.layer_norm, "elements", wide) + 2 * along(times.add, "elements", wide)
    elementwise += along(times.gelu, "elements", tokens * ffn)
    elementwise *= 1 + (again - 1) / 3  # forward is about a third of both
    return {"matrix products": products, "attention": attention, "elementwise": elementwise}


def head_s(job: Job, times: ComputeTimes) -> float:
    """Return the seconds of the head and the loss for one micro batch, both ways."""
    tokens = job.micro_batch * job.model.seq_length / job.layout.context
    vocab = job.model.vocab / job.layout.tensor
    products = product_s(times, tokens, job.model.hidden, vocab, FORWARD + BACKWARD)
    return products + along(times.cross_entropy, "elements", tokens * vocab)


def embedding_s(job: Job, times: ComputeTimes) -> float:
    """Return the seconds of the embedding and the final LayerNorm, about those of so many additions."""
    wide = job.micro_batch * job.model.seq_length * job.model.hidden
    return along(times.add, "elements", wide) + along(times.layer_norm, "elements", wide)


def host_s(times: ComputeTimes) -> tuple[float, float]:
    """Return what a step costs the host, however small it is: seconds for each block, and for the rest."""
    few, many = min(times.small_step, key=_layers), max(times.small_step, key=_layers)
    of_block = max(many["seconds"] - few["seconds"], 0.0) / max(many["layers"] - few["layers"], 1)
    return of_block, max(few["seconds"] - few["layers"] * of_block, 0.0)


def _layers(row: Row) -> float:
    return row["layers"]
