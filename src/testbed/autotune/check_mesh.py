"""Build strategies as single ranks of a large mesh would, on one machine: no other rank, no device, no memory.

Process groups send nothing (PyTorch's fake backend) and tensors have shapes but no storage. So settings, groups,
shards, stages and schedules are those of a real start, and what would end one ends here. No step is made: what a
kernel, a driver or a network would refuse is not found.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as torch_ddp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.config.run_types import STRATEGIES
from testbed.config.settings import RunSettings
from testbed.data.token_file import TokenFileWriter
from testbed.distributed import process_group
from testbed.distributed.launch import Launch
from testbed.errors import first_line
from testbed.memory_model.job import Job, Machine
from testbed.memory_model.model_states import ends_of_each, held_by_rank
from testbed.model.gpt2 import GPT2
from testbed.planner.command import arguments_of, mesh_of
from testbed.strategies import Strategy, build_strategy
from testbed.strategies.deepspeed_zero import import_deepspeed

# What the first build of a process would import, in seconds for each rank.
PRELOADED = (
    *("deepspeed.runtime.zero.muon.muon_optimizer", "torch._dynamo", "torch.distributed.pipelining"),
    *(f"testbed.strategies.{entry.module}" for entry in STRATEGIES.values()),
)
META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class BuiltRank:
    """One rank as it was built, or the reason that it could not be."""

    rank: int
    fault: str | None = None
    data_rank: int = 0
    data_world_size: int = 1
    group_sizes: tuple[int, ...] = ()  # of the groups that it made
    parameter_bytes: int = 0  # that it holds
    seconds: float = 0.0


def role_ranks(job: Job) -> list[int]:
    """Return ranks that stand for all ranks of a job.

    The first and the last are taken of pipeline ranks with as many blocks, of tensor ranks with as many rows of the
    vocabulary, and of data and context ranks, whose shards differ where rows do not divide. All are in groups of the
    same sizes.
    """
    mesh = mesh_of(job)
    rows = -(-job.model.vocab // mesh.tensor)  # DTensor cuts so: the last pieces are smaller, or empty
    pieces = [min(max(job.model.vocab - tensor * rows, 0), rows) for tensor in range(mesh.tensor)]
    inner = range(mesh.data * mesh.context)
    return [
        (stage * len(inner) + data) * mesh.tensor + tensor
        for stage in ends_of_each([held.kind for held in held_by_rank(job)])
        for data in ends_of_each([None for _ in inner])
        for tensor in ends_of_each(pieces)
    ]


def build_ranks(
    jobs: Sequence[Sequence[str]], ranks_of: Sequence[Sequence[int]], world_size: int, per_node: int
) -> list[list[BuiltRank]]:
    """Build each job on its ranks, one rank after the other in as many processes as there are cores.

    DeepSpeed's jobs are built in a process for each rank, as it keeps its groups for good.

    Args:
        jobs: flags of src/gpt2.py, with token files.
        ranks_of: the ranks of each job.
    """
    context = multiprocessing.get_context("forkserver")  # a fork of this process would share its threads' locks
    context.set_forkserver_preload([__name__, *PRELOADED])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed looks for one, and says so
    with_deepspeed, others = _works(jobs, ranks_of, world_size, per_node)
    workers = os.cpu_count() or 1
    shares = [[work] for work in with_deepspeed] + [others[first::workers] for first in range(workers)]
    made: dict[tuple[int, int], BuiltRank] = {}
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        for found in pool.map(_build, filter(None, shares)):
            made |= found
    return [[made[number, rank] for rank in ranks] for number, ranks in enumerate(ranks_of)]


_Work = tuple[Launch, dict[int, list[str]]]  # a rank, and the jobs, by number, that it is to be built for


def _works(
    jobs: Sequence[Sequence[str]], ranks_of: Sequence[Sequence[int]], world_size: int, per_node: int
) -> tuple[list[_Work], list[_Work]]:
    """Return the work of each rank: DeepSpeed's jobs, and all others."""
    works: tuple[list[_Work], list[_Work]] = ([], [])
    has_deepspeed = [STRATEGIES[parse_command_line(list(job)).values["run_type"]].engine == "deepspeed" for job in jobs]
    for rank in sorted({rank for ranks in ranks_of for rank in ranks}):
        launch = Launch(rank, rank % per_node, world_size, per_node)
        for kind, found in zip((True, False), works, strict=True):
            mine = [number for number, ranks in enumerate(ranks_of) if rank in ranks and has_deepspeed[number] is kind]
            if mine:
                found.append((launch, {number: list(jobs[number]) for number in mine}))
    return works


