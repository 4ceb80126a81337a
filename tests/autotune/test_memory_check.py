"""What cannot fit is refused before the model is built, and what may not is said."""

from __future__ import annotations

import pytest
import torch
from support.programs import TINY_RUN, data_flags
from support.settings import launch, settings_of, typed

from testbed.autotune import memory_check
from testbed.autotune.memory_check import GIB, check_memory
from testbed.errors import InputError

CPU = torch.device("cpu")


def settings_of_size(token_files, model: str, *flags: str, ranks: int = 1):
    words = ["--model", model, *data_flags(token_files), "--device", "cpu", "--precision", "fp32", *flags]
    return typed(words, ranks).settings


def here(monkeypatch, gib: float, settings, ranks: int = 1) -> str | None:
    monkeypatch.setattr(memory_check, "memory_here", lambda launch, device: (gib * GIB, ranks))
    return check_memory(settings, launch(ranks), CPU)


def test_states_larger_than_the_memory_are_refused_and_the_rest_is_a_warning(token_files, monkeypatch):
    """gpt2-xl keeps 16 bytes of each of 1,480 M parameters with this vocabulary: 22 GiB."""
    settings = settings_of_size(token_files, "gpt2-xl", "--micro_batch_size_per_gpu", "4", "--seq_length", "512")
    with pytest.raises(
        InputError, match=r"--run_type baseline with --model gpt2-xl .* cannot fit: .* GiB of this mach"
    ):
        here(monkeypatch, 21, settings)
    said = here(monkeypatch, 23.5, settings)
    for words in ("warning: --model gpt2-xl", "may not fit", "4 x 512 tokens", "23.5 GiB of this machine"):
        assert words in said
    assert "--micro_batch_size_per_gpu" in said and "--activation_checkpointing block" in said
    assert here(monkeypatch, 200, settings) is None


def test_a_batch_far_too_large_is_refused(token_files, monkeypatch):
    """The gpt2-xl with 64 sequences that trained on in silence."""
    settings = settings_of_size(
        token_files, "gpt2-xl", "--micro_batch_size_per_gpu", "64", "--global_batch_size", "64", "--seq_length", "128"
    )
    with pytest.raises(
        InputError, match=r"in micro batches of 64 x .* cannot fit: .* estimated .*; it takes less with a smaller"
    ):
        here(monkeypatch, 23.5, settings)


@pytest.mark.parametrize(
    ("flags", "fits"),
    [
        (("--run_type", "ddp"), False),
        (("--run_type", "fsdp"), True),
        (("--run_type", "optimized", "--zero_stage", "3"), True),
        (("--run_type", "pipeline"), True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_ranks_of_a_machine_count_with_what_each_of_them_holds(token_files, monkeypatch, flags, fits):
    settings = settings_of_size(token_files, "gpt2-xl", "--seq_length", "128", *flags, ranks=2)
    if fits:
        here(monkeypatch, 36, settings, ranks=2)  # states of one copy are 22 GiB, padding and copies aside
    else:
        with pytest.raises(InputError, match=r"for its 2 ranks.*fewer ranks, or --run_type fsdp"):
            here(monkeypatch, 36, settings, ranks=2)


def test_evaluation_keeps_weights_alone(token_files, monkeypatch):
    settings = settings_of_size(token_files, "gpt2-xl", "--eval_only")
    assert here(monkeypatch, 7, settings) is None
    with pytest.raises(InputError, match="weights alone take 5"):
        here(monkeypatch, 4, settings)


def test_tiny_models_fit_here_whatever_is_open(token_files):
    for flags in ([], ["--precision", "auto", "--micro_batch_size_per_gpu", "auto", "--run_type", "ddp"]):
        assert check_memory(settings_of(token_files, *flags), launch(), CPU) is None


@pytest.mark.launches
def test_the_program_ends_with_one_sentence_before_it_touches_the_folder(ranks, token_files, tmp_path):
    wide = ["--num_layers", "400", "--embedding_size", "8192", "--num_heads", "64", "--run_type", "baseline"]
    words = [*TINY_RUN, *data_flags(token_files), *wide, "--checkpoint_path", str(tmp_path / "run")]
    done = ranks.run_program(words, tmp_path / "ranks")
    assert done.returncode == 2 and done.stderr.startswith("gpt2.py: error: --run_type baseline with ")
    assert "cannot fit: weights, gradients and optimizer state alone take" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()
