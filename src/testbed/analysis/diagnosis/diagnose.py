"""Find the rank and the cause that hold a run back, from its own training_metrics.json.

A rank is compared with the others of its group by its own times (docs/diagnosis.md). What all ranks share, as a slow
link, is told from the run's other figures. On CUDA there are no own times: a rank is compared by how long the others
wait for it inside collectives.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from testbed.analysis.diagnosis.shifts import (
    LEAST_WINDOWS,
    MEAN,
    MIDDLE,
    QUIET,
    Shift,
    against_others,
    batches,
    shift_of,
)
from testbed.errors import counted, one_line

LEAST_SHARE = 0.005  # of the step: less is not said
LEAST_SHARE_OF_CORE = 0.03  # what else runs on a machine is never shared out evenly
LEAST_SHARE_BETWEEN = 0.03  # rank 0 alone keeps rows and prints, by design
LEAST_SHARE_OF_ALL = 0.03  # of what no rank has less of: every run waits for data and collects garbage a little
LEAST_SHARE_OF_RUN = 0.1  # of checkpoints and validation, which are asked for
SLOW_LINK_BYTES_PER_S = 60e6
LEAST_SHARE_OF_LINK = 0.1
LEAST_WAIT_S = 50e-6  # of a rank's GPU in each collective: ranks that come together do not leave together either
LONGEST_IN_STEPS = 100.0  # collectives of a step, on the mean over a window
TOO_FEW_TIMED = (
    f"PyTorch's flight recorder had timed all ranks' collectives in fewer than {LEAST_WINDOWS} measured steps: it "
    "takes more steps, more room (TORCH_FR_BUFFER_SIZE), TORCH_NCCL_ENABLE_TIMING=1, no TORCH_NCCL_BLOCKING_WAIT"
)
NOT_COMPARED = (
    "on GPUs ranks that exchange in pairs, batches or along one axis of a mesh are not compared: who is late because "
    "it waited is not told from who is slow; merge_traces.py shows all ranks on one clock"
)
OF_DEVICES = (
    "on GPUs this was never tried: it was tested with made-up times of collectives (docs/diagnosis.md), and only which "
    "rank the others wait for was looked at, not data, a link, garbage collection, writing and the start-up"
)
LEAST_LATENCY_S = 1e-3  # of a collective: what is allowed for each, beside what the run's smallest ones take
START_UP_AHEAD = 0.75  # a rank's own start-up over the others', as a fraction and in seconds: one number, no interval
START_UP_AHEAD_S = 3.0
COMPUTING = ("forward", "backward", "optimizer")
PHASES = ("data_wait", "forward", "backward", "synchronise", "optimizer")
ELSEWHERE = "elsewhere"  # in the step, in none of its phases: of a pipeline, its schedule
CAUSE_OF_PHASE = {
    "data_wait": "data", "forward": "forward", "backward": "backward", "synchronise": "collective",
    "optimizer": "optimizer", ELSEWHERE: "collective", "between": "writing",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A cause. `rank` None: all ranks alike. `shift` is in seconds per step, of start-up in seconds once; without an
    interval where the run has one number only. `details` are what the words need, `settings` the run's flags."""

    cause: str
    rank: int | None
    shift: Shift
    share: float | None  # of the step; None: not of the step
    details: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """Findings, sorted by the lower bound of their cost, the largest first.

    `unknown` is why nothing can be said, and `notes` what was not looked at.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    unknown: str | None = None


def diagnose(metrics: Mapping[str, Any]) -> Diagnosis:
    """Return what holds a run back. `metrics`: its file, of any version, with or without the rows of its steps."""
    rows = metrics.get("watched_steps") or []
    world_size = (metrics.get("hardware") or {}).get("world_size") or 1
    if not rows and "timed_collectives" in metrics:
        return _of_timed_collectives(metrics)
    if not rows:
        return Diagnosis(unknown=_why_not_watched(metrics))
    if len(rows) < LEAST_WINDOWS:
        few = f"it watched {counted(len(rows), 'step')} after warm-up, and a claim takes {LEAST_WINDOWS}"
        return Diagnosis(unknown=f"{few}; train more steps, or watch each: --watch_collectives every_step")
    if any(len(row["per_rank_gc_s"]) != world_size for row in rows):
        return Diagnosis(unknown="its watched steps are not of all of its ranks")
    if not metrics["timing"]["step_time_p50_sec"]:
        return Diagnosis(unknown="its file has no median step time")
    watched = _Watched(metrics, rows, world_size)
    found = [*_of_ranks(watched), *_of_all(watched), *_slow_link(watched), *_of_the_run(watched)]
    if not all(math.isfinite(one.shift.seconds) for one in found):
        return Diagnosis(unknown="its times are too large to be added up")
    found.sort(key=lambda one: (one.share is None, -one.shift.low))
    settings = metrics.get("settings") or {}
    return Diagnosis(tuple(replace(one, settings=settings) for one in found), tuple(_notes(watched)))


def _why_not_watched(metrics: Mapping[str, Any]) -> str:
    hardware = metrics.get("hardware") or {}
    if hardware.get("device_type") == "cuda":
        how = "--watch_collectives every_step"
        return f"on CUDA it takes a run of several ranks on NCCL with {how}, that has ended by itself"
    if (metrics.get("settings") or {}).get("watch_collectives") == "off":
        return "it was run with --watch_collectives off"
    return "it has no watched steps after warm-up: an earlier version wrote it, or it did no such step"


def _of_timed_collectives(metrics: Mapping[str, Any]) -> Diagnosis:
    """Return which ranks the others wait for inside collectives: who comes last waits least."""
    timed, step_s = metrics["timed_collectives"], metrics["timing"]["step_time_p50_sec"]
    if timed["has_smaller_groups"] or (metrics.get("training_config") or {}).get("mesh", {}).get("pipeline", 1) > 1:
        return Diagnosis(unknown=NOT_COMPARED)
    times = np.array(timed["per_rank_s"])
    if not step_s or timed["num_steps"] < LEAST_WINDOWS or len(times) < 2 or times.shape[1] < 2:
        return Diagnosis(unknown=TOO_FEW_TIMED)
    if times.max() > LONGEST_IN_STEPS * step_s:
        return Diagnosis(unknown="its collectives take far longer than its steps")
    found = []
    for rank, ahead in enumerate(-against_others(times).T):
        shift = shift_of(ahead, times.shape[1])
        if shift.low > 0 and shift.seconds >= max(LEAST_SHARE * step_s, LEAST_WAIT_S):
            phase = _longer_phase(metrics, rank, shift.seconds / 2)
            details = {"phase": phase, **({"what": "data"} if phase == "data_wait" else {})}
            found.append(Finding("late", rank, shift, shift.seconds / step_s, details, metrics.get("settings") or {}))
    found.sort(key=lambda one: -one.shift.low)
    return Diagnosis(tuple(found), (OF_DEVICES,))


def _longer_phase(metrics: Mapping[str, Any], rank: int, least_s: float) -> str | None:
    """Return the phase that takes this rank so much longer than the others. None: none, or it holds collectives, in
    which all ranks end together."""
    rows = [row for row in metrics.get("steps") or [] if not row["is_warmup"]]
    found = {}
    for phase in PHASES:
        times = [row[name] for row in rows if len(row.get(name := f"per_rank_{phase}_s") or ()) > rank]
        if len(times) >= LEAST_WINDOWS and {len(one) for one in times} == {len(times[0])} - {1}:
            ahead = against_others(batches(np.array(times), MIDDLE))[:, rank]
            found[phase] = shift_of(ahead, len(times[0]) * len(PHASES))
    longer = [phase for phase, shift in found.items() if shift.low > 0 and shift.seconds >= least_s]
    return max(longer, key=lambda phase: found[phase].seconds, default=None)


class _Watched:
    """The run's numbers, and the ranks that may be compared.

    Attributes:
        groups: ranks that do equal work, those of one stage; of stages that have one rank each, all ranks.
        has_lone_stages: the latter, so that how long a rank computes is by design.
        call_s: of each rank, by collective and phase, seconds of a step in its calls.
    """

    def __init__(self, metrics: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], world_size: int):
        self.metrics, self.rows, self.world_size = metrics, rows, world_size
        self.step_s = float(metrics["timing"]["step_time_p50_sec"])
        stages = ((metrics.get("training_config") or {}).get("mesh") or {}).get("pipeline") or 1
        self.is_pipeline, of_stage = stages > 1, max(1, world_size // stages)  # outermost: distributed/axes.py
        self.has_lone_stages = of_stage < min(2, world_size)
        size = world_size if self.has_lone_stages else of_stage
        self.groups = [range(first, min(first + size, world_size)) for first in range(0, world_size, size)]
        # of a rank: CPU times and pauses of phases; calls, elsewhere; its core, by waiting and by speed; between and
        # garbage, each by mean and lowest tenth
        of_rank = 2 * len(PHASES) + 2 + 2 + 4
        self.comparisons = world_size * of_rank + 3  # data, garbage and a slow link of all ranks
        watched = (metrics.get("watched") or {}).get("per_rank") or []
        self.num_steps = min((row["num_steps"] for row in watched), default=0)
        self.collectives = [row["collectives"] for row in watched] or [[] for _ in range(world_size)]
        self.call_s: list[dict[tuple[str, str], float]] = []
        for of_rank_rows in self.collectives:
            self.call_s.append(defaultdict(float))
            for row in of_rank_rows:
                if phase := _phase_of(row):
                    self.call_s[-1][_named(row), phase] += row["call_s"] / max(1, self.num_steps)

    def of(self, name: str) -> np.ndarray:
        """Return a figure, windows x ranks."""
        return np.array([row[f"per_rank_{name}_s"] for row in self.rows])

    def own(self, phase: str) -> np.ndarray:
        """Return the own times of a phase but those in which the thread waited for its core, windows x ranks."""
        return np.maximum(0.0, self.of(f"own_{phase}") - self.of(f"queued_{phase}"))

    def pause(self, phase: str) -> np.ndarray:
        """Return the part of own times in which the thread neither computed nor could."""
        return np.maximum(0.0, self.own(phase) - self.of(f"cpu_{phase}"))

    def shifts(self, ahead: np.ndarray) -> list[Shift]:
        """Return the shift of each rank, of batches x ranks."""
        return [shift_of(of_rank, self.comparisons) for of_rank in ahead.T]

    def is_said(self, shift: Shift, least_share: float) -> bool:
        return shift.low > 0 and shift.seconds >= least_share * self.step_s

    def said(
        self, cause: str, rank: int | None, shift: Shift, least_share: float = LEAST_SHARE, **details: Any
    ) -> Iterator[Finding]:
        """Yield a finding if the shift is sure, and large enough."""
        if self.is_said(shift, least_share):
            yield Finding(cause, rank, shift, shift.seconds / self.step_s, details)


def _of_ranks(run: _Watched) -> Iterator[Finding]:
    """Yield what one rank has more of than the others."""
    for group in run.groups if run.world_size > 1 else ():
        if len(group) > 1:
            yield from _cores(run, group)
            yield from _of_phases(run, group)
    for cause, times in (("writing", run.own("between")), ("garbage collection", run.of("gc"))):
        # what comes in some steps only, or in each
        by_quantile = [run.shifts(against_others(batches(times, one))) for one in (MEAN, QUIET) if run.world_size > 1]
        for rank, shifts in enumerate(zip(*by_quantile, strict=True)):
            least = LEAST_SHARE_BETWEEN if (cause, rank) == ("writing", 0) else LEAST_SHARE
            shift = next((one for one in shifts if run.is_said(one, least)), shifts[0])
            yield from run.said(cause, rank, shift, least)


def _cores(run: _Watched, group: range) -> Iterator[Finding]:
    """Yield the ranks whose core is slow: they wait for it, or compute all more slowly."""
    # stages exchange and wait unequally by design, outside these phases
    phases = COMPUTING if run.is_pipeline else (*PHASES, ELSEWHERE)
    queued = sum((run.of(f"queued_{phase}") for phase in phases), np.zeros(1))[:, group]
    computed_s = np.median(sum((run.of(f"cpu_{phase}") for phase in COMPUTING), np.zeros(1)), axis=0)[group]
    computed_s = np.maximum(computed_s, 1e-9)  # who computes longer waits longer, so it is for each second of that
    waiting = run.shifts(against_others(batches(queued / computed_s, MEAN)) * computed_s)
    slower = [] if run.has_lone_stages else run.shifts(_speeds(run, group)[0])
    for shifts, is_waiting in ((waiting, True), (slower, False)):
        for rank, shift in zip(group, shifts, strict=False):
            yield from run.said("core", rank, shift, LEAST_SHARE_OF_CORE, is_waiting=is_waiting)


def _speeds(run: _Watched, group: range) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return what a slower core costs each rank, and what each phase computes beyond that, batches x ranks.

    The cores of a virtual machine change their speed, in all phases alike. So the slowness of a core is the middle one
    of the ratios to the others' CPU times in forward, backward and optimizer: what slows one of them leaves the other
    two. Speed varies to both sides, so it is of medians.
    """
    cpu = {phase: np.maximum(batches(run.of(f"cpu_{phase}"), MIDDLE)[:, group], 1e-9) for phase in PHASES}
    others = {phase: times - against_others(times) for phase, times in cpu.items()}
    slowness = np.median([cpu[phase] / others[phase] for phase in COMPUTING], axis=0)
    computed_s = np.median(sum((run.of(f"cpu_{phase}") for phase in PHASES), np.zeros(1)), axis=0)[group]
    return (1 - 1 / slowness) * computed_s, {phase: cpu[phase] - slowness * others[phase] for phase in PHASES}


