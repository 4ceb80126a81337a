"""Find the rank and the cause that hold a run back, from its own training_metrics.json.

A rank is compared with the others of its group by its own times (docs/diagnosis.md). What all ranks share, as a slow
link, is told from the run's other figures. On CUDA there are no own times: a rank is compared by how long the others
wait for it inside collectives.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
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
from testbed.errors import one_line

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
        few = f"it watched {len(rows)} steps after warm-up, and a claim takes {LEAST_WINDOWS}; train more steps"
        return Diagnosis(unknown=f"{few}, or watch each: --watch_collectives every_step")
    if any(len(row["per_rank_gc_s"]) != world_size for row in rows):
        return Diagnosis(unknown="its watched steps are not of all of its ranks")
    if not metrics["timing"]["step_time_p50_sec"]:
        return Diagnosis(unknown="its file has no median step time")
    watched = _Watched(metrics, rows, world_size)
    found = [*_of_ranks(watched), *_of_all(watched), *_of_the_run(watched)]
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
    least_s = max(LEAST_SHARE * step_s, LEAST_WAIT_S * timed["waits_per_step"])
    for rank, ahead in enumerate(-against_others(times).T):
        shift = shift_of(ahead, times.shape[1])
        if shift.low > 0 and shift.seconds >= least_s:
            phase = _longer_phase(metrics, rank, shift.seconds / 2)
            details: dict[str, Any] = {"phase": phase, "is_longest": timed["waits_per_step"] == 1}
            details |= {"what": "data"} if phase == "data_wait" else {}
            if timed["kinds"]:
                kind = max(timed["kinds"], key=lambda one: np.median(one["per_rank_s"]) - one["per_rank_s"][rank])
                details |= {"collective": one_line(kind["name"], 80), "calls": kind["num"] / timed["num_steps"]}
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
    """The run's numbers, and the ranks that may be compared."""

    def __init__(self, metrics: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], world_size: int):
        self.metrics, self.rows, self.ranks = metrics, rows, range(world_size)
        self.step_s = float(metrics["timing"]["step_time_p50_sec"])
        self.mesh = (metrics.get("training_config") or {}).get("mesh") or {}
        self.groups = _groups(self.mesh, world_size)
        # of a rank: CPU times and pauses of phases; calls, elsewhere; its core, by waiting and by speed; between and
        # garbage, each by mean and lowest tenth
        of_rank = 2 * len(PHASES) + 2 + 2 + 4
        self.comparisons = world_size * of_rank + 3  # data, garbage and a slow link of all ranks
        self.is_pipeline = (self.mesh.get("pipeline") or 1) > 1
        # once for all ranks of a group, so that the time grows with the ranks and not with their square
        self.of, self.shifts = functools.cache(self._of), functools.cache(self._shifts)
        self.speeds, self.queues = functools.cache(self._speeds), functools.cache(self._queues)
        self.calls = functools.cache(self._calls)
        self.computed_s = np.median(sum(self.cpu(phase) for phase in PHASES), axis=0)

    def _of(self, name: str) -> np.ndarray:
        """Return a figure, windows x ranks."""
        zeros = [0.0] * len(self.ranks)  # earlier files lack queued times and calls
        return np.array([row.get(f"per_rank_{name}_s", zeros) for row in self.rows])

    def own(self, phase: str) -> np.ndarray:
        """Return the own times of a phase but those in which the thread waited for its core, windows x ranks."""
        return np.maximum(0.0, self.of(f"own_{phase}") - self.queued(phase))

    def queued(self, phase: str) -> np.ndarray:
        """Return the part of own times in which the thread was ready to run and its core did something else."""
        return self.of(f"queued_{phase}")

    def cpu(self, phase: str) -> np.ndarray:
        """Return the part of own times in which the thread computed."""
        return self.of(f"cpu_{phase}")

    def pause(self, phase: str) -> np.ndarray:
        """Return the part of own times in which the thread neither computed nor could."""
        return np.maximum(0.0, self.own(phase) - self.cpu(phase))

    def group_of(self, rank: int) -> range:
        return next(group for group in self.groups if rank in group)

    def _shifts(self, kind: str, phases: tuple[str, ...], group: range, quantile: float | None) -> list[Shift]:
        """Return by how much each rank of a group exceeds the others, in the sum over phases of a kind of times."""
        times = sum((getattr(self, kind)(phase) for phase in phases), np.zeros(1))
        return self._of_each(against_others(batches(times, quantile)[:, group]))

    def _queues(self, group: range) -> list[Shift]:
        """Return how long each rank waits for its core beyond the others. Who computes longer waits longer, so it is
        compared for each second of computing."""
        # stages exchange and wait unequally by design, outside these phases
        phases = COMPUTING if self.is_pipeline else (*PHASES, ELSEWHERE)
        queued = sum((self.queued(phase) for phase in phases), np.zeros(1))[:, group]
        computed_s = np.maximum(np.median(sum(self.cpu(phase) for phase in COMPUTING), axis=0)[group], 1e-9)
        return self._of_each(against_others(batches(queued / computed_s, MEAN)) * computed_s)

    def _calls(self, group: range) -> list[Shift]:
        """Return how long each rank's calls of collectives take beyond the others', call for call: how many a stage
        makes is by design."""
        steps = max(1, _num_steps(self))
        num = [sum(row["num"] for row in rows if _phase_of(row)) / steps for rows in _collectives(self)]
        of_rank = np.maximum(np.array(num)[group], 1e-9)
        return self._of_each(against_others(batches(self.of("calls")[:, group] / of_rank)) * of_rank)

    def _speeds(self, group: range) -> tuple[list[Shift], dict[str, list[Shift]]]:
        """Return what a slower core costs each rank, and what each phase computes beyond that.

        The cores of a virtual machine change their speed, in all phases alike. So the slowness of a core is the middle
        one of the ratios to the others' CPU times in forward, backward and optimizer: what slows one of them leaves the
        other two.
        """
        cpu = {phase: np.maximum(batches(self.cpu(phase), MIDDLE)[:, group], 1e-9) for phase in PHASES}
        others = {phase: times - against_others(times) for phase, times in cpu.items()}
        slowness = np.median([cpu[phase] / others[phase] for phase in COMPUTING], axis=0)
        slower = (1 - 1 / slowness) * self.computed_s[group]
        beyond = {phase: cpu[phase] - slowness * others[phase] for phase in PHASES}
        return self._of_each(slower), {phase: self._of_each(times) for phase, times in beyond.items()}

    def _of_each(self, ahead: np.ndarray) -> list[Shift]:
        """Return the shift of each rank, of batches x ranks."""
        return [shift_of(of_rank, self.comparisons) for of_rank in ahead.T]


