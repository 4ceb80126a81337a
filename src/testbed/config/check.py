"""Fill in the settings of a run and check every rule before torch is imported. No torch.

An error is an InputError with one sentence: the flag, its value, the rule, the way out.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.config.automatic_run_type import Planner, hash_of, with_automatic_run_type
from testbed.config.compatibility import math_changes
from testbed.config.deepspeed_file import DeepSpeedFile, read_deepspeed_file, with_deepspeed_file
from testbed.config.flag_types import AUTO, MOST_THREADS
from testbed.config.flags import ParsedFlags, parse_command_line, with_recorded_flags
from testbed.config.initial_shape import check_start_is_not_overwritten, model_dimensions
from testbed.config.mesh import options_of_run_type, spread_over_ranks
from testbed.config.resumed_folder import check_resumed
from testbed.config.run_types import STRATEGIES
from testbed.config.schedule import (
    check_data_suffices,
    count_steps,
    learning_rate_marks,
    one_length,
    options_of_optimizer,
    peak_learning_rate,
)
from testbed.config.settings import CheckedRun, Origin, Plan, RunSettings
from testbed.config.tracker_names import WANDB, check_installed, trackers_of
from testbed.config.trained_run import as_trained
from testbed.data.token_file import TokenFile, open_token_file
from testbed.distributed.launch import Launch, limit_gomp_spinning, read_launch, refuse, threads_per_rank
from testbed.distributed.rendezvous import check_port
from testbed.distributed.signals import end_on_signals
from testbed.errors import InputError, counted, one_line, refusals_say
from testbed.io import SOURCE, cannot_become_a_folder

DEFAULT_DEEPSPEED_CONFIG = SOURCE / "deepspeed_config.json"
LONGEST_REFUSAL = 8000  # characters: --deepspeed_config names all that it cannot take at once
OLDEST_TORCH, OLDEST_WANDB = (2, 11), (0, 31)  # as in pyproject.toml


def check_command_line(arguments: list[str], planner: Planner | None = None) -> tuple[CheckedRun, Launch]:
    """Return the checked run and its launch; --help and errors end the process here, before torch is imported.

    Args:
        planner: the plan's best for --run_type auto.
    """
    end_on_signals()
    limit_gomp_spinning()
    launch = None
    try:
        launch = read_launch()
        checked = check_run(parse_command_line(arguments), launch, planner)
        check_port(launch)
        return checked, launch
    except InputError as error:
        raise SystemExit(refuse(launch, one_line(str(error), LONGEST_REFUSAL))) from None
    except OSError as error:  # a folder that may not be entered, a name that is too long
        said = f"{error.filename} cannot be looked at ({error.strerror}); name another"
        raise SystemExit(refuse(launch, one_line(said))) from None


def check_run(asked: ParsedFlags, launch: Launch, planner: Planner | None = None) -> CheckedRun:
    """Fill in the settings and check all that can be checked without a device.

    Args:
        planner: as in `check_command_line`.
    """
    check_resumed(asked.values["resume"])
    resumed, file = with_recorded_flags(asked)
    if file is not None:
        return _resolve_resumed(resumed, file, launch)
    asked = resumed
    if asked.values["run_type"] == AUTO:
        return with_automatic_run_type(asked, launch, _resolve, planner)
    if asked.values["choice"] is not None:
        raise InputError("--choice is for --run_type auto, which takes it; give that, or leave --choice out")
    if not asked.values["eval_only"]:
        return _resolve(asked, launch)
    with refusals_say("--eval_only takes what is not typed from the record of --init_from"):
        return _resolve(asked, launch)


def _resolve_resumed(asked: ParsedFlags, file: Path, launch: Launch) -> CheckedRun:
    """Fill in the settings of a run that is resumed, and say where those that were not typed come from."""
    with refusals_say(f"--resume takes what is not typed from {file}"):
        checked = _resolve(asked, launch)
    note = f"--resume: {asked.values['run_type']}, with the flags of {file} where none is typed"
    # a folder that some nodes do not see would give their ranks other flags
    return dataclasses.replace(checked, notes=(note,), flags_sha256=hash_of(checked.settings.as_config()))


def _resolve(asked: ParsedFlags, launch: Launch) -> CheckedRun:
    """Fill in the settings, with those of DeepSpeed's file."""
    if not has_version("torch", OLDEST_TORCH):
        oldest, found = ".".join(map(str, OLDEST_TORCH)), importlib.metadata.version("torch")
        raise InputError(f"PyTorch {found} is too old: {oldest} or newer is needed; pip install 'torch>={oldest}'")
    _check_ranks(asked.values["run_type"], launch)
    deepspeed_file = _deepspeed_file(asked)
    if deepspeed_file is None:
        return _filled_in(asked, launch, None)
    try:
        return _filled_in(with_deepspeed_file(asked, deepspeed_file), launch, deepspeed_file)
    except InputError as error:
        raise InputError(f"{error}{deepspeed_file.origin_of(str(error))}") from None


