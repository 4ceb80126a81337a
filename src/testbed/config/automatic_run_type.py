"""Settle `--run_type auto`: choice.json, else the plan. No torch.

choice.json says what scripts/find_fastest.py found to be the fastest, for which work, device and ranks. It is taken
where all of that is the same. A run that is resumed has a run type already (with_recorded_flags).

A flag that was given, or that DeepSpeed's file decides, wins over the choice, as it does over a --config file, and a
sentence says so. A file that states keys of ZeRO takes the run type that does them.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from testbed.config.deepspeed_file import read_deepspeed_file, with_deepspeed_file
from testbed.config.device_name import device_name, gpu_names, torch_version
from testbed.config.flags import ParsedFlags, checked_like_a_flag
from testbed.config.run_types import ALL_OPTIONS, PLAIN, REFERENCE, STRATEGIES, run_types_with
from testbed.config.settings import CheckedRun, RunSettings
from testbed.config.table import FLAGS
from testbed.distributed.launch import Launch
from testbed.errors import InputError, one_line, refusals_say, value_text
from testbed.io import holding_together, read_json
from testbed.typed_json import check as check_types

SCHEMA = 1
LONGEST_VERDICT = 400  # characters that a start prints of it
DEFAULT_CHOICE = "checkpoint/fastest/choice.json"
# What a run is about and what a step computes: of other values the race says nothing. Learning rates, lengths and data
# change no step's time.
WORK = (
    *("num_layers", "num_heads", "embedding_size", "vocab_size", "max_position_embeddings", "seq_length"),
    *("global_batch_size", "optimizer", "precision", "matmul", "dropout", "attention"),
)
# What a choice may set: how the work is spread and carried out. The run type stands beside them.
SETS = frozenset(ALL_OPTIONS - {"skip_gradient_sync"}) | {
    *("micro_batch_size_per_gpu", "compile", "activation_checkpointing", "threads_per_rank"),
}
SIZES = frozenset(WORK[: WORK.index("global_batch_size") + 1])
NAMES_WORK = SIZES | {"model", "micro_batch_size_per_gpu", "grad_accum_steps"}  # one of them means another work
DEFAULT_FOLDER = "checkpoint/auto"  # the type is not known before the folder is looked at
(DEEPSPEED,) = run_types_with(engine="deepspeed")  # the one that does what keys of ZeRO say


class _Chosen(TypedDict):
    run_type: str
    flags: dict[str, Any]  # values by flag, of `SETS`


class _Content(TypedDict):
    """What choice.json must hold; the program that measured adds how."""

    schema: int
    device: str
    torch: str
    commit: str
    ranks: Annotated[int, Meta(ge=1)]
    work: dict[str, Any]
    choice: _Chosen


@dataclass(frozen=True)
class Choice:
    """A choice, checked."""

    path: Path
    sha256: str  # of the file's bytes as JSON, which all ranks compare
    content: _Content
    verdict: str = ""  # the race's sentence where it did not find one configuration to be the fastest

    @property
    def run_type(self) -> str:
        return self.content["choice"]["run_type"]

    @property
    def flags(self) -> Mapping[str, Any]:
        return self.content["choice"]["flags"]


def spelled(run_type: str, flags: Mapping[str, Any]) -> str:
    """Return `optimized:zero_stage=2+compile=off`."""
    words = [f"{name}={'on' if value is True else 'off' if value is False else value}" for name, value in flags.items()]
    return run_type + (":" + "+".join(words) if words else "")


def work_of(settings: RunSettings) -> dict[str, Any]:
    """Return the values of `WORK` of a run."""
    return {name: settings.value(name) for name in WORK}


def hash_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_choice(path: Path) -> Choice:
    """Return the choice in a file. InputError, one sentence, if it cannot be used anywhere."""
    found = read_json(path)
    with holding_together(path):
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise InputError(f"it is not a choice of find_fastest.py with schema {SCHEMA}")
        content: _Content = check_types(found, _Content, may_hold_more=True)
        run_type, work = content["choice"]["run_type"], content["work"]
        if run_type not in STRATEGIES:
            raise InputError(f"{value_text(run_type)[:40]!r} is not a run type; known are {', '.join(STRATEGIES)}")
        if work.keys() != set(WORK):
            raise InputError(f"its work does not name {', '.join(WORK)}")
        foreign = ALL_OPTIONS - STRATEGIES[run_type].options.keys()
        for name in content["choice"]["flags"]:
            if name not in SETS - foreign:
                raise InputError(f"it sets {name[:40]!r}, which is not for a choice of {run_type}")
        flags = {
            name: checked_like_a_flag(FLAGS[name], value, name)
            for name, value in content["choice"]["flags"].items()
            if value is not None
        }
        verdict, sentence = found.get("verdict"), ""
        if isinstance(verdict, dict) and verdict.get("kind") != "fastest":
            sentence = one_line(str(verdict.get("sentence") or ""), LONGEST_VERDICT)
        return Choice(path, hash_of(found), {**content, "choice": {"run_type": run_type, "flags": flags}}, sentence)


def content_of(
    run_type: str, flags: Mapping[str, Any], ranks: int, settings: RunSettings, commit: str
) -> dict[str, Any]:
    """Return what a choice.json must hold."""
    return {
        "schema": SCHEMA,
        "device": device_name(settings.compute.device),
        "torch": torch_version(),
        "commit": commit,
        "ranks": ranks,
        "work": work_of(settings),
        "choice": {"run_type": run_type, "flags": dict(flags)},
    }


def misfit(choice: Choice, settings: RunSettings, world_size: int) -> str | None:
    """Return why the saved choice does not apply to a start; None if it does."""
    pairs = [
        ("ranks", choice.content["ranks"], devices_of(settings, world_size)),
        ("the device", choice.content["device"], device_name(settings.compute.device)),
        ("PyTorch", choice.content["torch"], torch_version()),
        *((f"--{name}", choice.content["work"][name], value) for name, value in work_of(settings).items()),
    ]
    for name, theirs, ours in pairs:
        if theirs != ours:
            return f"it is for {name} {value_text(theirs)[:80]}, not {value_text(ours)}"
    return None


def devices_of(settings: RunSettings, world_size: int) -> int:
    """Return the number of devices that compute: the ranks, or those that the one process of dp sees."""
    if STRATEGIES[settings.training.run_type].devices != "all":
        return world_size
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(gpu_names()) if seen is None else len([word for word in seen.split(",") if word.strip()])


@dataclasses.dataclass(frozen=True)
class Taken:
    """A run type with flags of its own. `why` follows its name in a sentence; `sha256` is of its file."""

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
    """Return the run with the type of choice.json, or why that is not taken."""
    path, is_given = Path(asked.values["choice"] or DEFAULT_CHOICE), asked.values["choice"] is not None
    try:
        choice = read_choice(path)
        if choice.content["ranks"] != launch.world_size and STRATEGIES[choice.run_type].devices != "all":
            raise InputError(f"{path} is for ranks {choice.content['ranks']}, not {launch.world_size}")
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
    of_other_work = bool(asked.given & NAMES_WORK)
    work = {
        name: checked_like_a_flag(FLAGS[name], value, name)
        for name, value in choice.content["work"].items()
        if name not in asked.given and (name == "precision" or not of_other_work)
    }
    said = SIZES | ({"precision"} if of_other_work else set())
    words = " ".join(f"--{name} {value_text(value)}" for name, value in work.items() if name in said)
    if not words:
        return asked, ""
    name = "precision" if of_other_work else "work"
    return asked.configured_with(work), f", and its {name}, as no flag names another: {words}"


def _checked(taken: Taken, asked: ParsedFlags, launch: Launch, check: Check) -> CheckedRun:
    """Return the run with what is taken, as if a --config file had it."""
    flags = {name: value for name, value in taken.flags.items() if name not in asked.given}
    given = {name: asked.values[name] for name in sorted(taken.flags.keys() & asked.given)}
    with refusals_say(f"--run_type auto took {taken.run_type}, {taken.why}"):
        checked = check(asked.configured_with(flags).replace({"run_type": taken.run_type}), launch)
    name = spelled(taken.run_type, taken.flags)
    kept = [f"--{flag} {value_text(value)}" for flag, value in given.items() if value != taken.flags[flag]]
    note = "; ".join([f"--run_type auto: {name}, {taken.why}", *(f"{each} stays, as it was given" for each in kept)])
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
