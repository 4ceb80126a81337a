"""Be one rank of transformers' GPT-2 under DeepSpeed that goes on from a universal checkpoint, as users write it.

Started by support/ranks.py. The tasks are objects with
    folder              of the universal checkpoint
    stage               of ZeRO
    lr, weight_decay    of AdamW, whose other numbers are those of the checkpoint
    batches             lists of sequences of token ids, one list for each step; a rank takes its equal part
The result of each is the loss of every step, over all ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import fused_adam
from torch.optim.adamw import adamw
from transformers import GPT2Config, GPT2LMHeadModel


def multi_tensor_adam(
    chunk_size: int, overflow: torch.Tensor, tensors: list[list[torch.Tensor]], lr: float, beta1: float, beta2: float,
    eps: float, step: int, is_decoupled: int, corrects_bias: int, weight_decay: float,
) -> None:  # fmt: skip
    """Update as DeepSpeed's kernel of that name, whose C++ takes a minute to compile; `step` is that of this update."""
    assert is_decoupled and corrects_bias
    gradients, *state = tensors
    steps = [torch.tensor(float(int(step) - 1)) for _ in gradients]
    adamw(state[0], gradients, *state[1:], [], steps, amsgrad=False, beta1=beta1, beta2=beta2, lr=lr,
          weight_decay=weight_decay, eps=eps, maximize=False)  # fmt: skip


def losses_of(task: dict[str, Any]) -> list[float]:
    folder = Path(task["folder"])
    torch.manual_seed(5)  # other weights than those that are loaded
    model = GPT2LMHeadModel(GPT2Config.from_json_file(folder / "config.json"))
    decayed = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": decayed, "weight_decay": task["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    config = {
        "train_batch_size": len(task["batches"][0]),
        "train_micro_batch_size_per_gpu": len(task["batches"][0]) // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": task["stage"]},
        "optimizer": {"type": "AdamW", "params": {"lr": task["lr"]}},
        "checkpoint": {"load_universal": True},
    }
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
    loaded, _ = engine.load_checkpoint(str(folder.parent))  # its name is in latest_universal
    assert Path(loaded).parent == folder, loaded
    losses = []
    for batch in task["batches"]:
        part = torch.tensor(batch).tensor_split(dist.get_world_size())[dist.get_rank()]
        loss = engine(input_ids=part, labels=part).loss
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item() / dist.get_world_size())
    return losses


def main(folder: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    kernels = SimpleNamespace(load=lambda: SimpleNamespace(multi_tensor_adam=multi_tensor_adam))
    with mock.patch.object(fused_adam, "FusedAdamBuilder", lambda: kernels):
        results = [losses_of(task) for task in json.loads((folder / "tasks.json").read_text())]
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
