"""Divide a calibration into starts, and say what the ranks of each measure. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testbed.io import write_text
from testbed.planner.calibration import WITHIN

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
FLAGS_OF_KIND = {
    **{name: ("--run_type", name) for name in ("baseline", "allreduce", "ddp", "fsdp")},
    **{f"optimized {stage}": ("--run_type", "optimized", "--zero_stage", str(stage)) for stage in range(4)},
    "model_parallel": ("--run_type", "model_parallel"),
    **{f"pipeline {name}": ("--run_type", "pipeline", "--pipeline_schedule", name) for name in SCHEDULES},
    "tensor": ("--run_type", "tensor"),
}  # every run type that a CPU runs; `measured_rates.kind_of` gives the names


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Model and batch of a whole step. Shapes as in ModelShape and Job; `micro_batch` of a data rank."""

    layers: int
    heads: int
    hidden: int
    vocab: int
    seq_length: int
    micro_batch: int
    accumulation: int

    def arguments(self, kind: str, data: Path, steps: int) -> list[str]:
        """Return the flags of gpt2.py."""
        values: dict[str, Any] = {
            "num_layers": self.layers,
            "num_heads": self.heads,
            "embedding_size": self.hidden,
            "vocab_size": self.vocab,
            "seq_length": self.seq_length,
            "max_position_embeddings": self.seq_length,
            "micro_batch_size_per_gpu": self.micro_batch,
            "grad_accum_steps": self.accumulation,
            "max_train_steps": steps,
            "timing_warmup_steps": 1,
            "epochs": 10_000,
            "max_val_steps": 0,
            "sample_tokens": 0,
            "train_data_path": data / "train.bin",
            "val_data_path": data / "val.bin",
        }
        words = [str(word) for name, value in values.items() for word in (f"--{name}", value)]
        return [*FLAGS_OF_KIND[kind], *words]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A start.

    Attributes:
        out: file in which rank 0 leaves the answer.
        data: folder of train.bin and val.bin.
        seconds: after which no whole step begins.
        sizes: of everything that is measured, by name in sizes.BY_NAME.
        kinds: of runs whose whole steps are timed, from FLAGS_OF_KIND.
        first: number of the whole step to begin with; those before it come last.
        link: between the ranks; "between nodes": only collectives are timed.
    """

    out: str
    data: str
    device: str
    precision: str
    seconds: float
    sizes: str
    kinds: list[str]
    first: int = 0
    link: str = WITHIN

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Work:
        return cls(**json.loads(path.read_text(encoding="utf-8")))