def _of_phases(run: _Watched, group: range) -> Iterator[Finding]:
    """Yield the phases in which a rank pauses or computes longer, and whether its calls of collectives are slow.

    Pauses are added to by what a rank meets now and then; so their quiet steps are compared. Calls are compared call
    for call: how many a stage makes is by design.
    """
    beyond = {} if run.has_lone_stages else _speeds(run, group)[1]
    num = [sum(row["num"] for row in rows if _phase_of(row)) / max(1, run.num_steps) for rows in run.collectives]
    num_calls = np.maximum(np.array(num)[group], 1e-9)
    shifts: dict[str, list[list[Shift]]] = {}
    for phase in (*PHASES, ELSEWHERE):
        is_whole = phase == ELSEWHERE or (run.has_lone_stages and phase == "data_wait")
        # a stage between two others exchanges twice as much, elsewhere
        each = num_calls if run.has_lone_stages and phase == ELSEWHERE else np.ones(len(group))
        times = (run.own(phase) if is_whole else run.pause(phase))[:, group] / each
        shifts[phase] = [run.shifts(against_others(batches(times)) * each)]
        if phase in beyond:
            shifts[phase].append(run.shifts(beyond[phase]))
    of_calls = run.shifts(against_others(batches(run.of("calls")[:, group] / num_calls)) * num_calls)
    for place, rank in enumerate(group):
        is_slow = run.is_said(of_calls[place], LEAST_SHARE)
        called = _called(run, rank, group) if is_slow else {}  # none is known of a run that was killed
        slow_calls = [*run.said("collective", rank, of_calls[place], **called, is_all=True)] if called else []
        yield from slow_calls
        for phase, kinds in shifts.items():
            said = [kind[place] for kind in kinds if run.is_said(kind[place], LEAST_SHARE)]
            if not said:
                continue
            shift, called = max(said, key=lambda shift: shift.low), _called(run, rank, group, phase)
            is_call = called.get("call_s", 0.0) > shift.seconds / 2
            if not (is_call and slow_calls):
                cause = "collective" if is_call else CAUSE_OF_PHASE[phase]
                yield from run.said(cause, rank, shift, **{"phase": phase, **called})


