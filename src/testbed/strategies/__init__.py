"""Strategy interface called by the training loop.

One step, not one micro batch, is what all strategies share: DeepSpeed counts its own accumulation boundary, a pipeline
schedule takes all micro batches at once, DDP wants to know the last one. To add a strategy, write one file with a class
that has these methods and name it in config/run_types.py; tests/strategies/test_strategies_agree.py then says whether
it is right.

Importing this module loads no torch: a strategy's own module is imported when it is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from testbed.config.run_types import STRATEGIES

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from testbed.config.settings import RunSettings
    from testbed.model.gpt2 import GPT2
    from testbed.step import MicroBatch, StepResult


class Strategy(Protocol):
    """Every method is called by all ranks, in the same order."""

    data_rank: int  # which share of the global batch this rank reads; not the rank: pipeline stages share one
    data_world_size: int
    optimizer: torch.optim.Optimizer  # the one that updates this rank's weights, for hooks; engines wrap it
    saves_in_background: bool  # whether `save_checkpoint` can go on writing while training does
    file_group: dist.ProcessGroup | None  # to agree on checkpoint files; made when first read, by all ranks

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """Forward, backward, synchronise, clip, update."""

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Return the loss of this rank's micro batches, without gradients and dropout."""

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's fp32 weights on the CPU, named as in model.GPT2, on rank 0; empty on the others."""

    def save_checkpoint(self, directory: Path, in_background: bool = False) -> Future | None:
        """Write what `load_checkpoint` needs to go on bit for bit into an existing folder. With `in_background`, where
        `saves_in_background`, it returns once the state is copied to host memory; rank 0's future is done when every
        rank's files are written, and until then no other may begin."""

    def load_checkpoint(self, directory: Path) -> None:
        """Restore what `save_checkpoint` wrote, into the same strategy on the same ranks that has done no step."""

    def load_full_state(self, directory: Path) -> None:
        """Restore weights, moments and step counters by name (state_files.py), from any strategy and world size."""

    def model_states(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors alive on this rank by what they hold: "parameters", "gradients", "optimizer" (moments and,
        where they are kept apart, the fp32 master weights), and, if the engine has any, "buffers" for what passes
        through. A shard is the local tensor."""

    def close(self) -> None:
        """Let go of what the strategy started."""


def build_strategy(settings: RunSettings, model: GPT2, device: torch.device) -> Strategy:
    """Build the strategy that --run_type names around a model that every rank initialised alike."""
    model.label_smoothing = settings.model.label_smoothing
    if settings.compute.compile:
        model.compile_blocks()
        model.compile_head()
    entry = STRATEGIES[settings.training.run_type]
    strategy_class = getattr(importlib.import_module(f"{__name__}.{entry.module}"), entry.class_name)
    return strategy_class(settings, model, device)
