"""Be a rank that trains strategies and counts the bytes of their model states with the formulas.

The count happens just before the second update; before the first there are no moments.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from support.agreement_worker import all_tasks_done
from support.ranks import Ranks
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.config.settings import RunSettings
from testbed.data.token_file import TokenFileWriter
from testbed.distributed import process_group
from testbed.distributed.launch import Launch, read_launch
from testbed.memory_model.job import DenseModel, job_of_settings
from testbed.memory_model.model_states import (
    held_by_rank,
    model_state_bytes,
    part_of,
    update_copy_bytes,
    whole,
)
from testbed.model.gpt2 import GPT2
from testbed.optim.lr_schedule import learning_rate_at
from testbed.optim.optimizer import local_tensor
from testbed.strategies import Strategy, build_strategy
from testbed.train.batches import TrainingBatches

SMALLEST_LISTED = 64 * 1024  # bytes; what is smaller and no model state is not worth a line
UPDATE_COPY = "fp32 copy for update"  # a kind that the paper has not, see update_copy_bytes
TRANSIENT = "transient"  # what is alive and no model state
Storages = dict[int, tuple[int, str]]  # address -> bytes, what it is
CPU = torch.device("cpu")
VOCABULARY = 8000
SEQUENCE = 16  # activations are not what is counted, and bf16 is slow on a CPU
MODEL = f"--num_layers 4 --num_heads 4 --embedding_size 384 --max_position_embeddings {SEQUENCE}"  # 10 million
NATIVE_BF16 = "--precision bf16 --mixed_precision native"
# stage 3 keeps weights below the threshold whole on every rank; the formula has none of them
DEEPSPEED_CONFIG = {
    "zero_optimization": {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 500_000,
        "reduce_bucket_size": 500_000,
        "allgather_bucket_size": 500_000,
    }
}
CASES = {
    "ZeRO 1": f"--run_type optimized --zero_stage 1 {NATIVE_BF16}",
    "ZeRO 2": f"--run_type optimized --zero_stage 2 {NATIVE_BF16}",
    "ZeRO 3": f"--run_type optimized --zero_stage 3 {NATIVE_BF16}",
    "FSDP": f"--run_type fsdp {NATIVE_BF16}",
    "ddp": "--run_type ddp --precision fp32",
    "ddp Muon": "--run_type ddp --precision fp32 --optimizer muon",
    "FSDP Muon": "--run_type fsdp --precision fp32 --optimizer muon",
    "pipeline": "--run_type pipeline --precision fp32",
    "tensor": "--run_type tensor --precision fp32",
}


def count_before_updates(strategy: Strategy, not_counted: list[torch.Tensor]) -> dict[str, Storages]:
    """Count in the optimizer's pre-hook whenever the dictionary that is returned is empty.

    ZeRO calls it once for each parameter group. At the first call, the matrices', nothing is updated yet: that one
    counts, and it finds the fp32 gradients of that group.
    """
    count: dict[str, Storages] = {}

    def before_update(optimizer: torch.optim.Optimizer, *_) -> None:
        if count:
            return
        states = strategy.model_states()
        buffers = states.pop("buffers", [])  # DeepSpeed's, listed apart; some are held where the walk does not see them
        count.update({kind: storages(tensors) for kind, tensors in states.items()})
        apart = {
            UPDATE_COPY: (p.grad for group in optimizer.param_groups for p in group["params"]),
            TRANSIENT: [*buffers, *live_tensors()],
        }
        for kind, tensors in apart.items():
            known = storages(not_counted).keys() | {address for found in count.values() for address in found}
            count[kind] = {address: what for address, what in storages(tensors).items() if address not in known}

    strategy.optimizer.register_step_pre_hook(before_update)
    return count


def storages(tensors: Iterable[torch.Tensor | None]) -> Storages:
    """Return each allocation once, whatever number of tensors are views of it."""
    found = {}
    for tensor in tensors:
        if tensor is None or tensor.layout != torch.strided:  # a sparse one of another test has no storage
            continue
        storage = local_tensor(tensor).untyped_storage()
        if storage.nbytes() > 0:
            elements = storage.nbytes() // tensor.element_size()
            found[storage.data_ptr()] = (storage.nbytes(), f"{elements:,} {str(tensor.dtype).removeprefix('torch.')}")
    return found


def live_tensors() -> list[torch.Tensor]:
    """Return every CPU tensor that Python knows. What C++ alone holds (saved for a backward pass, say) is not among
    them."""
    gc.collect()  # what only a cycle keeps is not alive
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    # the local part of a DTensor is a tensor of its own, and a FakeTensor has no memory
    without = (DTensor, FakeTensor)
    return [tensor for tensor in tensors if not isinstance(tensor, without) and tensor.device.type == "cpu"]


def published_zero_bytes(model: DenseModel, data_ranks: int, zero_stage: int) -> dict[str, int]:
    """Return the bytes of mixed precision in figure 1 of the ZeRO paper. Stage 3 is its fully sharded one."""
    elements = whole(model).elements
    part = part_of(elements, data_ranks)
    return {
        "parameters": 2 * (part if zero_stage >= 3 else elements),
        "gradients": 2 * (part if zero_stage >= 2 else elements),
        "optimizer": 12 * (part if zero_stage >= 1 else elements),
    }


def with_formulas(count: dict[str, Storages], settings: RunSettings, rank: int) -> dict[str, Any]:
    """Return a rank's counts in rows with their formulas, and what is transient by description."""
    mesh, job = settings.plan.mesh, job_of_settings(settings)
    formulas = model_state_bytes(
        job,
        held_by_rank(job)[rank] if mesh.pipeline > 1 else None,  # here all ranks are pipeline ranks
        data_rank=rank,  # only ZeRO asks, and there every rank is a data rank
        persistent=0,  # as DEEPSPEED_CONFIG has it
    )
    paper = {}
    if settings.compute.mixed_precision == "native":
        paper = published_zero_bytes(job.model, mesh.data, zero_stage=settings.deepspeed.zero_stage or 3)
    if settings.deepspeed.zero_stage:
        formulas[UPDATE_COPY], paper[UPDATE_COPY] = (
            update_copy_bytes(job.model, mesh.data, settings.deepspeed.zero_stage),
            0,
        )
    rows = []
    for kind, formula in formulas.items():
        measured = sum(size for size, _ in count[kind].values())
        row = {"kind": kind, "measured_bytes": measured, "formula_bytes": formula, "paper_bytes": paper.get(kind)}
        rows.append(row)
    transient: dict[str, int] = {}
    for size, what in sorted(count[TRANSIENT].values(), reverse=True):
        if size >= SMALLEST_LISTED:
            transient[what] = transient.get(what, 0) + size
    return {"rows": rows, "transient": transient}


