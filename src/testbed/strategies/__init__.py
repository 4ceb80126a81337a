"""The seam between the loop and the ways of spreading an optimizer step over ranks.

One step, not one micro batch, is what all strategies share: DeepSpeed counts its own accumulation boundary, a pipeline
schedule takes all micro batches at once, DDP wants to know the last one. To add a strategy, write one file with a class
that has these methods and name it in STRATEGIES; tests/test_strategies_agree.py then says whether it is right.

Importing this module loads no torch: a strategy's own module is imported when it is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from testbed.model import GPT2
    from testbed.settings import RunSettings
    from testbed.step import MicroBatch, StepResult


class Strategy(Protocol):
    """Every method is called by all ranks, in the same order."""

    data_rank: int  # which share of the global batch this rank reads; not the rank: pipeline stages share one
    data_world_size: int

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """Forward, backward, synchronise, clip, update."""

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Loss of this rank's micro batches; no gradients, no dropout."""

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's fp32 weights on the CPU, named as in model.GPT2, on rank 0; empty on the others."""

    def save_checkpoint(self, directory: Path) -> None:
        """Write what `load_checkpoint` needs to go on bit for bit into an existing folder."""

    def load_checkpoint(self, directory: Path) -> None:
        """Put back what `save_checkpoint` wrote."""

    def close(self) -> None:
        """Let go of what the strategy started."""


@dataclass(frozen=True)
class StrategyEntry:
    """A line of the registry. `module` is imported only when the strategy is used."""

    module: str
    class_name: str
    summary: str
    is_distributed: bool  # False: refuses more than one rank


STRATEGIES = {
    "baseline": StrategyEntry("testbed.strategies.baseline", "Baseline", "plain PyTorch on one device", False),
    "optimized": StrategyEntry("testbed.strategies.deepspeed_zero", "DeepSpeedZero", "DeepSpeed ZeRO 0-3", True),
}


def build_strategy(settings: RunSettings, model: GPT2, device: torch.device) -> Strategy:
    """Build the strategy that --run_type names around a model that every rank initialised alike."""
    entry = STRATEGIES[settings.run_type]
    strategy_class = getattr(importlib.import_module(entry.module), entry.class_name)
    return strategy_class(settings, model, device)
