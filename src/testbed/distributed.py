"""The process group: start, stop, what every rank says to every other. Rank numbers come from launch.py."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from testbed.launch import Launch
from testbed.measure import StepClock
from testbed.step import StepResult

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


def start_process_group(device: torch.device, launch: Launch, is_needed: bool) -> str | None:
    """Join the other ranks. A single process that needs a group (DeepSpeed) gets one without a network.

    Returns:
        The backend, or None where no group was needed.
    """
    if not (launch.is_distributed or is_needed):
        return None
    backend = "nccl" if device.type == "cuda" else "gloo"
    if launch.is_distributed:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device if backend == "nccl" else None)
    else:
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed insists on it
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
    return backend


def stop_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class WorldStep:
    """One step as all ranks saw it together."""

    loss: float  # mean over all target tokens of the global batch, nats
    num_target_tokens: int
    per_rank_step_time_s: list[float]
    per_rank_data_wait_s: list[float]

    @property
    def step_time_s(self) -> float:
        """The slowest rank's: the others wait for it."""
        return max(self.per_rank_step_time_s)


def gather_step(result: StepResult, clock: StepClock, device: torch.device) -> WorldStep:
    """Exact mean loss and every rank's times, in one collective after the clock has stopped. All ranks call it."""
    numbers = [float(result.num_target_tokens), clock.step_time_s, clock.data_wait_s]
    on_device = torch.tensor(numbers, dtype=torch.float64, device=device)
    mine = torch.cat([result.loss_sum.detach().to(torch.float64).view(1), on_device])
    rows = gather_rows(mine)
    loss_sum, num_tokens = sum(row[0] for row in rows), sum(row[1] for row in rows)
    loss = loss_sum / num_tokens if num_tokens else float("nan")
    return WorldStep(loss, int(num_tokens), [row[2] for row in rows], [row[3] for row in rows])


def gather_rows(mine: torch.Tensor) -> list[list[float]]:
    """Every rank's vector of numbers, in the order of the ranks. All ranks call it."""
    if not dist.is_initialized():
        return [mine.tolist()]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).tolist()


def gather_objects(mine: object) -> list:
    """Every rank's small Python object, in the order of the ranks. All ranks call it."""
    if not dist.is_initialized():
        return [mine]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def wait_for_everyone() -> None:
    if dist.is_initialized():
        dist.barrier()
