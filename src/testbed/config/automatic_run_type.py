"""Settle `--run_type auto`: choice.json, else the plan. No torch.

A run that is resumed has a run type already (recorded_flags.py).

A flag that was given, or that DeepSpeed's file decides, wins over the choice, as it does over a --config file, and a
sentence says so. A file that states keys of ZeRO takes the run type that does them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from testbed.config.choice_file import DEFAULT_CHOICE, WORK, Choice, hash_of, misfit, read_choice, spelled
from testbed.config.deepspeed_file import read_deepspeed_file, with_deepspeed_file
from testbed.config.flags import ParsedFlags, checked_like_a_flag
from testbed.config.run_types import PLAIN, REFERENCE, STRATEGIES, run_types_with
from testbed.config.settings import CheckedRun
from testbed.config.table import FLAGS
from testbed.distributed.launch import Launch
from testbed.errors import InputError, value_text

DEFAULT_FOLDER = "checkpoint/auto"  # the type is not known before the folder is looked at
SIZES = frozenset(WORK[: WORK.index("global_batch_size") + 1])
NAMES_WORK = SIZES | {"model", "micro_batch_size_per_gpu", "grad_accum_steps"}  # one of them means another work
(DEEPSPEED,) = run_types_with(engine="deepspeed")  # the one that does what keys of ZeRO say


@dataclasses.dataclass(frozen=True)
class Taken:
    """A run type with flags of its own. `why` goes on after its name; `sha256` is of the file that it is from."""

    run_type: str
    flags: Mapping[str, Any]
    why: str
    sha256: str | None = None


Check = Callable[[ParsedFlags, Launch], CheckedRun]
Planner = Callable[[ParsedFlags, Launch], Taken | None]


def with_automatic_run_type(asked: ParsedFlags, launch: Launch, check: Check, planner: Planner | None) -> CheckedRun:
    """Return the checked run with the run type that is taken, and the sentence about it in `notes`.

    Args:
        check: fills in and checks settings with a known run type.
        planner: returns the plan's best for these ranks; None where it has none.

    Raises:
        InputError: the settings break a rule, or a --choice that was given does not fit.
    """
    asked = asked.replace({"checkpoint_path": asked.values["checkpoint_path"] or DEFAULT_FOLDER})
    if asked.values["deepspeed_config"] is not None:
        file = read_deepspeed_file(Path(asked.values["deepspeed_config"]))
        asked = with_deepspeed_file(asked, file)
        if said := [
            file.decided[flag].said for flag in sorted(file.decided.keys() & STRATEGIES[DEEPSPEED].options.keys())
        ]:
            why = f"as --deepspeed_config {file.path} says {', '.join(said)}"
            return _checked(Taken(DEEPSPEED, {}, why), asked, launch, check)
    found = _by_choice(asked, launch, check)
    if isinstance(found, CheckedRun):
        return found
    planned = (planner(asked, launch) if planner is not None else None) or _without_plan(launch)
    return _checked(dataclasses.replace(planned, why=f"{planned.why}; {found}"), asked, launch, check)


def _by_choice(asked: ParsedFlags, launch: Launch, check: Check) -> CheckedRun | str:
    """Return the run with the type of choice.json, or why that is not taken.

    Raises:
        InputError: a --choice that was given is not taken.
    """
    path, is_given = Path(asked.values["choice"] or DEFAULT_CHOICE), asked.values["choice"] is not None
    try:
        choice = read_choice(path)
        if choice.ranks != launch.world_size and STRATEGIES[choice.run_type].devices != "all":
            raise InputError(f"{path} is for ranks {choice.ranks}, not {launch.world_size}")
        asked, work = _with_work_of(choice, asked)
        standing = f"not shown to be the fastest ({choice.verdict}) but first" if choice.verdict else "the fastest"
        why = f"{standing} by {path} (SHA-256 {choice.sha256[:8]}){work}"
        taken = Taken(choice.run_type, choice.flags, why, choice.sha256)
        checked = _checked(taken, asked, launch, check)
        if (fault := misfit(choice, checked.settings, launch.world_size)) is not None:
            raise InputError(f"{path}: {fault}")
    except InputError as error:
        if is_given:
            raise InputError(
                f"--choice {path}: {str(error).removeprefix(f'{path}: ')}; measure again with "
                "scripts/find_fastest.py, or leave --choice out"
            ) from None
        return f"no choice was taken: {error}"
    return checked


def _with_work_of(choice: Choice, asked: ParsedFlags) -> tuple[ParsedFlags, str]:
    """Return a start that names no model, length or batch with the choice's, and the words that say so.

    Precision is taken with any work: a race on a CPU is in fp32 unless it was typed, and a start may choose bf16.
    """
    if asked.given & NAMES_WORK:
        if "precision" in asked.given:
            return asked, ""
        precision = checked_like_a_flag(FLAGS["precision"], choice.work["precision"], "precision")
        words = f", and its --precision {value_text(precision)}, as no flag names another"
        return dataclasses.replace(
            asked.replace({"precision": precision}), configured=asked.configured | {"precision"}
        ), words
    work = {
        name: checked_like_a_flag(FLAGS[name], value, name)
        for name, value in choice.work.items()
        if name not in asked.given
    }
    words = " ".join(f"--{name} {value_text(value)}" for name, value in work.items() if name in SIZES)
    asked = dataclasses.replace(asked.replace(work), configured=asked.configured | work.keys())
    return asked, f", and its work, as no flag names another: {words}"


def _checked(taken: Taken, asked: ParsedFlags, launch: Launch, check: Check) -> CheckedRun:
    """Return the run with what is taken, as if a --config file had it."""
    flags = {name: value for name, value in taken.flags.items() if name not in asked.given}
    kept = {name: asked.values[name] for name in taken.flags.keys() & asked.given}
    kept = {name: value for name, value in kept.items() if value != taken.flags[name]}
    asked = dataclasses.replace(
        asked.replace({**flags, "run_type": taken.run_type}), configured=asked.configured | flags.keys()
    )
    try:
        checked = check(asked, launch)
    except InputError as error:
        raise InputError(f"{error} (--run_type auto took {taken.run_type}, {taken.why})") from None
    name = spelled(taken.run_type, taken.flags)
    note = f"--run_type auto: {name}, {taken.why}" + "".join(
        f"; --{flag} {value_text(value)} stays, as it was given" for flag, value in sorted(kept.items())
    )
    return dataclasses.replace(
        checked,
        settings=checked.settings.with_values(chosen=frozenset({"run_type"})),
        notes=(*checked.notes, note),
        flags_sha256=hash_of([taken.run_type, dict(taken.flags), taken.sha256]),
    )


def _without_plan(launch: Launch) -> Taken:
    """Return the plain run type for a number of ranks."""
    if launch.is_distributed:
        return Taken(PLAIN, {}, "the plain data-parallel one, as there is no plan for this device")
    return Taken(REFERENCE, {}, "as there is one rank")
