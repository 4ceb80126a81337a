"""Write TensorBoard scalars on rank 0, outside the step clock."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings
    from testbed.metrics.world_step import WorldStep

FLUSH_S = 5  # what a run that dies loses at most


class Scalars:
    """Scalars by optimizer step in `directory`; nothing without --tensorboard."""

    def __init__(self, settings: RunSettings, directory: Path, first_step: int, is_writer: bool):
        self._writer = None
        self._tokens_per_step = settings.tokens_per_step
        if settings.measuring.tensorboard and is_writer:
            from torch.utils.tensorboard import SummaryWriter  # 2 s that a run without it does not owe

            # purge_step: steps after the checkpoint that a resumed run begins with are trained again
            purge_step = first_step + 1 if first_step else None
            self._writer = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=FLUSH_S)

    def add_step(self, step: int, world: WorldStep, learning_rate: float) -> None:
        if self._writer is None:
            return
        assert world.grad_norm is not None
        curves = {
            "train/loss": world.loss,
            "train/grad_norm": world.grad_norm,
            "train/learning_rate": learning_rate,
            "speed/step_time_s": world.step_time_s,
            "speed/tokens_per_s": self._tokens_per_step / world.step_time_s,
        }
        for name, value in curves.items():
            if math.isfinite(value):  # fp16 skipped the update
                self._writer.add_scalar(name, value, step)

    def add_validation(self, step: int, loss: float) -> None:
        if self._writer is not None:
            self._writer.add_scalar("validation/loss", loss, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
