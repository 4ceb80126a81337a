"""Derive the work of every run of a comparison with peers from what was typed, the device and --quick. No torch."""

from __future__ import annotations

import argparse
from typing import Any

from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.config.settings import CheckedRun
from testbed.distributed.launch import Launch
from testbed.experiments.peers.plan import check_only_ours
from testbed.model.shape import LEARNING_RATES

# what is not given: by the device, or --quick
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"batch_size": 4, "seq_length": 512, "steps": 20, "warmup_steps": 3, "repeats": 5},
    "cuda": {"batch_size": 32, "seq_length": 1024, "steps": 60, "warmup_steps": 10, "repeats": 5},
    "quick": {"batch_size": 4, "seq_length": 64, "steps": 6, "warmup_steps": 2, "repeats": 2,
              "num_layers": 2, "num_heads": 2, "embedding_size": 64, "precision": ("fp32",)},
}  # fmt: skip
VALIDATION_BATCHES = 4  # of --batch_size sequences
DIMENSIONS = ("num_layers", "num_heads", "embedding_size")
GPT2_VOCABULARY = 50257  # of the published sizes; a token file with fewer tokens must not make the head smaller


def default(arguments: argparse.Namespace, device_type: str, name: str) -> Any:
    """What was given, else what --quick or the device suggests."""
    given = getattr(arguments, name)
    if given is not None:
        return given
    suggested = (DEFAULTS["quick"] if arguments.quick else {}).get(name, DEFAULTS[device_type].get(name))
    if name == "warmup_steps":  # a short run still measures half of its steps
        return min(suggested, default(arguments, device_type, "steps") // 2)
    return suggested


def gpt2_run(arguments: argparse.Namespace, device_type: str) -> tuple[list[str], CheckedRun]:
    """The flags of src/gpt2.py for the work of every run, and the run that they make.

    The learning rate is constant, because every trainer can do that alike. ValueError: what src/gpt2.py would refuse.
    """
    steps, batch = default(arguments, device_type, "steps"), default(arguments, device_type, "batch_size")
    learning_rate = arguments.learning_rate or LEARNING_RATES.get(arguments.model)  # an unknown size is refused below
    values = {
        "model": arguments.model,
        **{name: default(arguments, device_type, name) for name in DIMENSIONS},
        "vocab_size": vocabulary(arguments),
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
        "seed": arguments.seed,
        "train_data_path": arguments.train_data_path,
        "val_data_path": arguments.val_data_path,
        "max_val_steps": VALIDATION_BATCHES,
        "sample_tokens": 0,
        "device": device_type,
    }
    words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    launch = Launch(0, 0, 1, 1)
    checked = check_run(parse_command_line(words), launch)
    tokens = checked.train_file.vocab_size
    if checked.settings.model.vocab_size < tokens:
        raise ValueError(
            f"--vocab_size {checked.settings.model.vocab_size} is less than the {tokens} tokens that "
            f"{arguments.train_data_path} is written with; give --vocab_size {tokens} or more, or other data"
        )
    check_only_ours(arguments.only_ours)
    if arguments.only_ours:
        check_run(parse_command_line([*words, *arguments.only_ours]), launch)
    return words, checked


def vocabulary(arguments: argparse.Namespace) -> int | None:
    """Tokens of the model; None: as many as the data's."""
    is_published = arguments.model.startswith("gpt2") and not arguments.quick
    return arguments.vocab_size or (GPT2_VOCABULARY if is_published else None)
