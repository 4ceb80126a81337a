"""RunSettings: every flag worked out and checked, before torch is imported or a process group exists. No torch.

Each rule that a user can break raises ValueError with one sentence: the flag, its value, the rule, the way out.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.batch import batch_arithmetic
from testbed.deepspeed_config import DeepSpeedFile, merge_into_flags, read_deepspeed_file
from testbed.flags import NOT_IN_CONFIG_FILES, CommandLine, parse_command_line
from testbed.launch import Launch, read_launch, refuse, threads_per_rank
from testbed.model_shape import MODEL_SIZES, ModelShape
from testbed.parallelism import (
    MeshSizes,
    check_combination,
    check_schedule,
    math_changes,
    mesh_sizes,
    options_of_run_type,
    stages_per_rank,
)
from testbed.strategies import STRATEGIES
from testbed.token_file import TokenFile, open_token_file

FOLLOWS = frozenset(
    "micro_batch_size_per_gpu min_learning_rate warmup_steps lr_decay_steps threads_per_rank shard_size "
    "pipeline_stages stages_per_rank tensor_parallel_size".split()
)
DEFAULT_DEEPSPEED_CONFIG = Path(__file__).parent.parent / "deepspeed_config.json"


@dataclass(frozen=True)
class RunSettings:
    """The settings of one run. Field names are the flags'; what a flag left open is filled in."""

    run_type: str
    epochs: int
    max_train_steps: int | None
    stop_at_step: int | None
    max_val_steps: int | None
    eval_every: int | None
    eval_only: bool
    seed: int
    model: str
    num_layers: int
    num_heads: int
    embedding_size: int
    vocab_size: int
    max_position_embeddings: int
    dropout: float
    init_from: str
    use_flash_attention: bool
    train_data_path: str
    val_data_path: str
    seq_length: int
    num_workers: int
    global_batch_size: int
    micro_batch_size_per_gpu: int
    grad_accum_steps: int
    enforce_global_batch_size: int | None
    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    lr_decay_steps: int
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    max_grad_norm: float
    device: str
    precision: str
    threads_per_rank: int
    quiet_nccl_monitor: bool
    mixed_precision: str | None  # this and what follows to tensor_parallel_size: None where the run type has it not
    skip_gradient_sync: str | None
    bucket_cap_mb: float | None
    gradient_compression: str | None
    reshard_after_forward: str | None
    shard_size: int | None
    deepspeed_config: str | None
    zero_stage: int | None
    offload: str | None
    reduce_bucket_size: int | None
    allgather_bucket_size: int | None
    overlap_comm: str | None
    pipeline_stages: int | None
    pipeline_schedule: str | None
    stages_per_rank: int | None
    tensor_parallel_size: int | None
    activation_checkpointing: str
    compile: bool
    checkpoint_path: str
    overwrite: bool
    resume: bool
    save_every: int | None
    keep_best: bool
    steps_per_print: int
    timing_warmup_steps: int
    timing_sample_every: int
    profile: bool
    profile_steps: int
    profile_mode: bool
    tensorboard: bool
    sample_prompt: str
    sample_tokens: int
    # worked out, not flags
    mesh: MeshSizes
    math_changes: tuple[str, ...]  # what makes the run compute something else than the baseline does
    data_world_size: int
    steps_per_epoch: int
    total_steps: int  # optimizer steps that the schedule is made for
    given: frozenset[str] = dataclasses.field(compare=False)  # what a person set; the rest is default or follows

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            self.num_layers, self.num_heads, self.embedding_size, self.vocab_size, self.max_position_embeddings
        )

    @property
    def last_step(self) -> int:
        """Optimizer steps that this start of the run may reach."""
        if self.eval_only:
            return 0
        return min(self.total_steps, self.stop_at_step or self.total_steps)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length

    @property
    def is_instrumented(self) -> bool:
        """Something slows the step down or changes its timing: such a run enters no headline."""
        return self.profile or self.profile_mode or bool(self.skip_gradient_sync)

    def as_config(self) -> dict[str, Any]:
        """The settings in the form of a --config file. What nobody set and follows from other settings (the micro batch
        from the ranks, the warm-up from the steps) is null there, so that it follows again where the file is used."""
        config = self.as_dict()
        for name in FOLLOWS - self.given:
            config[name] = None
        return config

    def as_dict(self) -> dict[str, Any]:
        """Every flag that is part of the work, with the value that it has in this run."""
        worked_out = {"mesh", "math_changes", "data_world_size", "steps_per_epoch", "total_steps", "grad_accum_steps"}
        fields = dataclasses.asdict(self)
        return {
            name: value for name, value in fields.items() if name not in worked_out | {"given"} | NOT_IN_CONFIG_FILES
        }


@dataclass(frozen=True)
class CheckedRun:
    """All that is known before torch is imported."""

    settings: RunSettings
    train_file: TokenFile
    val_file: TokenFile
    deepspeed_file: DeepSpeedFile | None


