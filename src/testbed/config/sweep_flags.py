"""Parse what the programs that start runs have in common: a sweep, a race, a certificate. No torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import LONGEST_WAIT_S
from testbed.errors import InputError
from testbed.io import cannot_become_a_folder


def parse_before_dashes(parser: FlagParser, words: Sequence[str]) -> argparse.Namespace:
    """Return the program's own flags as `own`, and what follows `--`, for every src/gpt2.py, as `passed_on`."""
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    arguments.own, arguments.passed_on = list(words[:end]), list(words[end + 1 :])
    return arguments


def add_certificate(add: Callable[..., object]) -> None:
    """Add --certificate with `add_argument` of a parser or a group."""
    add("--certificate", type=Path, metavar="FILE.json",
        help="what scripts/more/certify_machine.py found about this machine; it is copied to --out_dir (default: "
        "checkpoint/certificate/machine_certificate.json, if there)")  # fmt: skip


def relative(folder: Path) -> Path:
    """Return a folder as it is recorded: a record should not name a home folder."""
    return Path(os.path.relpath(folder))


def check_folder_and_timeout(arguments: argparse.Namespace, purpose: str) -> None:
    """Check --out_dir and --run_timeout_s.

    Raises:
        InputError: names the flag, and what the folder is for.
    """
    if fault := cannot_become_a_folder(arguments.out_dir):
        raise InputError(f"--out_dir {arguments.out_dir} {fault}; give a folder for {purpose}")
    if arguments.run_timeout_s is not None and not arguments.run_timeout_s > 0:
        raise InputError(f"--run_timeout_s {arguments.run_timeout_s:g} is not above 0; leave it out for no limit")
    if arguments.run_timeout_s is not None and arguments.run_timeout_s > LONGEST_WAIT_S:
        raise InputError(
            f"--run_timeout_s {arguments.run_timeout_s:g} is longer than a week; leave it out for no limit"
        )