def _build(works: Sequence[_Work]) -> dict[tuple[int, int], BuiltRank]:
    """Return what was built, by number of the job and rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    made: dict[tuple[int, int], BuiltRank] = {}
    for launch, jobs in works:
        os.environ |= launch.as_variables("localhost", 1)
        dist.init_process_group("fake", store=FakeStore(), rank=launch.rank, world_size=launch.world_size)
        made |= {(number, launch.rank): _built(arguments, launch) for number, arguments in jobs.items()}
        dist.destroy_process_group()
    return made


def _built(arguments: list[str], launch: Launch) -> BuiltRank:
    start_s, before = time.perf_counter(), set(dist.distributed_c10d._world.pg_map)
    try:
        settings = check_run(parse_command_line(arguments), launch).settings
        strategy = build_without_memory(settings)
    except Exception as error:  # whatever would end the start: it is what was asked for
        fault = str(error) if isinstance(error, ValueError) else first_line(error)
        return BuiltRank(rank=launch.rank, fault=fault, seconds=time.perf_counter() - start_s)
    process_group.limit_waiting(settings.training.collective_timeout)  # as training does before its first step
    new = set(dist.distributed_c10d._world.pg_map) - before
    held = {id(tensor): tensor.nbytes for tensor in strategy.model_states()["parameters"]}
    facts = BuiltRank(
        rank=launch.rank,
        data_rank=strategy.data_rank,
        data_world_size=strategy.data_world_size,
        group_sizes=tuple(sorted({group.size() for group in new})),
        parameter_bytes=sum(held.values()),
        seconds=time.perf_counter() - start_s,
    )
    strategy.close()
    return facts


def build_without_memory(settings: RunSettings) -> Strategy:
    """Return the strategy of this rank around a model without storage."""
    is_deepspeed = STRATEGIES[settings.training.run_type].engine == "deepspeed"
    device = torch.device("cpu") if is_deepspeed else META
    with _fake_deepspeed() if is_deepspeed else _meta_torch():
        with device:
            model = GPT2(settings.shape, settings.model.dropout, settings.compute.activation_checkpointing)
        return build_strategy(settings, model, device)


@contextlib.contextmanager
def _meta_torch() -> Iterator[None]:
    """Let PyTorch's wrappers take tensors of the meta device: what compares or sends values is left out."""
    with (
        mock.patch.object(torch_ddp, "_verify_param_shape_across_processes", lambda *_, **__: True),
        mock.patch.object(torch_ddp, "_sync_module_states", lambda *_, **__: None),
        mock.patch.object(_fully_shard, "_get_device_from_mesh", lambda _: META),
        mock.patch.object(_fsdp_param, "_chunk_with_empty", _chunked),
    ):
        yield


def _chunked(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """Return what FSDP's own function does, whose every empty chunk is another tensor: minutes for 4,096 ranks."""
    chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
    return chunks + [chunks[0].new_empty(0)] * (num_chunks - len(chunks))


@contextlib.contextmanager
def _fake_deepspeed() -> Iterator[None]:
    """Let DeepSpeed, which knows no meta device, work on fake tensors that say they are on the CPU."""
    import_deepspeed(torch.device("cpu"))
    from deepspeed.accelerator import get_accelerator

    move = nn.Module.to

    def moved(module: nn.Module, *words, **names) -> nn.Module:
        """Return the module itself where nothing changes: PyTorch cannot swap fake weights."""
        device, dtype, *_ = torch._C._nn._parse_to(*words, **names)
        tensors = [*module.parameters(), *module.buffers()]
        stays = all(device in (None, each.device) and dtype in (None, each.dtype) for each in tensors)
        return module if stays else move(module, *words, **names)

    able = mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda _: True)  # the plan's devices are
    with mock.patch.object(nn.Module, "to", moved), able, FakeTensorMode(allow_non_fake_inputs=True):
        yield


@dataclass(frozen=True)
class CheckedJob:
    """A job, and the ranks that were built of it."""

    job: Job
    ranks: tuple[BuiltRank, ...]

    @property
    def faults(self) -> list[str]:
        """Return what would end the start, each sentence once, with the ranks that say it."""
        said: dict[str, list[int]] = {}
        for built in self.ranks:
            if built.fault is not None:
                said.setdefault(built.fault, []).append(built.rank)
        return [f"rank {', '.join(map(str, ranks))}: {fault}" for fault, ranks in said.items()]


def check_jobs(jobs: Sequence[Job], machine: Machine, work: Sequence[str] = ()) -> list[CheckedJob]:
    """Build every job. The text is made up, as its length is all that is looked at."""
    with tempfile.TemporaryDirectory() as folder:
        data = _write_tokens(Path(folder), max((job.global_batch, job.model.seq_length) for job in jobs))
        checked: dict[Job, CheckedJob] = {}
        for ranks in sorted({_ranks_of(job) for job in jobs}):
            alike = [job for job in jobs if _ranks_of(job) == ranks]
            arguments = [[*arguments_of(job, work), *data] for job in alike]
            roles = [role_ranks(job) if ranks > 1 else [0] for job in alike]
            built = build_ranks(arguments, roles, ranks, min(machine.per_node, ranks))
            checked |= {job: CheckedJob(job, tuple(found)) for job, found in zip(alike, built, strict=True)}
    return [checked[job] for job in jobs]


def _ranks_of(job: Job) -> int:
    assert job.run_type is not None
    return job.layout.devices if STRATEGIES[job.run_type].is_distributed else 1


def _write_tokens(folder: Path, largest: tuple[float, int]) -> list[str]:
    """Write enough for one global batch, and return the flags that name the files."""
    sequences, length = largest
    words = []
    for name in ("train", "val"):
        path = folder / f"{name}.bin"
        with TokenFileWriter(path, 50257, "gpt2", 50256) as writer:
            writer.append_document(np.zeros((int(sequences) + 1) * (length + 1), dtype=np.int64))
        words += [f"--{name}_data_path", str(path)]
    return words
