"""Count what FSDP gathers and reduces in one step on rank 0 of four, in a process group that sends nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as of_groups
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.agreement_worker import build
from support.settings import typed
from testbed.train.batches import TrainingBatches

RANKS = 4


def main(folder: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    checked = typed(json.loads((folder / "tasks.json").read_text()), RANKS)
    strategy = build(checked.settings)
    traffic: list[object] = []
    gather, reduce = of_groups.foreach_all_gather, dist.all_reduce
    of_groups.foreach_all_gather = lambda params, *a, **k: traffic.append(len(params)) or gather(params, *a, **k)
    dist.all_reduce = lambda tensor, *a, **k: traffic.append("all-reduce") or reduce(tensor, *a, **k)
    strategy.train_step(TrainingBatches(checked.train_file, checked.settings, 0, torch.device("cpu")).of_step(0), 0.01)
    reduced = traffic.count("all-reduce")
    norm_over_shards = 1
    counts = {"gathered": len(traffic) - reduced, "reduced": reduced - norm_over_shards}
    (folder / "results.json").write_text(json.dumps(counts))
