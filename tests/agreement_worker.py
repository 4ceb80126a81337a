"""One rank of an agreement run: trains a few steps as gpt2.py does and writes down what came out.

Usage, by python or torchrun: agreement_worker.py OUTPUT.json CASES.json, CASES: a list of argument lists of gpt2.py.
It goes through the program's own parts (settings, data, seam), so that a fault in any of them shows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from testbed import distributed
from testbed.data import TrainingBatches, ValidationBatches
from testbed.flags import parse_command_line
from testbed.launch import read_launch
from testbed.measure import StepClock
from testbed.model import GPT2
from testbed.optimizer import learning_rate_at
from testbed.settings import check_run
from testbed.step import StepResult
from testbed.strategies import build_strategy

CPU = torch.device("cpu")


def run_case(arguments: list[str]) -> dict:
    checked = check_run(parse_command_line(arguments), read_launch())
    settings = checked.settings
    torch.manual_seed(settings.seed)
    strategy = build_strategy(settings, GPT2(settings.shape, settings.dropout), CPU)
    batches = TrainingBatches(checked.train_file, settings, strategy.data_rank, CPU)
    losses, norms, first_windows = [], [], []
    for step in range(settings.last_step):
        micro_batches = batches.of_step(step)
        result = strategy.train_step(micro_batches, learning_rate_at(step, settings))
        losses.append(distributed.gather_step(result, StepClock(CPU), CPU).loss)
        norms.append(float(result.grad_norm))
        first_windows.append(distributed.gather_objects(micro_batches[0].inputs[0].tolist()))
    validation = ValidationBatches(checked.val_file, settings, strategy.data_rank, CPU)
    loss_sum, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for index in range(len(validation)):
        result = strategy.evaluate(validation.of_batch(index))
        loss_sum, num_tokens = loss_sum + result.loss_sum, num_tokens + result.num_target_tokens
    evaluation = distributed.gather_step(StepResult(loss_sum, num_tokens, None), StepClock(CPU), CPU)
    weights = strategy.full_state_dict()
    # key biases have no true gradient (a shift of all scores changes no softmax), so Adam steps on rounding noise there
    kept = []
    for name, tensor in weights.items():
        channels = settings.embedding_size
        kept.append(torch.cat([tensor[:channels], tensor[2 * channels :]]) if name.endswith("c_attn.bias") else tensor)
    strategy.close()
    return {
        "world_size": strategy.data_world_size,
        "losses": losses,
        "grad_norms": norms,
        "first_windows": first_windows,
        "val_loss": evaluation.loss,
        "val_tokens": evaluation.num_target_tokens,
        "weights": torch.cat([tensor.flatten() for tensor in kept]).tolist() if kept else [],
    }


def main() -> None:
    output, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    launch = read_launch()
    is_deepspeed = any("optimized" in case for case in cases)
    distributed.start_process_group(CPU, launch, is_needed=is_deepspeed)
    results = [run_case(case) for case in cases]
    if launch.rank == 0:
        output.write_text(json.dumps(results))
    distributed.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
