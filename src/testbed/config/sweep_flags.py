"""Parse what the programs that start runs have in common: a sweep, a race, a certificate. No torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import not_negative, positive, waiting_time
from testbed.errors import InputError
from testbed.io import cannot_become_a_folder

SHARED: dict[str, dict[str, Any]] = {
    "batch_size": {
        "type": positive,
        "default": 32,
        "metavar": "N",
        "help": "sequences per optimizer step of all ranks (default: %(default)s)",
    },
    "steps": {"type": positive, "metavar": "N", "help": "optimizer steps of a run (default on CPU / CUDA: 30 / 100)"},
    "seq_length": {
        "type": positive,
        "metavar": "TOKENS",
        "help": "tokens per sequence (default on CPU / CUDA: 128 / 1024)",
    },
    "dataset_mode": {
        "choices": ["small", "full"],
        "help": "train_small.bin and val_small.bin, or train.bin and val.bin (default: small)",
    },
    "deepspeed_config": {"metavar": "FILE.json", "help": "of every run (default: gpt2.py's)"},
    "seed": {"type": not_negative, "default": 42, "metavar": "N", "help": "of every run (default: %(default)s)"},
    "out_dir": {"type": Path, "metavar": "DIR", "help": "folder of the runs (default: %(default)s)"},
    "warmup_runs": {
        "type": not_negative,
        "default": 1,
        "metavar": "N",
        "help": "unmeasured runs before the first, to warm caches (default: %(default)s)",
    },
    "run_timeout_s": {
        "type": waiting_time,
        "metavar": "SECONDS",
        "help": "end a longer run; it counts as failed (default: never)",
    },
    "certificate": {
        "type": Path,
        "metavar": "FILE.json",
        "help": "what scripts/more/certify_machine.py found about this machine; it is copied to --out_dir (default: "
        "checkpoint/certificate/machine_certificate.json, if there)",
    },
    "dry_run": {"action": "store_true", "help": "print what would run and an estimate of the time; write nothing"},
    "yes": {"action": "store_true", "help": "run more ranks than there are cores, too"},
}
ALIASES = {"seq_length": ("--seq_len",)}


def parser_of(description: str | None) -> FlagParser:
    """Return a parser that shows a module's description as it stands and takes no abbreviated flag."""
    formatter = argparse.RawDescriptionHelpFormatter
    return FlagParser(description=description, formatter_class=formatter, allow_abbrev=False)


def add_flags(parser: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Add flags of the table to a parser or a group.

    Args:
        names: keys of SHARED.
        changes: what differs of the last of these flags: its help or its default.
    """
    for name in names:
        parser.add_argument(
            f"--{name}", *ALIASES.get(name, ()), **SHARED[name] | (changes if name == names[-1] else {})
        )


def parse_before_dashes(parser: FlagParser, words: Sequence[str]) -> argparse.Namespace:
    """Return the program's own flags as `own`, and what follows `--`, for every src/gpt2.py, as `passed_on`."""
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    arguments.own, arguments.passed_on = list(words[:end]), list(words[end + 1 :])
    return arguments


def relative(folder: Path) -> Path:
    """Return a folder as it is recorded: a record should not name a home folder."""
    return Path(os.path.relpath(folder))


def check_out_dir(arguments: argparse.Namespace, purpose: str) -> None:
    """Raise InputError where --out_dir cannot become a folder; `purpose` is what it is for."""
    if fault := cannot_become_a_folder(arguments.out_dir):
        raise InputError(f"--out_dir {arguments.out_dir} {fault}; give a folder for {purpose}")