def _filled_in(asked: ParsedFlags, launch: Launch, deepspeed_file: DeepSpeedFile | None) -> CheckedRun:
    """Fill in the settings. Each step sees the results of the steps before it."""
    values = {**asked.values, **options_of_run_type(asked.values, asked.typed)}
    values |= _paths(values, deepspeed_file)
    if values["init_from"] == "resume" and not Path("resume").exists():  # before what the data lacks
        raise InputError(
            "--init_from resume is nanoGPT's way to go on with a run; here it is --resume, without --init_from"
        )
    check_start_is_not_overwritten(Path(values["init_from"]), Path(values["checkpoint_path"]))
    values |= (taken := as_trained(values, asked.given))
    train_file, val_file = _open_token_files(values, is_same_file="train_data_path" in taken)
    values |= model_dimensions(values, asked.typed, train_file, val_file)
    values["learning_rate"] = peak_learning_rate(values)
    values |= options_of_optimizer(values, asked.typed)
    values, mesh = spread_over_ranks(values, launch.world_size)
    check_data_suffices(values, train_file, val_file)
    values |= one_length(values, asked.typed)
    steps_per_epoch, total_steps = count_steps(values, train_file)
    values |= learning_rate_marks(values, total_steps, deepspeed_file.open_end if deepspeed_file else None)
    values |= {"threads_per_rank": values["threads_per_rank"] or _default_threads(launch)}
    plan = Plan(
        mesh=mesh,
        math_changes=math_changes(values),
        data_world_size=mesh.data,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        deepspeed_file=deepspeed_file if STRATEGIES[values["run_type"]].engine == "deepspeed" else None,
    )
    settings = RunSettings.of_flags(values, plan, Origin(given=asked.given, typed=asked.typed))
    _check_measuring(settings)
    notes = (
        *_note_on_fine_tuning(settings),
        *_note_on_nanogpt(asked.values["config"]),
        *_note_on_one_file(settings, train_file, val_file),
    )
    return CheckedRun(asked, settings, train_file, val_file, notes)


def has_version(package: str, at_least: tuple[int, int]) -> bool:
    """Return whether it is of this version or newer. Where it has no number or is not installed, assume so."""
    try:
        numbers = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(package) or "")
    except importlib.metadata.PackageNotFoundError:
        return True
    return numbers is None or (int(numbers[1]), int(numbers[2])) >= at_least


def _check_ranks(run_type: str, launch: Launch) -> None:
    if launch.is_distributed and not STRATEGIES[run_type].is_distributed:
        raise InputError(
            f"--run_type {run_type} is one process, but the launcher started {launch.world_size} ranks; start it with "
            "python, or choose a run type that spreads the step over ranks: "
            + ", ".join(name for name, entry in STRATEGIES.items() if entry.is_distributed)
            + " (ddp is the plain data-parallel one)"
        )


def _deepspeed_file(asked: ParsedFlags) -> DeepSpeedFile | None:
    """Read the file of --deepspeed_config, which a baseline may name too, to do the same work."""
    named = asked.values["deepspeed_config"]
    if named is None and STRATEGIES[asked.values["run_type"]].engine != "deepspeed":
        return None
    # relative, as a record should not name a home folder
    return read_deepspeed_file(Path(named or os.path.relpath(DEFAULT_DEEPSPEED_CONFIG)))


def _paths(values: Mapping[str, Any], deepspeed_file: DeepSpeedFile | None) -> dict[str, Any]:
    """Return the run's folder and its DeepSpeed file."""
    folder = values["checkpoint_path"] or f"checkpoint/{values['run_type']}"
    if fault := cannot_become_a_folder(Path(folder)):
        raise InputError(f"--checkpoint_path {folder} {fault}; name a folder for the run's files")
    if STRATEGIES[values["run_type"]].engine == "deepspeed" and any(letter in str(folder) for letter in "*?["):
        raise InputError(
            f"--checkpoint_path {folder}: DeepSpeed looks for its files by patterns, and a *, ? or "
            "[ in their path is one; name another folder"
        )
    named = values["deepspeed_config"] or (None if deepspeed_file is None else str(deepspeed_file.path))
    return {"checkpoint_path": folder, "deepspeed_config": named}


def _default_threads(launch: Launch) -> int:
    threads = threads_per_rank(launch)
    if threads > MOST_THREADS and os.environ.get("OMP_NUM_THREADS"):
        raise InputError(
            f"OMP_NUM_THREADS={one_line(str(threads), 40)} is more than {MOST_THREADS}, the most of one process; "
            "give --threads_per_rank, at most the machine's cores"
        )
    return threads


