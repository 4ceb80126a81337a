"""Guess what a published row does not state: so that the run fits, since it ran. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from testbed.memory_model.devices import Device
from testbed.memory_model.job import Job
from testbed.memory_model.memory import fits, memory_of


@dataclass(frozen=True, kw_only=True)
class Unstated:
    """Say of each entry whether the row leaves it out, so that the job has a guess in its place."""

    device: bool = False  # no data sheet has it
    memory: bool = False
    heads: bool = False
    micro_batch: bool = False
    global_batch: bool = False
    precision: bool = False
    recompute: bool = False
    zero_stage: bool = False


def likely(job: Job, device: Device, unstated: Unstated) -> Job:
    """Return the first of the guesses that fits; the job as it is where none does."""
    if not (unstated.micro_batch or unstated.recompute or unstated.zero_stage):
        return job
    return next((guess for guess in _guesses(job, unstated) if fits(memory_of(guess), device)), job)


def _guesses(job: Job, unstated: Unstated) -> Iterator[Job]:
    """Yield the job with what it takes to need less, from the least unusual: smaller passes, recomputation, shards."""
    layout, micros, recomputes, layouts = job.layout, [job.micro_batch], [job.recompute], [job.layout]
    if unstated.micro_batch and job.micro_batch > 1 and not (job.micro_batch * job.accumulation) % 1:
        micros.append(1.0)
    if unstated.recompute:
        recomputes.append("full")
    ranks = layout.data * layout.context
    if unstated.zero_stage and ranks > 1:
        layouts += [replace(layout, zero_stage=stage, shard=ranks) for stage in (1, 3)]
    for shards in layouts:
        for recompute in recomputes:
            for micro in micros:
                again = job.micro_batch / micro if not unstated.global_batch else 1.0
                yield replace(
                    job, layout=shards, recompute=recompute, micro_batch=micro, accumulation=job.accumulation * again
                )
