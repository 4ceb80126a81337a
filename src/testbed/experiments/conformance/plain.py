"""Train a tiny language model with DeepSpeed alone, or with plain PyTorch in one process. Nothing of the testbed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from testbed.experiments.conformance import MAX_NORM, RANKS, RATE, ROWS, STEPS, WARMUP_STEPS, Trial

SEQUENCE = 24
VOCABULARY, CHANNELS, HEADS, LAYERS = 61, 20, 2, 2  # nothing that divides evenly, so that shards are filled up


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS, bias=False)  # a bias of keys has no gradient but rounding
        self.projection = nn.Linear(CHANNELS, CHANNELS)
        self.up, self.down = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        qkv = self.qkv(self.first_norm(x)).view(rows, length, 3, HEADS, CHANNELS // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(rows, length, CHANNELS))
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))


class Model(nn.Module):
    """A GPT whose head is its embedding. Returns the mean loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, CHANNELS), nn.Embedding(SEQUENCE, CHANNELS)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(CHANNELS)
        self.head = nn.Linear(CHANNELS, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.2)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def rows_of_step(step: int) -> torch.Tensor:
    """Return ROWS rows of SEQUENCE + 1 tokens, each of which follows from the one before, with noise."""
    steps = np.random.default_rng(step).integers(1, 4, (ROWS, SEQUENCE + 1))
    return torch.from_numpy(np.cumsum(steps, axis=1) % VOCABULARY)


def micro_batches(step: int, number: int, rank: int, ranks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's share of a step: inputs and targets of `number` micro batches of equal size."""
    for rows in rows_of_step(step).chunk(number * ranks)[rank::ranks]:
        yield rows[:, :-1], rows[:, 1:]


def built(seed: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.AdamW(groups(model.parameters()), lr=RATE, betas=(0.9, 0.95), eps=1e-8)


def groups(parameters: Any) -> list[dict[str, Any]]:
    everything = list(parameters)
    return [
        {"params": [each for each in everything if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in everything if each.dim() < 2], "weight_decay": 0.0},
    ]


def set_rate(optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = RATE * min(1.0, (step + 1) / WARMUP_STEPS)


def norm_of(gradients: Any) -> float:
    return float(sum((gradient.double() ** 2).sum() for gradient in gradients)) ** 0.5


Found = tuple[list[float], list[float], list[float]]  # loss and unclipped norm of each step, final weights in one row


def alone(trial: Trial, seed: int) -> Found:
    """Train in one process, without DeepSpeed."""
    torch.set_num_threads(1)
    model, optimizer = built(seed)
    masters: list[Any] = list(model.parameters())
    number = trial.accumulation * RANKS
    if trial.precision == "bf16":
        model.bfloat16()
        masters = [parameter.detach().float() for parameter in model.parameters()]  # rounded, as DeepSpeed's
        optimizer = torch.optim.AdamW(groups(masters), lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for inputs, targets in micro_batches(step, number, 0, 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=trial.precision == "autocast"):
                loss = model(inputs, targets)
            (loss / number).backward()
            total += loss.item() / number
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None, "every weight takes part"
            master.grad = parameter.grad.to(master.dtype)
        norms.append(norm_of(master.grad for master in masters))
        nn.utils.clip_grad_norm_(masters, MAX_NORM[trial.clipping])
        set_rate(optimizer, step)
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            if master is not parameter:
                parameter.data.copy_(master)
            parameter.grad = None
        losses.append(total)
    return losses, norms, in_one_row(model.parameters())


def in_one_row(weights: Iterable[torch.Tensor]) -> list[float]:
    return torch.cat([weight.detach().float().flatten() for weight in weights]).tolist()


def with_deepspeed(trial: Trial, seed: int) -> Found:
    """Train on all ranks with `deepspeed.initialize`, as its guide says."""
    import deepspeed

    torch.set_num_threads(1)
    # else it would compile a shared-memory all-reduce for inference, for a minute
    deepspeed.ops.__compatible_ops__.update(deepspeed_shm_comm=False, deepspeed_ccl_comm=False)
    deepspeed.init_distributed("gloo")
    model, optimizer = built(seed)
    config = {
        "train_micro_batch_size_per_gpu": ROWS // RANKS // trial.accumulation,
        "gradient_accumulation_steps": trial.accumulation,
        "gradient_clipping": MAX_NORM[trial.clipping],
        "zero_optimization": {"stage": trial.stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    if trial.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if trial.precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses, norms = [], []
    for step in range(STEPS):
        set_rate(optimizer, step)
        total = torch.zeros((), dtype=torch.float64)
        for inputs, targets in micro_batches(step, trial.accumulation, dist.get_rank(), RANKS):
            loss = engine(inputs, targets)
            engine.backward(loss)
            total += loss.detach() / trial.accumulation / RANKS
            # stage 0 in fp32 reports no norm: it keeps plain gradients, averaged by now
            own = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
            own_norm = norm_of(own) if own and trial.stage == 0 else float("nan")
            engine.step()
        dist.all_reduce(total)
        losses.append(total.item())
        norm = engine.get_global_grad_norm()
        norms.append(own_norm if norm is None else float(norm))
    weights = []
    for parameter in engine.module.parameters():
        is_cut = trial.stage == 3
        with deepspeed.zero.GatheredParameters([parameter]) if is_cut else contextlib.nullcontext():
            weights.append(parameter.detach().clone())
    return losses, norms, in_one_row(weights)
