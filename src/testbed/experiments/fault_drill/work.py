"""Build the run that is drilled: a few optimizer steps of a small model on two ranks, with dropout and saves."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from testbed.config.check import check_run, has_torch
from testbed.config.flags import parse_command_line
from testbed.data.token_file import TokenFileWriter
from testbed.distributed.launch import Launch
from testbed.distributed.store_port import free_port
from testbed.errors import InputError
from testbed.experiments.fault_drill.faults import DEEPSPEED, NUM_RANKS, PROCESSES, RESTARTING, TORCHRUN
from testbed.sweep.request import Variant

SEQUENCE = 64
MODELS = {  # flags and vocabulary
    "nano": (("--model", "nano"), 8192),
    "tiny": (("--num_layers", "2", "--num_heads", "2", "--embedding_size", "32"), 300),
}
NUM_TOKENS = 20_000


@dataclass(frozen=True)
class Work:
    """Say what every start of every drill does. `collective_timeout` and `grace`: seconds."""

    program: Path
    data: Path
    model: str
    steps: int
    save_every: int
    collective_timeout: int
    grace: int

    def write_data(self) -> None:
        """Make the two token files, unless they are there."""
        write_made_up_tokens(self.data, MODELS[self.model][1])

    def arguments(self, variant: Variant, directory: Path) -> list[str]:
        """Return flags of gpt2.py, the same for the first start and for those that resume, as in a job script."""
        return [
            *("--run_type", variant.run_type, *MODELS[self.model][0]),
            *("--train_data_path", str(self.data / "train.bin"), "--val_data_path", str(self.data / "val.bin")),
            *("--seq_length", str(SEQUENCE), "--max_position_embeddings", str(SEQUENCE), "--global_batch_size", "8"),
            *("--max_train_steps", str(self.steps), "--timing_warmup_steps", "1"),
            *("--dropout", "0.1", "--max_val_steps", "0", "--sample_tokens", "0", "--steps_per_print", "1"),
            *("--device", "cpu", "--precision", "fp32", "--threads_per_rank", "1"),
            *("--checkpoint_path", str(directory), "--save_every", str(self.save_every), "--resume", "auto"),
            *("--collective_timeout", str(self.collective_timeout), "--grace_seconds", str(self.grace)),
            *variant.arguments,  # last, so that they override
        ]

    def check(self, variants: Sequence[Variant]) -> None:
        """ValueError, one sentence, when a run type cannot do this work on two ranks."""
        for variant in variants:
            words = self.arguments(variant, self.data / "unused")
            try:
                check_run(parse_command_line(words), Launch(0, 0, NUM_RANKS, NUM_RANKS))
            except ValueError as error:
                raise InputError(f"--run_types {variant.text}: {error}") from None

    def commands(self, launcher: str, arguments: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
        """Return what is started, each with the variables that it needs besides the usual ones."""
        program = [str(self.program), *arguments]
        python = [sys.executable, *program]
        if launcher == PROCESSES:
            port = free_port()
            ranks = [Launch(rank, rank, NUM_RANKS, NUM_RANKS) for rank in range(NUM_RANKS)]
            return [(python, rank.as_variables("127.0.0.1", port)) for rank in ranks]
        if launcher == DEEPSPEED:
            runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(NUM_RANKS)]
            return [([*runner, "--master_port", str(free_port()), *program], {})]
        assert launcher in (TORCHRUN, RESTARTING), launcher
        # by module: the console script of another environment may come first on PATH
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        torchrun += ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
        if has_torch((2, 12)):  # before, torchrun had no such flag and killed ranks after 30 s
            torchrun += ["--shutdown-timeout", str(self.grace + 5)]
        if launcher == RESTARTING:
            torchrun += ["--max-restarts", "2"]
        return [([*torchrun, *program], {})]


def write_made_up_tokens(folder: Path, vocabulary: int) -> None:
    """Write train.bin and val.bin, unless they are there, for runs whose text does not matter."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed in (("train", 1), ("val", 2)):
        path = folder / f"{name}.bin"
        if not path.exists():
            steps = np.random.default_rng(seed).integers(1, 4, NUM_TOKENS)  # ids that follow from one another
            with TokenFileWriter(path, vocabulary, f"bpe:{vocabulary}", vocabulary - 1) as writer:
                writer.append_document(np.cumsum(steps) % (vocabulary - 1))


def surroundings(extensions: Path, marker: tuple[str, str]) -> dict[str, str]:
    """Return the environment of a start: ours, without what another launcher set, one thread per rank, and the
    marker."""
    unset = Launch(0, 0, 1, 1).as_variables("", 0).keys()
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    told = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_EXTENSIONS_DIR": str(extensions)}
    return kept | told | dict([marker])