def _open_token_files(values: Mapping[str, Any], is_same_file: bool) -> tuple[TokenFile, TokenFile]:
    """Open both files; return one object twice if --eval_only has a single file."""
    val_path = Path(values["val_data_path"])
    if is_same_file and values["train_data_path"] == values["val_data_path"]:
        val_file = open_token_file(val_path, "--val_data_path")
        return val_file, val_file
    train_file = open_token_file(Path(values["train_data_path"]), "--train_data_path")
    val_file = open_token_file(val_path, "--val_data_path")
    _check_apart(train_file, val_file)
    return train_file, val_file


def _check_apart(train_file: TokenFile, val_file: TokenFile) -> None:
    """Check that a pattern of training shards leaves out the files that are validated on. One file as both is meant."""
    shards = {(train_file.path.parent / name).resolve() for name in train_file.listing}
    held_back = {(val_file.path.parent / name).resolve() for name in val_file.listing or [val_file.path.name]}
    if both := shards & held_back:
        raise InputError(
            f"--train_data_path {train_file.path} matches {min(both).name} too, which --val_data_path validates on: "
            "the loss would be of text that was learned; name the training shards alone, such as 'DIR/train_*.bin'"
        )


def _note_on_fine_tuning(settings: RunSettings) -> tuple[str, ...]:
    """Return a line where trained weights are trained with the default peak, which is one for training from scratch."""
    is_resumed = settings.checkpointing.resume is not None  # which has its own rate, or its own note
    if settings.model.init_from == "scratch" or settings.training.eval_only or is_resumed:
        return ()
    if "learning_rate" in settings.origin.given:
        return ()
    peak = settings.optimizer.learning_rate
    return (
        f"note: the peak learning rate is {peak:g}, the default for training from scratch; to train the weights of "
        f"--init_from further, a tenth or less is usual: --learning_rate {peak / 10:g} (docs/optimizers.md)",
    )


def _check_validations(settings: RunSettings) -> None:
    """Check that flags about validation meet enough of it to do something."""
    training, plan = settings.training, settings.plan
    patience, most = training.early_stop_patience, 1 + plan.total_steps // max(1, plan.steps_per_epoch)
    if training.eval_every:
        most += plan.total_steps // training.eval_every
    needing = {
        "early_stop_patience": patience,
        "eval_multiple_choice": training.eval_multiple_choice,
        "keep_best": "" if settings.checkpointing.keep_best else None,
    }
    for name, value in needing.items():
        if value is not None and training.max_val_steps == 0:
            words = f"--{name} {value}".rstrip()
            raise InputError(f"{words} needs validations, and --max_val_steps 0 turns them off; leave one out")
    if patience is not None and not training.eval_only and most <= patience:
        raise InputError(
            f"--early_stop_patience {patience} cannot end a run that validates {counted(most, 'time')} at most; give "
            "--eval_every STEPS, or a smaller one"
        )


def _note_on_nanogpt(config: str | None) -> tuple[str, ...]:
    """Return a line where the file of --config is nanoGPT's."""
    if not config or Path(config).suffix.lower() != ".py":
        return ()
    taken = f"`bias`, `wandb_project` and `wandb_run_name` of --config {config} are not taken"
    return (f"note: {taken}; this GPT-2 has biases, nanoGPT's has none by default",)


def _note_on_one_file(settings: RunSettings, train_file: TokenFile, val_file: TokenFile) -> tuple[str, ...]:
    """Return a line where a run validates on what it trains on."""
    does_both = not settings.training.eval_only and settings.training.max_val_steps != 0
    if not does_both or train_file.path.resolve() != val_file.path.resolve():
        return ()
    return (f"warning: --val_data_path {val_file.path} is the training file: its loss is of text that was learned",)


def _check_measuring(settings: RunSettings) -> None:
    """Check that what the measuring flags need is there, before hours of training."""
    measuring, steps = settings.measuring, settings.last_step
    _check_validations(settings)
    warmup, looked_at = max(1, measuring.timing_warmup_steps), measuring.profile_steps
    if measuring.profile and steps < warmup + looked_at:
        raise InputError(
            f"--profile looks at {looked_at} steps after {warmup} of warm-up, but the run has {steps}; give "
            f"--max_train_steps {warmup + looked_at} or more, or a smaller --profile_steps"
        )
    if settings.compute.matmul == "fp8" and importlib.util.find_spec("torchao") is None:
        raise InputError("--matmul fp8 needs the package torchao; install it with pip install -e '.[fp8]'")
    trackers = trackers_of(measuring.track, measuring.tensorboard)
    check_installed(trackers)
    if WANDB in trackers and not has_version(WANDB, OLDEST_WANDB):
        raise InputError(
            f"--track wandb needs wandb {'.'.join(map(str, OLDEST_WANDB))} or newer: of a resumed offline run an older "
            "one uploads each start over the one before; pip install -U wandb"
        )
