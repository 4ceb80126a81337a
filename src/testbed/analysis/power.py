"""Say before a sweep what its repeats can show: by the noise of its finished runs, or by the machine's certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.analysis.certificate import (
    CERTIFICATE_FILE,
    EFFECTS,
    Machine,
    machine_in_words,
    planning_noise,
    read_certificate,
)
from testbed.analysis.equivalence import DEFAULT_MARGIN, repeats_to_show
from testbed.analysis.statistics import MIN_REPEATS, detectable_effect, noise_of, repeats_needed
from testbed.errors import InputError
from testbed.sweep.runner import in_words

DEFAULT_CERTIFICATE = Path("checkpoint/certificate") / CERTIFICATE_FILE
MOST = 1000  # repeats that are counted


@dataclass(frozen=True)
class KnownNoise:
    """Upper limit of the standard deviation of one run, as a fraction, and in words where it is from."""

    below: float
    source: str


def certificate_here(asked: Path | None, machine: Machine) -> tuple[Path, dict[str, Any]] | None:
    """Return the certificate that was asked for, or the one in the default place; None: there is none of this machine.

    InputError: the one that was asked for cannot be read, or is of another machine.
    """
    path = asked or DEFAULT_CERTIFICATE
    if asked is None and not path.is_file():
        return None
    content = read_certificate(path)
    if content["machine"] == machine:
        return path, content
    if asked is None:
        return None
    raise InputError(
        f"--certificate {asked} is of another machine ({machine_in_words(content['machine'])}; this one is "
        f"{machine_in_words(machine)}); make one with scripts/more/certify_machine.py"
    )


def known_noise(
    arms: Mapping[str, Sequence[float]], certificate: tuple[Path, Mapping[str, Any]] | None
) -> KnownNoise | None:
    """Return the noise of a run: of the finished runs of the sweep, by configuration, else of the certificate."""
    counts = [len(rates) for rates in arms.values() if len(rates) > 1]
    if sum(counts) - len(counts) >= MIN_REPEATS - 1:  # as much as one arm says from which a claim is made
        below = noise_of(arms.values())[1]
        assert below is not None, "an arm has two rates"
        return KnownNoise(below, f"{sum(counts)} finished runs of this sweep")
    if certificate is None:
        return None
    return KnownNoise(planning_noise(certificate[1]), str(certificate[0]))


def power_lines(known: KnownNoise | None, repeats: int, seconds_per_repeat: float) -> list[str]:
    """Return what so many repeats show, and how many a difference takes, with the time for all of them."""
    if known is None:
        return [
            "which difference these repeats can show is not known before some were made; "
            "python scripts/more/certify_machine.py measures the noise of this machine"
        ]

    def taken(number: int) -> str:
        if number > MOST:
            return f"more than {MOST:,} repeats"
        return f"{number} repeats ({in_words(number * seconds_per_repeat)})"

    if repeats < MIN_REPEATS:
        shown = f"{repeats} repeats make no claim; it takes {MIN_REPEATS}"
    else:
        shown = f"{repeats} repeats find a difference of {detectable_effect(known.below, repeats):.1%} in 80 % of cases"
    plans = [f"{effect:.0%}: {taken(repeats_needed(known.below, effect))}" for effect in EFFECTS]
    equal = taken(repeats_to_show(known.below, DEFAULT_MARGIN))
    return [
        f"{shown}; noise of a run below {known.below:.1%}, from {known.source}",
        f"to find a difference of {'; '.join(plans)}",
        f"to show that two are equal within {DEFAULT_MARGIN:.0%}: {equal}",
    ]
