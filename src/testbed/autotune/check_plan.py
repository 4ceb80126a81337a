"""Check a plan without devices: build each strategy as every kind of its ranks would (check_mesh.py)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from testbed.autotune.check_mesh import BuiltRank, build_ranks, role_ranks
from testbed.config.run_types import STRATEGIES
from testbed.data.token_file import TokenFileWriter
from testbed.distributed.mesh import MeshSizes
from testbed.memory_model.job import Job, Machine
from testbed.planner.command import arguments_of


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
            arguments = [[*arguments_of(job, machine, work), *data] for job in alike]
            roles = [role_ranks(_mesh_of(job)) if ranks > 1 else [0] for job in alike]
            built = build_ranks(arguments, roles, ranks, min(machine.per_node, ranks))
            checked |= {job: CheckedJob(job, tuple(found)) for job, found in zip(alike, built, strict=True)}
    return [checked[job] for job in jobs]


def _ranks_of(job: Job) -> int:
    assert job.run_type is not None
    return job.layout.devices if STRATEGIES[job.run_type].is_distributed else 1


def _mesh_of(job: Job) -> MeshSizes:
    layout = job.layout
    return MeshSizes(layout.data, layout.pipeline, layout.tensor, layout.shard)


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
