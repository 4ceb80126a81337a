"""Be one rank of an agreement run: train a few steps as gpt2.py does and write the results.

Usage, by support/ranks.py or a launcher: agreement_worker.py FOLDER, with FOLDER/tasks.json, a list of
[arguments of gpt2.py, bug]; rank 0 writes FOLDER/results.json.
It goes through the program's own parts (settings, data, seam), so that a fault in any of them shows. A bug is null, or
the name of a mistake of tests/support/planted_bugs.py that is made on purpose, to see that the comparison finds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/, as this file is started by itself

import torch
from torch.distributed.fsdp import FSDPModule

from support.planted_bugs import making
from support.waits import counted_waits
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.config.settings import CheckedRun, RunSettings
from testbed.distributed import process_group
from testbed.distributed.launch import read_launch
from testbed.metrics import world_step
from testbed.model.gpt2 import GPT2, Block, attention_kernel
from testbed.optim.lr_schedule import learning_rate_at
from testbed.profiling.step_clock import StepClock
from testbed.step import StepResult
from testbed.strategies import Strategy, build_strategy
from testbed.train.batches import TrainingBatches, ValidationBatches

CPU = torch.device("cpu")


@contextlib.contextmanager
def all_tasks_done(folder: Path, is_needed: bool) -> Iterator[list]:
    """Join the other ranks, and write what the tasks have put into the list once all of them are done."""
    torch.set_num_threads(1)
    process_group.start_process_group(CPU, read_launch(), is_needed)
    results: list = []
    yield results
    if read_launch().rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    process_group.wait_for_everyone()


def build(settings: RunSettings) -> Strategy:
    torch.manual_seed(settings.training.seed)
    model = GPT2(settings.shape, settings.model.dropout, settings.compute.activation_checkpointing)
    return build_strategy(settings, model, CPU)


def what_was_built(strategy: Strategy) -> list[str]:
    """Facts of the strategy itself, not of what was asked for: one that quietly ran as another has other facts."""
    built = [type(strategy).__name__]
    wrapped = getattr(strategy, "forward_module", None)
    if isinstance(wrapped, FSDPModule):
        groups = [module for module in wrapped.modules() if isinstance(module, FSDPModule)]
        mesh = next(wrapped.parameters()).device_mesh
        built.append(f"{len(groups)} groups on {dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))}")
    if hasattr(strategy, "schedule"):
        built.append(f"{type(strategy.schedule).__name__} of {strategy.micro_batches_per_pass}")
    if hasattr(strategy, "engine"):
        built.append(f"stage {strategy.engine.zero_optimization_stage()}")
    if strategy.settings.compute.compile and torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        built.append("compiled")
    return built


class CountedCalls:
    """Counts how often a block computes: recomputed blocks do it once more per micro batch."""

    def __init__(self):
        self.number, self.plain = 0, Block._layer

    def __enter__(self) -> CountedCalls:
        def counting(block: Block, x: torch.Tensor) -> torch.Tensor:
            self.number += 1
            return self.plain(block, x)

        Block._layer = counting
        return self

    def __exit__(self, *failure: object) -> None:
        Block._layer = self.plain


def losses_of_steps(strategy: Strategy, batches: TrainingBatches, steps: range) -> list[float]:
    losses = []
    for step in steps:
        result = strategy.train_step(batches.of_step(step), learning_rate_at(step, batches.settings))
        losses.append(world_step.gather_step(result, StepClock(CPU), CPU).loss)
    return losses


def results_of(checked: CheckedRun, looks_for_waits: bool) -> dict:
    settings = checked.settings
    strategy = build(settings)
    batches = TrainingBatches(checked.train_file, settings, strategy.data_rank, CPU)
    losses, norms, windows = [], [], []
    for step in range(settings.last_step):
        micro_batches = batches.of_step(step)
        # a compiled block is left alone: counting would become part of what is compiled
        counted = contextlib.nullcontext(CountedCalls()) if settings.compute.compile else CountedCalls()
        is_watched = looks_for_waits and step == settings.last_step - 1
        with counted as calls, counted_waits() if is_watched else contextlib.nullcontext({}) as waits:
            result = strategy.train_step(micro_batches, learning_rate_at(step, settings))
        losses.append(world_step.gather_step(result, StepClock(CPU), CPU).loss)
        norms.append(float(result.grad_norm))
        read = [zlib.crc32(row.numpy().tobytes()) for batch in micro_batches for row in batch.inputs]
        of_data_ranks = dict(process_group.gather_objects((strategy.data_rank, read)))
        windows.append(sorted(window for of_rank in of_data_ranks.values() for window in of_rank))
    validation = ValidationBatches(checked.val_file, settings, strategy.data_rank, CPU)
    loss_sum, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for index in range(len(validation)):
        result = strategy.evaluate(validation.of_batch(index))
        loss_sum, num_tokens = loss_sum + result.loss_sum, num_tokens + result.num_target_tokens
    evaluation = world_step.gather_step(StepResult(loss_sum, num_tokens, None), StepClock(CPU), CPU)
    weights = strategy.full_state_dict()
    # key biases have no true gradient (a shift of all scores changes no softmax), so Adam steps on rounding noise there
    kept = []
    for name, tensor in sorted(weights.items()):
        channels = settings.model.embedding_size
        kept.append(torch.cat([tensor[:channels], tensor[2 * channels :]]) if name.endswith("c_attn.bias") else tensor)
    weights_in_a_row = torch.cat([tensor.flatten() for tensor in kept]).tolist() if kept else []
    parameter_bytes = sum(tensor.numel() * tensor.element_size() for tensor in strategy.model_states()["parameters"])
    built = what_was_built(strategy)
    strategy.close()
    return {
        "world_size": read_launch().world_size,
        "built": built,
        "waits": waits,
        "block_passes": sum(process_group.gather_objects(calls.number)),
        "mesh": str(settings.plan.mesh),
        "losses": losses,
        "grad_norms": norms,
        "windows": windows,
        "val_loss": evaluation.loss,
        "val_tokens": evaluation.num_target_tokens,
        "parameter_bytes": process_group.gather_objects(parameter_bytes),
        "weights": weights_in_a_row,
    }


def main(folder: Path) -> None:
    cases = json.loads((folder / "tasks.json").read_text())
    is_needed = not all("baseline" in arguments for arguments, _ in cases)
    with all_tasks_done(folder, is_needed) as results:
        for arguments, bug in cases:
            with making(bug):
                checked = check_run(parse_command_line(arguments), read_launch())
                with attention_kernel(checked.settings.model.attention):
                    results.append(results_of(checked, looks_for_waits=bug is None and read_launch().rank == 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
