"""Search the questions near one for better answers, and say what to change; say which of several to take. No torch.

Near are: a typed flag left out, fp16 where bf16 is emulated, DeepSpeed's offload, another batch, fewer devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from testbed.config.run_types import REFERENCE, STRATEGIES
from testbed.errors import InputError
from testbed.memory_model.job import Job
from testbed.memory_model.memory import fits, memory_of
from testbed.planner.candidates import precision_of
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
from testbed.planner.question import Question, rounded
from testbed.planner.step_time import BETWEEN, WITHIN

WORTH_SAYING = 1.2  # times as fast, without a flag that somebody typed
LOW_MFU, LARGER, MUCH_FASTER = 0.3, 8, 1.5  # of the peak; times the batch that is tried there; times as fast with it
MUCH = 0.3  # of a step
MUCH_SLOWER = 4  # times as slow, from where on no fewer devices are tried
GAIN = 1.05  # times as fast, from where on another number of devices or another batch is named
STAYS = ("optimizer", "dropout")  # flags that change what is trained: leaving them out is never proposed for speed
# flags that may exclude fp16, which data parallelism alone has
STEPS_ASIDE = ((), ("mixed_precision",), ("run_type",), ("mixed_precision", "run_type"), ("micro_batch_size_per_gpu",))
OFFLOADED = {"run_type": "optimized", "offload": "optimizer"}
MOST_TRIED = 4096  # devices, above which other plans take too long to be made for a hint
MOST_DOUBLINGS = 14  # of a device or a node


def answered(asked: Question) -> tuple[list[PlannedRun], dict[str, InputError]]:
    """Return `Question.runs`. InputError: no candidate, or none that fits into the memory; with what has room."""
    if asked.fitting() is None:
        raise InputError(refusal(asked))
    return asked.runs


def hints(asked: Question) -> list[str]:
    """Return what else to ask for, where it promises more than the best run, and what has room where that is tight."""
    best, told = _best(asked), faster(asked)
    found = [*(_gains(asked, way, asked) for way in told), _larger_batch(asked, told)]
    if best.is_tight:
        found += [_has_room(asked, way) for way in with_room(asked) if way not in told]
    return [hint for hint in (*found, _unused(asked)) if hint]


def faster(at: Question) -> list[Question]:
    """Return changes that gain: flags, each on top of those before it; on top of them another batch, and fewer devices;
    flags again on those; and what only both together do."""
    flags = _other_flags(at)
    last = flags[-1] if flags else at
    fewer = _fewer_devices(last)
    found = [*flags, *filter(None, [_batch_that_divides(last), fewer]), *(_other_flags(fewer) if fewer else [])]
    both = _flag_on_one_node(at, max([at, *found], key=lambda way: way.rate))
    return [*found, both] if both else found


def ways_out(asked: Question) -> list[str]:
    """Return what has room, or at least fits, where nothing does that was asked for, and what is much faster than the
    fastest of it."""
    ways = with_room(asked, may_be_tight=True)
    if not ways:
        return []
    fastest = max(ways, key=lambda way: way.rate)
    with_batch = [way for way in ways if way.global_batch == asked.global_batch]
    said = [_has_room(asked, way) for way in ways]
    # the fastest of all, and the fastest of those that keep the batch
    for lead in {
        id(way): way for way in (fastest, max(with_batch, key=lambda way: way.rate, default=fastest))
    }.values():
        more = max(faster(lead), key=lambda way: way.rate, default=lead)
        if more.rate >= WORTH_SAYING * lead.rate and _gains(asked, more, lead) not in said:
            of = " of the fastest of these" if lead is fastest else " of the fastest with this batch"
            said.append(_gains(asked, more, lead, of))
    return said


def refusal(asked: Question) -> str:
    """Return the error message for a question without a run that fits: the reason, and changes with which one does."""
    (lacking, refused), said, batch = asked.runs, ways_out(asked), _dividing(asked)
    if not lacking and not said and batch is not None:
        lacking, _ = asked.asked(batch).runs  # the batch is not all that is in the way
    if lacking:
        words = f"{asked.model_name} does not fit on {asked.devices_in_words}: {_least(asked, lacking[0])}"
        return ". ".join([words, *said])
    words, free = asked.reason(refused), asked.without(*asked.given)
    if not said and free.given != asked.given:
        runs, free_refused = free.runs
        lead = "it does not fit either:" if runs else "there is no run either:"
        found = _least(free, runs[0]) if runs else free.reason(free_refused)
        said = [] if found in words else [f"{_change(asked, free)} {lead} {found}"]
    return ". ".join([f"nothing can be planned for {asked.devices_in_words}: {words}", *said])


def _best(asked: Question) -> PlannedRun:
    """Return the best run of a question that has one."""
    best = asked.fitting()
    assert best is not None
    return best


def _gains(asked: Question, way: Question, than: Question, of: str = "") -> str:
    return f"{_change(asked, way)}: {three(way.rate / than.rate)} times the tokens/s{of} ({_in_words(way)})"


def _has_room(asked: Question, way: Question) -> str:
    run, words = _best(way), _in_words(way).replace(", tight", "")
    fits_closely = f"it fits with {run.spare_bytes / 2**30:.1f} GiB left" if run.is_near_full else "there is room"
    words = f"{_change(asked, way)} {'it fits tightly' if run.is_tight else fits_closely}: {words}"
    tight = faster_but_tight(way.runs[0])
    return words + (f"; {tight}" if tight else "")


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


def _in_words(way: Question) -> str:
    budget, run = way.budget, _best(way)
    words = f"{name_of(run.job)}, {settings_of(run.job)}, {three(run.time.seconds)} s a step{', tight' * run.is_tight}"
    words += f", cost {three(way.cost)}" if way.cost is not None else ""
    if budget.deadline is None:
        return words
    meets = "within" if way.days <= budget.deadline else "longer than"
    return words + f", {duration(way.days)}, {meets} --deadline {duration(budget.deadline)}"


def _other_flags(at: Question) -> list[Question]:
    """Return the change of a flag that is fastest, where it is much faster, and each further one that is much faster
    again on top: fp16 where bf16 is emulated, compiled 8-bit layers, and leaving a typed flag out."""
    told: list[Question] = []
    while at.machine.devices <= MOST_TRIED:
        others = [at.without(name) for name in at.given if _may_slow_down(at, name)]
        others += itertools.islice((other for other in _in_fp16(at) if other.fitting()), 1)
        if at.given.get("matmul") == "fp8" and not at.given.get("compile"):
            others.append(at.asked(compile=True))
        fastest = max(_no_tighter(others, at), key=lambda other: (other.rate, len(other.given)), default=at)
        if fastest.rate < WORTH_SAYING * at.rate:
            break
        at = fastest
        told.append(at)
    return told


def _no_tighter(others: Iterable[Question], than: Question) -> list[Question]:
    """Return those questions that have a run, and none that is tight where another one is not."""
    return [other for other in others if (run := other.fitting()) and run.is_tight <= _best(than).is_tight]


def _may_slow_down(asked: Question, name: str) -> bool:
    """Return whether a typed flag may be left out for speed: one that changes the mathematics stays, and --precision
    does where it is what `auto` takes."""
    is_usual = name == "precision" and asked.given[name] == precision_of("auto", asked.machine.device)
    return name not in STAYS and not is_usual


def _in_fp16(asked: Question) -> list[Question]:
    """Return the question in fp16 on a device without native bf16: as it is, with a batch that divides, and without
    what may exclude fp16."""
    peaks = asked.machine.device.peak_flops
    if asked.given.get("precision") == "fp16" or "fp16" not in peaks or "bf16" in peaks:
        return []
    without = {tuple(other.given): other for other in (asked.without(*names) for names in STEPS_ASIDE)}.values()
    batches = dict.fromkeys((None, _dividing(asked)))
    return [other.asked(batch, precision="fp16") for other in without for batch in batches]


def _dividing(asked: Question) -> int | None:
    """Return a batch near the asked one that divides among all devices; None where that one does."""
    devices = asked.machine.devices
    if devices > asked.global_batch or not asked.global_batch % devices or devices > MOST_TRIED:
        return None
    return rounded(asked.global_batch, [devices * (asked.given.get("micro_batch_size_per_gpu") or 1)])


def _batch_that_divides(at: Question) -> Question | None:
    """Return the question with a batch that divides among the devices, where that gains."""
    batch = _dividing(at)
    if batch is None or _best(at).job.layout.data == at.machine.devices:
        return None
    other = at.asked(batch)
    return other if other.rate >= GAIN * at.rate else None


def _larger_batch(asked: Question, told: Sequence[Question]) -> str | None:
    """Return that the batch is too small, where the devices reach little of their peak, and much more with LARGER times
    as many sequences: most of a step is then paid once, however large the batch.

    Args:
        told: what is faster. A batch that divides among the devices must not be enough.
    """
    devices, best = asked.machine.devices, _best(asked)
    if devices == 1 or devices > MOST_TRIED or best.mfu >= LOW_MFU:
        return None
    larger = asked.asked(LARGER * asked.global_batch)
    larger = larger.asked(_dividing(larger))
    divided = [way.rate for way in told if way.given == asked.given and way.machine.devices == devices]
    if larger.rate < MUCH_FASTER * max([asked.rate, *divided]):
        return None
    each = three(best.job.tokens_per_step / devices)
    words = f"The batch is too small for so many devices: {each} tokens a device"
    return f"{words}. {_gains(asked, larger, asked)}"


def _fewer(asked: Question) -> list[int]:
    """Return smaller numbers of devices that are worth a try, the largest first: halves, a node, powers of two, which
    most batches and heads divide among, and the most that the batch divides among. Whole nodes, or devices of one."""
    devices, per_node = asked.machine.devices, asked.machine.per_node
    whole = [number for number in range(1, devices) if number <= per_node or not number % per_node]
    powers = range(MOST_DOUBLINGS)
    worth = {per_node, *(devices >> power for power in powers), *(1 << power for power in powers)}
    divide = [number for number in whole if not asked.global_batch % number]
    return sorted({number for number in whole if number in worth} | {*divide[-1:]}, reverse=True)


def _fewer_devices(at: Question) -> Question | None:
    """Return the question on the fewest devices that are about as fast as any, if they gain or are half as many: where
    the network costs much of a step, or the batch does not divide, for which it must divide among them.

    Cores are no devices that can be left out: with fewer ranks each has more of them.
    """
    best, machine = _best(at), at.machine
    if machine.device.kind == "cpu" or machine.devices > MOST_TRIED:
        return None
    of_network = sum(best.time.parts.get(name, 0.0) for name in (WITHIN, BETWEEN))
    numbers = _fewer(at)
    if of_network < MUCH * best.time.seconds:
        numbers = [number for number in numbers if at.global_batch % machine.devices and not at.global_batch % number]
    found: list[Question] = []
    least = 1 / at.rate
    for number in numbers:
        found = [*_no_tighter([_on(at, number)], at), *found]
        least = min([least, *(1 / way.rate for way in found[:1])])
        if found and 1 / found[0].rate > MUCH_SLOWER * least:
            break  # and fewer still are slower
    way = next((way for way in found if 1 / way.rate <= GAIN * least), None)
    if way is None:
        return None
    return way if way.rate >= GAIN * at.rate or 2 * way.machine.devices <= machine.devices else None


def _flag_on_one_node(at: Question, fastest: Question) -> Question | None:
    """Return a typed flag left out, or fp16, on the devices of one node or the most of it that the batch divides among,
    where that is faster than what flags and fewer devices do one after the other."""
    devices, per_node = at.machine.devices, at.machine.per_node
    divide = [number for number in range(1, per_node + 1) if not at.global_batch % number]
    found: list[Question] = []
    for number in {per_node, *divide[-1:]} if at.machine.device.kind != "cpu" and devices <= MOST_TRIED else ():
        if number < devices:
            here = _on(at, number)
            found += [*(here.without(name) for name in here.given if _may_slow_down(here, name)), *_in_fp16(here)]
    way = max(_no_tighter(found, fastest), key=lambda other: other.rate, default=fastest)
    return way if way.rate >= WORTH_SAYING * fastest.rate else None


def _on(asked: Question, number: int) -> Question:
    """Return the question on a number of devices, on one of any run type."""
    return (asked.without("run_type") if number == 1 else asked).on(number)


def _unused(asked: Question) -> str | None:
    """Return which typed flags the best run does without, as its run type has none such."""
    asks = [name for name, value in asked.given.items() if value not in (None, False, "none", "off")]
    having = {name for entry in STRATEGIES.values() for name in asks if name in entry.options}
    typed = having - STRATEGIES[_best(asked).job.run_type or REFERENCE].options.keys()
    if not typed:
        return None
    flags = " and ".join(_typed(name, asked.given[name]) for name in asks if name in typed)
    owners = [name for name, entry in STRATEGIES.items() if typed <= entry.options.keys()]
    are = "is" if len(typed) == 1 else "are"
    whose = f", which {are} for --run_type {' and '.join(owners)}" if owners else ": no run type has them all"
    return f"The first run does without {flags}{whose}"


def with_room(asked: Question, may_be_tight: bool = False) -> list[Question]:
    """Return which changes have room, one of each kind: typed flags left out, as few as can be; DeepSpeed's offload,
    also in fp16; and where the batch keeps every candidate out, another batch, or fewer devices. Where none has, all
    typed flags are left out with offload, or some on fewer devices. Of very many devices all flags are left out alone.
    """
    free, has_flags = asked.without(*asked.given), bool(asked.given)
    if asked.machine.devices > MOST_TRIED:
        return _first_of_each([[[free]]] if has_flags else [], may_be_tight)
    fewer_flags = _fewer_flags(asked)
    kinds = [fewer_flags, *_offloaded(asked)]
    if not asked.runs[0] and asked.global_batch % asked.machine.devices:
        kinds.append([[asked.asked(batch)] for batch in _other_batches(asked)])
        kinds.append([[_on(asked, number) for number in _fewer(asked)]])
    found = _first_of_each(kinds, may_be_tight)
    if found or not has_flags:
        return found
    if found := _first_of_each([[[free]], *_offloaded(free)], may_be_tight):
        return found
    on_fewer = (free.on(number) for number in _fewer(free)[:2])
    number = next((other.machine.devices for other in on_fewer if _first_of_each([[[other]]], may_be_tight)), None)
    levels = [[other.on(number) for other in level] for level in fewer_flags] if number else []
    return _first_of_each([levels], may_be_tight)


def _fewer_flags(asked: Question) -> list[list[Question]]:
    """Return the question without one typed flag or two, in levels: those that keep most flags first."""
    names = [*itertools.combinations(asked.given, 1), *itertools.combinations(asked.given, 2)]
    others = {tuple(other.given): other for other in (asked.without(*each) for each in names)}
    kept = sorted(others.values(), key=lambda other: -len(other.given))
    return [list(level) for _, level in itertools.groupby(kept, lambda other: len(other.given))]


def _offloaded(asked: Question) -> list[list[list[Question]]]:
    """Return the question with DeepSpeed's offload, and those with fp16 too; none where typed flags decide it."""
    if asked.machine.device.kind == "cpu" or asked.given.keys() & OFFLOADED.keys():
        return []
    first, *in_fp16 = [[other.asked(None, **OFFLOADED)] for other in (asked, *_in_fp16(asked))]
    return [[first], in_fp16]


