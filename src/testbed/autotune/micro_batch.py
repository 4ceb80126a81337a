"""Find the micro batch for --micro_batch_size_per_gpu auto: the largest that fits and divides a rank's share.

On CUDA, data-parallel run types try a real step of a single process. For sharded run types and on the CPU, which cannot
catch the error, the planner predicts it.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from testbed.config.run_types import REFERENCE, STRATEGIES
from testbed.distributed import process_group
from testbed.distributed.launch import Launch
from testbed.distributed.mesh import MeshSizes
from testbed.memory_model.job import Layout, job_of_settings
from testbed.memory_model.memory import memory_of, taken
from testbed.model.float8 import convert_to_float8_
from testbed.model.gpt2 import GPT2, attention_kernel
from testbed.profiling.device_limits import is_out_of_memory
from testbed.step import MicroBatch
from testbed.strategies.baseline import Baseline

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings

MARGIN = 0.05  # of the memory: fragments, the libraries' own, and the step that is a little larger than the first
# Tokens of a micro batch above which it gets no faster; docs/automatic_choices.md has what larger ones cost on a CPU.
# On a GPU products fill the device before 32k tokens, whose logits take 6 GiB in fp32 with the vocabulary of GPT-2.
ENOUGH_TOKENS = {"cpu": 2048, "cuda": 32768}
GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one rank's search."""

    micro_batch: int
    needed: int | None  # bytes at the peak of a step with it
    available: int
    too_large: int | None = None  # the next candidate, if it does not fit
    too_large_needs: int | None = None  # bytes
    is_tried: bool = False  # and not predicted
    is_enough: bool = False  # larger ones were not looked at

    def __str__(self) -> str:
        how = "tried" if self.is_tried else "predicted"
        of = f" of {self.available / GIB:.1f} GiB"
        if self.needed is None or self.needed > self.available:
            needs = "more than the" if self.needed is None else f"{self.needed / GIB:.1f}"
            return f"micro batch {self.micro_batch}: it may not fit ({how}: {needs}{of})"
        words = f"micro batch {self.micro_batch}: "
        if self.is_enough:
            return f"{words}larger ones are no faster ({how}: {self.needed / GIB:.1f}{of})"
        words += f"the largest that fits ({how}: {self.needed / GIB:.1f}{of})"
        if self.too_large is None:
            return f"{words}, a rank's whole share"
        needs = f"about {self.too_large_needs / GIB:.1f} GiB" if self.too_large_needs else "more"
        return f"{words}; {self.too_large} needs {needs}"


def find_micro_batch(settings: RunSettings, launch: Launch, device: torch.device) -> tuple[int, str]:
    """Return the largest micro batch that fits on every rank, and a line that says so. All ranks call it.

    Weights and random numbers of the run are not touched.
    """
    candidates = useful_candidates(settings, device)
    is_capped = len(candidates) < len(micro_batch_candidates(settings))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda" and STRATEGIES[settings.training.run_type].micro_batch == "tried":
            mine = _try(settings, device, candidates)
        else:
            mine = _predict(settings, candidates, available_bytes(device, launch))
    if is_capped and mine.micro_batch == candidates[-1]:
        mine = dataclasses.replace(mine, is_enough=True)
    findings = process_group.gather_objects(mine)
    finding = min(findings, key=lambda finding: finding.micro_batch)
    return finding.micro_batch, str(finding)


def available_bytes(device: torch.device, launch: Launch) -> int:
    """Return free memory of the device, or this rank's share of the host's, less MARGIN."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - MARGIN * total)
    free = min(psutil.virtual_memory().available, memory_of_container(CGROUP)[1])
    return int(free * (1 - MARGIN) / launch.local_world_size)


def memory_of_container(root: Path) -> tuple[int, int]:
    """Return the bytes that a container may use (cgroup 2, then 1), and those of them that are free, as cached files
    are. Without a limit both are beyond any machine."""
    for limit, used, cached in CGROUP_FILES:
        try:
            most, taken = int((root / limit).read_text()), int((root / used).read_text())
            rows = ((root / limit).parent / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return most, most - taken + sum(int(row.split()[1]) for row in rows if row.split()[0] == cached)
    return 2**63, 2**63


def _predict(settings: RunSettings, candidates: Sequence[int], available: int) -> Finding:
    """Search by predictions. A larger micro batch never needs less."""
    needs = functools.cache(lambda micro_batch: predicted_bytes(settings, micro_batch))
    num_fitting = bisect.bisect_right(candidates, available, key=needs)
    best = candidates[max(0, num_fitting - 1)]
    bigger = candidates[num_fitting] if 0 < num_fitting < len(candidates) else None
    return Finding(best, needs(best), available, bigger, needs(bigger) if bigger else None)


def predicted_bytes(settings: RunSettings, micro_batch: int) -> int:
    """Return the bytes that a rank needs: on a CPU in its process, on CUDA in PyTorch's allocator."""
    return int(taken(memory_of(job_of_settings(with_micro_batch(settings, micro_batch))), str(settings.compute.device)))


