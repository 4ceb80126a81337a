"""Start the programs, with a tiny model and tiny token files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = REPOSITORY / "src" / "gpt2.py"
VOCABULARY = 300  # not a multiple of 128: the padding of the embedding takes part in every test
SEQUENCE = 32

# small enough for two ranks on two cores; everything that a real run has, it has
TINY_MODEL = ["--num_layers", "2", "--num_heads", "2", "--embedding_size", "32", "--max_position_embeddings", "64"]
TINY_RUN = [*TINY_MODEL, "--seq_length", str(SEQUENCE), "--precision", "fp32", "--device", "cpu"]


def tokens_with_structure(num_tokens: int, seed: int) -> np.ndarray:
    """Ids below VOCABULARY - 1 in which each follows from the one before, with noise: something to learn."""
    steps = np.random.default_rng(seed).integers(1, 4, num_tokens)
    return np.cumsum(steps) % (VOCABULARY - 1)


def write_token_files(
    folder: Path, train_tokens: int = 20_000, val_tokens: int = 3_000, suffix: str = ""
) -> tuple[Path, Path]:
    """Write both and return their paths. The suffix "_small" gives the names that programs look for."""
    from testbed.data.token_file import TokenFileWriter

    paths = folder / f"train{suffix}.bin", folder / f"val{suffix}.bin"
    for path, num_tokens, seed in zip(paths, (train_tokens, val_tokens), (1, 2), strict=True):
        with TokenFileWriter(path, VOCABULARY, f"bpe:{VOCABULARY}", VOCABULARY - 1) as writer:
            writer.append_document(tokens_with_structure(num_tokens - 1, seed))
    return paths


def write_pair_files(folder: Path, train_pairs: int = 170, val_pairs: int = 21) -> tuple[Path, Path]:
    """Pairs of very unequal lengths, so that no two ranks or micro batches have as many targets; some fit into no
    window of SEQUENCE."""
    from testbed.data.token_file import TokenFileWriter

    paths = folder / "train_pairs.bin", folder / "val_pairs.bin"
    for path, num_pairs, seed in zip(paths, (train_pairs, val_pairs), (3, 4), strict=True):
        random = np.random.default_rng(seed)
        with TokenFileWriter(path, VOCABULARY, f"bpe:{VOCABULARY}", VOCABULARY - 1, has_targets=True) as writer:
            for number in range(num_pairs):
                prompt, reference = int(random.integers(1, 26)), int(random.integers(1, 14))
                writer.append_document(tokens_with_structure(prompt + reference, 1000 * seed + number), prompt)
    return paths


def data_flags(token_files: tuple[Path, Path]) -> list[str]:
    return ["--train_data_path", str(token_files[0]), "--val_data_path", str(token_files[1])]


def script(path: str) -> ModuleType:
    """Return a program of scripts/ as a module."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / "scripts" / path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def run_here(program: Path | str, *words: object, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """Run a program's main in this process, in a fraction of the time of a launch: exit code and what was printed.

    Args:
        program: absolute, or from the top of the repository.
    """
    program = REPOSITORY / program
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        kept_signals(),
        contextlib.chdir(cwd),
        mock.patch.object(sys, "argv", [str(program), *map(str, words)]),
        mock.patch.object(sys, "path", list(sys.path)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Put the handlers of signals back, as a program may set its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def python_command() -> list[str]:
    return [sys.executable, str(PROGRAM)]


def torchrun_command(ranks: int) -> list[str]:
    # by module: the console script of another environment may come first on PATH
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(PROGRAM)]


def deepspeed_command(ranks: int, port: int) -> list[str]:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--master_port", str(port)]
    return [*launcher, str(PROGRAM)]


def run_program(command: list[str], timeout_s: float = 180, **options) -> subprocess.CompletedProcess:
    """Run to the end and keep what was said."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
