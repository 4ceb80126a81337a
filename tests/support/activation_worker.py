"""Be a rank that counts the bytes that autograd keeps of one forward pass. Usage: as agreement_worker.py."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from support.agreement_worker import CPU, all_tasks_done, build
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.distributed.launch import read_launch
from testbed.memory_model.job import job_of_settings
from testbed.memory_model.memory import memory_of
from testbed.train.batches import TrainingBatches


def kept_bytes(arguments: list[str]) -> dict[str, float]:
    """Return the bytes of a micro batch that are kept for backward, as counted and by the formulas."""
    checked = check_run(parse_command_line(arguments), read_launch())
    strategy = build(checked.settings)
    weights = {parameter.untyped_storage()._cdata for parameter in map(_local, strategy.parameters)}
    shapes = {tuple(_local(parameter).shape) for parameter in strategy.parameters}  # copies of weights too
    shapes |= {shape[::-1] for shape in shapes}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        if storage._cdata not in weights and tuple(tensor.shape) not in shapes:
            kept[storage._cdata] = storage
        return tensor

    micro_batch = TrainingBatches(checked.train_file, checked.settings, strategy.data_rank, CPU).of_step(0)[0]
    strategy.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = strategy.loss_sum(micro_batch)
    loss.backward()
    moments = memory_of(job_of_settings(checked.settings)).moments["forward end"]
    counted = float(sum(storage.nbytes() for storage in kept.values()))
    return {"counted": counted, "formula": moments["activations"] + moments["logits"]}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main(folder: Path) -> None:
    with all_tasks_done(folder, is_needed=True) as results:
        results += [kept_bytes(arguments) for arguments in json.loads((folder / "tasks.json").read_text())]
