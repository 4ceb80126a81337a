"""Gather what all ranks measured of an optimizer step, in one collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from testbed.distributed import watchdog
from testbed.distributed.process_group import gather_rows
from testbed.profiling.collective_watch import NUMBER
from testbed.profiling.step_clock import RECORDED_PHASES, StepClock
from testbed.step import StepResult


@dataclass(frozen=True)
class WorldStep:
    """One optimizer step over all ranks."""

    loss: float  # mean over all target tokens of the global batch, nats
    num_target_tokens: int
    per_rank_step_time_s: list[float]
    per_rank_phase_s: dict[str, list[float]]  # by phase of the step clock
    stop: int = 0  # largest StopSignals.number of all ranks; 0: no rank was asked to stop
    grad_norm: float | None = None  # of the whole model, the same on every rank; not finite: fp16 skipped the update
    per_rank_watched: dict[str, list[float]] = field(default_factory=dict)  # by name of WATCHED; empty: not watched

    @property
    def step_time_s(self) -> float:
        """Time of the slowest rank, for which the others wait."""
        return max(self.per_rank_step_time_s)


def gather_step(result: StepResult, clock: StepClock, device: torch.device, stop: int = 0) -> WorldStep:
    """Return the exact mean loss, every rank's times and whether a rank was asked to stop.

    All ranks call it after the clock has stopped.
    """
    watchdog.enter("exchange")
    phases = [clock.phase_s[name] for name in RECORDED_PHASES]
    numbers = [float(result.num_target_tokens), clock.step_time_s, float(stop), *phases, *clock.watched.values()]
    rows = _gather(result.loss_sum, numbers, device)
    loss, num_tokens = _mean_loss(rows)
    watched = {name: [row[4 + len(phases) + place] for row in rows] for place, name in enumerate(clock.watched)}
    if watched and clock.watch is not None:
        clock.watch.limit_cost(max(watched.pop(NUMBER)), max(row[2] for row in rows))
    return WorldStep(
        loss,
        num_tokens,
        per_rank_step_time_s=[row[2] for row in rows],
        per_rank_phase_s={name: [row[4 + place] for row in rows] for place, name in enumerate(RECORDED_PHASES)},
        stop=int(max(row[3] for row in rows)),
        grad_norm=None if result.grad_norm is None else float(result.grad_norm),
        per_rank_watched=watched,
    )


def gather_loss(loss_sum: torch.Tensor, num_target_tokens: int, device: torch.device) -> tuple[float, int]:
    """Return the exact mean loss over all ranks' target tokens, and their number. All ranks call it."""
    return _mean_loss(_gather(loss_sum, [float(num_target_tokens)], device))


def _gather(loss_sum: torch.Tensor, numbers: Sequence[float], device: torch.device) -> list[list[float]]:
    on_device = torch.tensor(numbers, dtype=torch.float64, device=device)
    return gather_rows(torch.cat([loss_sum.detach().to(torch.float64).view(1), on_device]))


def _mean_loss(rows: Sequence[Sequence[float]]) -> tuple[float, int]:
    loss_sum, num_tokens = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return loss_sum / num_tokens if num_tokens else float("nan"), int(num_tokens)
