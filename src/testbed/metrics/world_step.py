"""What all ranks say of an optimizer step, gathered in one collective."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from testbed.distributed.process_group import gather_rows
from testbed.profiling.step_clock import RECORDED_PHASES, StepClock
from testbed.step import StepResult


@dataclass(frozen=True)
class WorldStep:
    """One step as all ranks saw it together."""

    loss: float  # mean over all target tokens of the global batch, nats
    num_target_tokens: int
    per_rank_step_time_s: list[float]
    per_rank_phase_s: dict[str, list[float]]  # by phase of the step clock
    stop: int = 0  # what a rank was asked to stop for by now (StopSignals.number); every rank has the same here

    @property
    def step_time_s(self) -> float:
        """The slowest rank's: the others wait for it."""
        return max(self.per_rank_step_time_s)


def gather_step(result: StepResult, clock: StepClock, device: torch.device, stop: int = 0) -> WorldStep:
    """Exact mean loss, every rank's times, and whether one was asked to stop, in one collective after the clock has
    stopped. All ranks call it."""
    phases = [clock.phase_s[name] for name in RECORDED_PHASES]
    numbers = [float(result.num_target_tokens), clock.step_time_s, float(stop), *phases]
    on_device = torch.tensor(numbers, dtype=torch.float64, device=device)
    mine = torch.cat([result.loss_sum.detach().to(torch.float64).view(1), on_device])
    rows = gather_rows(mine)
    loss_sum, num_tokens = sum(row[0] for row in rows), sum(row[1] for row in rows)
    loss = loss_sum / num_tokens if num_tokens else float("nan")
    per_phase = {name: [row[4 + place] for row in rows] for place, name in enumerate(RECORDED_PHASES)}
    return WorldStep(loss, int(num_tokens), [row[2] for row in rows], per_phase, int(max(row[3] for row in rows)))
