"""The audit's rules about the conditions of a comparison: one code, equal devices, and what more devices gained."""

from __future__ import annotations

import math
from collections.abc import Iterator

from testbed.analysis.comparison.confounders import CHANGED_FILES, COMMIT, DEVICE, Confounder, confounders
from testbed.analysis.runs.arms import configuration
from testbed.analysis.runs.comparability import cores_of
from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.measures import gain
from testbed.audit.reported import Claim

_THREADS = "cpu threads per rank"
# of the runs of one side that say it
_DIRTY: dict[tuple[str, ...], str] = {("True",): "in every run", ("False",): "in no run"}
SLOWER = 0.95  # under it more than the noise of single runs made the larger run slower
HALF = 0.5
# in which a token costs another time, so that rates do not compare
SAME_IN_LOGS = ("device_name", "num_parameters", "sequence_length")  # unknown in one only is another
COST_OF_A_TOKEN = ("num_layers", "num_heads", "embedding_size", "seq_len", "vocab_size")


def code_is_the_same(claim: Claim) -> Iterator[Finding]:
    """Compare commits. Two are one change, and may be what is compared; with other settings too, they are two."""
    found = {item.kind: item for item in confounders(*claim.measured_runs) if item.a != item.b}
    if commit := found.get(COMMIT):
        one, other = (" / ".join(each[:10] for each in side) for side in (commit.a, commit.b))
        message = f"commit {one} against {other}"
    elif changed := found.get(CHANGED_FILES):
        one, other = (_DIRTY.get(values, "in some runs") for values in (changed.a, changed.b))
        message = f"files that differ from the commit: {claim.names[0]} {one}, {claim.names[1]} {other}"
    else:
        return
    is_two_changes = not _is_set_alike(claim)
    if is_two_changes:
        message += ", and other settings: two changes at once, so neither explains the difference"
    yield claim.finds(Rule.TRACEABLE, FAILS if is_two_changes else NOTE, message)


def _is_set_alike(claim: Claim) -> bool:
    """Return whether both arms have one configuration but for their devices, whose threads are a setting too."""
    found = []
    for run in (runs[0] for runs in claim.measured_runs):
        each = configuration(run)
        each["settings"].pop("threads_per_rank", None)
        found.append({name: value for name, value in each.items() if name != "devices"})
    return found[0] == found[1]


def devices_are_the_same(claim: Claim) -> Iterator[Finding]:
    """Compare devices. Others refute a claim; another machine of the same devices, or other software, is a note."""
    for item in confounders(*claim.measured_runs):
        if item.kind == DEVICE and item.a != item.b:
            if item.what != _THREADS:
                yield claim.fails(Rule.DEVICES, f"{item.what} {item.against}")
            elif not _cores_are_equal(claim):
                yield _other_threads(claim, item)
        elif item.kind not in (COMMIT, CHANGED_FILES):
            said = f"{item.what} {item.against}: it may explain the difference"
            yield claim.notes(Rule.DEVICES, said)


def _cores_are_equal(claim: Claim) -> bool:
    """Return whether both arms compute on the same number of cores, however many ranks share them."""
    one, other = ({cores_of(run) for run in runs} for runs in claim.measured_runs)
    return len(one) == 1 and one == other and None not in one


def _other_threads(claim: Claim, item: Confounder) -> Finding:
    """Return a note where the number of threads is all that differs, so that it is what is compared."""
    message = f"{item.what} {item.against}"
    if _is_set_alike(claim):
        return claim.notes(Rule.DEVICES, f"{message}: a ratio of the two is what more cores do")
    return claim.fails(Rule.DEVICES, message)


def more_devices_are_faster(claim: Claim) -> Iterator[Finding]:
    """Compare the rate of all devices on more of them with that on fewer, whichever was named first.

    In our own files a slow run is a result and is pointed out; in another program's it contradicts a claimed speed-up.
    """
    few, many = _devices(claim)
    if few is not None and many is not None and many < few:
        claim, few, many = claim.turned, many, few
    if few is None or many is None or few == many or claim.protocol == "time_to_loss" or not _compares(claim):
        return
    ratio, by = gain(claim)
    is_a_ratio = ratio is not None and 0 < ratio < math.inf and few > 0  # numbers that a run can have
    if ratio is None or not is_a_ratio or (ratio >= SLOWER and ratio >= HALF * many / few):
        return
    base, other = claim.baseline.first, claim.other.first
    is_slower = ratio < SLOWER
    said = "more devices were slower" if is_slower else "efficiency is under 50 %"
    yield claim.finds(
        Rule.MORE_DEVICES,
        FAILS if is_slower and not (base.is_our_own and other.is_our_own) else NOTE,
        f"{said}: {ratio:.2f}x ({by}) on {many} devices against {few}",
        f"{ratio * few / many:.0%} efficiency: {many} devices do the work of {ratio * few:.2f}",
    )


def _devices(claim: Claim) -> tuple[int | None, int | None]:
    """Return on how many devices each side computes; cores on CPUs, where one rank may have the cores of many.

    Equal ranks are equal devices: what more threads of a rank gain is said by the rule on devices.
    """
    sides = claim.baseline.first, claim.other.first
    if sides[0].world_size == sides[1].world_size:
        return None, None
    cores = [cores_of(item.run) if item.run else None for item in sides]
    return (cores[0], cores[1]) if None not in cores else (sides[0].world_size, sides[1].world_size)


def _compares(claim: Claim) -> bool:
    """Return whether a difference in rates could be the devices' number: same devices, model, and instruments."""
    base, other = claim.baseline.first, claim.other.first
    if bool(base.instruments) != bool(other.instruments) or (base.form != other.form and not (base.run and other.run)):
        return False
    if any(getattr(base, name) != getattr(other, name) for name in SAME_IN_LOGS):
        return False
    of_devices = (item for item in confounders(*claim.measured_runs) if item.kind == DEVICE and item.a != item.b)
    if any(item.what != "cpu threads per rank" for item in of_devices):
        return False
    work = [item.run.work if item.run else {} for item in (base, other)]
    pairs = [(work[0].get(name), work[1].get(name)) for name in COST_OF_A_TOKEN]
    return not any(None not in pair and pair[0] != pair[1] for pair in pairs)
