"""Name the collective that rank 0 is in while rank 1 is late, and once it has come."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from support.agreement_worker import all_tasks_done
from testbed.distributed.flight_recorder import collective_under_way


def main(folder: Path) -> None:
    with all_tasks_done(folder, is_needed=True) as results:
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(2), group=pair)
        results.append(settled())
        if dist.get_rank() == 0:
            late = [
                dist.all_reduce(torch.ones(3, 4, dtype=torch.bfloat16), group=pair, async_op=True),
                dist.all_reduce(torch.ones(()), group=pair, async_op=True),
            ]
            results.append(collective_under_way())
            dist.send(torch.ones(1), 1)
            for work in late:
                work.wait()
        else:
            dist.recv(torch.ones(1), 0)
            dist.all_reduce(torch.ones(3, 4, dtype=torch.bfloat16), group=pair)
            dist.all_reduce(torch.ones(()), group=pair)
        dist.barrier()
        results.append(settled())


def settled() -> str | None:
    """Return what is under way once the recorder has noted what is over, a moment after the wait for it ends."""
    for _ in range(100):
        if (found := collective_under_way()) is None:
            break
        time.sleep(0.05)
    return found
