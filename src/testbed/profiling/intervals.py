"""Set arithmetic on intervals of time. No torch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Intervals = np.ndarray  # (n, 2) float64: begin and end in microseconds, sorted and disjoint


def without_pauses(intervals: Intervals, longest_us: float) -> Intervals:
    """Join intervals closer than `longest_us`."""
    if not len(intervals):
        return intervals
    half = longest_us / 2
    return union(intervals + np.array([-half, half])) - np.array([-half, half])


def union(spans: Iterable) -> Intervals:
    """Return any spans as sorted, disjoint intervals."""
    array = np.array(list(spans), dtype=float).reshape(-1, 2)
    if not len(array):
        return array
    array = array[np.argsort(array[:, 0])]
    ends = np.maximum.accumulate(array[:, 1])
    starts_new = np.concatenate([[True], array[1:, 0] > ends[:-1]])
    last_of_each = np.concatenate([np.flatnonzero(starts_new)[1:] - 1, [len(array) - 1]])
    return np.column_stack([array[starts_new, 0], ends[last_of_each]])


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Return where both are."""
    if not len(left) or not len(right):
        return union([])
    first = np.searchsorted(right[:, 1], left[:, 0], side="right")
    last = np.searchsorted(right[:, 0], left[:, 1], side="left")
    counts = np.maximum(0, last - first)
    mine = np.repeat(np.arange(len(left)), counts)
    theirs = np.concatenate([np.arange(f, f + n) for f, n in zip(first, counts, strict=True)] or [np.empty(0, int)])
    return np.column_stack([np.maximum(left[mine, 0], right[theirs, 0]), np.minimum(left[mine, 1], right[theirs, 1])])


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """Return where `left` is and `right` is not."""
    if not len(left) or not len(right):
        return left
    begin, end = min(left[0, 0], right[0, 0]) - 1, max(left[-1, 1], right[-1, 1]) + 1
    gaps = np.column_stack([np.concatenate([[begin], right[:, 1]]), np.concatenate([right[:, 0], [end]])])
    return intersect(left, gaps)


def total_us(intervals: Intervals) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def contains(intervals: Intervals, moment: float) -> bool:
    place = np.searchsorted(intervals[:, 0], moment, side="right") - 1
    return bool(place >= 0 and moment < intervals[place, 1])
