"""Build strategies as one rank of many, in process groups that send nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.agreement_worker import build
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.distributed import process_group
from testbed.distributed.launch import Launch

RANKS_OF_NODE = 8


def facts_of(arguments: list[str], launch: Launch) -> dict:
    start_s, before = time.perf_counter(), set(dist.distributed_c10d._world.pg_map)
    strategy = build(check_run(parse_command_line(arguments), launch).settings)
    process_group.limit_waiting(20.0)
    new = set(dist.distributed_c10d._world.pg_map) - before
    held = {tensor.data_ptr(): tensor.nbytes for tensor in strategy.model_states()["parameters"]}
    facts = {
        "data_rank": strategy.data_rank,
        "data_world_size": strategy.data_world_size,
        "group_sizes": sorted({group.size() for group in new}),
        "parameter_bytes": sum(held.values()),
        "seconds": time.perf_counter() - start_s,
    }
    strategy.close()
    return facts


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    task = json.loads((folder / "tasks.json").read_text())
    rank, ranks = task["rank"], task["ranks"]
    launch = Launch(rank, rank % RANKS_OF_NODE, ranks, RANKS_OF_NODE)
    os.environ |= launch.as_variables("localhost", 1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    (folder / "results.json").write_text(json.dumps([facts_of(each, launch) for each in task["optimized"]]))
