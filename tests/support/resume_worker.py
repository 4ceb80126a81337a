"""One rank of a run that is cut into starts: trains some steps, saves, is built anew, reads and goes on.

Usage, by python or torchrun: resume_worker.py OUTPUT.json TASKS.json, TASKS: a list of objects with
    flags       of gpt2.py
    steps       [first, last]: the optimizer steps to do
    load        null, or [folder, "load_checkpoint" or "load_full_state"]
    save        null, or [folder, after how many steps, whether in the background]
Every start begins with other random weights, so that one that goes on as it should has read its state.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/, as this file is started by itself

import torch

from support.agreement_worker import CPU, losses_of_steps
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
    """What is still to be waited for."""
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
    model = GPT2(
        settings.shape, settings.model.dropout, settings.model.attention, settings.compute.activation_checkpointing
    )
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
    strategy.close()
    return {"losses": losses, "begins_with": begins_with, "saved": saved, "weights": weights}


def main() -> None:
    output, tasks = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    launch = read_launch()
    process_group.start_process_group(CPU, launch, is_needed=True)
    results = [run(task, number) for number, task in enumerate(tasks)]
    if launch.rank == 0:
        output.write_text(json.dumps(results))
    process_group.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