def _groups(mesh: Mapping[str, int], world_size: int) -> list[range]:
    """Return the ranks that do equal work, those of one stage; stages are outermost (distributed/axes.py).

    Context ranks are among them: each has a chunk from both ends of a sequence.
    """
    stages = mesh.get("pipeline") or 1
    firsts = [-(-stage * world_size // stages) for stage in range(stages + 1)]
    return [range(first, last) for first, last in itertools.pairwise(firsts)]


def _of_ranks(watched: _Watched) -> list[Finding]:
    """Return what one rank has more of than the others."""
    if len(watched.ranks) == 1:
        return []
    found = []
    for rank in watched.ranks:
        found += _of_phases(watched, rank)
        for name, kind, phases, least in (
            ("writing", "own", ("between",), LEAST_SHARE if rank else LEAST_SHARE_BETWEEN),
            ("garbage collection", "of", ("gc",), LEAST_SHARE),
        ):
            for quantile in (MEAN, QUIET):  # what comes in some steps only, or in each
                shift = watched.shifts(kind, phases, watched.ranks, quantile)[rank]
                if _is_said(watched, shift, least):
                    found.append(Finding(name, rank, shift, shift.seconds / watched.step_s))
                    break
    return found


def _of_phases(watched: _Watched, rank: int) -> list[Finding]:
    """Return the phases in which a rank is slow, and whether its core is.

    CPU times show what is computed; the speed of a core varies to both sides, so their medians are compared. Pauses are
    added to by what a rank meets now and then; so their quiet steps are.
    """
    group = watched.group_of(rank)
    is_alone = len(group) == 1  # in its stage: how much it computes is by design, how long it pauses is not
    group = watched.ranks if is_alone else group

    def shift_in(kind: str, phases: tuple[str, ...], quantile: float | None) -> Shift:
        return watched.shifts(kind, phases, group, quantile)[group.index(rank)]

    place, said = group.index(rank), {}
    cores = [(watched.queues(group)[place], True)]
    if not is_alone:
        slower, beyond = watched.speeds(group)
        cores.append((slower[place], False))
    found = [
        Finding("core", rank, shift, shift.seconds / watched.step_s, {"is_waiting": is_waiting})
        for shift, is_waiting in cores
        if _is_said(watched, shift, LEAST_SHARE_OF_CORE)
    ]
    for phase in (*PHASES, ELSEWHERE):
        is_whole = phase == ELSEWHERE or (is_alone and phase == "data_wait")
        shifts = [shift_in("own" if is_whole else "pause", (phase,), QUIET)]
        if not (is_alone or is_whole):
            shifts.append(beyond[phase][place])
        if shifts := [shift for shift in shifts if _is_said(watched, shift, LEAST_SHARE)]:
            said[phase] = max(shifts, key=lambda shift: shift.low)
    called = _called(watched, rank, group)  # of a run that was killed nothing is known of single collectives
    if is_said := bool(called) and _is_said(watched, calls := watched.calls(group)[place], LEAST_SHARE):
        found.append(Finding("collective", rank, calls, calls.seconds / watched.step_s, {**called, "is_all": True}))
    for phase, shift in said.items():
        called = _called(watched, rank, group, phase)
        is_call = called.get("call_s", 0.0) > shift.seconds / 2
        if not (is_call and is_said):
            cause = "collective" if is_call else CAUSE_OF_PHASE[phase]
            found.append(Finding(cause, rank, shift, shift.seconds / watched.step_s, {"phase": phase, **called}))
    return found


def _is_said(watched: _Watched, shift: Shift, least_share: float) -> bool:
    return shift.low > 0 and shift.seconds >= least_share * watched.step_s


def _called(watched: _Watched, rank: int, group: Sequence[int], phase: str | None = None) -> dict[str, Any]:
    """Return the collective, of a phase or of the step, whose calls take this rank the longest beyond the others."""
    ahead: dict[tuple[str, str], float] = {}
    per_rank: list[dict[tuple[str, str], float]] = []
    for rows in _collectives(watched):
        calls: dict[tuple[str, str], float] = {}
        for row in rows:
            of_row = _phase_of(row)
            if of_row and phase in (of_row, None):
                place = _named(row), of_row
                calls[place] = calls.get(place, 0.0) + row["call_s"]
        per_rank.append(calls)
    for place in per_rank[rank]:
        others = [per_rank[other].get(place, 0.0) for other in group if other != rank]
        ahead[place] = (per_rank[rank][place] - float(np.median(others))) / max(1, _num_steps(watched))
    if not ahead:
        return {}
    most = max(ahead, key=lambda place: ahead[place])
    return {"collective": most[0], "phase": most[1], "call_s": ahead[most]}


def _phase_of(row: dict[str, Any]) -> str | None:
    """Return the phase of a step in which a collective was called. None: not in a step."""
    return ELSEWHERE if row["phase"] in ("step", "schedule") else row["phase"] if row["phase"] in PHASES else None


def _named(row: dict[str, Any]) -> str:
    return one_line(f"{row['name']} along {row['axes']}" if row["axes"] else row["name"], 80)


def _collectives(watched: _Watched) -> list[list[dict[str, Any]]]:
    per_rank = (watched.metrics.get("watched") or {}).get("per_rank") or []
    return [row["collectives"] for row in per_rank] or [[] for _ in watched.ranks]


def _num_steps(watched: _Watched) -> int:
    per_rank = (watched.metrics.get("watched") or {}).get("per_rank") or []
    return min((row["num_steps"] for row in per_rank), default=0)


def _of_all(watched: _Watched) -> list[Finding]:
    """Return what every rank has: what the one with the least has of it."""
    found = []
    for cause, times in (("data", watched.own("data_wait")), ("garbage collection", watched.of("gc"))):
        quantile = QUIET if cause == "data" else MEAN
        shift = shift_of(batches(times, quantile).min(axis=1), watched.comparisons)
        if _is_said(watched, shift, LEAST_SHARE_OF_ALL):
            found.append(Finding(cause, None, shift, shift.seconds / watched.step_s))
    return found + _slow_link(watched)


def _slow_link(watched: _Watched) -> list[Finding]:
    """Return that collectives take long on the rank that waits least, beyond what as many of the smallest ones take."""
    steps = _num_steps(watched)
    if len(watched.ranks) == 1 or watched.is_pipeline or not steps:
        return []
    per_rank = _collectives(watched)
    inside = [[row for row in rows if row["phase"] in (*PHASES, "step")] for rows in per_rank]
    between = [row for rows in per_rank for row in rows if (row["name"], row["phase"]) == ("allgather", "between")]
    small = [row["blocked_s"] / max(1, row["num"]) for row in between]
    latency_s = max(LEAST_LATENCY_S, 2 * min(small, default=0.0))
    num, num_bytes = (max(sum(row[name] for row in rows) / steps for rows in inside) for name in ("num", "bytes"))
    waited = watched.of("blocked").min(axis=1, keepdims=True)
    shift = shift_of(batches(waited)[:, 0] - num * latency_s, watched.comparisons)
    is_fast = num_bytes > SLOW_LINK_BYTES_PER_S * shift.seconds
    if is_fast or not _is_said(watched, shift, LEAST_SHARE_OF_LINK):
        return []
    least = [min(rows, key=lambda row: row["blocked_s"]) for rows in _same_collective(inside)]
    most = max(least, key=lambda row: row["blocked_s"])
    details = {"collective": _named(most), "phase": most["phase"], "bytes": num_bytes}
    return [Finding("link", None, shift, shift.seconds / watched.step_s, details)]


def _same_collective(per_rank: Sequence[Sequence[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in (row for rows in per_rank for row in rows):
        rows.setdefault((_named(row), row["phase"]), []).append(row)
    return list(rows.values())


def _of_the_run(watched: _Watched) -> list[Finding]:
    """Return what lies outside the steps: checkpoints, validation, start-up."""
    metrics, found = watched.metrics, []
    first = watched.rows[0]["step"]
    last = watched.rows[-1]["step"] + watched.rows[-1]["num_steps"] - 1
    for name, seconds in (
        ("checkpoints", [row["blocking_s"] for row in metrics.get("checkpoints") or [] if first <= row["step"] < last]),
        ("validation", [row["wall_time_s"] for row in metrics.get("evaluations") or [] if first <= row["step"] < last]),
    ):
        per_step = sum(seconds) / max(1, last - first + 1)
        if per_step >= LEAST_SHARE_OF_RUN * watched.step_s:
            shift = Shift(per_step, per_step, per_step, float("inf"))
            details = {"what": name, "num": len(seconds)}
            found.append(Finding("writing", None, shift, per_step / watched.step_s, details))
    own = [row["own_start_up_s"] for row in (metrics.get("watched") or {}).get("per_rank") or []]
    for rank, ahead in enumerate(against_others(np.array([own]))[0].tolist() if len(own) > 1 else ()):
        if ahead > max(START_UP_AHEAD_S, START_UP_AHEAD * (own[rank] - ahead)):
            found.append(Finding("start-up", rank, Shift(ahead, ahead, ahead, float("inf")), None))
    return found


def _notes(watched: _Watched) -> list[str]:
    notes = []
    if len(watched.ranks) == 1:
        notes.append("the run is a single process, so no ranks were compared")
    elif not watched.metrics.get("watched"):
        notes.append(
            "the run has not ended by itself, so a slow link, the start-up of the ranks and the calls of single "
            "collectives were not looked at"
        )
    if any(len(group) == 1 for group in watched.groups) and len(watched.ranks) > 1:
        notes.append(
            "ranks that do different work by design, as the stages of a pipeline, are compared by the time in which "
            "they neither compute nor wait: a stage that computes longer is not told from one with more to compute"
        )
    if watched.is_pipeline:
        notes.append("a slow link between stages is not told from a stage that is waited for")
    return notes
