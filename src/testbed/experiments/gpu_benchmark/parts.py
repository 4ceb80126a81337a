"""Split the steps into numbered parts that fit a machine which ends commands after minutes. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.experiments.gpu_benchmark.steps import DATA, Step

DEADLINE_S = 540  # no step of a part runs beyond it
PART_S = 510  # of the estimates, so that not every wrong one makes a part too long
INSTALL_S = 12  # of the wheels, on a machine that has none of them


def parts(steps: Sequence[Step], most_s: int = PART_S) -> list[list[Step]]:
    """Return the steps in parts, each with an estimate of at most `most_s` on a bare machine.

    A step goes into the first part that has room for it, with the run whose files it reads. One that is longer than a
    part is a part of its own.
    """
    found: list[list[Step]] = []
    for group in _groups([step for step in steps if step.left_out is None]):
        for part in found:
            if estimate_s([*part, *group], steps) <= most_s:
                part += group
                break
        else:
            found.append(list(group))
    return found


def _groups(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the steps, those that read a run's files together with it."""
    groups: list[list[Step]] = []
    for step in steps:
        needed = {name for name, _ in step.needs} - {DATA[0]}
        if groups and needed & {other.name for other in groups[-1]}:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def estimate_s(part: Sequence[Step], steps: Sequence[Step]) -> int:
    """Return the seconds of a part on a bare machine: wheels, data and cold caches, each once.

    Args:
        steps: of the whole plan, which say what making the data takes.
    """
    names = {step.name for step in part}
    data = [step for step in steps if step.name in ("corpus", DATA[0]) and step.name not in names]
    seconds = INSTALL_S + sum(step.seconds for step in data)
    warm: set[str] = set()
    for step in part:
        seconds += step.estimate_s(warm)
        warm |= set(step.cold)
    return seconds