def _first_of_each(kinds: Iterable[Sequence[Sequence[Question]]], may_be_tight: bool) -> list[Question]:
    """Return for each kind of change the fastest that has room, of the first level in which one has; else the first
    that fits, if that will do."""
    told = []
    for levels in kinds:
        tight: list[Question] = []
        for level in levels:
            found = [other for other in level if other.fitting()]
            if roomy := [other for other in found if not _best(other).is_tight]:
                told.append(min(roomy, key=lambda other: _best(other).time.seconds))
                break
            tight += found
        else:
            told += tight[:1] if may_be_tight else []
    return told


def _other_batches(asked: Question) -> Iterator[int]:
    """Yield larger batches, which a pipeline or tensor ranks may share, and one that divides among all devices."""
    batch = 2 * asked.global_batch
    while batch < asked.machine.devices:
        yield batch
        batch *= 2
    yield _dividing(asked) or asked.machine.devices


def _least(asked: Question, run: PlannedRun) -> str:
    """Return what the most frugal run lacks, and how many devices would do; where fewer would without the typed flags,
    or only then, how many."""
    enough, free = _enough(asked), asked.without(*asked.given)
    words = _would_do(enough) if enough else "no number of them would do as asked"
    others = _enough(free) if asked.given else {}
    if any(number < enough.get(has_room, math.inf) for has_room, number in others.items()):
        change = _change(asked, free)
        words += f", and {change[:1].lower()}{change[1:]} {_would_do(others)}"
    return f"{asked.lack(run)}; {words}"


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
            run = _best(choice)
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
        nothing = f"Nothing is done {limit}: ask for other devices, or train on fewer tokens"
        found.append((f"{'Cheapest' if is_priced else 'Fewest devices'} {limit}" if least else nothing, least))
    return found