def _called(run: _Watched, rank: int, group: Sequence[int], phase: str | None = None) -> dict[str, Any]:
    """Return the collective, of a phase or of the step, whose calls take this rank the longest beyond the others."""
    ahead = {
        place: seconds - float(np.median([run.call_s[other].get(place, 0.0) for other in group if other != rank]))
        for place, seconds in run.call_s[rank].items()
        if phase in (place[1], None)
    }
    if not ahead:
        return {}
    name, of_phase = most = max(ahead, key=lambda place: ahead[place])
    return {"collective": name, "phase": of_phase, "call_s": ahead[most]}


def _phase_of(row: dict[str, Any]) -> str | None:
    """Return the phase of a step in which a collective was called. None: not in a step."""
    return ELSEWHERE if row["phase"] in ("step", "schedule") else row["phase"] if row["phase"] in PHASES else None


def _named(row: dict[str, Any]) -> str:
    return one_line(f"{row['name']} along {row['axes']}" if row["axes"] else row["name"], 80)


def _of_all(run: _Watched) -> Iterator[Finding]:
    """Yield what every rank has: what the one with the least has of it."""
    for cause, times, quantile in (
        ("data", run.own("data_wait"), QUIET),
        ("garbage collection", run.of("gc"), MEAN),
    ):
        shift = shift_of(batches(times, quantile).min(axis=1), run.comparisons)
        yield from run.said(cause, None, shift, LEAST_SHARE_OF_ALL)


