"""Divide a calibration into starts, and say what the ranks of each measure. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testbed.config.mesh import STAGES_PER_RANK
from testbed.io import write_text
from testbed.memory_model.job import DenseModel, Job, Layout
from testbed.model.shape import ModelShape

WITHIN, BETWEEN = "within a node", "between nodes"
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
FLAGS_OF_KIND = {
    **{name: ("--run_type", name) for name in ("baseline", "allreduce", "ddp", "fsdp")},
    **{f"optimized {stage}": ("--run_type", "optimized", "--zero_stage", str(stage)) for stage in range(4)},
    "model_parallel": ("--run_type", "model_parallel"),
    **{f"pipeline {name}": ("--run_type", "pipeline", "--pipeline_schedule", name) for name in SCHEDULES},
    "tensor": ("--run_type", "tensor"),
}  # every run type that a CPU runs; `residuals.kind_of` gives the names


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

    def arguments(self, kind: str, data: Path, steps: int, warmup_steps: int = 1) -> list[str]:
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
            "timing_warmup_steps": warmup_steps,
            "epochs": 10_000,
            "max_val_steps": 0,
            "sample_tokens": 0,
            "train_data_path": data / "train.bin",
            "val_data_path": data / "val.bin",
        }
        words = [str(word) for name, value in values.items() for word in (f"--{name}", value)]
        return [*FLAGS_OF_KIND[kind], *words]

    def job(self, kind: str, ranks: int, precision: str) -> Job:
        """Return the run that this is on `ranks` ranks, for the formulas."""
        run_type, _, variant = kind.partition(" ")
        is_cut, is_tensor = run_type in ("pipeline", "model_parallel"), run_type == "tensor"
        data = 1 if is_cut or is_tensor else ranks
        layout = Layout(
            data=data,
            zero_stage=int(variant) if run_type == "optimized" else 3 if run_type == "fsdp" else 0,
            shard=data if run_type == "fsdp" else 1,
            tensor=ranks if is_tensor else 1,
            pipeline=ranks if is_cut else 1,
            virtual_stages=STAGES_PER_RANK.get(variant, 1),
        )
        shape = ModelShape(self.layers, self.heads, self.hidden, self.vocab, self.seq_length)
        return Job(
            model=DenseModel.of_gpt2(shape, self.seq_length),
            layout=layout,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            run_type=run_type,
            precision=precision,
            schedule=variant if run_type == "pipeline" else None,
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """A start. `kinds` are trained at each of `settings`; no whole step begins after `seconds`.

    Attributes:
        out: file in which rank 0 leaves the answer.
        data: folder of train.bin and val.bin.
        blocks: repeats of each operation.
        sizes: of the operations, as in `Sizes`; None: none are timed.
        message_bytes: of the collectives; empty: none are timed.
        first: number of the whole step to begin with; those before it come last.
        steps: optimizer steps of each whole step that is timed.
        link: name of the link between the ranks.
    """

    out: str
    data: str
    device: str
    precision: str
    seconds: float
    blocks: int
    sizes: dict[str, Any] | None = None
    message_bytes: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    settings: tuple[dict[str, int], ...] = ()
    first: int = 0
    steps: int = 6
    link: str = WITHIN

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Work:
        return cls(**json.loads(path.read_text(encoding="utf-8")))