def caveats_of(choices: Sequence[Question]) -> list[str]:
    """Return what to know of the first choice of each kind of device, and of each that an answer names; of the others
    a batch that would make them faster."""
    firsts: dict[str, Question] = {}  # without one, the first that a change lets run, or the last of them
    for choice in choices:
        kind = choice.machine.device.name
        if kind not in firsts or not (firsts[kind].fitting() or with_room(firsts[kind], may_be_tight=True)):
            firsts[kind] = choice
    told = [*firsts.values(), *(choice for _, choice in _winners(choices))]
    said: dict[str, None] = {}
    for each in choices:
        if any(each is choice for choice in told):
            found = _caveats(each)
        else:
            other = _batch_that_divides(each) if each.fitting() else None
            found = [_gains(each, other, each)] if other else []
        said |= dict.fromkeys(f"{each.devices_in_words}: {hint}." for hint in found)
    return list(said)


def _caveats(choice: Question) -> list[str]:
    """Return what to know of a choice's run, or what lets one fit."""
    runs, _ = choice.runs
    if choice.fitting() is None:
        return ways_out(choice) or [_least(choice, run) for run in runs[:1]]
    tight = ["It fits only tightly"] if runs[0].is_tight else []
    return [*hints(choice), *advice(best_of_each(runs)), *tight]
