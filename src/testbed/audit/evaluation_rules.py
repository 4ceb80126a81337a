"""The audit's rules for the evaluations of transformers' Trainer: amounts are whole, and those of one set are equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from testbed.audit.finding import Finding, Rule
from testbed.audit.log_lines import Disagreement, LogLine, Relation, disagreement, few_of
from testbed.audit.log_rules import said
from testbed.audit.readers.curve_lines import related_by
from testbed.audit.readers.evaluations import RATES, Evaluation
from testbed.audit.reported import ANY, Reported

MOST_AMOUNTS = 1000  # whole numbers that a rounded figure allows: more tell nothing


def evaluations_are_of_one_set(item: Reported) -> Iterator[Finding]:
    """Check the evaluations of each set against one another, then each by itself."""
    every = item.details.get("evaluations") or []
    for of in dict.fromkeys(each.of for each in every):
        evaluations = [each for each in every if each.of == of]
        accused: set[int] = set()
        for found in _disagreements(evaluations):
            accused |= {line.step for line in found.lines}
            yield item.fails(Rule.FOLLOWS, *said(found))
        impossible = [each for each in evaluations if not _is_possible(each)]
        if len(impossible) > min(few_of(len(evaluations)), len(evaluations) / 2):
            continue  # the program counts in another way
        for each in impossible:
            if each.step not in accused:
                yield item.fails(Rule.FOLLOWS, _amounts_of(each))


def _disagreements(evaluations: Sequence[Evaluation]) -> Iterator[Disagreement]:
    """Yield the evaluations whose seconds x rate is another amount, without those that may be of another set."""
    of = evaluations[0].of
    relations = [related_by({f"{of}_runtime": 1, f"{of}_{rate}": 1}) for rate in RATES]
    lines = [
        LogLine(each.step, {f"{each.of}_{name}": figure for name, figure in each.figures.items()})
        for each in evaluations
    ]
    of_line = {id(line): each for line, each in zip(lines, evaluations, strict=True)}
    for relation in relations:
        if found := disagreement(relation, lines):
            kept = [line for line in found.lines if not _may_be_of_another_set(of_line[id(line)], evaluations)]
            if kept:
                yield replace(found, lines=tuple(kept))


def _may_be_of_another_set(one: Evaluation, evaluations: Sequence[Evaluation]) -> bool:
    """Return whether the program may have evaluated another set here: before or behind the training, or twice."""
    is_one_of_two = sum(each.step == one.step for each in evaluations) > 1
    return (is_one_of_two or not one.is_of_the_training) and _is_possible(one)


def _is_possible(one: Evaluation) -> bool:
    """Return whether a whole number of samples, in batches of one size, gives the rates in these seconds."""
    amounts = []
    for rate in RATES:
        interval = Relation("", {"runtime": 1, rate: 1}).interval(LogLine(one.step, one.figures))
        amounts.append(interval and (max(1, math.ceil(interval[0])), math.floor(interval[1])))
    if any(each and each[0] > each[1] for each in amounts):
        return False
    samples, steps = amounts
    if samples is None or steps is None or steps[1] - steps[0] > MOST_AMOUNTS:
        return True
    # steps = ceil(samples / batch): of the batches that are large enough the least leaves the most room.
    return any(math.ceil(samples[0] / number) * (number - 1) < samples[1] for number in range(steps[0], steps[1] + 1))


def _amounts_of(one: Evaluation) -> str:
    runtime_s, samples, steps = (one.figures.get(name) for name in ("runtime", *RATES))
    assert runtime_s is not None
    amounts = [
        f"{rate.value:,.10g} {name}/s x {runtime_s.value:,.10g} s = {rate.value * runtime_s.value:,.6g} {name}"
        for name, rate in (("samples", samples), ("steps", steps))
        if rate
    ]
    return (
        f"the evaluation of step {one.step:,} ({one.of}): {' and '.join(amounts)}: no whole number of samples in "
        "batches of one size gives these rates"
    )


EVALUATION_RULES = {evaluations_are_of_one_set: ANY}
