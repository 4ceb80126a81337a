"""Work out the settings of a run and check every rule, before torch is imported or a process group exists. No torch.

Each rule that a user can break raises ValueError with one sentence: the flag, its value, the rule, the way out.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from testbed.config.batch import batch_arithmetic
from testbed.config.compatibility import check_combination, check_schedule, math_changes
from testbed.config.deepspeed_file import DeepSpeedFile, merge_into_flags, read_deepspeed_file, values_of
from testbed.config.flag_types import AUTO
from testbed.config.flags import CommandLine, parse_command_line
from testbed.config.initial_shape import check_start_is_not_overwritten, model_dimensions
from testbed.config.mesh import mesh_sizes, options_of_run_type, stages_per_rank
from testbed.config.run_types import STRATEGIES
from testbed.config.schedule import default_learning_rate, options_of_optimizer, schedule
from testbed.config.settings import BENCHMARK_NEW_TOKENS, BENCHMARK_PROMPT_TOKENS, CheckedRun, RunSettings
from testbed.config.trained_run import as_trained, origin_of_refused
from testbed.data.token_file import open_token_file
from testbed.distributed.launch import Launch, read_launch, refuse, threads_per_rank
from testbed.distributed.mesh import MeshSizes
from testbed.distributed.openmp import wait_briefly
from testbed.distributed.signals import end_on_signals
from testbed.distributed.store_port import check_port
from testbed.errors import one_line
from testbed.io import SOURCE, cannot_become_a_folder, not_a_folder
from testbed.model.shape import ModelShape

DEFAULT_DEEPSPEED_CONFIG = SOURCE / "deepspeed_config.json"


def start(arguments: list[str]) -> tuple[CheckedRun, Launch]:
    """From the command line to a checked run; --help and what was typed wrong end the process here, in a second."""
    end_on_signals()
    wait_briefly()
    launch = None
    try:
        launch = read_launch()
        checked = check_run(parse_command_line(arguments), launch)
        check_port(launch)
        return checked, launch
    except ValueError as error:
        raise SystemExit(refuse(launch, one_line(str(error)))) from None
    except OSError as error:  # a folder that may not be entered, a name that is too long
        said = f"{error.filename} cannot be looked at ({error.strerror}); name another"
        raise SystemExit(refuse(launch, one_line(said))) from None


def check_run(command_line: CommandLine, launch: Launch) -> CheckedRun:
    """Work out the settings and check all that can be checked without a device.

    Raises:
        ValueError: one sentence for the first rule that is broken.
    """
    try:
        return _check_run(command_line, launch)
    except ValueError as error:
        origin = origin_of_refused(str(error), command_line.values, command_line.explicit)
        if origin is None:
            raise
        raise ValueError(f"{error}; {origin}") from None


def _check_run(command_line: CommandLine, launch: Launch) -> CheckedRun:
    """As `check_run`, whose refusals say what nobody typed."""
    values = dict(command_line.values)
    run_type = values["run_type"]
    if launch.is_distributed and not STRATEGIES[run_type].is_distributed:
        raise ValueError(
            f"--run_type {run_type} is one process, but the launcher started {launch.world_size} ranks; start it with "
            "python, or choose a run type that spreads the step over ranks: "
            + ", ".join(name for name, entry in STRATEGIES.items() if entry.is_distributed)
            + " (ddp is the plain data-parallel one)"
        )
    deepspeed_file = _deepspeed_file(values, run_type)
    if deepspeed_file is not None:
        values = merge_into_flags(deepspeed_file, values, command_line.explicit)
    values.update(options_of_run_type(values, command_line.typed))
    values["attention"] = _attention(values)
    values["checkpoint_path"] = values["checkpoint_path"] or f"checkpoint/{run_type}"
    if fault := cannot_become_a_folder(Path(values["checkpoint_path"])):
        raise ValueError(f"--checkpoint_path {values['checkpoint_path']} {fault}; name a folder for the run's files")
    if run_type == "optimized" and any(letter in str(values["checkpoint_path"]) for letter in "*?["):
        raise ValueError(
            f"--checkpoint_path {values['checkpoint_path']}: DeepSpeed looks for its files by patterns, and a *, ? or "
            "[ in their path is one; name another folder"
        )
    check_start_is_not_overwritten(Path(values["init_from"]), Path(values["checkpoint_path"]))
    given = command_line.explicit | (values_of(deepspeed_file).keys() if deepspeed_file else set())
    taken = as_trained(values, given)
    values.update(taken)
    if taken.get("train_data_path") == values["val_data_path"]:
        train_file = val_file = open_token_file(Path(values["val_data_path"]), "--val_data_path")
    else:
        train_file = open_token_file(Path(values["train_data_path"]), "--train_data_path")
        val_file = open_token_file(Path(values["val_data_path"]), "--val_data_path")
    values.update(model_dimensions(values, train_file, val_file))
    if values["learning_rate"] is None:
        values["learning_rate"] = default_learning_rate(_shape(values), values["model"], values["optimizer"])
    values.update(options_of_optimizer(values, command_line.typed))
    mesh = mesh_sizes(values, launch.world_size)
    values.update({name: size for name, size in mesh.flags().items() if name in STRATEGIES[run_type].options})
    values["stages_per_rank"] = stages_per_rank(values)
    check_combination(values, mesh)
    if values["matmul"] == "fp8":  # what is not multiplied in 8 bits; every device that has them has fast bf16
        values["precision"] = "bf16"
    values["finds_micro_batch"] = values["micro_batch_size_per_gpu"] == AUTO
    values.update(_batch(values, mesh))
    check_schedule(values, mesh)
    values.update(mesh=mesh, math_changes=math_changes(values))
    values.update(schedule(values, train_file, val_file))
    values["threads_per_rank"] = values["threads_per_rank"] or threads_per_rank(launch)
    _check_measuring(values)
    if values["overwrite"] and values["resume"]:
        raise ValueError("--overwrite replaces the run and --resume continues it; give one of them")
    _check_saving(values)
    names = {field.name for field in dataclasses.fields(RunSettings)}
    values["given"] = given
    settings = RunSettings(**{name: value for name, value in values.items() if name in names})
    return CheckedRun(settings, train_file, val_file, deepspeed_file)


def _deepspeed_file(values: dict[str, Any], run_type: str) -> DeepSpeedFile | None:
    """The file that --deepspeed_config names. A baseline that names it does the work it asks for, as in seed 000."""
    if values["deepspeed_config"] is None:
        if run_type != "optimized":
            return None
        values["deepspeed_config"] = os.path.relpath(DEFAULT_DEEPSPEED_CONFIG)  # a record should not name a home folder
    return read_deepspeed_file(Path(values["deepspeed_config"]))


def _shape(values: dict[str, Any]) -> ModelShape:
    return ModelShape(**{field.name: values[field.name] for field in dataclasses.fields(ModelShape)})


def _attention(values: dict[str, Any]) -> str:
    """--attention, or what the older flag says."""
    if not values["use_flash_attention"]:
        return values["attention"]
    if values["attention"] not in (AUTO, "flash"):
        raise ValueError(f"--use_flash_attention contradicts --attention {values['attention']}; leave one of them out")
    return "flash"


def _batch(values: dict[str, Any], mesh: MeshSizes) -> dict[str, int]:
    """The batch arithmetic, with the default micro batch that the run type is about."""
    if values["run_type"] == "model_parallel":  # the whole batch passes through the stages at once
        return batch_arithmetic(values, mesh.data, largest_micro_batch=sys.maxsize)
    return batch_arithmetic(values, mesh.data, at_least=mesh.pipeline)


def _check_saving(values: dict[str, Any]) -> None:
    """What can be said of saving and resuming before a checkpoint is looked at."""
    if values["allow_setting_change"] and not values["resume"]:
        raise ValueError(
            "--allow-setting-change is about a run that --resume continues; give --resume too, or leave it out"
        )
    if values["eval_only"] and values["resume"]:
        raise ValueError("--eval_only trains nothing, so there is nothing to --resume; leave one of them out")
    if values["async_mode"] == "async" and values["run_type"] == "optimized":
        raise ValueError(
            "--async_mode async with --run_type optimized: DeepSpeed writes its checkpoints while the loop waits; "
            "leave --async_mode out, or use --run_type fsdp"
        )
    given = values["resume"]
    if given not in (None, AUTO) and not Path(given).is_dir():
        raise ValueError(
            f"--resume {given} {not_a_folder(Path(given))}; give auto, a checkpoint such as {values['checkpoint_path']}"
            "/checkpoints/step_000020, or a run's folder"
        )


def _check_measuring(values: dict[str, Any]) -> None:
    """What the measuring flags need is there before hours of training."""
    steps = 0 if values["eval_only"] else min(values["total_steps"], values["stop_at_step"] or values["total_steps"])
    warmup, looked_at = max(1, values["timing_warmup_steps"]), values["profile_steps"]
    if values["profile"] and steps < warmup + looked_at:
        raise ValueError(
            f"--profile looks at {looked_at} steps after {warmup} of warm-up, but the run has {steps}; give "
            f"--max_train_steps {warmup + looked_at} or more, or a smaller --profile_steps"
        )
    if values["skip_gradient_sync"] and (values["save_every"] or values["resume"]):
        raise ValueError(
            "--skip_gradient_sync is no training: there is nothing to go on from with --save_every or --resume"
        )
    if values["run_inference_benchmark"]:
        _check_inference_benchmark(values)
    if values["matmul"] == "fp8" and importlib.util.find_spec("torchao") is None:
        raise ValueError("--matmul fp8 needs the package torchao; install it with pip install -e '.[fp8]'")
    if values["tensorboard"] and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs the package tensorboard; install it with pip install tensorboard")


def _check_inference_benchmark(values: dict[str, Any]) -> None:
    """There will be weights to generate with, and positions for all tokens."""
    if values["skip_gradient_sync"]:
        raise ValueError(
            "--run_inference_benchmark measures the trained weights, and --skip_gradient_sync leaves none; leave one "
            "of them out"
        )
    needed = BENCHMARK_PROMPT_TOKENS + BENCHMARK_NEW_TOKENS
    if values["max_position_embeddings"] < needed:
        raise ValueError(
            f"--run_inference_benchmark generates {BENCHMARK_NEW_TOKENS} tokens after a prompt of "
            f"{BENCHMARK_PROMPT_TOKENS}, and this model reads {values['max_position_embeddings']} at most; give "
            f"--max_position_embeddings {needed} or more, or leave it out"
        )
