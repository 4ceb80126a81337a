"""Work out from the shapes alone how long the bytes of a network study need over a link, and how many can overlap.

No measurement enters. The bound of a strategy is a yardstick: that of the gradients' ring all-reduce for those that
keep whole gradients or cut them up, and for a pipeline, whose gradients stay at home, that of what passes between its
stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from testbed.model.shape import MODEL_SIZES, ModelShape

BYTES_PER_NUMBER = 4


def bound_s(content: Mapping[str, Any], hosts: int, link: str) -> float | None:
    """Return the seconds of a ring all-reduce of the gradients at the rate of the link, 2 (N - 1) / N x bytes /
    bandwidth."""
    return _seconds(content, 2 * (hosts - 1) / hosts * content["work"]["gradient_bytes"], link)


def bound_of(content: Mapping[str, Any], arm: Mapping[str, Any]) -> float | None:
    """Return the bound of an arm, in seconds; None without a rate. Of a pipeline: what the link of its first stage, and
    of its last, carries in one direction: the activations of a step, or their gradients, and the embedding's gradient,
    which the two add up."""
    if arm["strategy"] != "pipeline":
        whole_s = bound_s(content, arm["hosts"], arm["link"])
        return whole_s / 2 if whole_s is not None and "bf16" in (arm["lever"] or "") else whole_s  # half the bytes
    shape = shape_of(content["work"])
    tokens = next(run["tokens_per_step"] for run in content["runs"] if run["arm"] == arm["name"])
    numbers = (shape.padded_vocab_size + tokens) * shape.embedding_size  # two ranks' all-reduce: all of it each way
    return _seconds(content, BYTES_PER_NUMBER * numbers, arm["link"])


def _seconds(content: Mapping[str, Any], num_bytes: float, link: str) -> float | None:
    rate = next(each for each in content["links"] if each["name"] == link)["rate_bit_per_s"]
    return None if rate is None else num_bytes / (rate / 8)


def shape_of(work: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the model that a study trained; its sequences fill its positions."""
    size = MODEL_SIZES[work["model_name"]]
    return dataclasses.replace(size, vocab_size=work["vocab_size"], max_position_embeddings=work["seq_len"])


def share_ready_last(work: Mapping[str, Any]) -> float:
    """Return the share of the gradients' bytes that are the embeddings': the token embedding is also the head, so its
    gradient is complete only when backward has reached the first layer again, and there is nothing left to overlap
    with."""
    shape = shape_of(work)
    return (shape.vocab_size + shape.max_position_embeddings) * shape.embedding_size / shape.num_parameters
