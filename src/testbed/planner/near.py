"""Search the questions near one for better answers. No torch.

Near are: typed flags left out, fp16 where bf16 is emulated, DeepSpeed's offload where memory lacks, another batch,
fewer devices, and all of these together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from testbed.planner.candidates import precision_of
from testbed.planner.plan import WORTH_A_TRY, PlannedRun
from testbed.planner.question import Question, rounded
from testbed.planner.step_time import BETWEEN, BUBBLE, WITHIN

WORTH_SAYING = 1.2  # times as fast, with other flags
GAIN = 1.05  # times as fast, with the same flags on another number of devices or with another batch
OF_USE = 0.1  # of the rate of a tight run: with room, and slower than this, is of no use
MUCH = 0.3  # of a step
STAYS = ("optimizer", "dropout")  # flags that change what is trained: leaving them out is never proposed for speed
OFFLOADED = {"run_type": "optimized", "offload": "optimizer"}
MOST_TRIED = 4096  # devices, above which other plans take too long to be made for a hint
QUICK = 64  # devices, up to which all changes are tried
MOST_DOUBLINGS = 14  # of a device or a node
MOST_LEFT_OUT = 3  # flags


def best_of(asked: Question) -> PlannedRun:
    """Return the best run of a question that has one."""
    best = asked.fitting()
    assert best is not None
    return best


def faster(asked: Question) -> list[Question]:
    """Return the changes that gain. One is tighter than the best run only if it is WORTH_A_TRY."""
    ways = list(_near(asked))
    return _and_tight(asked, ways, [way for way in ways if is_tight(way) <= is_tight(asked)], [asked])


def with_room(asked: Question) -> list[Question]:
    """Return the changes that have room, or that fit where none of their kind has; and a tight one that
    is WORTH_A_TRY."""
    ways = list(_near(asked))
    having = [_kinds(asked, way) for way in ways if not is_tight(way)]
    usable = [way for way in ways if not is_tight(way) or _kinds(asked, way) not in having]
    return _and_tight(asked, ways, usable, [])


def is_tight(way: Question) -> bool:
    return best_of(way).is_tight


def _and_tight(
    asked: Question, ways: Sequence[Question], usable: Sequence[Question], start: Sequence[Question]
) -> list[Question]:
    """Return which of the usable ways are worth saying, and the tight one that is WORTH_A_TRY, planned in full."""
    told = _worth_saying(asked, usable, start)
    least = WORTH_A_TRY * max(way.rate for way in (asked, *told))
    tight = [way for way in ways if is_tight(way) and way.rate >= least]
    told += sorted(tight, key=lambda way: (_num_changes(asked, way), -way.rate))[:1]
    return [replace(way, is_quick=False) for way in told]


def dividing(asked: Question) -> int | None:
    """Return a batch near the asked one that divides among all devices; None where that one does."""
    devices = asked.machine.devices
    if devices > asked.global_batch or not asked.global_batch % devices or devices > MOST_TRIED:
        return None
    return rounded(asked.global_batch, [devices * (asked.given.get("micro_batch_size_per_gpu") or 1)])


def _worth_saying(asked: Question, ways: Sequence[Question], start: Sequence[Question]) -> list[Question]:
    """Return the fastest ways with one kind of change, then those with several that gain again, first of those with
    the asked batch; and much fewer devices that are about as fast.

    Args:
        start: the asked question, if it has an answer that will do.
    """
    by_kind = [(way, _kinds(asked, way)) for way in ways]
    told: list[Question] = []
    for kind in ("flags", "offload", "batch", "devices"):
        told += _climbed(asked, [way for way, kinds in by_kind if kinds == {kind}], start)
    with_batch = [way for way, kinds in by_kind if "batch" not in kinds]
    told += _climbed(asked, with_batch, [*start, *(way for way in told if way.global_batch == asked.global_batch)])
    told += _climbed(asked, ways, [*start, *told])
    leads = [*start]
    for those in ([*start, *told], [way for way in (*start, *told) if way.global_batch == asked.global_batch]):
        fastest = max(those, key=lambda way: way.rate, default=asked)
        leads += [fastest] if all(fastest is not lead for lead in (asked, *leads)) else []
    for lead in leads:
        fewer = _fewer_as_fast(asked, ways, lead)
        told += [way for way in fewer if not any(way.key == other.key for other in told)]
    return told


def _climbed(asked: Question, among: Iterable[Question], reached: Sequence[Question]) -> list[Question]:
    """Return of each number of changes the fastest, those with few changes first, where it gains on all before it."""
    found: list[Question] = []
    by_changes = sorted(among, key=lambda way: _num_changes(asked, way))
    for _, level in itertools.groupby(by_changes, lambda way: _num_changes(asked, way)):
        way = max(level, key=lambda way: (not is_tight(way), way.rate, -way.machine.devices))
        before = [*reached, *found]
        least = max((other.rate for other in before if is_tight(other) <= is_tight(way)), default=0.0)
        least = max(least, OF_USE * max((other.rate for other in before), default=0.0))
        has_flags = any(other.given == way.given for other in (asked, *before))
        if way.rate >= (GAIN if has_flags else WORTH_SAYING) * least:
            found.append(way)
    return found


def _fewer_as_fast(asked: Question, ways: Sequence[Question], lead: Question) -> list[Question]:
    """Return the fewest devices, at most half of a way's, that are about as fast as it: with its flags, or else, unless
    it is as asked, with others."""
    fewer = [way for way in ways if GAIN * way.rate >= lead.rate and 2 * way.machine.devices <= lead.machine.devices]
    fewer = [way for way in fewer if way.given == lead.given] or (fewer if lead is not asked else [])
    return sorted(fewer, key=lambda way: (way.machine.devices, _num_changes(asked, way), -way.rate))[:1]


def _kinds(asked: Question, way: Question) -> set[str]:
    """Return the kinds of changes: flags, offload, batch, devices."""
    offload = OFFLOADED.keys() if "offload" in _changed(asked.given, way.given) else ()
    flags = _changed(asked.given, way.given) - {*offload}
    found = {"flags": flags, "offload": offload, "batch": way.global_batch != asked.global_batch}
    found |= {"devices": way.machine.devices != asked.machine.devices}
    return {kind for kind, is_there in found.items() if is_there}


def _changed(given: Mapping[str, object], other: Mapping[str, object]) -> set[str]:
    return {name for name in given.keys() | other.keys() if given.get(name) != other.get(name)}


def _num_changes(asked: Question, way: Question) -> int:
    names = _changed(asked.given, way.given)
    return len(names) + (way.global_batch != asked.global_batch) + (way.machine.devices != asked.machine.devices)


def _near(asked: Question) -> Iterator[Question]:
    """Yield the changed questions that have a run that fits, each once: all changes on up to QUICK devices, and on more
    of them the typed flags, those of the fastest with the asked batch, and those of the fastest with any. What lacks
    memory is also tried with DeepSpeed's offload."""
    if asked.machine.devices > MOST_TRIED:
        yield from (way for way in [asked.without(*asked.given)] if asked.given and way.fitting())
        return
    seen = {asked.key}

    def new(ways: Iterable[Question]) -> Iterator[Question]:
        for way in (replace(way, is_quick=True) for way in ways):
            is_given = bool(way.given.keys() & OFFLOADED.keys()) or way.machine.device.kind == "cpu"
            lacks_room = not is_given and ((best := way.fitting()) is None or best.is_near_full)
            for each in (way, *([way.asked(None, **OFFLOADED)] if lacks_room else [])):
                if each.key not in seen and each.fitting():
                    yield each
                seen.add(each.key)

    numbers, fastest, of_batch = _fewer(asked), asked, asked
    for changed in _with_other_flags(asked):
        few = [_on(changed, number) for number in numbers if number <= QUICK]
        for way in new([changed, *map(changed.asked, _other_batches(changed)), *few]):
            fastest = max(fastest, way, key=lambda way: way.rate)
            if way.global_batch == asked.global_batch:
                of_batch = max(of_batch, way, key=lambda way: way.rate)
            yield way
    for lead in (asked, *(replace(asked, given=way.given) for way in (of_batch, fastest))):
        yield from new(_on(lead, number) for number in numbers if number > QUICK and _may_gain(asked, number))


