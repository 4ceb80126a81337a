"""Compare answers for several kinds and numbers of devices: which is done first, and which costs least. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from testbed.planner.advice import batch_hint, hints, ways_out, with_room
from testbed.planner.plan import PlannedRun, advice, best_of_each, duration, name_of, three
from testbed.planner.question import Question


def _days(choice: Question) -> float:
    """Return the wall time of the whole run; infinite where nothing fits, or it is not known how long the run is."""
    best = choice.fitting()
    days = None if best is None else choice.budget.days(best)
    return math.inf if days is None else days


def _cost(choice: Question) -> float | None:
    best = choice.fitting()
    return None if best is None else choice.budget.cost(best)


def _hints(choice: Question) -> list[str]:
    """Return what to know of the run, or what lets one fit."""
    best = choice.fitting()
    if best is None:
        return ways_out(choice)
    tight = ["It fits only tightly"] if best.is_tight else []
    return [*hints(choice, best), *advice(best_of_each(choice.runs[0])), *tight]


def _said(choice: Question, run: PlannedRun) -> str:
    """Return devices, strategy, the time of the whole run and its cost."""
    ends = (choice.budget.days(run, end) or 0.0 for end in (run.time.low, run.time.high))
    words = f"{choice.devices_in_words}, {name_of(run.job)}: {duration(_days(choice), *ends)}"
    cost = _cost(choice)
    return words + ("" if cost is None else f", cost {three(cost)}")


def answers_of(choices: Sequence[Question]) -> list[str]:
    """Return which choice is done first, which costs least, and which costs least within the deadline."""
    named = [(lead, choice, choice.fitting() if choice else None) for lead, choice in _winners(choices)]
    return [f"{lead}: {_said(choice, run)}." if choice and run else f"{lead}." for lead, choice, run in named]


def _winners(choices: Sequence[Question]) -> list[tuple[str, Question | None]]:
    """Return what each answer says, and the choice that it names."""
    done = [choice for choice in choices if math.isfinite(_days(choice))]
    if not done:
        return []
    is_priced = all(_cost(choice) is not None for choice in done)

    def price(choice: Question) -> tuple[float, ...]:
        return (_cost(choice) or 0.0,) if is_priced else (choice.machine.devices, _days(choice))

    found: list[tuple[str, Question | None]] = [("Fastest", min(done, key=_days))]
    found += [("Cheapest", min(done, key=price))] if is_priced else []
    deadline = choices[0].budget.deadline
    if deadline is not None:
        limit = f"within --deadline {duration(deadline)}"
        least = min((choice for choice in done if _days(choice) <= deadline), key=price, default=None)
        nothing = f"Nothing is done {limit}: ask for other devices, or train on fewer tokens"
        found.append((f"{'Cheapest' if is_priced else 'Fewest devices'} {limit}" if least else nothing, least))
    return found


def caveats_of(choices: Sequence[Question]) -> list[str]:
    """Return what to know of the first choice of each kind of device, and of each that an answer names; of the others
    a batch that would make them faster."""
    firsts: dict[str, Question] = {}  # without one, the first that a change lets run, or the last of them
    for choice in choices:
        kind = choice.machine.device.name
        if kind not in firsts or not (firsts[kind].fitting() or with_room(firsts[kind])):
            firsts[kind] = choice
    told = {id(choice) for choice in [*firsts.values(), *(choice for _, choice in _winners(choices))]}
    said: dict[str, None] = {}
    for each in choices:
        best = each.fitting()
        other = None if best is None else batch_hint(each, best)
        for hint in _hints(each) if id(each) in told else filter(None, [other]):
            said[f"{each.devices_in_words}: {hint}."] = None
    return list(said)
