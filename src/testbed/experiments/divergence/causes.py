"""Guess the cause of a parting from simple patterns. No torch."""

from __future__ import annotations

import numpy as np

from testbed.experiments.divergence.comparison import OTHER_COPIES, OTHER_SIDE, Parting, size_of
from testbed.experiments.divergence.sides import FIRST, Place, Side

SAME = 0.02  # as close as a pattern must come
BF16 = (3e-4, 2e-2)  # relative differences that rounding to 8 bits makes in a sum
NO_RATIO = float("nan")


def ratio_of(a: np.ndarray, b: np.ndarray) -> float:
    """Return the number by which b makes a everywhere; not a number: there is none."""
    if a.shape != b.shape or not np.any(b[..., FIRST:] if b.ndim > 1 else b):
        return NO_RATIO
    if b.ndim == 1:
        return float(a[0] / b[0])
    x, y = a[..., FIRST:].ravel(), b[..., FIRST:].ravel()
    ratio = float(x @ y / (y @ y))
    return ratio if np.linalg.norm(x - ratio * y) <= SAME * max(abs(ratio), SAME) * np.linalg.norm(y) else NO_RATIO


def likely_cause(parting: Parting, a: Side, b: Side) -> str:
    """Return a sentence, without its full stop."""
    if parting.is_absent:
        return parting.against
    of_phase = {"data": _of_data, "weights": _of_weights, "forward": _of_forward, "clipping": _of_clipping}
    patterns = of_phase.get(parting.place.phase, _of_update if parting.place.phase == "update" else _of_gradients)
    return patterns(parting, ratio_of(parting.a, parting.b), a, b)


def _is(number: float, other: float) -> bool:
    return abs(number - other) <= SAME * abs(other)


def _of_data(parting: Parting, ratio: float, a: Side, b: Side) -> str:
    place = parting.place
    if parting.a.ndim == 1:
        return f"losses are divided by {parting.a[0]:g} tokens in place of {parting.b[0]:g}"
    for rank in parting.ranks:
        first, last = a.rows_of_rank(rank)
        mine = parting.a[first:last]
        for other in a.ranks:
            start, end = a.rows_of_rank(other)
            if start != first and len(mine) == end - start and size_of(mine, parting.b[start:end]) == 0:
                return f"rank {rank} reads the share of rank {other}"
    rows = [set(map(bytes, side.whole(place).round(6))) for side in (a, b)]
    return "the same sequences in another order" if rows[0] == rows[1] else "other sequences are read"


def _of_weights(parting: Parting, ratio: float, a: Side, b: Side) -> str:
    place = parting.place
    if place.step > 1:
        before = Place(place.step - 2, "update", place.name)
        if before in a.records and size_of(parting.a, a.whole(before)) <= 1e-6:
            return "forward reads stale weights: those of before the last update"
    return "forward reads other weights than the last update left"


def _of_forward(parting: Parting, ratio: float, a: Side, b: Side) -> str:
    if parting.a.ndim == 1:
        return f"the loss is {ratio:.4g} times the other's"
    if not np.isnan(ratio) and not _is(ratio, 1.0):
        return f"outputs are {ratio:.4g} times the other's everywhere"
    off = np.sqrt(np.mean((parting.a - parting.b)[..., FIRST:] ** 2, axis=-1))
    scale = np.sqrt(np.mean(parting.b[..., FIRST:] ** 2))
    bins = np.flatnonzero((off > max(parting.limit, 1e-6) * scale).any(axis=0))
    name = parting.place.name
    if name == "wpe":
        return "other positions are looked up"
    if name.endswith("attention"):
        if len(bins) and bins[0] > 1:  # from the second on is all that has something to attend to
            length = off.shape[1]
            return (
                f"attention differs from position {bins[0] * 100 // length} % of the sequence on: its mask or its keys"
            )
        return "attention is computed otherwise: its mask, its scale or its keys"
    return "the module computes something else, though it reads the same weights"


