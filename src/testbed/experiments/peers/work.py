"""Derive the work of every run of a comparison with peers from what was typed, the device and --quick. No torch."""

from __future__ import annotations

import argparse
from typing import Any

from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.config.settings import CheckedRun
from testbed.distributed.launch import Launch
from testbed.errors import InputError
from testbed.experiments.peers.plan import check_only_ours
from testbed.model.shape import LEARNING_RATES

# what is not given: by the device, or --quick
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"batch_size": 4, "seq_length": 512, "steps": 20, "warmup_steps": 3, "repeats": 5},
    "cuda": {"batch_size": 32, "seq_length": 1024, "steps": 60, "warmup_steps": 10, "repeats": 5},
    "quick": {"batch_size": 4, "seq_length": 64, "steps": 6, "warmup_steps": 2, "repeats": 2, "precision": ("fp32",)},
}
QUICK_MODEL = {"num_layers": 2, "num_heads": 2, "embedding_size": 64}
VALIDATION_BATCHES = 4  # of --batch_size sequences
GPT2_VOCABULARY = 50257


def default(arguments: argparse.Namespace, device_type: str, name: str) -> Any:
    """Return what was given, else what --quick or the device suggests."""
    given = getattr(arguments, name)
    if given is not None:
        return given
    suggested = (DEFAULTS["quick"] if arguments.quick else {}).get(name, DEFAULTS[device_type].get(name))
    if name == "warmup_steps":  # a short run still measures half of its steps
        return min(suggested, default(arguments, device_type, "steps") // 2)
    return suggested


def gpt2_run(arguments: argparse.Namespace, device_type: str) -> tuple[list[str], CheckedRun]:
    """Return the flags of src/gpt2.py for the work of every run, and the run that they make.

    The learning rate is constant, because every trainer can do that alike. InputError: what src/gpt2.py would refuse.
    """
    steps, batch = default(arguments, device_type, "steps"), default(arguments, device_type, "batch_size")
    learning_rate = LEARNING_RATES.get(arguments.model)  # an unknown size is refused below
    values = {
        "model": arguments.model,
        **(QUICK_MODEL if arguments.quick else {}),
        # a published size has its whole vocabulary; a token file with fewer tokens must not make the head smaller
        "vocab_size": GPT2_VOCABULARY if arguments.model.startswith("gpt2") and not arguments.quick else None,
        "seq_length": default(arguments, device_type, "seq_length"),
        "global_batch_size": batch,
        "micro_batch_size_per_gpu": arguments.micro_batch_size or batch,
        "max_train_steps": steps,
        "epochs": steps,  # a short corpus must not end the run
        "timing_warmup_steps": default(arguments, device_type, "warmup_steps"),
        "learning_rate": learning_rate,
        "min_learning_rate": learning_rate,
        "warmup_steps": 0,
        "optimizer": "adamw",
        "seed": 42,
        "train_data_path": arguments.train_data_path,
        "val_data_path": arguments.val_data_path,
        "max_val_steps": VALIDATION_BATCHES,
        "sample_tokens": 0,
        "device": device_type,
    }
    words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    launch = Launch(0, 0, 1, 1)
    checked = check_run(parse_command_line(words), launch)
    vocabulary, tokens = checked.settings.model.vocab_size, checked.train_file.vocab_size
    if vocabulary < tokens:
        raise InputError(
            f"{arguments.train_data_path} is written with {tokens} tokens and --model {arguments.model} has "
            f"{vocabulary:,}; give --train_data_path another file, or --model another size"
        )
    check_only_ours(arguments.only_ours)
    if arguments.only_ours:
        check_run(parse_command_line([*words, *arguments.only_ours]), launch)
    return words, checked
