"""Plan: estimate every candidate, put the best first, and say what costs each the most. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from testbed.memory_model.devices import Device
from testbed.memory_model.job import Job, Machine
from testbed.memory_model.memory import MemoryEstimate, fits, memory_of, needs
from testbed.memory_model.model_states import FP32, MOMENTS, whole
from testbed.planner.command import command_of
from testbed.planner.rows import own_rows
from testbed.planner.step_time import BETWEEN, BUBBLE, WITHIN, Constants, StepTime, step_time

NORMAL_WIDTH = 1.645  # standard deviations on each side that hold 90 % of a normal distribution
FORMAT = 1  # of plan.json, and properties of a run that are in it
RECORDED = (
    *("fits", "needs_bytes", "spare_bytes", "host_bytes", "checkpoint_bytes", "tokens_per_s", "mfu", "limited_by"),
)
MORE_WORK = ("none", "selective_op", "full")  # kinds of recomputation
DAY_S, HOUR_S = 86400.0, 3600.0
UNITS = (
    ("seconds", DAY_S, 2 / 1440),
    ("minutes", 1440.0, 2 / 24),
    ("hours", 24.0, 2.0),
)  # name, how many are a day, below how many days
GIVEN_UP = 1.05  # times the fastest estimate that the simplest run may take; more is too much for being simple
SAME = 1.01  # times the fastest of equally simple runs, up to where the one that needs least memory is taken
NEAR_FULL = 0.05  # of the memory
WORTH_A_TRY = 1.3  # times as fast, from where on a run that is tight is named
PRODUCTS = ("matrix products", "attention", "head")  # parts that compute what the model asks for
BELOW_PEAK, UNEVEN = "kernels below peak", "uneven stages"
LOSSES = {"elementwise": "memory traffic", "optimizer": "memory traffic", WITHIN: "network", BETWEEN: "network"}
FORWARD_AGAIN = 0.25  # of the products, where each block's forward pass is computed twice
# How far a part may be off in one run and not in another, as a share of it: estimates. What is off in both cancels.
PART_ERRORS = {
    "matrix products": 0.05,
    "attention": 0.1,
    "head": 0.1,
    "elementwise": 0.2,
    "optimizer": 0.2,
    BUBBLE: 0.1,
}
OTHER_ERROR = 0.4  # of collectives, the host, stragglers, offloading
FORGOTTEN = 0.02  # of a step: what the formulas know nothing of
RESTART_S = 300.0  # assumed
SAVED_PER_S = 1e9  # bytes of a checkpoint that a node writes in a second, assumed where flags do not say
# the simplest first: what a rank keeps, then what it sends
KEEPS = ("whole", "shards", "parts", "stages", "axes")
SENDS = ("nothing", "buckets", "tensors", "at_end", "zero", "shards")


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A candidate and its estimates."""

    job: Job
    machine: Machine
    memory: MemoryEstimate
    time: StepTime

    @property
    def needs_bytes(self) -> float:
        """Memory that it takes where there is room: with what PyTorch's allocator reserves, and the context."""
        return roomy_bytes(self.memory, self.machine.device)

    @property
    def fits(self) -> bool:
        return fits(self.memory, self.machine.device)

    @property
    def is_tight(self) -> bool:
        """Return whether it fits only if the allocator frees what it cached, which costs time, or may not suffice."""
        return self.fits and self.spare_bytes < 0

    @property
    def is_near_full(self) -> bool:
        """Return whether so little is left that an error of the estimate could end the run."""
        return self.spare_bytes < NEAR_FULL * self.machine.device.memory_bytes

    @property
    def spare_bytes(self) -> float:
        """Memory of the device that is left; below zero: what is missing, or what the allocator must do without."""
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
    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint: fp32 weights and moments of the whole model."""
        job = self.job
        moments = MOMENTS * job.model.parameters
        if job.optimizer == "muon":
            moments -= FP32 * whole(job.model).matrices
        return FP32 * job.model.parameters + moments

    @property
    def host_bytes(self) -> float:
        """Host memory that --offload takes on each node, by DeepSpeed's own estimate of it (its
        `estimate_zero3_model_states_mem_needs`): 16 bytes for each parameter of the node's share, 18 with the weights,
        no less than a whole fp32 model for each rank, and half as much again for buffers."""
        job = self.job
        if job.offload not in ("optimizer", "parameters"):
            return 0.0
        ranks = min(self.machine.devices, self.machine.per_node)
        share = (16 if job.offload == "optimizer" else 18) * ranks / self.machine.devices
        return 1.5 * job.model.parameters * max(4 * ranks, share)

    @property
    def limited_by(self) -> str:
        """Return what costs the step most against the ideal, the model's FLOPs at the devices' peak.

        "memory" if the run does not fit.
        """
        if not self.fits:
            return "memory"
        computing = sum(self.time.parts.get(part, 0.0) for part in PRODUCTS)
        again = computing * FORWARD_AGAIN * self.job.recompute_share if self.job.recompute == "full" else 0.0
        below = computing - again - self.time.uneven - self.mfu * self.time.seconds
        losses = {"recomputation": again, BELOW_PEAK: below, UNEVEN: self.time.uneven}
        for part, took in self.time.parts.items():
            if part not in PRODUCTS:
                losses[LOSSES.get(part, part)] = losses.get(LOSSES.get(part, part), 0.0) + took
        return max(losses, key=lambda name: losses[name])

    def ratio_to(self, first: PlannedRun) -> tuple[float, float, float]:
        """Return this step's time over another's, and the 90 % interval of that.

        Two runs share devices, kernels and most parts, and what is off in both cancels. So the ratio is known better
        than either time: what is left is the error of the parts of which one has more than the other.
        """
        names = {*self.time.parts, *first.time.parts}
        shares = [
            self.time.parts.get(name, 0.0) / self.time.seconds - first.time.parts.get(name, 0.0) / first.time.seconds
            for name in names
        ]
        errors = [share * PART_ERRORS.get(name, OTHER_ERROR) for share, name in zip(shares, names, strict=True)]
        half = NORMAL_WIDTH * math.hypot(FORGOTTEN, *errors) if self is not first else 0.0
        ratio = self.time.seconds / first.time.seconds
        return ratio, ratio * math.exp(-half), ratio * math.exp(half)

    @property
    def simplicity(self) -> tuple[Any, ...]:
        """Return a key by which the simpler of two runs comes first: what fewer things can go wrong with."""
        entry, layout = self.job.strategy, self.job.layout
        if entry is None:
            return (len(KEEPS),)
        stage = layout.zero_stage if entry.sends == "zero" else 0
        axes = sum(size > 1 for size in (layout.shard, layout.tensor, layout.context, layout.pipeline))
        is_hybrid = layout.shard < layout.data * layout.context  # context ranks hold shards too
        return (KEEPS.index(entry.keeps), axes, SENDS.index(entry.sends), stage, is_hybrid, self.job.offload)


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures of a whole machine, and what they cost, all in seconds: Young 1974, Daly 2006
    (doi:10.1016/j.future.2004.11.016)."""

    between_s: float  # mean time between failures that stop the run
    save_s: float  # a checkpoint, while which nothing is trained
    restart_s: float = RESTART_S  # from the failure to the first step after it

    @property
    def interval_s(self) -> float:
        """Training time between two checkpoints that loses least: Daly's equation 37, Young's square root corrected."""
        if self.save_s >= 2 * self.between_s:
            return self.between_s
        share = self.save_s / (2 * self.between_s)
        young_s = math.sqrt(2 * self.save_s * self.between_s)
        return young_s * (1 + math.sqrt(share) / 3 + share / 9) - self.save_s

    @property
    def goodput(self) -> float:
        """Training time over wall time with that interval, for failures that come at random (Daly's equation 20)."""
        cycle = (self.interval_s + self.save_s) / self.between_s
        if cycle + self.restart_s / self.between_s > 50:  # e^50: it never gets there
            return 0.0
        wall_s = self.between_s * math.exp(self.restart_s / self.between_s) * math.expm1(cycle)
        return self.interval_s / wall_s


