"""Compare answers for several kinds and numbers of devices: which is done first, and which costs least. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.planner.plan import PlannedRun, advice, best_of_each, duration, name_of, three
from testbed.planner.question import Question


@dataclass(frozen=True)
class Choice:
    """One kind and number of devices: the best run on them, or why there is none."""

    question: Question
    best: PlannedRun | str

    @classmethod
    def of(cls, question: Question, devices: int) -> Choice:
        """Answer a question for a number of devices. InputError: they are not whole nodes."""
        on = question.on(devices)
        return cls(on, on.best())

    @property
    def days(self) -> float:
        """Wall time of the whole run; infinite where nothing fits, or it is not known how long the run is."""
        days = self.question.budget.days(self.best) if isinstance(self.best, PlannedRun) else None
        return math.inf if days is None else days

    @property
    def cost(self) -> float | None:
        return self.question.budget.cost(self.best) if isinstance(self.best, PlannedRun) else None

    def hints(self) -> list[str]:
        """Return what to know of the run, or what lets one fit."""
        if isinstance(self.best, str):
            return self.question.ways()
        tight = ["It fits only tightly"] if self.best.is_tight else []
        return [*self.question.hints(self.best), *advice(best_of_each(self.question.runs[0])), *tight]

    def said(self) -> str:
        """Return devices, strategy, the time of the whole run and its cost."""
        run, budget = self.best, self.question.budget
        assert isinstance(run, PlannedRun)
        ends = (budget.days(run, end) or 0.0 for end in (run.time.low, run.time.high))
        words = f"{self.question.devices_in_words}, {name_of(run.job)}: {duration(self.days, *ends)}"
        return words + ("" if self.cost is None else f", cost {three(self.cost)}")


def answers_of(choices: Sequence[Choice]) -> list[str]:
    """Return which choice is done first, which costs least, and which costs least within the deadline."""
    return [f"{lead}: {choice.said()}." if choice else f"{lead}." for lead, choice in _winners(choices)]


def _winners(choices: Sequence[Choice]) -> list[tuple[str, Choice | None]]:
    """Return what each answer says, and the choice that it names."""
    done = [choice for choice in choices if math.isfinite(choice.days)]
    if not done:
        return []
    is_priced = all(choice.cost is not None for choice in done)

    def price(choice: Choice) -> tuple[float, ...]:
        return (choice.cost or 0.0,) if is_priced else (choice.question.machine.devices, choice.days)

    found: list[tuple[str, Choice | None]] = [("Fastest", min(done, key=lambda choice: choice.days))]
    found += [("Cheapest", min(done, key=price))] if is_priced else []
    deadline = choices[0].question.budget.deadline
    if deadline is not None:
        limit = f"within --deadline {duration(deadline)}"
        least = min((choice for choice in done if choice.days <= deadline), key=price, default=None)
        nothing = f"Nothing is done {limit}: ask for other devices, or train on fewer tokens"
        found.append((f"{'Cheapest' if is_priced else 'Fewest devices'} {limit}" if least else nothing, least))
    return found


def caveats_of(choices: Sequence[Choice]) -> list[str]:
    """Return what to know of the first choice of each kind of device, and of each that an answer names; of the others
    a batch that would make them faster."""
    firsts: dict[str, Choice] = {}  # without one, the last of them
    for choice in choices:
        kind = choice.question.machine.device.name
        if kind not in firsts or isinstance(firsts[kind].best, str):
            firsts[kind] = choice
    told = {id(choice) for choice in [*firsts.values(), *(choice for _, choice in _winners(choices))]}
    said: dict[str, None] = {}
    for each in choices:
        other = None if isinstance(each.best, str) else each.question.with_batch_that_divides(each.best)
        for hint in each.hints() if id(each) in told else filter(None, [other]):
            said[f"{each.question.devices_in_words}: {hint}."] = None
    return list(said)
