"""The audit's rules for settings that logs print: what sets two runs apart, and batches that were not fed."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.audit.finding import Finding, Rule
from testbed.audit.printed_setup import OFFLOADED, PRECISION
from testbed.audit.run_rules import RATE_TOLERANCE
from testbed.audit.sides import Claim


def printed_settings_are_the_same(claim: Claim) -> Iterator[Finding]:
    """Compare precision where both logs print it, and offloading, which a log without DeepSpeed has none of."""
    base, other = (side.first.printed_settings for side in (claim.baseline, claim.other))
    precisions = base.get(PRECISION), other.get(PRECISION)
    if None not in precisions and precisions[0] != precisions[1]:
        yield claim.fails(Rule.EQUAL_WORK, f"not equal work: precision {precisions[0]} against {precisions[1]}")
    kept = base.get(OFFLOADED), other.get(OFFLOADED)
    if kept[0] != kept[1]:
        said = " against ".join(value or "nothing offloaded" for value in kept)
        yield claim.notes(Rule.DEVICES, f"{said}, as DeepSpeed prints: what offloading costs is in the ratio")


def the_loader_fed_the_printed_batch(claim: Claim) -> Iterator[Finding]:
    """Compare printed batches per rank with rate x time, which of one model is in proportion to the real ones."""
    base, other = claim.baseline.first, claim.other.first
    work = base.work_per_iteration, other.work_per_iteration
    if not (base.batch_is_printed and other.batch_is_printed and base.world_size and other.world_size):
        return
    if not work[0] or not work[1] or base.rate_unit != other.rate_unit:
        return
    assert base.global_batch_size is not None and other.global_batch_size is not None  # printed
    per_rank = base.global_batch_size / base.world_size, other.global_batch_size / other.world_size
    if per_rank[0] == per_rank[1] or not abs(work[1] / work[0] - 1) <= RATE_TOLERANCE:  # nan is not
        return
    yield claim.fails(
        Rule.EQUAL_WORK,
        f"the printed global batches, {base.global_batch_size} on {base.world_size} and {other.global_batch_size} on "
        f"{other.world_size} ranks, are {per_rank[0]:g} and {per_rank[1]:g} sequences per rank and step; that does not "
        f"follow from rate x time, {work[0]:.3g} and {work[1]:.3g} {base.rate_unit.removesuffix('/s')} per rank and "
        "iteration: one batch per rank, so the work grew with the ranks",
        f"if {per_rank[0]:g} per rank is right, {per_rank[0] * other.world_size:g} sequences per step on "
        f"{other.world_size} ranks",
    )