def _slow_link(run: _Watched) -> Iterator[Finding]:
    """Yield that collectives take long on the rank that waits least, beyond what as many of the smallest ones take."""
    if run.world_size == 1 or run.is_pipeline or not run.num_steps:
        return
    inside = [[row for row in rows if _phase_of(row)] for rows in run.collectives]
    between = [
        row for rows in run.collectives for row in rows if (row["name"], row["phase"]) == ("allgather", "between")
    ]
    small = [row["blocked_s"] / max(1, row["num"]) for row in between]
    latency_s = max(LEAST_LATENCY_S, 2 * min(small, default=0.0))
    num, num_bytes = (
        max(sum(row[name] for row in rows) / run.num_steps for rows in inside) for name in ("num", "bytes")
    )
    waited = run.of("blocked").min(axis=1, keepdims=True)
    shift = shift_of(batches(waited)[:, 0] - num * latency_s, run.comparisons)
    if num_bytes <= SLOW_LINK_BYTES_PER_S * shift.seconds and any(inside):
        quickest = min(filter(None, inside), key=lambda rows: sum(row["blocked_s"] for row in rows))
        most = max(quickest, key=lambda row: row["blocked_s"])
        details = {"collective": _named(most), "phase": most["phase"], "bytes": num_bytes}
        yield from run.said("link", None, shift, LEAST_SHARE_OF_LINK, **details)


