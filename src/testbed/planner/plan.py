"""Plan: estimate every candidate, put the best first, and say what limits each. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from testbed.memory_model.devices import Device
from testbed.memory_model.job import Job, Machine
from testbed.memory_model.memory import MemoryEstimate, fits, memory_of, needs
from testbed.planner.goodput import RESTART_S, SAVE_S, Failures
from testbed.planner.step_time import StepTime

MORE_WORK = ("none", "selective_op", "full")  # kinds of recomputation
DAY_S, HOUR_S = 86400.0, 3600.0
TIGHT = 0.1  # of the memory: with less to spare an estimate may be too low, and the allocator frees and retries
LIMITS = {"matrix products": "matrix products", "attention": "matrix products", "head": "matrix products"}
LIMITS |= {"elementwise": "memory traffic", "optimizer": "memory traffic", "bubble": "bubble", "host": "host"}


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A candidate and its estimates."""

    job: Job
    machine: Machine
    memory: MemoryEstimate
    time: StepTime

    @property
    def needs_bytes(self) -> float:
        return needs(self.memory, self.machine.device)

    @property
    def fits(self) -> bool:
        return fits(self.memory, self.machine.device)

    @property
    def spare_bytes(self) -> float:
        """Memory of the device that is left; below zero: missing."""
        return self.machine.device.memory_bytes - self.needs_bytes

    @property
    def memory_by_kind(self) -> dict[str, float]:
        """Bytes at the peak, by kind. They add up to `needs_bytes`."""
        kinds = dict(self.memory.moments[self.memory.peak_moment])
        context = self.machine.device.context_bytes
        rest = self.needs_bytes - sum(kinds.values()) - context
        between = "heap and libraries" if self.machine.device.kind == "cpu" else "fragmentation"
        return kinds | {between: rest, "context": context}

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens_per_step / self.time.seconds

    @property
    def mfu(self) -> float:
        """FLOPs of the model over what the devices do at most in its precision, counted as src/gpt2.py counts them."""
        peak = self.machine.device.peak_of(self.job.precision) * self.machine.devices
        return self.tokens_per_s * self.job.model.flops_per_token(is_whole=True) / peak

    @property
    def limited_by(self) -> str:
        """Return the kind of part that takes most of the step; "memory" if the run does not fit."""
        if not self.fits:
            return "memory"
        seconds: dict[str, float] = {}
        for part, took in self.time.parts.items():
            limit = "network" if "communication" in part else LIMITS.get(part, part)
            seconds[limit] = seconds.get(limit, 0.0) + took
        return max(seconds, key=lambda limit: seconds[limit])


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Work of a whole run, and the price of a device.

    Attributes:
        tokens: to be trained on.
        price: of a device and hour.
        mtbf_hours: mean time between failures of one node; None: it never fails.
        save_s, restart_s: as in `Failures`.
    """

    tokens: float | None = None
    price: float | None = None
    mtbf_hours: float | None = None
    save_s: float = SAVE_S
    restart_s: float = RESTART_S

    def failures(self, machine: Machine) -> Failures | None:
        """Return the failures of the whole machine; None if it never fails."""
        if self.mtbf_hours is None:
            return None
        nodes = -(-machine.devices // machine.per_node)
        return Failures(between_s=self.mtbf_hours * HOUR_S / nodes, save_s=self.save_s, restart_s=self.restart_s)

    def goodput(self, machine: Machine) -> float:
        """Training time over wall time."""
        failures = self.failures(machine)
        return 1.0 if failures is None else failures.goodput

    def days(self, run: PlannedRun, step_s: float | None = None) -> float | None:
        """Return the wall time of the whole run. `step_s`: an end of the interval in place of the estimate."""
        if self.tokens is None:
            return None
        goodput = self.goodput(run.machine)
        steps = self.tokens / run.job.tokens_per_step
        return steps * (step_s or run.time.seconds) / DAY_S / goodput if goodput else float("inf")

    def cost(self, run: PlannedRun, step_s: float | None = None) -> float | None:
        days = self.days(run, step_s)
        if days is None or self.price is None:
            return None
        return days * 24 * self.price * run.machine.devices


def plan(jobs: Iterable[Job], machine: Machine, time_of: Callable[[Job], StepTime]) -> list[PlannedRun]:
    """Return the jobs with their estimates: those that fit first, by time, the others by what they need.

    A job that recomputes more than one that fits and is the same otherwise is left out: it only does more work.

    Args:
        time_of: `step_time` with constants, or a machine's calibration.
    """
    runs = [
        PlannedRun(job=job, machine=machine, memory=memory, time=time_of(job))
        for job, memory in _frugal(jobs, machine.device)
    ]
    return sorted(runs, key=lambda run: (not run.fits, run.time.seconds if run.fits else run.needs_bytes))


def _frugal(jobs: Iterable[Job], device: Device) -> list[tuple[Job, MemoryEstimate]]:
    """Return the jobs that recompute no more than memory asks for."""
    alike: dict[Job, list[Job]] = {}
    for job in jobs:
        alike.setdefault(replace(job, recompute="", compiled=False), []).append(job)
    found = []
    for group in alike.values():
        estimated = [(job, memory_of(job)) for job in sorted(group, key=lambda job: MORE_WORK.index(job.recompute))]
        fitting = [each for each in estimated if fits(each[1], device)]
        found += fitting[:1] or estimated
    return found


def best_of_each(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the first run of each strategy and mesh: the best micro batch and recomputation."""
    first: dict[Any, PlannedRun] = {}
    for run in runs:
        first.setdefault((run.job.run_type, run.job.layout, run.job.schedule, run.job.offload), run)
    return list(first.values())