def _nodes(machine: Machine) -> int:
    return -(-machine.devices // machine.per_node)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Work of a whole run, and the price of a device.

    Attributes:
        tokens: to be trained on.
        price: of a device and hour.
        mtbf_hours: mean time between failures of one node; None: it never fails.
        save_s: as in `Failures`; None: what a checkpoint takes at SAVED_PER_S of each node.
        deadline: days that the whole run may take.
    """

    tokens: float | None = None
    price: float | None = None
    mtbf_hours: float | None = None
    save_s: float | None = None
    deadline: float | None = None

    def saving_s(self, run: PlannedRun) -> float:
        """Return the seconds that a checkpoint takes: each rank writes a part, also of what all hold."""
        return run.checkpoint_bytes / SAVED_PER_S / _nodes(run.machine) if self.save_s is None else self.save_s

    def failures(self, run: PlannedRun) -> Failures | None:
        """Return the failures of the whole machine; None if it never fails."""
        if self.mtbf_hours is None:
            return None
        between_s = self.mtbf_hours * HOUR_S / _nodes(run.machine)
        return Failures(between_s=between_s, save_s=self.saving_s(run))

    def goodput(self, run: PlannedRun) -> float:
        """Training time over wall time."""
        failures = self.failures(run)
        return 1.0 if failures is None else failures.goodput

    def days(self, run: PlannedRun, step_s: float | None = None) -> float | None:
        """Return the wall time of the whole run; None where failures never let it end. `step_s`: an end of the interval
        in place of the estimate."""
        goodput = self.goodput(run)
        if self.tokens is None or not goodput:
            return None
        steps = math.ceil(self.tokens / run.job.tokens_per_step)
        return steps * (step_s or run.time.seconds) / DAY_S / goodput

    def cost(self, run: PlannedRun, step_s: float | None = None) -> float | None:
        days = self.days(run, step_s)
        if days is None or self.price is None:
            return None
        return days * 24 * self.price * run.machine.devices


def plan(
    jobs: Iterable[Job], machine: Machine, constants: Constants, known: dict[Any, Any] | None = None
) -> list[PlannedRun]:
    """Return the jobs with their estimates, the one to take first; where none fits, the one that needs least memory.

    Then come those that fit, by time, those that are tight, and the others by what they need. Of those that are
    `as_fast` as the fastest and not near full, the simplest is the one to take, and of equally simple ones that take
    the SAME time the one that needs least memory. A job that recomputes more than one that has room and is the same
    otherwise is left out: it only does more work.

    Args:
        known: estimates that were made for near questions, which are added to.
    """
    known = {} if known is None else known
    found = _frugal(jobs, machine.device)
    if found and not any(fits(memory, machine.device) for _, memory in found):
        found = [min(found, key=lambda each: roomy_bytes(each[1], machine.device))]
    runs: list[PlannedRun] = []
    for job, memory in found:
        key = machine.devices, job
        if key not in known:
            known[key] = PlannedRun(job=job, machine=machine, memory=memory, time=step_time(job, machine, constants))
        runs.append(known[key])
    ordered = sorted(
        runs, key=lambda run: (not run.fits, run.is_tight, run.time.seconds if run.fits else run.needs_bytes)
    )
    if not ordered or not ordered[0].fits:
        return ordered
    alike = as_fast(ordered)
    simplest = min((run.is_near_full, run.simplicity) for run in alike)
    alike = [run for run in alike if (run.is_near_full, run.simplicity) == simplest]
    least = min(run.time.seconds for run in alike)
    taken = min((run for run in alike if run.time.seconds <= SAME * least), key=lambda run: run.needs_bytes)
    return [taken, *(run for run in ordered if run is not taken)]


def roomy_bytes(memory: MemoryEstimate, device: Device) -> float:
    """Return the memory that a job takes where there is room."""
    return needs(memory, device) if device.kind == "cpu" else memory.reserved + device.context_bytes


def as_fast(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that the estimate does not tell from the fastest; those that are tight only among each other.

    They take at most GIVEN_UP times as long as it, and their ratio to the fastest run of each strategy may be 1.
    """
    alike = [run for run in runs if run.fits and run.is_tight == runs[0].is_tight]
    least = min(run.time.seconds for run in alike)
    near = sorted((run for run in alike if run.time.seconds <= GIVEN_UP * least), key=lambda run: run.time.seconds)
    first = best_of_each(near)
    return [run for run in near if all(run.ratio_to(other)[1] <= 1 for other in first)]


def _frugal(jobs: Iterable[Job], device: Device) -> list[tuple[Job, MemoryEstimate]]:
    """Return the jobs that recompute no more than memory asks for: up to the first that has room, tight ones too. Of
    those that do not fit, larger micro batches are left out."""
    alike: dict[Any, list[Job]] = {}
    for job in jobs:
        alike.setdefault((_mesh_of(job), job.micro_batch), []).append(job)
    found = []
    too_large = set()
    for group in alike.values():
        estimated: list[tuple[Job, MemoryEstimate]] = []
        for job in sorted(group, key=lambda job: MORE_WORK.index(job.recompute)):
            kind = _mesh_of(job), job.recompute
            if kind in too_large and job.accumulation > 1:  # with one micro batch no gradients lie beside its passes
                continue
            memory = memory_of(job)
            estimated.append((job, memory))
            if not fits(memory, device):
                too_large.add(kind)
            elif roomy_bytes(memory, device) <= device.memory_bytes:
                break
        found += [each for each in estimated if fits(each[1], device)] or estimated
    return found


def _mesh_of(job: Job) -> tuple[Any, ...]:
    return job.run_type, job.layout, job.schedule, job.offload


def best_of_each(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the first run of each strategy and mesh: the best micro batch and recomputation."""
    first: dict[Any, PlannedRun] = {}
    for run in runs:
        first.setdefault(_mesh_of(run.job), run)
    return list(first.values())


def name_of(job: Job) -> str:
    """Return the strategy and its mesh in few words: `fsdp 8 x 4 copies`, `ZeRO-2`, `pipeline 4 x 2 data, 1f1b`."""
    layout, entry, name = job.layout, job.strategy, job.run_type or job.stack
    if entry is not None and entry.sends == "zero":
        return f"ZeRO-{layout.zero_stage}" + (f", {job.offload} offloaded" if job.offload != "none" else "")
    shards = max(1, layout.shard // layout.context) if layout.zero_stage else 1
    copies = layout.data // shards
    if entry is not None and entry.keeps == "shards":
        return name + (f" {shards} x {copies} copies" if copies > 1 else "")
    is_mesh = entry is not None and entry.keeps == "axes"
    sizes = {"": layout.pipeline * layout.tensor}
    if is_mesh:
        sizes = {"stages": layout.pipeline, "tensor": layout.tensor, "context": layout.context, "shards": shards}
    words = [f"{size} {axis}".strip() for axis, size in sizes.items() if size > 1]
    words += [f"{copies} {'copies' if is_mesh else 'data'}"] if copies > 1 and words else []
    if layout.zero_stage and layout.context == layout.shard > 1:  # else as whole weights on context ranks
        words[-1] += f" in {layout.shard} shards"
    schedule = f", {job.schedule}" if job.schedule and layout.pipeline > 1 else ""
    schedule += f", {layout.virtual_stages} stages each" if layout.virtual_stages > 2 else ""
    return " ".join([name, *([" x ".join(words)] if words else [])]) + schedule


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
    ends = (time.seconds, time.low, time.high)
    words = (
        f"{name_of(job)} on {run.machine.devices} x {device.name}, {settings_of(job)}: needs "
        f"{run.needs_bytes / 2**30:.1f} of {device.memory_bytes / 2**30:.1f} GiB per device"
        f"{', which is tight' * run.is_tight}; a step of {job.global_batch:,.0f} x {job.model.seq_length:,} tokens "
        f"takes {_span(*ends)} s"
    )
    if budget.tokens is not None and not budget.goodput(run):
        words += f"; {_short(budget.tokens)} tokens are never reached, as failures leave no time to train"
    elif budget.tokens is not None:
        days = [budget.days(run, seconds) or 0.0 for seconds in ends]
        words += f"; {_short(budget.tokens)} tokens take {duration(*days)}"
        if budget.price is not None:
            cost = _span(*(budget.cost(run, seconds) or 0.0 for seconds in ends))
            words += f" and cost {cost} in the currency of --price_per_gpu_hour"
        if budget.deadline is not None:
            limit = f"--deadline {duration(budget.deadline)}"
            late = ", though the upper end of the interval is not" if days[2] > budget.deadline else ""
            words += f", within {limit}{late}" if days[0] <= budget.deadline else (
                f", longer than {limit}: --sweep shows what other numbers of devices take"
            )  # fmt: skip
    alike = as_fast(runs)
    if len(alike) > 1:
        words += (
            f". {len(alike) - 1} more of {len(runs) - 1} may be as fast as the fastest, by the interval of their ratio "
            f"to it. Taken is the simplest (of those that leave {NEAR_FULL:.0%} of the memory, if some do). Of "
            f"equally simple ones it is that with least memory, unless another is {SAME - 1:.0%} faster"
        )
    return ". ".join([words, *advice(runs)]) + "."


def advice(runs: Sequence[PlannedRun]) -> list[str]:
    """Return what an experienced reader would object to in the first run, where it is true."""
    run, device, said = runs[0], runs[0].machine.device, []
    if run.is_near_full and not run.is_tight:
        said.append(f"It leaves {run.spare_bytes / 2**30:.1f} GiB, which an error of the estimate may use up")
    if tight := faster_but_tight(runs):
        said.append(f"{tight}: try whether it fits, with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    if device.kind == "cuda" and run.time.label.startswith("uncalibrated") and device.name not in _known_devices():
        said.append(f"No published run on {device.name} is known, so what it reaches of its peak is an estimate")
    return said


def faster_but_tight(runs: Sequence[PlannedRun]) -> str | None:
    """Return which run is tight and so much faster than the first, which is not, that it is worth a try."""
    tight = [run for run in runs if run.is_tight and not runs[0].is_tight]
    fastest = min(tight, key=lambda run: run.time.seconds, default=runs[0])
    gain = runs[0].time.seconds / fastest.time.seconds
    return f"{name_of(fastest.job)} would be {gain:.1f} times as fast and is tight" if gain > WORTH_A_TRY else None


@cache
def _known_devices() -> frozenset[str]:
    return frozenset(row.machine.device.name for row in own_rows())


def _short(number: float) -> str:
    """Return `10B`, `1.5M`."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:g}{suffix}"
    return f"{number:,.0f}"


def duration(days: float, *interval: float) -> str:
    """Return days as people say them, in seconds to days, with the ends of an interval where there is one."""
    unit, of_day = next(((name, of_day) for name, of_day, most in UNITS if days < most), ("days", 1.0))
    values = [of_day * each for each in (days, *interval)]
    return f"{_span(*values) if interval else three(values[0])} {unit}"


def _span(value: float, low: float, high: float) -> str:
    return f"{three(value)} ({three(low)} to {three(high)})"


def three(value: float) -> str:
    """Return three digits, all of a large number: 0.0123, 1.36, 1,010."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plan_record(
    runs: Sequence[PlannedRun], budget: Budget, work: Sequence[str] | None, command_line: str
) -> dict[str, Any]:
    """Return the content of plan.json. Bytes and seconds.

    Args:
        work: flags of the model and the batch as they were typed; None where no command trains the model.
    """
    return {
        "format": FORMAT,
        "command_line": command_line,
        "label": runs[0].time.label,
        "machine": asdict(runs[0].machine),
        "budget": asdict(budget),
        "runs": [
            {
                "name": name_of(run.job),
                "command": None if work is None else command_of(run.job, run.machine, work),
                "job": asdict(run.job),
                **{name: getattr(run, name) for name in RECORDED},
                **{f"{name}_bytes": getattr(run.memory, name) for name in ("allocated", "reserved", "steady")},
                "memory_bytes": run.memory_by_kind,
                "peak_moment": run.memory.peak_moment,
                "step_s": {"estimate": run.time.seconds, "low": run.time.low, "high": run.time.high},
                "parts_s": dict(run.time.parts),
                **{name: getattr(budget, name)(run) for name in ("days", "cost", "goodput")},
            }
            for run in runs
        ],
    }