def start(arguments: list[str]) -> tuple[CheckedRun, Launch]:
    """From the command line to a checked run; --help and what was typed wrong end the process here, in a second."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while PyTorch loads ends without a page of traceback
    launch = None
    try:
        launch = read_launch()
        return check_run(parse_command_line(arguments), launch), launch
    except ValueError as error:
        raise SystemExit(refuse(launch, str(error))) from None


def check_run(command_line: CommandLine, launch: Launch) -> CheckedRun:
    """Work out the settings and check all that can be checked without a device.

    Raises:
        ValueError: one sentence for the first rule that is broken.
    """
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
    values["checkpoint_path"] = values["checkpoint_path"] or f"checkpoint/{run_type}"
    _check_start_is_not_overwritten(Path(values["init_from"]), Path(values["checkpoint_path"]))
    train_file = open_token_file(Path(values["train_data_path"]), "--train_data_path")
    val_file = open_token_file(Path(values["val_data_path"]), "--val_data_path")
    values.update(_model_dimensions(values, train_file, val_file))
    mesh = mesh_sizes(values, launch.world_size)
    values.update({name: size for name, size in mesh.flags().items() if name in STRATEGIES[run_type].options})
    values["stages_per_rank"] = stages_per_rank(values)
    check_combination(values, mesh)
    values.update(_batch(values, mesh))
    check_schedule(values, mesh)
    values.update(mesh=mesh, math_changes=math_changes(values))
    values.update(_schedule(values, train_file, val_file))
    if values["min_learning_rate"] is None:
        values["min_learning_rate"] = values["learning_rate"] / 10
    if values["min_learning_rate"] > values["learning_rate"]:
        raise ValueError(
            f"--min_learning_rate {values['min_learning_rate']:g} is above --learning_rate "
            f"{values['learning_rate']:g}; the schedule ends at the lower one"
        )
    values["threads_per_rank"] = values["threads_per_rank"] or threads_per_rank(launch)
    _check_measuring(values)
    if values["overwrite"] and values["resume"]:
        raise ValueError("--overwrite replaces the run and --resume continues it; give one of them")
    names = {field.name for field in dataclasses.fields(RunSettings)}
    values["given"] = command_line.explicit
    settings = RunSettings(**{name: value for name, value in values.items() if name in names})
    return CheckedRun(settings, train_file, val_file, deepspeed_file)


def _deepspeed_file(values: dict[str, Any], run_type: str) -> DeepSpeedFile | None:
    """The file that --deepspeed_config names. A baseline that names it does the work it asks for, as in seed 000."""
    if values["deepspeed_config"] is None:
        if run_type != "optimized":
            return None
        values["deepspeed_config"] = os.path.relpath(DEFAULT_DEEPSPEED_CONFIG)  # a record should not name a home folder
    return read_deepspeed_file(Path(values["deepspeed_config"]))


def _model_dimensions(values: dict[str, Any], train_file: TokenFile, val_file: TokenFile) -> dict[str, Any]:
    """The shape: the size's numbers, overridden by the dimension flags, or those of the folder in --init_from."""
    for attribute in ("tokenizer", "vocab_size", "end_of_text_id", "tokenizer_file"):
        ours, theirs = getattr(train_file, attribute), getattr(val_file, attribute)
        if ours != theirs:
            raise ValueError(
                f"--train_data_path {train_file.path} has {attribute} {ours} and --val_data_path {val_file.path} has "
                f"{theirs}; both must come from one run of preprocess_small.py"
            )
    base = dataclasses.asdict(_starting_shape(values))
    expected_tokenizer = _tokenizer_of_weights(values["init_from"])
    if expected_tokenizer is not None and train_file.tokenizer != expected_tokenizer:
        raise ValueError(
            f"--init_from {values['init_from']} reads ids of the tokenizer {expected_tokenizer}, but {train_file.path} "
            f"is written with {train_file.tokenizer}; tokenize the text with preprocess_small.py --tokenizer "
            f"{expected_tokenizer}"
        )
    shape = {name: values[name] or base[name] for name in base}
    if values["vocab_size"] is None and values["init_from"] == "scratch":
        shape["vocab_size"] = train_file.vocab_size
    if values["init_from"] != "scratch":
        changed = [name for name in base if shape[name] != base[name]]
        if changed:
            raise ValueError(
                f"--{changed[0]} {shape[changed[0]]} does not fit the weights of --init_from {values['init_from']} "
                f"({base[changed[0]]}); leave the flag out"
            )
    if shape["vocab_size"] < train_file.vocab_size and values["vocab_size"] is None:
        raise ValueError(
            f"--init_from {values['init_from']} knows {shape['vocab_size']} tokens, but {train_file.path} is written "
            f"with {train_file.vocab_size}; tokenize the text with the tokenizer of those weights"
        )
    if shape["embedding_size"] % shape["num_heads"]:
        raise ValueError(
            f"--embedding_size {shape['embedding_size']} is not a multiple of --num_heads {shape['num_heads']}; "
            "every head takes an equal share of the channels"
        )
    if values["seq_length"] > shape["max_position_embeddings"]:
        raise ValueError(
            f"--seq_length {values['seq_length']} is longer than the {shape['max_position_embeddings']} positions of "
            "the model; shorten it or raise --max_position_embeddings"
        )
    return shape


