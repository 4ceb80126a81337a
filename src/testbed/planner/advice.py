"""Say what to change in a question for a better answer, and which of several to take. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from testbed.config.run_types import REFERENCE, STRATEGIES
from testbed.errors import InputError
from testbed.memory_model.job import Job
from testbed.memory_model.memory import fits, memory_of
from testbed.planner.near import GAIN, MOST_DOUBLINGS, MOST_TRIED, best_of, dividing, faster, is_tight, with_room
from testbed.planner.plan import (
    NEAR_FULL,
    PlannedRun,
    advice,
    best_of_each,
    duration,
    faster_but_tight,
    name_of,
    roomy_bytes,
    settings_of,
    three,
)
from testbed.planner.question import Question

LOW_MFU, LARGER, MUCH_FASTER = 0.3, 8, 1.5  # of the peak; times the batch that is tried there; times as fast with it


def answered(asked: Question) -> tuple[list[PlannedRun], dict[str, InputError]]:
    """Return `Question.runs`. InputError: no candidate, or none that fits into the memory; with what has room."""
    if asked.fitting() is None:
        raise InputError(refusal(asked))
    return asked.runs


def hints(asked: Question) -> list[str]:
    """Return what else to ask for, where it promises more than the best run, and what has room where that is tight."""
    best, told = best_of(asked), faster(asked)
    found = [*(_gains(asked, way) for way in told), _larger_batch(asked, told)]
    if best.is_tight:
        found += [_has_room(asked, way) for way in with_room(asked) if way not in told and not best_of(way).is_tight]
    unused = _unused(asked, best)
    return [hint for hint in (*found, f"The first run {unused}" if unused else "") if hint]


def ways_out(asked: Question) -> list[str]:
    """Return what has room, or at least fits, where nothing does that was asked for, and what is much faster."""
    return [_has_room(asked, way) for way in with_room(asked)]


def refusal(asked: Question) -> str:
    """Return the error message for a question without a run that fits: the reason, and changes with which one does."""
    (_, refused), said = asked.runs, ways_out(asked)
    if lacking := _lacking(asked, said):
        words = f"{asked.model_name} does not fit on {asked.devices_in_words}: {_least(asked, lacking[0])}"
        return ". ".join([words, *said])
    words = asked.reason(refused)
    return ". ".join([f"nothing can be planned for {asked.devices_in_words}: {words}", *(said or _also(asked, words))])


def _lacking(asked: Question, said: Sequence[str]) -> list[PlannedRun]:
    """Return the run that lacks least memory, with the asked batch or else with one that divides among the devices: if
    no change fits, the batch is not all that is in the way. `said`: the changes that fit."""
    runs, _ = asked.runs
    batch = dividing(asked)
    return runs or ([] if batch is None or said else asked.asked(batch).runs[0])


def _also(asked: Question, reason: str) -> list[str]:
    """Return why no run fits without the typed flags either; an empty list if the reason is the same with them."""
    free = asked.without(*asked.given)
    if free.given == asked.given:
        return []
    runs, refused = free.runs
    lead = "it does not fit either:" if runs else "there is no run either:"
    found = _least(free, runs[0]) if runs else free.reason(refused)
    return [] if found in reason else [f"{_change(asked, free)} {lead} {found}"]


def _gains(asked: Question, way: Question) -> str:
    room = " and room" if best_of(asked).is_tight and not best_of(way).is_tight else ""
    return f"{_change(asked, way)}: {three(way.rate / asked.rate)} times the tokens/s{room} ({_in_words(way)})"


def _has_room(asked: Question, way: Question) -> str:
    run, words = best_of(way), _in_words(way, says_room=False)
    fits_closely = f"it fits with {run.spare_bytes / 2**30:.1f} GiB left" if run.is_near_full else "there is room"
    words = f"{_change(asked, way)} {'it fits tightly' if run.is_tight else fits_closely}: {words}"
    tight = faster_but_tight(way.runs[0])
    return f"{words}, {three(way.rate)} tokens/s" + (f"; {tight}" if tight else "")


def _change(asked: Question, other: Question) -> str:
    """Return the flags that differ between two questions, such as `With --precision fp16, without --run_type fsdp`."""
    comes = [_typed(name, value) for name, value in other.given.items() if asked.given.get(name) != value]
    comes += [f"--global_batch_size {other.global_batch}"] if other.global_batch != asked.global_batch else []
    comes += [f"--gpus {other.machine.devices}"] if other.machine.devices != asked.machine.devices else []
    goes = [_typed(name, value) for name, value in asked.given.items() if name not in other.given]
    changes = (("with", comes), ("without", goes))
    words = ", ".join(f"{lead} {' and '.join(flags)}" for lead, flags in changes if flags)
    return words[:1].upper() + words[1:]


def _typed(name: str, value: object) -> str:
    """Return a flag as it was typed."""
    return f"--{name} {('off', 'on')[value] if isinstance(value, bool) else value}"


def _in_words(way: Question, says_room: bool = True) -> str:
    budget, run = way.budget, best_of(way)
    words = f"{name_of(run.job)}, {settings_of(run.job)}, {three(run.time.seconds)} s a step"
    if says_room and run.is_near_full:
        words += ", tight" if run.is_tight else f", {run.spare_bytes / 2**30:.1f} GiB left"
    words += f", cost {three(way.cost)}" if way.cost is not None else ""
    if budget.deadline is None:
        return words
    meets = "within" if way.days <= budget.deadline else "longer than"
    return words + f", {duration(way.days)}, {meets} --deadline {duration(budget.deadline)}"


def _larger_batch(asked: Question, told: Sequence[Question]) -> str | None:
    """Return that the batch is too small, where the devices reach little of their peak, and much more with LARGER times
    as many sequences: most of a step is then paid once, however large the batch.

    Args:
        told: what is faster. A batch that divides among the devices must not be enough.
    """
    devices, best = asked.machine.devices, best_of(asked)
    if devices == 1 or devices > MOST_TRIED or best.mfu >= LOW_MFU:
        return None
    larger = asked.asked(LARGER * asked.global_batch)
    larger = larger.asked(dividing(larger))
    divided = [way.rate for way in told if way.given == asked.given and way.machine.devices == devices]
    if larger.rate < MUCH_FASTER * max([asked.rate, *divided]):
        return None
    each = three(best.job.tokens_per_step / devices)
    words = f"The batch is too small for so many devices: {each} tokens a device"
    return f"{words}. {_gains(asked, larger)}"


def _unused(asked: Question, run: PlannedRun) -> str:
    """Return which typed flags a run does without, as its run type has none such; "" if it has all."""
    asks = [name for name, value in asked.given.items() if value not in (None, False, "none", "off")]
    having = {name for entry in STRATEGIES.values() for name in asks if name in entry.options}
    typed = having - STRATEGIES[run.job.run_type or REFERENCE].options.keys()
    if not typed:
        return ""
    flags = " and ".join(_typed(name, asked.given[name]) for name in asks if name in typed)
    owners = [name for name, entry in STRATEGIES.items() if typed <= entry.options.keys()]
    are = "is" if len(typed) == 1 else "are"
    whose = f", which {are} for --run_type {' and '.join(owners)}" if owners else ": no run type has them all"
    return f"does without {flags}{whose}"


def _least(asked: Question, run: PlannedRun) -> str:
    """Return what the most frugal run lacks, and how many devices would do; where fewer would without the typed flags,
    or only then, how many."""
    enough, free = _enough(asked), asked.without(*asked.given)
    words = _would_do(enough) if enough else "no number of them that was tried would do as asked"
    others = _enough(free) if asked.given else {}
    if any(number < enough.get(has_room, math.inf) for has_room, number in others.items()):
        change = _change(asked, free)
        words += f", and {change[:1].lower()}{change[1:]} {_would_do(others)}"
    unused = _unused(asked, run)
    return f"{asked.lack(run)}{f', and {unused}' if unused else ''}; {words}"


def _would_do(enough: dict[bool, int]) -> str:
    roomy = enough.get(True)
    words = f"{enough[False]} of them would do"
    if roomy != enough[False]:
        words += f" tightly, and {roomy} with room" if roomy else " tightly"
    return words


def _enough(asked: Question) -> dict[bool, int]:
    """Return how many devices fit, and how many leave NEAR_FULL of their memory, as far as there are: each number up to
    a node is tried, then twice as many again."""
    per_node, device = asked.machine.per_node, asked.machine.device
    enough: dict[bool, int] = {}  # has room -> devices
    for number in (*range(1, per_node + 1), *(per_node << times for times in range(1, MOST_DOUBLINGS))):
        memories = [memory for memory in map(memory_of, _frugal_jobs(asked.on(number))) if fits(memory, device)]
        for memory in memories:
            enough.setdefault(False, number)
            if roomy_bytes(memory, device) <= (1 - NEAR_FULL) * device.memory_bytes:
                enough.setdefault(True, number)
        if True in enough or (enough and number > MOST_TRIED):
            break
    return enough


def _frugal_jobs(asked: Question) -> Iterator[Job]:
    """Yield the runs that need least memory."""
    for kind in ("block", "selective", "none"):  # the most frugal first, which not every mesh has
        frugal = {"micro_batch_size_per_gpu": 1, "activation_checkpointing": kind}
        jobs, _ = asked.asked(None, **{**frugal, **asked.given}).jobs(True)
        yield from jobs
        if jobs and not asked.given.get("compile"):  # with which tensor ranks have the second alone
            return


def answers_of(choices: Sequence[Question]) -> list[str]:
    """Return which choice is done first, which costs least, and which costs least within the deadline."""
    said = []
    for lead, choice in _winners(choices):
        words = ""
        if choice is not None:
            run = best_of(choice)
            ends = (choice.budget.days(run, end) or 0.0 for end in (run.time.low, run.time.high))
            words = f": {choice.devices_in_words}, {name_of(run.job)}: {duration(choice.days, *ends)}"
            words += "" if choice.cost is None else f", cost {three(choice.cost)}"
        said.append(f"{lead}{words}.")
    return said


def _winners(choices: Sequence[Question]) -> list[tuple[str, Question | None]]:
    """Return what each answer says, and the choice that it names."""
    done = [choice for choice in choices if math.isfinite(choice.days)]
    if not done:
        return []
    is_priced = all(choice.cost is not None for choice in done)

    def price(choice: Question) -> tuple[float, ...]:
        return (choice.cost or 0.0,) if is_priced else (choice.machine.devices, choice.days)

    found: list[tuple[str, Question | None]] = [("Fastest", min(done, key=lambda choice: choice.days))]
    found += [("Cheapest", min(done, key=price))] if is_priced else []
    deadline = choices[0].budget.deadline
    if deadline is not None:
        limit = f"within --deadline {duration(deadline)}"
        least = min((choice for choice in done if choice.days <= deadline), key=price, default=None)
        nothing = f"None of these is done {limit}: change what is named below, ask for others, or train on fewer tokens"
        found.append((f"{'Cheapest' if is_priced else 'Fewest devices'} {limit}" if least else nothing, least))
    return found


def caveats_of(choices: Sequence[Question]) -> list[str]:
    """Return what to know of the first choice of each kind of device, and of each that an answer names; of the others
    a batch that would make them faster."""
    by_kind: dict[str, list[Question]] = {}
    for choice in choices:
        by_kind.setdefault(choice.machine.device.name, []).append(choice)
    told = [*map(_first_of, by_kind.values()), *(choice for _, choice in _winners(choices))]
    said: dict[str, None] = {}
    for each in choices:
        if any(each is choice for choice in told):
            found = _caveats(each)
        else:
            batch = dividing(each) if each.fitting() else None
            divided = [each.asked(batch)] if batch else []
            found = [_gains(each, other) for other in divided if other.rate >= GAIN * each.rate]
        said |= dict.fromkeys(f"{each.devices_in_words}: {hint}." for hint in found)
    return list(said)


def _first_of(choices: Sequence[Question]) -> Question:
    """Return the first choice with a run or a change that has room, or else with a change that fits, or the last."""

    def has_room(choice: Question) -> bool:
        return choice.fitting() is not None or not all(map(is_tight, with_room(choice)))

    return next(filter(has_room, choices), None) or next(filter(with_room, choices), choices[-1])


def _caveats(choice: Question) -> list[str]:
    """Return what to know of a choice's run, or what lets one fit."""
    runs, refused = choice.runs
    if choice.fitting() is None:
        said = ways_out(choice)
        lacking = [_least(choice, run) for run in _lacking(choice, said)[:1]]
        return said or lacking or _also(choice, choice.reason(refused))
    tight = ["It fits only tightly"] if runs[0].is_tight else []
    return [*hints(choice), *advice(best_of_each(runs)), *tight]
