"""Compare the records of two sides in the order of computation, and name the first that parts. No torch."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections import defaultdict

import numpy as np

from testbed.experiments.divergence.sides import FIRST, SQUARES, Parts, Place, Side

BEYOND = 8.0  # times the noise
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-9}
LEAST = {"fp32": 64 * ROUNDING["fp32"], "bf16": 8 * ROUNDING["bf16"]}  # noise to allow for where none is measured
AMPLIFIED = 16  # Adam divides by gradients that may be as small as their own rounding
OWN = 1e-5  # of what a side itself says twice: a norm and its gradients, a sum and its summands
EXACT = 1e-12  # of numbers that no rounding of --precision reaches: learning rate, weight decay
TINY = 1e-30
OF_ITSELF = ("weights", "clipping")  # a side's own: what forward and backward read shows in them
ENDS = (".weight", ".bias")  # of a parameter's name
OTHER_SIDE, OTHER_COPIES = "the other side", "the copies of other ranks"
NORM_OF_GRADIENTS = "what follows from the synchronised gradients"
SQUARES_OF_ALL = "squares of all clipped gradients"  # where the optimizer has flat pieces of many parameters
WHAT_UPDATE_LEFT = "what the last update left"
SUMMANDS = "the sum of all ranks' own gradients"


@dataclasses.dataclass
class Parting:
    """The first place where two sides part.

    Attributes:
        ranks: of side A, whose part it is; empty: it cannot be said, or all.
        size: relative difference; `limit` is what rounding explains.
        a, b: what was compared, for `causes.py`.
        against: what A differs from, in words.
    """

    place: Place
    ranks: list[int]
    size: float
    limit: float
    a: np.ndarray
    b: np.ndarray
    against: str = OTHER_SIDE

    @property
    def is_absent(self) -> bool:
        """Return whether a side or a rank does not have the place at all."""
        return not self.a.size


def size_of(a: np.ndarray, b: np.ndarray) -> float:
    """Return how far `a` is from `b`, relative to b; of a batch the row where that is most."""
    if a.shape != b.shape:
        return float("inf")
    if b.ndim == 1:
        return float(abs(a[0] - b[0]) / max(abs(b[0]), TINY))
    difference, scale = a[..., FIRST:] - b[..., FIRST:], np.sqrt(np.mean(b[..., FIRST:] ** 2))
    by_row = np.sqrt(np.mean(difference**2, axis=(-2, -1)))
    with np.errstate(invalid="ignore"):
        found = float(np.max(by_row) / max(scale, TINY))
    return float("inf") if np.isnan(found) else found


class Comparison:
    """Of side A with side B, whose noise is known from B once more in another split, or from floors alone."""

    def __init__(self, a: Side, b: Side, noisy: Side | None = None):
        self.a, self.b = a, b
        steps = min(a.steps, b.steps)
        alone = {place for place in a.records if place.phase == "clipping"}  # judged by A's own gradients
        of_both = {place for place in a.records.keys() & b.records.keys() | alone if place.step <= steps}
        of_one = {
            place
            for place in a.records.keys() ^ b.records.keys()
            if place.step <= steps and place.phase not in OF_ITSELF
        }
        self.absent = {place for place in of_one if self._is_expected(place)}
        self.left_out = len(of_one - self.absent)
        self.places = sorted(of_both | self.absent, key=Place.order)
        self.noise = {} if noisy is None else _noise(b, noisy)
        precisions = {side.facts.get("precision", "fp32") for side in (a, b)}
        self.floor = LEAST["bf16" if "bf16" in precisions else "fp32"]
        of_phase = defaultdict(list)
        for place, size in self.noise.items():
            of_phase[place.step, place.phase].append(size)
        self.typical = {key: statistics.quantiles([*sizes, *sizes], n=4)[2] for key, sizes in of_phase.items()}
        self.largest = {key: max(sizes) for key, sizes in of_phase.items()}
        # of A's synchronised gradients: the squared norm of each step, and the ranks that have each, or any
        self.squares: dict[int, float] = defaultdict(float)
        self.have: dict[tuple[int, str], set[int]] = defaultdict(set)
        for place, parts in a.records.items():
            if place.phase == "synchronisation":
                self.squares[place.step] += float(a.whole(place)[:, SQUARES].sum())
                for name in (place.name, SQUARES_OF_ALL):
                    self.have[place.step, name].update(*parts.values())

    def first(self) -> Parting | None:
        """Return where A parts first, or None."""
        return next((found for place in self.places if (found := self.at(place)) is not None), None)

    def _is_expected(self, place: Place) -> bool:
        """Return whether the side that lacks a place has others of its kind in this step, so that it is missing."""
        lacks = self.b if place in self.a.records else self.a
        alike = {each for each in lacks.records if (each.step, each.phase) == (place.step, place.phase)}
        if place.phase == "backward" and Place(place.step, "synchronisation", place.name) in lacks.records:
            return False  # it came past the hooks
        return _kind(place.name) in {_kind(each.name) for each in alike}

    def limit(self, place: Place) -> float:
        """Return the largest difference from side B that rounding explains."""
        if place.phase == "data":
            return 0.0
        if place.phase == "update" and self.b.whole(place).ndim == 1:
            return EXACT
        floor = LEAST["fp32"] if place.phase == "weights" or place.step == 0 else self.floor
        if place.phase in ("forward", "backward") and place.step > 1:
            floor = max(floor, AMPLIFIED * LEAST["fp32"])  # what is within the limit of an update is in what follows
        if place.phase == "update" and place.step > 0:
            weights = np.sqrt(np.mean(self.b.whole(place)[..., FIRST:] ** 2))
            updates = np.sqrt(np.mean(value_of(self.b, place)[..., FIRST:] ** 2))
            floor = max(AMPLIFIED * floor, float(BEYOND * ROUNDING["fp32"] * weights / max(updates, TINY)))
        measured = max(self.noise.get(place, 0.0), self.typical.get((place.step, place.phase), 0.0))
        return max(BEYOND * measured, floor)

    def at(self, place: Place) -> Parting | None:
        """Return how the sides part at one place, or None."""
        nothing = np.zeros(0)
        if place in self.absent:
            side = "A" if place in self.a.records else "B"
            return Parting(place, [], float("inf"), 0.0, nothing, nothing, f"side {side} alone computes this")
        if place.phase == "clipping" and (
            idle := sorted(self.have[place.step, place.name].difference(*self.a.records[place].values()))
        ):
            name = "all weights" if place.name == SQUARES_OF_ALL else place.name
            said = f"rank {', '.join(map(str, idle))} skips the optimizer's step, or has no gradient there"
            return Parting(Place(place.step, "update", name), idle, 1.0, 0.0, nothing, nothing, said)
        b, limit, against = self._expected(place)
        if (found := self._copies(place, b, limit, against)) is not None:
            return found
        a = value_of(self.a, place)
        size = size_of(a, b)
        is_explained = size <= limit or (place.phase == "update" and self._is_of_few(place, size))
        return None if is_explained else Parting(place, self._to_blame(place, a, b, limit), size, limit, a, b, against)

    def _is_of_few(self, place: Place, size: float) -> bool:
        """Return whether an update differs as the noise run's largest does, and most others of the step do not.

        Adam's first steps are about the signs of gradients: where one is smaller than its rounding it flips, in few
        weights, and not in the same ones each time.
        """
        if size > BEYOND * self.largest.get((place.step, place.phase), 0.0):
            return False
        both = self.a.records.keys() & self.b.records.keys()
        alike = [each for each in both
                 if (each.step, each.phase) == (place.step, place.phase) and self.b.whole(each).ndim > 1]  # fmt: skip
        sizes = {each: size_of(value_of(self.a, each), value_of(self.b, each)) for each in alike}
        return 2 * sum(size > self.limit(each) for each, size in sizes.items()) <= len(alike)

    def _expected(self, place: Place) -> tuple[np.ndarray, float, str]:
        """Return what A should have, by how much rounding explains a difference from that, and what that is in words:
        what follows from A itself, where it says it twice, else what side B has."""
        if place.phase == "clipping":
            return self._clipped(place)
        before = Place(place.step, "backward", place.name)
        if place.phase == "synchronisation" and before in self.a.records:
            return self.a.whole(before), max(OWN, self._rounding_of_b(place, before)), SUMMANDS
        before = Place(place.step - 1, "update", place.name)
        if place.phase == "weights" and place.step > 1 and before in self.a.records:
            left = self.a.whole(before)
            if left.shape == self.a.whole(place).shape:  # else flat pieces of many
                return left, max(LEAST["fp32"], self._rounding_of_b(place, before)), WHAT_UPDATE_LEFT
        return value_of(self.b, place), self.limit(place), OTHER_SIDE

    def _rounding_of_b(self, place: Place, before: Place) -> float:
        """Return what to allow, as side B itself says this twice too: of weights that are read in bf16 it differs."""
        if before not in self.b.records or self.b.whole(before).shape != self.b.whole(place).shape:
            return 0.0
        return BEYOND * size_of(self.b.whole(place), self.b.whole(before))

    def _clipped(self, place: Place) -> tuple[np.ndarray, float, str]:
        """Return the norm, or what clipping should leave, as it follows from the synchronised gradients."""
        squares, most = self.squares[place.step], float(self.a.facts.get("max_grad_norm", 0.0))
        if place.name == "norm" and not squares:
            return self.b.whole(place), 10 * OWN, OTHER_SIDE
        norm = squares**0.5
        factor = min(1.0, most / (norm + 1e-6)) if most > 0 else 1.0
        if place.name == "norm":
            return np.array([norm]), 10 * OWN, NORM_OF_GRADIENTS
        if place.name == SQUARES_OF_ALL:
            return np.array([squares * factor**2]), OWN, NORM_OF_GRADIENTS
        return factor * self.a.whole(Place(place.step, "synchronisation", place.name)), OWN, NORM_OF_GRADIENTS

    def _copies(self, place: Place, b: np.ndarray, limit: float, against: str) -> Parting | None:
        """Compare what several ranks of A have of one thing: with what is expected if it is the whole, else with the
        copy to believe."""
        odd: dict[int, tuple[float, np.ndarray, np.ndarray]] = {}
        parts = self.a.records[place]
        is_known = len(parts) == 1 and (against != OTHER_SIDE or place.name == "target tokens")
        limit = max(limit, OWN) if place.phase in ("forward", "backward", "weights") else OWN
        for part, of_ranks in parts.items():
            if len({array.tobytes() for array in of_ranks.values()}) == 1:
                continue
            honest = b if is_known else _nearest(of_ranks, self._copy_of_b(place, part, of_ranks))
            for rank, array in of_ranks.items():
                size = size_of(array, honest)
                if size > limit:
                    odd[rank] = (size, array, honest)
        if not odd:
            return None
        rank = max(odd, key=lambda each: odd[each][0])
        size, mine, honest = odd[rank]
        return Parting(place, sorted(odd), size, limit, mine, honest, against if is_known else OTHER_COPIES)

    def _copy_of_b(self, place: Place, part: str, of_ranks: dict[int, np.ndarray]) -> dict[int, np.ndarray] | None:
        """Return what side B has of a part; of data its rows, however B's ranks share the batch."""
        if place.phase == "data" and place in self.b.records and ":" in part:
            first, length = int(part.partition(":")[0]), len(next(iter(of_ranks.values())))
            return {0: self.b.whole(place)[first : first + length]}
        return self.b.records.get(place, {}).get(part)

    def _to_blame(self, place: Place, a: np.ndarray, b: np.ndarray, limit: float) -> list[int]:
        """Return the ranks of A whose rows or bins differ, if not all do."""
        if a.shape != b.shape or a.ndim == 1:
            return []
        ranks, scale = self.a.ranks, np.sqrt(np.mean(b[..., FIRST:] ** 2))
        if place.phase == "backward":
            return self._summands_to_blame(place, limit)
        off = np.sqrt(np.mean((a - b)[..., FIRST:] ** 2, axis=-1)) > limit * max(scale, TINY) / 2
        blamed = []
        for rank in ranks:
            held = np.zeros(off.shape, dtype=bool)
            for part, array in self.a.of_rank(place, rank):
                has = array[..., SQUARES] > 0
                first = int(part.partition(":")[0]) if array.ndim == 3 else 0
                held[first : first + len(has)] |= has
            if held.any() and (off & held).any():
                blamed.append(rank)
        return blamed if len(blamed) < len(ranks) else []

    def _summands_to_blame(self, place: Place, limit: float) -> list[int]:
        """Return the ranks whose rows bring other gradients than the same rows of side B."""
        theirs = {int(part.rpartition(":row")[2]): array for part, array in _by_row(self.b.records[place])}
        scale, blamed, rows_of = np.sqrt(np.mean(self.b.whole(place)[..., FIRST:] ** 2)), [], self.a.rows_of_rank
        for rank in self.a.ranks:
            first, last = rows_of(rank)
            expected = [array for row, array in theirs.items() if first <= row < last]
            parts = [
                next(iter(of_ranks.values()))
                for of_ranks in self.a.records[place].values()
                if any(rows_of(other) == (first, last) for other in of_ranks)
            ]
            if not expected or not parts:
                return []
            difference = (np.sum(parts, axis=0) - np.sum(expected, axis=0))[..., FIRST:]
            if np.sqrt(np.mean(difference**2)) > limit * scale / len(self.a.ranks):
                blamed.append(rank)
        return blamed if len(blamed) < len(self.a.ranks) else []