def _of_gradients(parting: Parting, ratio: float, a: Side, b: Side) -> str:
    place, ranks = parting.place, len(a.ranks)
    is_exchange = place.phase == "synchronisation"
    if not np.any(parting.a[..., FIRST:]):
        return "the gradient is zero: it was lost or never computed"
    if is_exchange and (own := _own_summand(parting, a)) is not None:
        return own
    if not np.isnan(ratio) and not _is(ratio, 1.0):
        theirs = "the other side's" if parting.against == OTHER_SIDE else parting.against
        return f"gradients are {ratio:.4g} times {theirs}: {_meaning(ratio, ranks, a, is_exchange)}"
    if is_exchange and place.name == "wte.weight" and _has_two_ends(place, a):
        return "the tied embedding: the gradients of its two ends are not added as they should be"
    if is_exchange and BF16[0] < parting.size < BF16[1]:
        return "the size of rounding to bf16: gradients are averaged in it"
    if parting.ranks and not is_exchange:
        return "these ranks alone bring other gradients for the same rows"
    return "the summands are right and their sum is not" if is_exchange else "forward agrees and backward does not"


def _has_two_ends(place: Place, a: Side) -> bool:
    """Return whether the embedding is that of two stages, as far as the summands of its gradient tell."""
    summands = a.records.get(Place(place.step, "backward", place.name), {})
    stages = {part.partition("stage")[2].partition(":")[0] for part in summands}
    return len(stages) != 1


def _meaning(ratio: float, ranks: int, a: Side, is_exchange: bool) -> str:
    data_ranks, accumulation = a.facts.get("data_ranks", ranks), a.facts.get("accumulation", 1)
    if is_exchange and _is(ratio, data_ranks):
        return "summed in place of averaged, or exchanged twice"
    if is_exchange and _is(ratio * data_ranks, 1.0):
        return "divided by the ranks once too often, or not exchanged"
    if _is(ratio, accumulation):
        return "not divided by the micro batches of a step"
    if _is(ratio * accumulation, 1.0):
        return "divided by the micro batches once too often"
    if any(_is(ratio, n) or _is(ratio * n, 1.0) for n in {data_ranks, ranks} if n > 1):
        return "a number of ranks too often or too seldom in the divisor of the loss"
    return "a wrong factor"


def _own_summand(parting: Parting, a: Side) -> str | None:
    """Say so if a rank has nothing but its own part."""
    local = Place(parting.place.step, "backward", parting.place.name)
    if local not in a.records:
        return None
    for rank in parting.ranks or a.ranks:
        mine = [array for _, array in a.of_rank(local, rank)]
        own = np.sum(mine, axis=0) if mine else a.whole(local)
        if size_of(own, a.whole(local)) > SAME and not np.isnan(ratio_of(parting.a, own)):  # others have summands too
            return f"rank {rank} has its own gradient alone: it was not exchanged"
    return None


def _of_clipping(parting: Parting, ratio: float, a: Side, b: Side) -> str:
    if parting.place.name == "norm":
        where = "ranks do not agree on the norm" if parting.ranks else "the norm is not that of the gradients"
        return f"{where}: it is {ratio:.4g} times as large"
    if np.isnan(ratio):
        return "gradients change between synchronisation and update"
    ratio = ratio**0.5 if parting.a.ndim == 1 else ratio  # of squares
    return f"gradients are scaled by {ratio:.4g} times the factor that the norm asks for"


def _of_update(parting: Parting, ratio: float, a: Side, b: Side) -> str:
    place = parting.place
    if place.step == 0:
        return "the initial weights differ"
    if parting.a.ndim == 1:
        return f"{place.name} is {parting.a[0]:g} in place of {parting.b[0]:g}"
    before = Place(place.step - 1, "update", place.name)
    if parting.against == OTHER_COPIES and before in a.records:
        for rank in parting.ranks:
            mine = dict(a.of_rank(before, rank))
            if any(size_of(array, mine[part]) == 0 for part, array in a.of_rank(place, rank) if part in mine):
                return f"rank {rank} does not update this weight"
        return "ranks update their copies differently"
    if not np.any(parting.a[..., FIRST:]):
        return "the weight is not updated"
    if not np.isnan(ratio) and not _is(ratio, 1.0):
        return f"the update is {ratio:.4g} times the other's"
    return "the optimizer makes another update of the same gradients"