def more_than_alone(settings: RunSettings) -> int:
    """Return the bytes that a rank of a data-parallel run type holds beyond a single process."""
    job = job_of_settings(with_micro_batch(settings, 1))
    alone = dataclasses.replace(job, layout=Layout(), run_type=REFERENCE)
    return int(max(0.0, memory_of(job).allocated - memory_of(alone).allocated))


def _try(settings: RunSettings, device: torch.device, candidates: Sequence[int]) -> Finding:
    """Search by real steps until one runs out of memory, with the run's other memory held as ballast."""
    free, total = torch.cuda.mem_get_info(device)
    held = int(MARGIN * total) + more_than_alone(settings)
    peaks: dict[int, int] = {}
    ballast = strategy = None
    try:
        ballast = torch.empty(held, dtype=torch.uint8, device=device)
        strategy = _throw_away(settings, device)
        for micro_batch in candidates:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            with attention_kernel(settings.model.attention):
                _step(strategy, settings, micro_batch)
            torch.cuda.synchronize(device)
            peaks[micro_batch] = torch.cuda.max_memory_allocated(device)
    except RuntimeError as error:  # of which torch.OutOfMemoryError is one
        if not is_out_of_memory(error):
            raise
    del ballast, strategy
    gc.collect()  # a step that broke off leaves cycles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    if not peaks:
        return Finding(candidates[0], None, free, is_tried=True)
    best = max(peaks)
    bigger = next((candidate for candidate in candidates if candidate > best), None)
    needs = None
    if bigger is not None and len(peaks) > 1:  # activations grow in proportion
        before = sorted(peaks)[-2]
        needs = peaks[best] + (peaks[best] - peaks[before]) * (bigger - best) // (best - before)
    return Finding(best, peaks[best], free, bigger, needs, is_tried=True)


def _throw_away(settings: RunSettings, device: torch.device) -> Baseline:
    """Return a single process with the work of one rank, not compiled."""
    alone = settings.with_values(run_type=REFERENCE, compile=False, mesh=MeshSizes())
    with device:
        model = GPT2(settings.shape, settings.model.dropout, settings.compute.activation_checkpointing)
    if settings.compute.matmul == "fp8":
        convert_to_float8_(model)
    model.label_smoothing = settings.model.label_smoothing
    return Baseline(alone, model, device)


def _step(strategy: Baseline, settings: RunSettings, micro_batch: int) -> None:
    """Run an optimizer step, of two micro batches if the run has several: the second one adds to gradients."""
    share = settings.batch.global_batch_size // settings.plan.data_world_size
    tokens = torch.zeros(micro_batch, settings.data.seq_length, dtype=torch.int64, device=strategy.device)
    count = min(2, share // micro_batch)
    # every token a target: one that is none takes as much memory
    batch = MicroBatch(tokens, tokens, tokens.numel(), count * tokens.numel())
    strategy.train_step([batch] * count, learning_rate=0.0)


def micro_batch_candidates(settings: RunSettings) -> list[int]:
    """Return every micro batch that divides a rank's share of the global batch, smallest first."""
    share = settings.batch.global_batch_size // settings.plan.data_world_size
    return [size for size in range(1, share + 1) if share % size == 0]


def useful_candidates(settings: RunSettings, device: torch.device) -> list[int]:
    """Return the candidates of at most ENOUGH_TOKENS tokens, or the smallest."""
    limit = ENOUGH_TOKENS[device.type] // settings.data.seq_length
    return [size for size in micro_batch_candidates(settings) if size <= limit] or [1]


def with_micro_batch(settings: RunSettings, micro_batch: int) -> RunSettings:
    """Return the same work in micro batches of another size."""
    share = settings.batch.global_batch_size // settings.plan.data_world_size
    return settings.with_values(micro_batch_size_per_gpu=micro_batch, grad_accum_steps=share // micro_batch)
