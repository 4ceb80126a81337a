"""Answer one claim, "B is 2.9 times as fast as A": it stands, it does not stand, or the files cannot tell."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from testbed.audit.comparison_rules import ARITHMETIC_RULES
from testbed.audit.conditions import (
    BATCHES,
    DIFFERS,
    LEARNS,
    MEASURED,
    OF_BOTH,
    SAME,
    SCALING,
    UNKNOWN,
    Condition,
    batch_is_in_proportion,
    conditions,
    in_words,
    kind_of,
    learns_worse,
    loss_of,
    strategy_of,
)
from testbed.audit.finding import FAILS, NOTE, Finding
from testbed.audit.foreign_rules import findings_of_run
from testbed.audit.measures import TO_LOSS, Measure, measures, of_one_device
from testbed.audit.reported import ROW, Claim

STANDS, FALLS, OPEN = "stands", "does not stand", "cannot be known"
EXIT_CODES = {STANDS: 0, FALLS: 1, OPEN: 3}
SINGLE_RUN_NOISE = 0.1  # one run of each side may differ by so much without a cause
ROUNDING, MOST_ROUNDED = 0.01, 0.05  # of a claimed ratio: always, and at most by its digits
APART = 1.15  # two ratios of one pair of runs
WEAK = "the batch grows with the devices, which is weak scaling and no shorter way to the same loss"
ITERATION = "time of one iteration"
# columns of metadata and of memory use, which are no conditions
_OF_RECORD = re.compile(
    r"(?i)(?:run )?(?:date|created|updated|started|tags?|user|authors?|contributors?|by|commit|pr|#|no\.?|refs?|id"
    r"|sha|link|url|logs?|host|hostname)"
    r"|(?:(?:peak|gpu|max) )*mem(?:ory)?(?: ?(?:usage|used|peak|allocated|reserved|[gm]i?b|%|\([^()]*\)|/ ?gpu))*"
)
_TO_ONE_TARGET = re.compile(
    r"(?i)\b(?:to|until|reach\w*) (?:a |the )?(?:[\d.]+ ?%?|target|loss|accuracy|quality|convergence)"
)


@dataclass(frozen=True)
class Answer:
    """Verdict on a claim, with the measured ratios, the compared conditions and the sentences of the page.

    `reasons` say why the claim does not stand, `instead` what the files support, `ask` which unknown values decide.
    """

    claim: Claim
    claimed: float | None
    verdict: str
    measures: tuple[Measure, ...]
    conditions: tuple[Condition, ...]
    reasons: tuple[str, ...]
    instead: tuple[str, ...]
    ask: tuple[str, ...]
    also: tuple[str, ...] = ()  # unknown values that are worth knowing and do not decide
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    quotes: tuple[str, ...] = ()  # sentences of the text that bear on the two rows
    read: tuple[str, ...] = ()  # what the headings of a table were taken for

    @property
    def in_question(self) -> Measure | None:
        return _in_question(self.claim, self.claimed, self.measures)


def answer(claim: Claim, claimed: float | None = None, of_table: Sequence[Finding] = ()) -> Answer:
    """Answer the claim that the other side is faster than the baseline, `claimed` times as fast where it is given.

    Args:
        of_table: what the figures of these two rows contradict.
    """
    ratios = tuple(measures(claim))
    question = _in_question(claim, claimed, ratios)
    found = conditions(claim)
    findings = (
        *(finding for side in claim.sides for item in side.runs for finding in findings_of_run(item)),
        *(finding for rule in ARITHMETIC_RULES for finding in rule(claim)),
        *of_table,
    )
    reasons = [*_against_figures(claim, claimed, ratios, question), *_reasons(claim, question, found, findings)]
    ask = [each.name for each in found if each.state == UNKNOWN and each.decides]
    others = _differing_words(claim)
    ask += [f"whether {each.against} decides it too" for each in others]
    if question is None:
        ask.insert(0, "a rate or a time that both sides have")
    elif question.low is None and abs(math.log(question.ratio)) < math.log1p(SINGLE_RUN_NOISE):
        ask.append("repeats of both sides")
    verdict = FALLS if reasons else OPEN if ask else STANDS
    also = tuple(each.name for each in found if each.state == UNKNOWN and each.name in ("loss", "warm-up", "compile"))
    notes = tuple(dict.fromkeys(item.message for item in findings if item.severity == NOTE and not item.unknown))
    instead = tuple(_instead(claim, ratios, question, findings, verdict))
    return Answer(
        claim, claimed, verdict, ratios, (*found, *others), tuple(reasons), instead, tuple(ask), also, notes, findings
    )


def _in_question(claim: Claim, claimed: float | None, ratios: Sequence[Measure]) -> Measure | None:
    """Return what the claim is about: the whole job by the first measure, or the time to one target, or the column
    without a known heading, that gives the claimed ratio.

    It is never about one device's rate, nor about a time of which nothing says that as much was done.
    """
    first = ratios[0] if ratios else None
    if claimed is None or first is None or _is_what_was_claimed(claimed, first):
        return first
    of_job = [each for each in ratios[1:] if each.is_of_unit
              or (_TO_ONE_TARGET.search(each.name) and not claim.other.first.is_of_iteration)]  # fmt: skip
    if found := next((each for each in of_job if _is_what_was_claimed(claimed, each)), None):
        return found
    a, b = claim.firsts
    is_open = a.world_size != b.world_size and not (a.global_batch_size and b.global_batch_size)
    return None if is_open and first.name.startswith("time of one iteration") else first


def _differing_words(claim: Claim) -> list[Condition]:
    """Return the words of two rows that differ under headings that are not understood."""
    a, b = (side.first.details.get("others", {}) for side in claim.sides)
    return [
        Condition(heading, a[heading] or "nothing", b[heading] or "nothing", DIFFERS)
        for heading in a
        if heading in b and a[heading].lower() != b[heading].lower() and not _OF_RECORD.fullmatch(heading.strip("`"))
    ]  # fmt: skip


def _against_figures(
    claim: Claim, claimed: float | None, ratios: Sequence[Measure], question: Measure | None
) -> Iterator[str]:
    """Yield what the figures say against a claim: another ratio, none, or two that contradict each other."""
    if question is None:
        return
    if claimed is not None and not _is_what_was_claimed(claimed, question):
        yield f"The files give {question.ratio_in_words} ({question.name}), not {claimed:g}x."
        yield from _of_whole_runs(claim, claimed, ratios)
    noise = SINGLE_RUN_NOISE if question.low is None else ROUNDING
    if claimed is None and (question.high or question.ratio) < 1 - noise:
        yield f"B is slower: {question.ratio_in_words} ({question.name})."
    if question.low is not None and question.high is not None and question.low <= 1 <= question.high:
        yield f"No detectable difference: {question.ratio_in_words} has 1 in its interval."
    base, other = claim.firsts
    of_step = next((each for each in ratios[1:] if each.name == f"{ITERATION}, s"), None)
    is_of_one_batch = base.global_batch_size is not None and base.global_batch_size == other.global_batch_size
    is_apart = of_step is not None and abs(math.log(of_step.ratio / question.ratio)) > math.log(APART)
    if of_step and is_apart and is_of_one_batch and base.form == other.form == ROW:
        yield (
            f"The figures contradict each other: {question.ratio_in_words} by {question.name}, "
            f"{of_step.ratio_in_words} by {ITERATION}, at an equal batch."
        )


def _of_whole_runs(claim: Claim, claimed: float, ratios: Sequence[Measure]) -> Iterator[str]:
    """Yield that a claimed ratio is that of the total training times of two runs with different numbers of steps."""
    base, other = claim.firsts
    of_step = next((each.ratio for each in ratios if each.name == f"{ITERATION}, s"), None)
    steps = base.optimizer_steps, other.optimizer_steps
    if not of_step or not steps[0] or not steps[1] or steps[0] == steps[1]:
        return
    if _is_what_was_claimed(claimed, replace(ratios[0], ratio=of_step * steps[0] / steps[1])):
        losses = [in_words(each) for each in (loss_of(base), loss_of(other)) if each is not None]
        ends = f", which end at a loss of {' and '.join(losses)}" if len(losses) == 2 else ""
        runs = f"whole runs of {steps[0]:,} and {steps[1]:,} steps{ends}"
        yield f"{claimed:g}x compares the times of {runs}: it comes of fewer steps, not of a faster step."


def _reasons(
    claim: Claim, question: Measure | None, found: Sequence[Condition], findings: Sequence[Finding]
) -> Iterator[str]:
    """Yield a sentence for each thing that keeps a claim from standing."""
    ranks = next(each for each in found if each.name == "ranks")
    if kind_of(claim) == OF_BOTH:
        yield (f"{_sentence(ranks.against)}: {strategy_of(claim.other)} and {strategy_of(claim.baseline)} differ, and "
               "so does the number of devices; the ratio is of both.")  # fmt: skip
    is_weak = kind_of(claim) == SCALING and batch_is_in_proportion(*claim.firsts)
    for each in found:
        if not each.spoils or each.name == "ranks":
            continue
        if each.name == "figures are":
            told = {side: value for side, value in (("A", each.a), ("B", each.b)) if value != MEASURED}
            words = " and ".join(f"{side} is {value}" for side, value in told.items())
            yield f"{words}: a ratio needs two measurements."
            continue
        effect = WEAK if each.name in BATCHES and is_weak else each.effect or "it is part of the work"
        yield f"{_sentence(each.against)}: {effect}."
    status = next(each for each in found if each.name == "figures are")
    if status.state == SAME and status.a != MEASURED:
        yield f"Neither side is measured ({status.a}): a ratio needs two measurements."
    is_planned = claim.protocol in ("weak", "time_to_loss") and claim.other.first.run is not None
    for each in found if question is not None and not is_planned else ():
        if each.name in LEARNS and each.state == DIFFERS and learns_worse(claim, each) == (question.ratio > 1):  # type: ignore[union-attr]
            heading = f"{_sentence(each.name)} " if each.name.startswith("loss") else ""
            yield f"{heading}{in_words(each.b)} against {in_words(each.a)} where it is faster: {each.effect}."
    for message in dict.fromkeys(item.message for item in findings if item.severity == FAILS):
        yield _sentence(message) + "."


def _is_what_was_claimed(claimed: float, question: Measure) -> bool:
    """Return whether a ratio is the claimed one, within its digits, or has it in its interval."""
    text = f"{claimed:.10g}"
    unit = 10.0 ** -len(text.partition(".")[2]) if "." in text else 1.0
    if question.low is not None and question.high is not None and question.low <= claimed <= question.high:
        return True
    by_digits = min(0.5 * unit, MOST_ROUNDED * claimed)
    return abs(question.ratio - claimed) <= max(by_digits, ROUNDING * claimed)


def _instead(
    claim: Claim, ratios: Sequence[Measure], question: Measure | None, findings: Sequence[Finding], verdict: str
) -> Iterator[str]:
    """Yield what may be said in place of a claim that does not stand, or beside one that does."""
    base, other = claim.firsts
    per_device = of_one_device(ratios)
    added = other.world_size / base.world_size if other.world_size and base.world_size else 1.0
    is_possible = not any(item.severity == FAILS for item in findings)  # else the figures themselves are in question
    if question and per_device and added != 1 and is_possible:
        yield f"{question.ratio:.3g}x on {added:g} times the devices, {per_device.ratio:.3g}x for one device."
    to_loss = next((each for each in ratios if each.name.startswith(TO_LOSS)), None)
    is_one_task = not any(each.state == DIFFERS for each in conditions(claim) if each.name in ("model", "data"))
    is_other = to_loss and question and abs(to_loss.ratio / question.ratio - 1) > 0.02
    if verdict == FALLS and to_loss and is_possible and is_one_task and is_other:
        yield f"{to_loss.ratio:.3g}x by the {to_loss.name.removesuffix(', s')}."
    for corrected in dict.fromkeys(item.corrected for item in findings if item.corrected and item.severity == FAILS):
        yield _sentence(corrected) + "."
    if verdict == STANDS and question is not None and question.low is None:
        yield "One run of each side, or too few for an interval: how far repeats would scatter is not in the files."


def _sentence(text: str) -> str:
    return re.sub(r"^[a-z]", lambda first: first[0].upper(), text.rstrip("."))
