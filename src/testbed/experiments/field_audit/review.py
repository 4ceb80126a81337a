"""Read the verdicts of a review by hand, and draw what to review next.

reviews.json holds {id: {verdict, sure, why}}. `holds`: the figures do not follow from one another, and nothing in the
file explains it. `explained`: they do not, and the file or a usual convention says why. `wrong`: they do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.errors import InputError
from testbed.io import read_json

VERDICTS = ("holds", "explained", "wrong")
SURE = ("certain", "likely")
NORMAL_95 = 1.959964


def read_reviews(path: Path) -> dict[str, dict[str, str]]:
    """Return the reviews by the finding's id.

    Raises:
        InputError: it cannot be read, or a review has another verdict.
    """
    reviews = read_json(path)
    for name, review in reviews.items():
        if review.get("verdict") not in VERDICTS or review.get("sure") not in SURE or not review.get("why"):
            raise InputError(
                f"{path}: {name} needs a verdict ({', '.join(VERDICTS)}), sure ({', '.join(SURE)}) and why"
            )
    return reviews


def in_random_order(findings: Iterable[Mapping[str, Any]], seed: int) -> list[Mapping[str, Any]]:
    """Return findings in an order that depends on their ids and the seed alone: a new finding moves no other."""
    return sorted(findings, key=lambda finding: hashlib.sha256(f"{seed} {finding['id']}".encode()).hexdigest())


def counts(findings: Sequence[Mapping[str, Any]], reviews: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    """Return how many findings got each verdict."""
    given = [reviews[finding["id"]]["verdict"] for finding in findings if finding["id"] in reviews]
    return {verdict: given.count(verdict) for verdict in VERDICTS}


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    share, squared = successes / trials, NORMAL_95**2
    middle = (share + squared / (2 * trials)) / (1 + squared / trials)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / trials + squared / (4 * trials**2)) / (1 + squared / trials)
    return max(0.0, middle - half), min(1.0, middle + half)


def with_interval(successes: int, trials: int) -> str:
    """Return a share in words: 57 of 60 = 95 % (86 % to 98 %)."""
    if not trials:
        return "none"
    low, high = wilson(successes, trials)
    return f"{successes:,} of {trials:,} = {successes / trials:.0%} ({low:.0%} to {high:.0%})"
