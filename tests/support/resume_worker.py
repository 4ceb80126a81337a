"""Be one rank of a run in several starts: train some steps, save, build a new strategy, read and go on.

Started by support/ranks.py. The tasks are objects with
    flags       of gpt2.py
    steps       [first, last]: the optimizer steps to do
    load        null, or [folder, "load_checkpoint" or "load_full_state"]
    save        null, or [folder, after how many steps, whether in the background]
Every start begins with other random weights, so that one that goes on as it should has read its state.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from support.agreement_worker import CPU, all_tasks_done, losses_of_steps
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.distributed import process_group
from testbed.distributed.launch import read_launch
from testbed.model.gpt2 import GPT2
from testbed.strategies import Strategy, build_strategy
from testbed.train.batches import TrainingBatches


def hash_of(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save(strategy: Strategy, folder: Path, in_background: bool) -> list:
    """Save a checkpoint and return the writes that are still going on."""
    rank = read_launch().rank
    if rank == 0:
        folder.mkdir(parents=True)
    process_group.wait_for_everyone()
    torch.save(torch.get_rng_state(), folder / f"random_state_{rank}.pt")
    if in_background and strategy.saves_in_background:
        return [strategy.save_checkpoint(folder, in_background=True)]
    assert strategy.save_checkpoint(folder) is None
    return []


def run(task: dict, number: int) -> dict:
    launch = read_launch()
    checked = check_run(parse_command_line(task["flags"]), launch)
    settings = checked.settings
    torch.manual_seed(1000 + number)
    model = GPT2(settings.shape, settings.model.dropout, settings.compute.activation_checkpointing)
    strategy = build_strategy(settings, model, CPU)
    torch.manual_seed(process_group.seed_of_rank(settings.training.seed, launch.rank))
    if task["load"]:
        folder, method = Path(task["load"][0]), task["load"][1]
        getattr(strategy, method)(folder)
        if method == "load_checkpoint":
            torch.set_rng_state(torch.load(folder / f"random_state_{launch.rank}.pt", weights_only=True))
    begins_with = hash_of(strategy.full_state_dict())
    batches = TrainingBatches(checked.train_file, settings, strategy.data_rank, CPU)
    (first, last), (folder, save_at, in_background) = task["steps"], task["save"] or (None, None, None)
    losses, writing, saved = [], [], None
    for step in range(first, last + 1):
        if step + 1 == save_at and in_background and strategy.saves_in_background:
            # the memory of its copy is used again by the one that counts
            for future in save(strategy, Path(f"{folder}_earlier"), in_background):
                future.result()
        if step == save_at:
            saved = hash_of(strategy.full_state_dict())
            writing = save(strategy, Path(folder), in_background)
        if step < last:
            losses += losses_of_steps(strategy, batches, range(step, step + 1))
    for future in writing:  # only now: the steps since must not have changed what is written
        future.result()
    process_group.wait_for_everyone()
    weights = hash_of(strategy.full_state_dict())
    parts = {str(number): part.flatten() for number, part in enumerate(strategy.model_states()["parameters"])}
    held = process_group.gather_objects(hash_of(parts))  # a whole model may be a mean of the ranks' own
    strategy.close()
    return {"losses": losses, "begins_with": begins_with, "saved": saved, "weights": weights, "held": held}


def main(folder: Path) -> None:
    tasks = json.loads((folder / "tasks.json").read_text())
    with all_tasks_done(folder, is_needed=True) as results:
        results += [run(task, number) for number, task in enumerate(tasks)]
