"""Find the innermost of ranges inside ranges, so that a moment is counted once."""

from __future__ import annotations

from collections.abc import Sequence

Interval = tuple[int, int]  # start and end in nanoseconds


def innermost(intervals: Sequence[Interval]) -> list[list[Interval]]:
    """Return for each interval of one thread the parts in which none of those that began later is open.

    Together the parts are the time that the intervals cover, each moment once. Of two that begin together the shorter
    is the inner one.
    """
    parts: list[list[Interval]] = [[] for _ in intervals]
    open_ones: list[int] = []  # the innermost last
    now = 0

    def advance(until: int) -> None:
        """Give the time up to `until` to the innermost interval, closing what ends on the way."""
        nonlocal now
        while open_ones:
            current = open_ones[-1]
            end = intervals[current][1]
            if now < min(end, until):
                parts[current].append((now, min(end, until)))
                now = min(end, until)
            if end > until:
                return
            open_ones.pop()
        now = max(now, until)

    for index in sorted(range(len(intervals)), key=lambda number: (intervals[number][0], -intervals[number][1])):
        advance(intervals[index][0])
        now = intervals[index][0]
        open_ones.append(index)
    advance(max((end for _, end in intervals), default=0))
    return parts