def _with_other_flags(asked: Question) -> Iterator[Question]:
    """Yield the question as it is and with other flags: some left out, in fp16 where bf16 is emulated, with compiled
    8-bit layers."""
    best, device = asked.fitting(), asked.machine.device
    names = [name for name in asked.given if best is None or _may_slow_down(asked, name)]
    sets = [names, *itertools.chain(*(itertools.combinations(names, num) for num in range(MOST_LEFT_OUT + 1)))]
    for left_out in sets:
        kept = asked.without(*left_out)
        more: list[dict[str, Any]] = [{}]
        if "fp16" in device.peak_flops and "bf16" not in device.peak_flops:
            more.append({"precision": "fp16"})
        if kept.given.get("matmul") == "fp8":
            more.append({"compile": True})
        yield from (kept.asked(None, **flags) for flags in more)


def _may_slow_down(asked: Question, name: str) -> bool:
    """Return whether a typed flag may be left out for speed: one that changes the mathematics stays, and --precision
    does where it is what `auto` takes."""
    is_usual = name == "precision" and asked.given[name] == precision_of("auto", asked.machine.device)
    return name not in STAYS and not is_usual


def _other_batches(asked: Question) -> Iterator[int]:
    """Yield the global batch sizes to try: a near one that is a multiple of the devices and, if the asked one runs on
    no mesh, larger ones, which pipeline or tensor ranks can share."""
    batch, devices = 2 * asked.global_batch, asked.machine.devices
    while batch < 2 * devices and not asked.runs[0]:
        yield min(batch, devices)
        batch *= 2
    if divided := dividing(asked):
        yield divided