def name_of(job: Job) -> str:
    """Return the strategy and its mesh in few words: `fsdp 8 x 4 copies`, `ZeRO-2`, `pipeline 4 x 2 data, 1f1b`."""
    layout, name = job.layout, job.run_type or job.stack
    data = f" x {layout.data} data" if layout.data > 1 else ""
    if job.strategy is not None and job.strategy.sends == "zero":
        name = f"ZeRO-{layout.zero_stage}"
        name += f", {job.offload} offloaded" if job.offload != "none" else ""
    elif job.strategy is not None and job.strategy.sends == "shards":
        name += f" {layout.shard} x {layout.data // layout.shard} copies" if layout.shard < layout.data else ""
    elif layout.pipeline > 1:
        name += f" {layout.pipeline}{data}" + (f", {job.schedule}" if job.schedule else "")
    elif layout.tensor > 1:
        name += f" {layout.tensor}{data}"
    return name


def settings_of(job: Job) -> str:
    """Return batch and recomputation in words."""
    recompute = {"none": "", "full": ", recompute blocks", "selective_op": ", recompute selectively"}
    return f"micro batch {job.micro_batch:g} x {job.accumulation:g}{recompute.get(job.recompute, job.recompute)}"


def headline(runs: Sequence[PlannedRun], budget: Budget) -> str:
    """Return the answer in a sentence: strategy, settings, memory, time, cost; and how many others are as fast.

    Args:
        runs: one of each strategy and mesh, the best first.
    """
    run = runs[0]
    job, time, device = run.job, run.time, run.machine.device
    words = f"{name_of(job)} on {run.machine.devices} x {device.name}, {settings_of(job)}: needs "
    words += f"{run.needs_bytes / 2**30:.1f} of {device.memory_bytes / 2**30:.1f} GiB per device"
    words += "; a step of " if run.spare_bytes >= TIGHT * device.memory_bytes else ", which is tight; a step of "
    words += (
        f"{job.global_batch:,.0f} x {job.model.seq_length:,} tokens takes {_span(time.seconds, time.low, time.high)} s"
    )
    days = [budget.days(run, seconds) for seconds in (time.seconds, time.low, time.high)]
    if budget.tokens is not None and not budget.goodput(run.machine):
        words += f"; {_short(budget.tokens)} tokens are never reached, as failures leave no time to train"
    elif budget.tokens is not None and None not in days:
        words += f"; {_short(budget.tokens)} tokens take {_span(*days)} days"  # type: ignore[arg-type]
        costs = [budget.cost(run, seconds) for seconds in (time.seconds, time.low, time.high)]
        if None not in costs:
            words += " and cost {} ({} to {}) in the currency of --price_per_gpu_hour".format(
                *(f"{cost:,.0f}" for cost in costs)
            )
    as_fast = sum(other.fits and other.time.seconds <= time.high for other in runs[1:])
    if as_fast:
        words += f". {as_fast} more of {len(runs) - 1} lie within its interval: only a measurement tells them apart"
    return words + "."


def _short(number: float) -> str:
    """Return `10B`, `1.5M`."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:g}{suffix}"
    return f"{number:,.0f}"


def _span(value: float, low: float, high: float) -> str:
    return f"{three(value)} ({three(low)} to {three(high)})"


def three(value: float) -> str:
    """Return three digits, all of a large number: 0.0123, 1.36, 1,010."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
