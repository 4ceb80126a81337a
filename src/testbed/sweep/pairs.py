"""Plan pairs of equal runs: each configuration against itself, in turn. No torch."""

from __future__ import annotations

import dataclasses

from testbed.sweep.field import again
from testbed.sweep.plan import NOT_APPLICABLE, Cell, cell_of, order_of_round, why_not_applicable
from testbed.sweep.request import Request

SIDES = ("a", "b")


def cells_of_pairs(request: Request, ranks: int, pairs: int) -> list[Cell]:
    """Return both runs of every pair, in order: the first pair of each configuration, then the second, and so on.

    Side a begins the odd pairs and side b the even ones, so a drift favours neither. What cannot run on `ranks`
    runs on one. What cannot run here at all comes last, once each, with a reason.
    """
    possible, impossible = [], []
    for variant in request.variants:
        of_variant = ranks if why_not_applicable(variant, ranks, request.machine) is None else 1
        first = cell_of(request, variant, of_variant, request.batch_sizes[0], repeat=1)
        reason = why_not_applicable(variant, of_variant, request.machine)
        if reason is None:
            possible.append(first)
        else:
            impossible.append(dataclasses.replace(first, status=NOT_APPLICABLE, reason=reason, oversubscribed=False))
    planned = [
        again(dataclasses.replace(possible[index], name=f"{possible[index].name}_{side}"), number)
        for number in range(1, pairs + 1)
        for index in order_of_round(len(possible), number)
        for side in (SIDES if number % 2 else reversed(SIDES))
    ]
    return planned + impossible