def _fewer(asked: Question) -> list[int]:
    """Return smaller numbers of devices that are worth a try: half, quarters, a node, powers of two up to QUICK, which
    most batches and heads divide among, and the most that the batch divides among, also in a node. Whole nodes, or
    devices of one.

    Cores are no devices that can be left out: with fewer ranks each has more of them.
    """
    devices, per_node = asked.machine.devices, asked.machine.per_node
    if asked.machine.device.kind == "cpu":
        return []
    whole = [number for number in range(1, devices) if number <= per_node or not number % per_node]
    halves = {devices >> power for power in range(MOST_DOUBLINGS)} | {1 << power for power in range(MOST_DOUBLINGS)}
    quarters = {devices >> power for power in range(0, MOST_DOUBLINGS, 2)}
    worth = {per_node, devices >> 1, *quarters, *(number for number in halves if number <= QUICK)}
    divide = [number for number in whole if not asked.global_batch % number]
    of_node = [number for number in divide if number <= per_node]
    return sorted({number for number in whole if number in worth} | {*divide[-1:], *of_node[-1:]})


def _may_gain(asked: Question, number: int) -> bool:
    """Return whether fewer devices may be as fast: where there is no run, the network or a pipeline's bubble costs much
    of a step, or only the fewer divide the batch."""
    best = asked.fitting()
    if best is None or (asked.global_batch % asked.machine.devices and not asked.global_batch % number):
        return True
    return sum(best.time.parts.get(name, 0.0) for name in (WITHIN, BETWEEN, BUBBLE)) >= MUCH * best.time.seconds


def _on(asked: Question, number: int) -> Question:
    """Return the question on a number of devices, on one of any run type."""
    return (asked.without("run_type") if number == 1 else asked).on(number)
