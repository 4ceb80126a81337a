"""Keep what ranks watched in their steps (--watch_collectives) in at most 128 rows, however long the run. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MOST_ROWS = 128  # even: full, every two neighbours become one


class WatchedSteps:
    """Means over windows of as many steps each, in the order of the steps. The last window may be shorter."""

    def __init__(self) -> None:
        self._size = 1  # steps of a window
        self._windows: list[tuple[int, int, dict[str, list[float]]]] = []  # first step, number of steps, sums

    def add(self, step: int, per_rank: Mapping[str, Sequence[float]]) -> None:
        """Add a step's numbers of every rank, by name."""
        new = (step, 1, {name: list(values) for name, values in per_rank.items()})
        if self._windows and self._windows[-1][1] < self._size:
            self._windows[-1] = _together(self._windows[-1], new)
            return
        if len(self._windows) == MOST_ROWS:
            pairs = zip(self._windows[::2], self._windows[1::2], strict=True)
            self._windows = [_together(one, other) for one, other in pairs]
            self._size *= 2
        self._windows.append(new)

    def rows(self) -> list[dict[str, Any]]:
        """Return the means as training_metrics.json has them, seconds to a tenth of a microsecond."""
        return [
            {
                "step": first,
                "num_steps": number,
                **{f"per_rank_{name}": [round(one / number, 7) for one in values] for name, values in sums.items()},
            }
            for first, number, sums in self._windows
        ]


def _together(
    one: tuple[int, int, dict[str, list[float]]], other: tuple[int, int, dict[str, list[float]]]
) -> tuple[int, int, dict[str, list[float]]]:
    sums = {name: [a + b for a, b in zip(values, other[2][name], strict=True)] for name, values in one[2].items()}
    return one[0], one[1] + other[1], sums
