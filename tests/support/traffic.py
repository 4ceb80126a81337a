"""Record what each rank sends of activations and their gradients in its second step, and in a validation."""

from __future__ import annotations

import json
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

from support.agreement_worker import CPU, all_tasks_done, build
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.distributed.launch import read_launch
from testbed.distributed.process_group import gather_objects
from testbed.train.batches import TrainingBatches

SENDING = ("c10d.send", "_c10d_functional.all_reduce")  # of stages, and of DTensors


class Sent(TorchDispatchMode):
    """Lists the bytes of each tensor that is sent or reduced."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if str(function).startswith(SENDING):
            tensors = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
            self.sizes += [tensor.nbytes for tensor in tensors]
        return function(*arguments, **(options or {}))


def main(folder: Path) -> None:
    """The first step is left out: in it the stages also tell each other the shapes."""
    with all_tasks_done(folder, is_needed=True) as results:
        for arguments in json.loads((folder / "tasks.json").read_text()):
            checked = check_run(parse_command_line(arguments), read_launch())
            strategy = build(checked.settings)
            micro_batches = TrainingBatches(checked.train_file, checked.settings, strategy.data_rank, CPU).of_step(0)
            strategy.train_step(micro_batches, 0.01)
            with Sent() as trained:
                strategy.train_step(micro_batches, 0.01)
            with Sent() as validated:
                strategy.evaluate(micro_batches)
            results.append([gather_objects(sent.sizes) for sent in (trained, validated)])
