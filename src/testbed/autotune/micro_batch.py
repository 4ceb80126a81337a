"""Find the micro batch for --micro_batch_size_per_gpu auto: the largest that fits and divides a rank's share.

On CUDA, data-parallel run types try a real step of a single process. Sharded run types and the CPU, which cannot catch
the error, run the step on fake tensors and add up the bytes.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from testbed.autotune.memory_model import FP32, elements_held, model_state_bytes, update_copy_bytes
from testbed.distributed import process_group
from testbed.distributed.launch import Launch
from testbed.distributed.mesh import MeshSizes
from testbed.model.float8 import convert_to_float8_
from testbed.model.gpt2 import GPT2, attention_kernel
from testbed.profiling.device_limits import is_out_of_memory
from testbed.step import MicroBatch
from testbed.strategies.average import BUCKET_BYTES
from testbed.strategies.baseline import Baseline

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings

MARGIN = 0.05  # of the memory: fragments, the libraries' own, and the step that is a little larger than the first
# Tokens of a micro batch above which it gets no faster; docs/automatic_choices.md has what larger ones cost on a CPU.
# On a GPU products fill the device before 32k tokens, whose logits take 6 GiB in fp32 with the vocabulary of GPT-2.
ENOUGH_TOKENS = {"cpu": 2048, "cuda": 32768}
TRIED_ON_CUDA = ("baseline", "allreduce", "ddp")
GIB = 2**30


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
        if device.type == "cuda" and settings.training.run_type in TRIED_ON_CUDA:
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
    free = min(psutil.virtual_memory().available, _left_in_cgroup(Path("/sys/fs/cgroup")))
    return int(free * (1 - MARGIN) / launch.local_world_size)


def _left_in_cgroup(root: Path) -> int:
    """Return the bytes until the limit of a container (cgroup 2, then 1); cached files count as free."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, taken = int((root / limit).read_text()), int((root / used).read_text())
            rows = ((root / limit).parent / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return most - taken + sum(int(row.split()[1]) for row in rows if row.split()[0] == cached)
    return 2**63


def _predict(settings: RunSettings, candidates: Sequence[int], available: int) -> Finding:
    """Search by steps on fake tensors, few of them, as a larger micro batch never needs less."""
    needs = functools.cache(lambda micro_batch: predicted_bytes(settings, micro_batch))
    num_fitting = bisect.bisect_right(candidates, available, key=needs)
    best = candidates[max(0, num_fitting - 1)]
    bigger = candidates[num_fitting] if 0 < num_fitting < len(candidates) else None
    return Finding(best, needs(best), available, bigger, needs(bigger) if bigger else None)


def predicted_bytes(settings: RunSettings, micro_batch: int) -> int:
    """Return the most bytes that a step of this rank holds, model states and communication buffers included."""
    alone = _as_on_a_cpu(settings)
    with FakeTensorMode(), attention_kernel(alone.model.attention), HeldBytes() as held_bytes:
        strategy = _throw_away(alone, torch.device("cpu"))
        _step(strategy, settings, micro_batch)
        states = sum(tensor.nbytes for held in strategy.model_states().values() for tensor in held)
        states += sum(parameter.nbytes for parameter in strategy.parameters)  # their gradients, gone after the step
    return held_bytes.peak + more_than_alone(settings, states)


def _as_on_a_cpu(settings: RunSettings) -> RunSettings:
    """Return settings that fake tensors on a CPU can compute, with equal memory: no GPU kernel, fp16 or 8 bits."""
    return settings.with_values(
        attention="math" if settings.model.attention == "math" else "auto",
        matmul="default",
        precision="bf16" if settings.compute.precision == "fp16" else settings.compute.precision,
    )


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside it make, until they are freed.

    torch.distributed._tools.MemTracker does the same by module, but refuses a second forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._counted: set[int] = set()  # addresses of storages that are alive

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._counted:
            return
        self._counted.add(address)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._let_go, address, num_bytes)

    def _let_go(self, address: int, num_bytes: int) -> None:
        self._counted.discard(address)
        self.now -= num_bytes


def more_than_alone(settings: RunSettings, states_alone: int) -> int:
    """Return an upper bound of the bytes that a rank holds beyond a single process; negative if it shards.

    Args:
        states_alone: weights, gradients and optimizer state of the single process.
    """
    parameters = elements_held(settings.shape)
    if settings.training.run_type == "baseline":
        return 0
    if settings.training.run_type == "allreduce":
        return 2 * BUCKET_BYTES
    if settings.training.run_type == "ddp":
        return FP32 * parameters  # its buckets, in addition to the gradients of earlier micro batches
    zero_stage = settings.deepspeed.zero_stage
    has_16_bit_weights = settings.compute.mixed_precision == "native" or settings.compute.precision == "fp16"
    states = model_state_bytes(
        settings.shape,
        settings.plan.mesh,
        zero_stage=zero_stage,
        has_16_bit_weights=has_16_bit_weights,
        optimizer=settings.optimizer.name,
    )
    own = sum(states.values()) + update_copy_bytes(settings.shape, settings.plan.mesh.data, zero_stage)
    if settings.training.run_type == "fsdp":
        block = elements_held(settings.shape) - elements_held(
            dataclasses.replace(settings.shape, num_layers=settings.model.num_layers - 1)
        )
        outside = parameters - settings.model.num_layers * block  # embeddings stay gathered, two blocks at a time do
        gathered = parameters if settings.data_parallel.reshard_after_forward == "off" else outside + 2 * block
        return own + FP32 * (gathered + 2 * block) - states_alone  # and two blocks' gradients on their way
    deepspeed = settings.deepspeed
    assert zero_stage is not None
    assert deepspeed.allgather_bucket_size is not None and deepspeed.reduce_bucket_size is not None
    whole_gradients = parameters if zero_stage < 2 else 0  # while they accumulate
    gathered = parameters if zero_stage == 3 else min(parameters, deepspeed.allgather_bucket_size)
    buckets = 2 * min(parameters, deepspeed.reduce_bucket_size)
    return own + FP32 * (whole_gradients + gathered + buckets) - states_alone


def _try(settings: RunSettings, device: torch.device, candidates: Sequence[int]) -> Finding:
    """Search by real steps until one runs out of memory, with the run's other memory held as ballast."""
    free, total = torch.cuda.mem_get_info(device)
    held = int(MARGIN * total) + more_than_alone(settings, 0)
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


class _Placed(GPT2):
    """A model that is created on its device, as fake tensors cannot be moved."""

    def to(self, *place: Any, **options: Any) -> Self:
        return self


def _throw_away(settings: RunSettings, device: torch.device) -> Baseline:
    """Return a single process with the work of one rank, not compiled."""
    alone = settings.with_values(run_type="baseline", compile=False, mesh=MeshSizes())
    with device:
        model = _Placed(settings.shape, settings.model.dropout, settings.compute.activation_checkpointing)
    if settings.compute.matmul == "fp8":
        convert_to_float8_(model)
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
    return settings.with_values(
        micro_batch_size_per_gpu=micro_batch,
        grad_accum_steps=share // micro_batch,
        finds_micro_batch=False,
    )
