"""The audit's rules about the conditions of a comparison: equal work, equal losses, one code, equal devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from testbed.analysis.comparison.confounders import CHANGED_FILES, COMMIT, DEVICE, Confounder, confounders
from testbed.analysis.runs.arms import configuration
from testbed.analysis.runs.comparability import LOSS_NOISE, differing_validation, loss_noise
from testbed.audit.conditions import DIFFERS, UNKNOWN, conditions
from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.measures import gain
from testbed.audit.reported import DATA, OFFLOADED, Claim

THREADS = "cpu threads per rank"
# of the runs of one side that say it
_DIRTY: dict[tuple[str, ...], str] = {("True",): "in every run", ("False",): "in no run"}


def work_is_equal(claim: Claim) -> Iterator[Finding]:
    base, other = claim.baseline.first, claim.other.first
    work = [item for item in conditions(claim) if item.is_work]
    steps = next(item for item in work if item.name == "optimizer steps")
    if differing := [item.against for item in work if item.spoils]:
        yield claim.fails(Rule.EQUAL_WORK, f"not equal work: {'; '.join(differing)}", _at_equal_updates(claim))
    elif steps.state == DIFFERS and base.losses and other.losses:
        words = f"{steps.against}: the logs compare rates, and neither losses nor whole times"
        yield claim.notes(Rule.EQUAL_WORK, words)
    is_open = claim.protocol == "time_to_loss" and not (base.run and other.run)  # of a log, batch and steps are free
    if unknown := [item.name for item in work if item.state == UNKNOWN and item.name != DATA and not is_open]:
        said = f"equal work cannot be shown, not in every file: {', '.join(unknown)}"
        yield claim.cannot_tell(Rule.EQUAL_WORK, said, *unknown)


def _at_equal_updates(claim: Claim) -> str | None:
    """Return the time of the other arm for as many optimizer steps at its own pace, by plain proportion."""
    base_steps, steps = claim.baseline.middle("optimizer_steps"), claim.other.middle("optimizer_steps")
    base_s, seconds = claim.baseline.middle("time_s"), claim.other.middle("time_s")
    if not base_steps or not steps or not base_s or not seconds or base_steps == steps:
        return None
    if claim.baseline.first.is_of_iteration or claim.other.first.is_of_iteration:
        return None
    scaled_s = seconds * base_steps / steps
    return (
        f"{base_steps:,.0f} optimizer steps at {claim.other.name}'s pace take {seconds:,.2f} s x {base_steps:,.0f} / "
        f"{steps:,.0f} = {scaled_s:,.0f} s, against {base_s:,.0f} s"
    )


def faster_is_not_worse(claim: Claim) -> Iterator[Finding]:
    """Compare validation losses at the end. Under weak scaling arms train with other batches, so nothing is said."""
    speed_up, by = gain(claim)
    base, other = claim.baseline.first, claim.other.first
    if base.losses and other.losses and base.optimizer_steps != other.optimizer_steps:
        return  # losses of other steps: `work_is_equal` says so
    if speed_up is not None and 0 < speed_up < 1:  # whichever was named first
        claim, speed_up = claim.turned, 1 / speed_up
    before, after = claim.baseline.middle("val_loss"), claim.other.middle("val_loss")
    if not before or not after or speed_up is None or speed_up <= 1 or claim.protocol in ("weak", "time_to_loss"):
        return
    runs = [side.first.run for side in (claim.baseline, claim.other) if side.first.run]
    if len(runs) == 2 and any(not item.is_unknown_only for item in differing_validation(runs)):
        yield claim.notes(Rule.LOSSES, "validation losses are over different data or numbers of tokens")
        return
    losses = [[run.val_loss for run in side.runs if run.val_loss is not None] for side in (claim.baseline, claim.other)]
    noise, whose = loss_noise(*losses)
    worse = after - before
    said = f"{speed_up:.2f}x ({by}) with validation loss {after:.3f} against {before:.3f}: worse by {worse:.3f}"
    if worse > noise:
        between = "seeds" if whose is None else "repeats"
        said = f"{said}, more than the {noise:.3g} that chance explains between {between}"
        yield claim.fails(Rule.LOSSES, said, "no speed-up at equal loss; time to a loss was not compared")
    elif worse > LOSS_NOISE and whose is None:
        yield claim.notes(Rule.LOSSES, f"{said}. One run of a side does not tell how much of that its seed explains")


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
            if item.what != THREADS:
                yield claim.fails(Rule.DEVICES, f"{item.what} {item.against}")
            elif len(set(claim.cores)) > 1 or None in claim.cores:
                yield _other_threads(claim, item)
        elif item.kind not in (COMMIT, CHANGED_FILES):
            said = f"{item.what} {item.against}: it may explain the difference"
            yield claim.notes(Rule.DEVICES, said)


def _other_threads(claim: Claim, item: Confounder) -> Finding:
    """Return a note where the number of threads is all that differs, so that it is what is compared."""
    message = f"{item.what} {item.against}"
    if _is_set_alike(claim):
        return claim.notes(Rule.DEVICES, f"{message}: a ratio of the two is what more cores do")
    return claim.fails(Rule.DEVICES, message)


def offloading_is_the_same(claim: Claim) -> Iterator[Finding]:
    """Compare offloading, which a log without DeepSpeed has none of."""
    kept = [side.first.settings.get(OFFLOADED) for side in (claim.baseline, claim.other)]
    if kept[0] != kept[1]:
        said = " against ".join(value or "nothing offloaded" for value in kept)
        yield claim.notes(Rule.DEVICES, f"{said}, as DeepSpeed prints: what offloading costs is in the ratio")


CONDITION_RULES: tuple[Callable[[Claim], Iterator[Finding]], ...] = (
    work_is_equal,
    faster_is_not_worse,
    code_is_the_same,
    devices_are_the_same,
    offloading_is_the_same,
)
