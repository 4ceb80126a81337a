"""Train one small model under releases of DeepSpeed and PyTorch, and say which releases train the same one."""

from dataclasses import dataclass

RANKS, STEPS, ROWS = 2, 6, 16  # of every run; rows of a global batch
RATE, WARMUP_STEPS = 0.01, 2  # the learning rate rises in equal steps
MAX_NORM = {True: 0.25, False: 1e9}  # the model's norms lie between 0.4 and 3


@dataclass(frozen=True)
class Trial:
    """One way to train.

    Attributes:
        stage: of ZeRO; None: plain PyTorch in one process, which goes through the same micro batches.
        accumulation: micro batches per step and rank.
        clipping: whether clipping is active.
        precision: "fp32"; "bf16": weights and gradients in bf16, masters in fp32; "autocast": fp32 weights.
    """

    stage: int | None
    accumulation: int
    clipping: bool
    precision: str

    @property
    def name(self) -> str:
        clipping = "clipping" if self.clipping else "not clipping"
        return f"ZeRO {self.stage}, accumulation {self.accumulation}, {clipping}, {self.precision}"
