"""Train one small model under releases of DeepSpeed and PyTorch, and say which releases train the same one."""

from typing import NamedTuple

RANKS, STEPS, ROWS = 2, 6, 16  # of every run; rows of a global batch
RATE, WARMUP_STEPS = 0.01, 2  # the learning rate rises in equal steps


class Task(NamedTuple):
    """A run of the small model.

    Attributes:
        stage: of ZeRO; None: plain PyTorch in one process, which goes through the same micro batches.
        accumulation: micro batches per step and rank.
        max_norm: of clipping.
        precision: "fp32"; "bf16": weights and gradients in bf16, masters in fp32; "autocast": fp32 weights.
        seed: of the initial weights.
    """

    stage: int | None
    accumulation: int
    max_norm: float
    precision: str
    seed: int