def counts_of(ranks: Ranks, folder: Path, number: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Train some of CASES on a number of ranks, in one process group, and return what each rank counted."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY - 1, 4000)
    for name in ("train", "val"):
        with TokenFileWriter(folder / f"{name}.bin", VOCABULARY, "random", VOCABULARY - 1) as writer:
            writer.append_document(tokens)
    (folder / "deepspeed.json").write_text(json.dumps(DEEPSPEED_CONFIG))
    shared = (
        f"{MODEL} --seq_length {SEQUENCE} --max_train_steps 2 --device cpu --train_data_path {folder / 'train.bin'}"
    )
    # two micro batches on each data rank, enough of them for a pipeline
    shared += f" --val_data_path {folder / 'val.bin'} --micro_batch_size_per_gpu 1 --global_batch_size {2 * number}"
    runs = {name: [*shared.split(), *CASES[name].split()] for name in names}
    for flags in runs.values():
        if "optimized" in flags:
            flags += ["--deepspeed_config", str(folder / "deepspeed.json")]
    return ranks.run("support.model_states", folder, list(runs.items()), number)


def train_and_count(flags: list[str], launch: Launch) -> dict[str, Any]:
    """Return this rank's counts in the last step with the formulas."""
    checked = check_run(parse_command_line(flags), launch)
    settings = checked.settings
    # held until this run has ended, so that no address is used again: DeepSpeed does not let go of everything
    left_by_earlier_runs = live_tensors()
    torch.manual_seed(settings.training.seed)
    model = GPT2(settings.shape)
    strategy = build_strategy(settings, model, CPU)
    del model  # a strategy may hold a part of it only
    count = count_before_updates(strategy, not_counted=left_by_earlier_runs)
    batches = TrainingBatches(checked.train_file, settings, strategy.data_rank, CPU)
    for step in range(settings.last_step):
        count.clear()
        strategy.train_step(batches.of_step(step), learning_rate_at(step, settings))
    strategy.close()
    return with_formulas(count, settings, launch.rank)


def main(folder: Path) -> None:
    launch = read_launch()
    with all_tasks_done(folder, is_needed=True) as results:
        for name, flags in json.loads((folder / "tasks.json").read_text()):
            per_rank = process_group.gather_objects(train_and_count(flags, launch))
            results.append({"strategy": name, "ranks": launch.world_size, "per_rank": per_rank})
