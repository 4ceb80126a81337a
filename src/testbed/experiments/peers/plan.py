"""Plan a comparison with peers: sets of precisions, arms, and the order of runs. No torch.

An arm is a peer at one precision; every repeat of it is one run. Two sets may ask for the same arm (on a device without
fast bf16, most trainers compute in fp32 of themselves): it is run once and stands in both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from testbed.config.flag import Filled, Flag, Kind, Resume
from testbed.config.flags import parse_command_line
from testbed.config.table import FLAGS
from testbed.data.token_file import TokenFile
from testbed.errors import InputError
from testbed.experiments.peers import NANOGPT_SOURCE, PEERS
from testbed.sweep.plan import order_of_round

OURS, CEILING = "ours", "matrix product"  # the second is no peer, but is measured in every round like one
SETS = ("own", "fp32", "bf16")
EMULATED = "this device has no fast bf16 (a trial product was not 1.5 times as fast as in fp32)"


def _is_only_how(flag: Flag) -> bool:
    """Return whether a flag may stand after `--`: it says how a step is computed, and a run decides it for itself or
    keeps it when it resumes. All else is other work, other cores, or another clock."""
    return flag.kind is Kind.EXECUTION and (flag.filled is Filled.DECIDED or flag.resume is not Resume.FREE)


ONLY_HOW = tuple(name for name, flag in FLAGS.items() if _is_only_how(flag))


@dataclass(frozen=True)
class PeerArm:
    """A peer, or the matrix product, at a precision."""

    peer: str
    precision: str

    def __str__(self) -> str:
        return f"{self.peer} {self.precision}"


@dataclass
class Plan:
    """`sets`: name -> its arms, ours first. `not_measured`: arm or peer -> why; such a comparison cannot pass.

    `skipped`: a set -> why; it was not asked for, so leaving it out is no failure.
    """

    sets: dict[str, list[PeerArm]]
    not_measured: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def arms(self) -> list[PeerArm]:
        """Return every arm once, and the matrix product at each precision that an arm has."""
        arms = list(dict.fromkeys(arm for arms in self.sets.values() for arm in arms))
        return arms + [PeerArm(CEILING, precision) for precision in dict.fromkeys(arm.precision for arm in arms)]

    def rounds(self, repeats: int) -> list[tuple[int, PeerArm]]:
        """Round number, from 1, and arm of every run in the order in which they are made (see `order_of_round`)."""
        arms = self.arms
        return [
            (number, arms[index]) for number in range(1, repeats + 1) for index in order_of_round(len(arms), number)
        ]


def make_plan(
    peers: Sequence[str], sets: Sequence[str] | None, device_type: str, is_bf16_fast: bool, missing: dict[str, str]
) -> Plan:
    """Return the arms of each set.

    Args:
        sets: those that were asked for; None: own and fp32, and bf16 where the device multiplies it fast.
        missing: peer -> why it cannot be run at all.
    """
    plan = Plan({}, {peer: reason for peer, reason in missing.items() if peer in peers})
    if sets is None and not is_bf16_fast:
        plan.skipped["bf16"] = f"{EMULATED}; --precision bf16 measures it all the same"
    for name in sets or [name for name in SETS if name not in plan.skipped]:
        arms = []
        for peer in peers:
            if peer in plan.not_measured:
                continue
            precision = _precision(peer, name, device_type, is_bf16_fast)
            reason = _why_not(peer, precision, name, device_type, is_bf16_fast or "bf16" in (sets or ()))
            if reason is None:
                arms.append(PeerArm(peer, precision))
            elif reason:
                plan.not_measured.setdefault(f"{peer} {precision}", reason)
        plan.sets[name] = arms
    return plan


def _precision(peer: str, set_name: str, device_type: str, is_bf16_fast: bool) -> str:
    if set_name != "own":
        return set_name
    own = PEERS[peer].own_precision[device_type]
    return own if own != "auto" else "bf16" if is_bf16_fast else "fp32"


def _why_not(peer: str, precision: str, set_name: str, device_type: str, is_bf16_wanted: bool) -> str | None:
    """Return why a peer has no place in a set; "" where it is not expected there, None where it has one."""
    if peer == "nanogpt-bf16" and precision != "bf16":
        return ""
    if peer == "nanogpt" and precision == "bf16" and device_type == "cpu":
        return "" if set_name == "bf16" else "nanoGPT's train.py has no autocast on a CPU; nanogpt-bf16 is that port"
    if set_name == "own" and precision == "bf16" and not is_bf16_wanted:
        return f"{EMULATED}; --precision own,bf16 measures it all the same"
    return None


def merged_sets(sets: dict[str, list[PeerArm]]) -> list[tuple[list[str], list[PeerArm]]]:
    """Return sets with the same arms as one, in the order in which they came: (names, arms)."""
    merged: list[tuple[list[str], list[PeerArm]]] = []
    for name, arms in sets.items():
        same = next((names for names, others in merged if others == arms), None)
        if same is not None:
            same.append(name)
        else:
            merged.append(([name], arms))
    return merged


def check_only_ours(words: Sequence[str]) -> None:
    """ValueError where a flag after `--` would give ours other work, or another clock, than the other trainers have."""
    for name in sorted(parse_command_line(list(words)).typed - set(ONLY_HOW)):
        raise InputError(
            f"--{name} after `--` would change the work of our runs alone; what all trainers do is set before it, and "
            f"after it may stand {', '.join(f'--{flag}' for flag in ONLY_HOW)}"
        )


def why_missing(
    peers: Sequence[str], nanogpt_dir: Path | None, train_file: TokenFile, val_file: TokenFile
) -> dict[str, str]:
    """Return peer -> why it cannot be run here at all, as far as can be told without running it."""
    missing = {}
    pairs = next((file for file in (train_file, val_file) if file.targets is not None), None)
    for peer in peers:
        absent = [package for package in PEERS[peer].packages if importlib.util.find_spec(package) is None]
        if absent:
            missing[peer] = f"the package {absent[0]} is not installed; pip install {' '.join(absent)}"
        elif PEERS[peer].needs_nanogpt and nanogpt_dir is None:
            missing[peer] = f"no --nanogpt_dir was given; clone {NANOGPT_SOURCE} and give its folder"
        elif peer == "nanogpt" and train_file.tokens.dtype.itemsize != 2:
            missing[peer] = f"nanoGPT reads uint16 tokens, and {train_file.path} holds uint32 (over 65,536 tokens)"
        elif pairs is not None:
            missing[peer] = f"it learns every token, and of the pairs in {pairs.path} only references are learned"
    return missing
