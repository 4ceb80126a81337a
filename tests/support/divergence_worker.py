"""Be one rank of sides that are recorded one after the other: see support/ranks.py.

FOLDER/tasks.json is a list of [flags, fault, where the fingerprints go, steps]. A fault is null, or a name of
support/divergence_faults.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from support.agreement_worker import CPU, all_tasks_done, build
from support.divergence_faults import planting
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.distributed import process_group
from testbed.distributed.launch import read_launch
from testbed.experiments.divergence.attach import attach
from testbed.model.gpt2 import attention_kernel
from testbed.optim.lr_schedule import learning_rate_at
from testbed.train.batches import TrainingBatches


def record(arguments: list[str], prints: Path, steps: int) -> None:
    checked, launch = check_run(parse_command_line(arguments), read_launch()), read_launch()
    prints.mkdir(parents=True, exist_ok=True)
    with attention_kernel(checked.settings.model.attention):
        strategy = build(checked.settings)
        torch.manual_seed(process_group.seed_of_rank(checked.settings.training.seed, launch.rank))
        attach(strategy, checked.settings, launch.rank, prints, steps)
        batches = TrainingBatches(checked.train_file, checked.settings, strategy.data_rank, CPU)
        for step in range(steps):
            strategy.train_step(batches.of_step(step), learning_rate_at(step, checked.settings))
        batches.close()
        strategy.close()


def main(folder: Path) -> None:
    tasks = json.loads((folder / "tasks.json").read_text())
    is_needed = not all("baseline" in arguments for arguments, *_ in tasks)
    with all_tasks_done(folder, is_needed) as results:
        for arguments, fault, prints, steps in tasks:
            with planting(fault):
                record(arguments, Path(prints), steps)
            results.append(None)
