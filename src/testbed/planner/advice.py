"""Search the questions near one for a better answer, and say what to change. No torch.

Near are: a typed flag left out, fp16 where bf16 is emulated, DeepSpeed's offload, another batch, fewer devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from testbed.config.run_types import REFERENCE, STRATEGIES
from testbed.errors import InputError
from testbed.memory_model.job import Job
from testbed.memory_model.memory import fits, memory_of
from testbed.planner.candidates import precision_of
from testbed.planner.plan import PlannedRun, duration, name_of, roomy_bytes, settings_of, three
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
MOST_HALVINGS = 7  # of a number of devices that cannot share the batch
MOST_TRIED = 4096  # devices, above which other plans take too long to be made for a hint
MOST_DOUBLINGS = 14  # of a node, in the search for enough memory


class Way(NamedTuple):
    """A question near the one that was asked, and its best run."""

    question: Question
    run: PlannedRun


def answered(asked: Question) -> tuple[list[PlannedRun], dict[str, str]]:
    """Return `Question.runs`. InputError: no candidate, or none that fits into the memory; with what has room."""
    runs, refused = asked.runs
    if not runs or not runs[0].fits:
        raise InputError(refusal(asked))
    return runs, refused


def hints(asked: Question, best: PlannedRun) -> list[str]:
    """Return what else to ask for, where it promises more than the best run, and what has room where that is tight."""
    told = faster(Way(asked, best))
    found = [*(_gains(asked, way, best) for way in told), _larger_batch(asked, best, told)]
    if best.is_tight:
        known = [way.question for way in told]
        found += [_has_room(asked, way) for way in with_room(asked) if way.question not in known]
    return [hint for hint in (*found, _unused(asked, best)) if hint]


def batch_hint(asked: Question, best: PlannedRun) -> str | None:
    """Return a batch that divides among the devices, and what it gains."""
    way = _batch_that_divides(Way(asked, best))
    return _gains(asked, way, best) if way else None


def faster(at: Way) -> list[Way]:
    """Return changes that gain: flags, each on top of those before it; on top of them another batch, and fewer devices;
    and flags again on those."""
    flags = _other_flags(at)
    last = flags[-1] if flags else at
    fewer = _fewer_devices(last)
    return [*flags, *filter(None, [_batch_that_divides(last), fewer]), *(_other_flags(fewer) if fewer else [])]


def _gains(asked: Question, way: Way, than: PlannedRun, of: str = "") -> str:
    gain = three(way.run.tokens_per_s / than.tokens_per_s)
    return f"{_change(asked, way.question)}: {gain} times the tokens/s{of} ({_in_words(way)})"


def _has_room(asked: Question, way: Way) -> str:
    change, words = _change(asked, way.question), _in_words(way)
    return (
        f"{change} it fits tightly: {words.replace(', tight', '')}"
        if way.run.is_tight
        else f"{change} there is room: {words}"
    )


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


def _in_words(way: Way) -> str:
    budget, run = way.question.budget, way.run
    words = f"{name_of(run.job)}, {settings_of(run.job)}, {three(run.time.seconds)} s a step{', tight' * run.is_tight}"
    cost = budget.cost(run)
    words += f", cost {three(cost)}" if cost is not None else ""
    if budget.deadline is None:
        return words
    days = budget.days(run) or 0.0
    meets = "within" if days <= budget.deadline else "longer than"
    return words + f", {duration(days)}, {meets} --deadline {duration(budget.deadline)}"


def _other_flags(at: Way) -> list[Way]:
    """Return the change of a flag that is fastest, where it is much faster, and each further one that is much faster
    again on top: fp16 where bf16 is emulated, compiled 8-bit layers, and leaving a typed flag out."""
    told: list[Way] = []
    while at.question.machine.devices <= MOST_TRIED:
        asked = at.question
        others = [asked.without(name) for name in asked.given if _may_slow_down(asked, name)]
        others += itertools.islice((other for other in _in_fp16(asked) if other.fitting()), 1)
        if asked.given.get("matmul") == "fp8" and not asked.given.get("compile"):
            others.append(asked.asked(compile=True))
        found = _no_tighter(others, at.run)
        most_kept = sorted(found, key=lambda way: (-way.run.tokens_per_s, -len(way.question.given)))
        if not most_kept or most_kept[0].run.tokens_per_s < WORTH_SAYING * at.run.tokens_per_s:
            break
        at = most_kept[0]
        told.append(at)
    return told


def _no_tighter(others: Iterable[Question], than: PlannedRun) -> list[Way]:
    """Return those questions that have a run, and none that is tight where another one is not."""
    found = [Way(other, run) for other in others if (run := other.fitting())]
    return [way for way in found if way.run.is_tight <= than.is_tight]


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


def _batch_that_divides(at: Way) -> Way | None:
    """Return the question with a batch that divides among the devices, where that gains."""
    batch = _dividing(at.question)
    if batch is None or at.run.job.layout.data == at.question.machine.devices:
        return None
    found = at.question.asked(batch).fitting()
    is_faster = found is not None and found.tokens_per_s >= GAIN * at.run.tokens_per_s
    return Way(at.question.asked(batch), found) if found and is_faster else None


def _larger_batch(asked: Question, best: PlannedRun, told: Sequence[Way]) -> str | None:
    """Return that the batch is too small, where the devices reach little of their peak, and much more with LARGER times
    as many sequences: most of a step is then paid once, however large the batch.

    Args:
        told: what is faster. A batch that divides among the devices must not be enough.
    """
    devices = asked.machine.devices
    if devices == 1 or devices > MOST_TRIED or best.mfu >= LOW_MFU:
        return None
    larger = asked.asked(LARGER * asked.global_batch)
    larger = larger.asked(_dividing(larger))
    run = larger.fitting()
    divided = [run for other, run in told if other.given == asked.given and other.machine.devices == devices]
    least = max(each.tokens_per_s for each in (best, *divided))
    if run is None or run.tokens_per_s < MUCH_FASTER * least:
        return None
    each = three(best.job.tokens_per_step / devices)
    words = f"The batch is too small for so many devices: {each} tokens a device"
    return f"{words}. {_gains(asked, Way(larger, run), best)}"


def _fewer_devices(at: Way) -> Way | None:
    """Return the question on the fewest devices that are about as fast as any, if they gain or are half as many: where
    the network costs much of a step, a node and halves; where the batch does not divide, the most that it does among.

    Cores are no devices that can be left out: with fewer ranks each has more of them.
    """
    asked, best, machine = at.question, at.run, at.question.machine
    if machine.device.kind == "cpu" or machine.devices > MOST_TRIED:
        return None
    numbers: set[int] = set()
    if sum(best.time.parts.get(name, 0.0) for name in (WITHIN, BETWEEN)) >= MUCH * best.time.seconds:
        numbers |= {machine.per_node, *(machine.devices >> times for times in range(1, MOST_DOUBLINGS))}
    if asked.global_batch % machine.devices:
        numbers |= {max(number for number in _fewer(asked) if asked.global_batch % number == 0)}
    found: list[Way] = []
    least = best.time.seconds
    for number in sorted(numbers & {*_fewer(asked)}, reverse=True):
        found = [*_no_tighter([_on(asked, number)], best), *found]
        least = min([least, *(way.run.time.seconds for way in found[:1])])
        if found and found[0].run.time.seconds > MUCH_SLOWER * least:
            break  # and fewer still are slower
    way = next((way for way in found if way.run.time.seconds <= GAIN * least), None)
    if way is None:
        return None
    gains = GAIN * way.run.time.seconds <= best.time.seconds or 2 * way.question.machine.devices <= machine.devices
    return way if gains else None


def _fewer(asked: Question) -> list[int]:
    """Return the smaller numbers of devices that are whole nodes, or of one node."""
    per_node = asked.machine.per_node
    return [number for number in range(1, asked.machine.devices) if number <= per_node or not number % per_node]


def _on(asked: Question, number: int) -> Question:
    """Return the question on a number of devices, on one of any run type."""
    return (asked.without("run_type") if number == 1 else asked).on(number)


def _unused(asked: Question, best: PlannedRun) -> str | None:
    """Return which typed flags the best run does without, as its run type has none such."""
    asks = [name for name, value in asked.given.items() if value not in (None, False, "none", "off")]
    having = {name for entry in STRATEGIES.values() for name in asks if name in entry.options}
    typed = having - STRATEGIES[best.job.run_type or REFERENCE].options.keys()
    if not typed:
        return None
    flags = " and ".join(_typed(name, asked.given[name]) for name in asks if name in typed)
    owners = [name for name, entry in STRATEGIES.items() if typed <= entry.options.keys()]
    are = "is" if len(typed) == 1 else "are"
    whose = f", which {are} for --run_type {' and '.join(owners)}" if owners else ": no run type has them all"
    return f"The first run does without {flags}{whose}"


def with_room(asked: Question, may_be_tight: bool = False) -> list[Way]:
    """Return which changes have room, one of each kind: typed flags left out, as few as can be; DeepSpeed's offload,
    also in fp16; and where the batch keeps every candidate out, another batch, or fewer devices. Where none has, all
    typed flags are left out with offload, or some on fewer devices."""
    if asked.machine.devices > MOST_TRIED:
        return []
    fewer_flags, free = _fewer_flags(asked), asked.without(*asked.given)
    kinds = [fewer_flags, *_offloaded(asked)]
    if not asked.runs[0] and asked.global_batch % asked.machine.devices:
        kinds += [[[asked.asked(batch)] for batch in _other_batches(asked)], [_fewer_for_the_batch(asked)]]
    found = _first_of_each(kinds, may_be_tight)
    if found or free.given == asked.given:
        return found
    is_tried = any(not other.given for level in fewer_flags for other in level)
    if found := _first_of_each([*([] if is_tried else [[[free]]]), *_offloaded(free)], may_be_tight):
        return found
    # the two largest powers of two, which most batches and heads divide among
    numbers = [number for number in _fewer(asked)[::-1] if number.bit_count() == 1][:2]
    enough = _first_of_each([[[free.on(number)] for number in numbers]], may_be_tight)
    number = enough[0].question.machine.devices if enough else 1
    on_fewer = [[other.on(number) for other in level] for level in fewer_flags] if enough else []
    return _first_of_each([on_fewer], may_be_tight)


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


def _first_of_each(kinds: Iterable[Sequence[Sequence[Question]]], may_be_tight: bool) -> list[Way]:
    """Return for each kind of change the fastest that has room, of the first level in which one has; else the first
    that fits, if that will do."""
    told = []
    for levels in kinds:
        tight = None
        for level in levels:
            found = [Way(other, run) for other in level if (run := other.fitting())]
            if roomy := [way for way in found if not way.run.is_tight]:
                told.append(min(roomy, key=lambda way: way.run.time.seconds))
                break
            tight = tight or next(iter(found), None)
        else:
            told += [tight] if tight and may_be_tight else []
    return told


def _other_batches(asked: Question) -> Iterator[int]:
    """Yield larger batches, which a pipeline or tensor ranks may share, and one that divides among all devices."""
    batch = 2 * asked.global_batch
    while batch < asked.machine.devices:
        yield batch
        batch *= 2
    yield _dividing(asked) or asked.machine.devices


def _fewer_for_the_batch(asked: Question) -> list[Question]:
    """Return the question on the most devices that divide the batch, on a half of all devices, whose tensor, context or
    pipeline ranks may share a sequence, and on halves of each."""
    fewer = _fewer(asked)
    firsts = [*[number for number in fewer if asked.global_batch % number == 0][-1:], asked.machine.devices // 2]
    numbers = {first >> times for first in firsts for times in range(MOST_HALVINGS)}
    return [_on(asked, number) for number in sorted(numbers & {*fewer})]


def ways_out(asked: Question) -> list[str]:
    """Return what has room, where nothing has that was asked for; else how many devices would."""
    runs, _ = asked.runs
    return _ways_in_words(asked, with_room(asked)) or [_least(asked, run) for run in runs[:1]]


def _ways_in_words(asked: Question, ways: Sequence[Way]) -> list[str]:
    """Return what has room, and what is much faster than the fastest of it."""
    if not ways:
        return []
    fastest = max(ways, key=lambda way: way.run.tokens_per_s)
    much = [way for way in faster(fastest) if way.run.tokens_per_s >= WORTH_SAYING * fastest.run.tokens_per_s]
    more = sorted(much, key=lambda way: -way.run.tokens_per_s)[:1]
    said = [_has_room(asked, way) for way in ways]
    return [*said, *(_gains(asked, way, fastest.run, " of the fastest of these") for way in more)]


def refusal(asked: Question) -> str:
    """Return the error message for a question without a run that fits: the reason, and changes with which one does."""
    runs, refused = asked.runs
    ways, batch = with_room(asked, may_be_tight=True), _dividing(asked)
    lacking = runs
    if not runs and not ways and batch is not None:
        lacking, _ = asked.asked(batch).runs  # the batch is not all that is in the way
    if lacking:
        words = f"{asked.model_name} does not fit on {asked.devices_in_words}: {_least(asked, lacking[0])}"
    else:
        words = f"nothing can be planned for {asked.devices_in_words}: {asked.reason(refused)}"
    said, free = _ways_in_words(asked, ways), asked.without(*asked.given)
    if not ways and not lacking and free.given != asked.given:
        first, free_refused = free.runs
        if first and first[0].fits:  # of so many devices that ways out are not sought
            said = [_has_room(asked, Way(free, first[0]))]
        else:
            found = f"it does not fit either: {_least(free, first[0])}" if first else free.reason(free_refused)
            is_said = found in words
            lead = _change(asked, free) + ("" if first else " there is no run either:")
            said = [] if is_said else [f"{lead} {found}"]
    return ". ".join([words, *said])


def _least(asked: Question, run: PlannedRun) -> str:
    """Return what the most frugal run lacks, and how many devices would do; where fewer would without the typed flags,
    or only then, how many."""
    enough, free = _enough(asked), asked.without(*asked.given)
    words = _would_do(enough) if enough else "no number of them would do as asked"
    others = _enough(free) if free.given != asked.given else {}
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
    """Return how many devices fit, and how many have room, as far as there are: each number up to a node is tried, then
    twice as many again."""
    per_node, device = asked.machine.per_node, asked.machine.device
    enough: dict[bool, int] = {}  # has room -> devices
    for number in (*range(1, per_node + 1), *(per_node << times for times in range(1, MOST_DOUBLINGS))):
        memories = [memory for memory in map(memory_of, _frugal_jobs(asked.on(number))) if fits(memory, device)]
        for memory in memories:
            enough.setdefault(False, number)
            if roomy_bytes(memory, device) <= device.memory_bytes:
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