def _of_the_run(run: _Watched) -> Iterator[Finding]:
    """Yield what lies outside the steps: checkpoints, validation, start-up."""
    first = run.rows[0]["step"]
    last = run.rows[-1]["step"] + run.rows[-1]["num_steps"] - 1
    for name, rows, seconds in (
        ("checkpoints", "checkpoints", "blocking_s"),
        ("validation", "evaluations", "wall_time_s"),
    ):
        of_steps = [row[seconds] for row in run.metrics.get(rows) or [] if first <= row["step"] < last]
        per_step = sum(of_steps) / max(1, last - first + 1)
        shift = Shift(per_step, per_step, per_step, math.inf)
        yield from run.said("writing", None, shift, LEAST_SHARE_OF_RUN, what=name, num=len(of_steps))
    own = [row["own_start_up_s"] for row in (run.metrics.get("watched") or {}).get("per_rank") or []]
    for rank, ahead in enumerate(against_others(np.array([own]))[0].tolist() if len(own) > 1 else ()):
        if ahead > max(START_UP_AHEAD_S, START_UP_AHEAD * (own[rank] - ahead)):
            yield Finding("start-up", rank, Shift(ahead, ahead, ahead, math.inf), None)


def _notes(run: _Watched) -> list[str]:
    notes = []
    if run.world_size == 1:
        notes.append("the run is a single process, so no ranks were compared")
    elif not run.metrics.get("watched"):
        notes.append(
            "the run has not ended by itself, so a slow link, the start-up of the ranks and the calls of single "
            "collectives were not looked at"
        )
    if run.has_lone_stages:
        notes.append(
            "ranks that do different work by design, as the stages of a pipeline, are compared by the time in which "
            "they neither compute nor wait: a stage that computes longer is not told from one with more to compute"
        )
    if run.is_pipeline:
        notes.append("a slow link between stages is not told from a stage that is waited for")
    return notes