def _kind(name: str) -> str:
    """Return what a side has wholly or not at all: --compile hides what is inside blocks, ZeRO which weights decay."""
    if name.startswith("weight decay"):
        return "weight decay"
    return "inside" if name == "ln_f" or (re.fullmatch(r"h\.\d+\..*", name) and not name.endswith(ENDS)) else "outside"


def _by_row(parts: Parts) -> list[tuple[str, np.ndarray]]:
    return [(part, next(iter(of_ranks.values()))) for part, of_ranks in parts.items() if ":row" in part]


def _nearest(of_ranks: dict[int, np.ndarray], expected: dict[int, np.ndarray] | None) -> np.ndarray:
    """Return the copy to believe: what most ranks have, or else what is nearest to the other side's."""
    counts: dict[bytes, int] = defaultdict(int)
    for array in of_ranks.values():
        counts[array.tobytes()] += 1
    most = max(counts.values())
    common = [array for array in of_ranks.values() if counts[array.tobytes()] == most]
    if expected is None or len({array.tobytes() for array in common}) == 1:
        return common[0]
    other = next(iter(expected.values()))
    return min(common, key=lambda array: size_of(array, other))


def value_of(side: Side, place: Place) -> np.ndarray:
    """Return what is compared of a place: of a weight what the step added to it, else what is there."""
    now, before = side.whole(place), Place(place.step - 1, place.phase, place.name)
    is_weight = place.phase == "update" and now.ndim > 1 and before in side.records
    return now - side.whole(before) if is_weight else now


def _noise(side: Side, again: Side) -> dict[Place, float]:
    """Return the differences that another split of the same work makes."""
    return {
        place: size_of(value_of(again, place), value_of(side, place))
        for place in side.records.keys() & again.records.keys()
        if place.phase not in ("data", "clipping")
    }
