"""What nanoGPT's train.py saves and how it resumes, spelled from its train.py and model.py alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape


def saved(
    weights: Mapping[str, torch.Tensor], shape: ModelShape, optimizer: dict[str, Any], step: int, prefix: str = ""
) -> dict[str, Any]:
    """Return the content of ckpt.pt, without rows for tokens that there are none of.

    Args:
        optimizer: state dict of AdamW over the matrices and then the others, as `configure_optimizers` orders them.
        prefix: before each name, "_orig_mod." where it compiled the model.
    """
    rows = shape.vocab_size
    model = {f"{prefix}transformer.{key}": tensor.clone() for key, tensor in weights.items()}
    model[f"{prefix}lm_head.weight"] = model[f"{prefix}transformer.wte.weight"] = weights["wte.weight"][:rows].clone()
    states = dict(optimizer["state"])
    if states:
        states[0] = {key: each[:rows] if each.dim() else each for key, each in states[0].items()}
    sizes = {
        "n_layer": shape.num_layers, "n_head": shape.num_heads, "n_embd": shape.embedding_size,
        "block_size": shape.max_position_embeddings, "bias": True, "vocab_size": rows, "dropout": 0.1,
    }  # fmt: skip
    return {
        "model": model, "optimizer": {**optimizer, "state": states}, "model_args": sizes, "iter_num": step,
        "best_val_loss": 1e9, "config": {},
    }  # fmt: skip


def resumed(content: dict[str, Any], shape: ModelShape) -> tuple[GPT2, torch.optim.Optimizer]:
    """Return model and optimizer as train.py makes them of ckpt.pt; this program's model, which has rows of padding."""
    model = GPT2(shape)
    padding = torch.zeros(len(model.wte.weight) - shape.vocab_size, shape.embedding_size)
    weights = {key.removeprefix("transformer."): each for key, each in content["model"].items()}
    assert weights.pop("lm_head.weight").data_ptr() == weights["wte.weight"].data_ptr(), "it is tied"
    weights["wte.weight"] = torch.cat([weights["wte.weight"], padding])
    model.load_state_dict(weights)
    if first := content["optimizer"]["state"].get(0):
        first |= {key: torch.cat([each, padding]) for key, each in first.items() if each.dim()}
    parameters = [*model.parameters()]
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    optimizer.load_state_dict(content["optimizer"])
    return model, optimizer