def _starting_shape(values: dict[str, Any]) -> ModelShape:
    init_from = values["init_from"]
    if init_from == "scratch":
        return MODEL_SIZES[values["model"]]
    if init_from in MODEL_SIZES and init_from.startswith("gpt2"):
        values["model"] = init_from
        return MODEL_SIZES[init_from]
    return shape_of_folder(Path(init_from))


def _check_start_is_not_overwritten(init_from: Path, checkpoint_path: Path) -> None:
    """The weights that a run begins with must not lie where it writes its own."""
    start, run = init_from.resolve(), checkpoint_path.resolve()
    if init_from.is_dir() and (start == run or run in start.parents):
        raise ValueError(
            f"--init_from {init_from} lies in --checkpoint_path {checkpoint_path}, which this run writes; give another "
            "--checkpoint_path"
        )


def _tokenizer_of_weights(init_from: str) -> str | None:
    """The tokenizer whose ids the weights know; None where that is not written down."""
    if init_from in MODEL_SIZES:
        return "gpt2"
    config_file = Path(init_from) / "config.json"
    if init_from == "scratch" or not config_file.is_file():
        return None
    return json.loads(config_file.read_text(encoding="utf-8")).get("tokenizer")


def shape_of_folder(folder: Path) -> ModelShape:
    """The shape that a `config.json` in the form of `transformers` describes.

    Raises:
        ValueError: there is no such file, or it describes no GPT-2.
    """
    config_file = folder / "config.json"
    if not (folder / "model.safetensors").is_file() or not config_file.is_file():
        raise ValueError(
            f"--init_from {folder} is neither scratch, nor one of gpt2, gpt2-medium, gpt2-large, gpt2-xl, nor a folder "
            "with config.json and model.safetensors"
        )
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        if config["model_type"] != "gpt2":
            raise ValueError(f"its model_type is {config['model_type']!r}, not gpt2")
        positions = config.get("n_positions", 1024)
        return ModelShape(config["n_layer"], config["n_head"], config["n_embd"], config["vocab_size"], positions)
    except (ValueError, KeyError) as error:
        raise ValueError(f"--init_from {folder}: config.json does not describe a GPT-2: {error}") from None


def _batch(values: dict[str, Any], mesh: MeshSizes) -> dict[str, int]:
    """The batch arithmetic, with the default micro batch that the run type is about."""
    if values["run_type"] == "model_parallel":  # the whole batch passes through the stages at once
        return batch_arithmetic(values, mesh.data, largest_micro_batch=sys.maxsize)
    return batch_arithmetic(values, mesh.data, at_least=mesh.pipeline)


def _schedule(values: dict[str, Any], train_file: TokenFile, val_file: TokenFile) -> dict[str, int]:
    """How many optimizer steps there are, and the learning rate's marks on them."""
    sequence, global_batch = values["seq_length"], values["global_batch_size"]
    if num_windows(val_file, sequence) == 0 and values["max_val_steps"] != 0:
        raise ValueError(
            f"--val_data_path {val_file.path} holds {len(val_file.tokens):,} tokens, fewer than one window of "
            f"--seq_length {sequence} + 1; use more text, a shorter sequence, or --max_val_steps 0"
        )
    steps_per_epoch = num_windows(train_file, sequence) // global_batch
    if steps_per_epoch == 0 and not values["eval_only"]:
        raise ValueError(
            f"--train_data_path {train_file.path} holds {num_windows(train_file, sequence)} windows of --seq_length "
            f"{sequence}, fewer than the global batch of {global_batch}; use more text, a shorter sequence or a "
            "smaller --global_batch_size"
        )
    total = steps_per_epoch * values["epochs"]
    if values["max_train_steps"] is not None:
        total = min(total, values["max_train_steps"])
    warmup = values["warmup_steps"] if values["warmup_steps"] is not None else min(2000, total // 10)
    decay = values["lr_decay_steps"] or max(total, 1)
    if warmup > decay:
        raise ValueError(
            f"--warmup_steps {warmup} reaches past the end of the schedule at step {decay} "
            "(--lr_decay_steps, or the run's last step): the learning rate would never get to its peak"
        )
    return {
        "steps_per_epoch": steps_per_epoch,
        "total_steps": total,
        "warmup_steps": warmup,
        "lr_decay_steps": decay,
    }


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
    if values["tensorboard"] and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs the package tensorboard; install it with pip install tensorboard")


def num_windows(token_file: TokenFile, seq_length: int) -> int:
    """Non-overlapping windows of seq_length + 1 tokens that start every seq_length tokens."""
    return max(0, (len(token_file.tokens) - 1) // seq_length)
