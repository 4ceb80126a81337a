"""Read and check DeepSpeed's configuration file. No torch.

"auto" in it means that flags decide. A value that contradicts a flag is refused; a value for which no flag was given
counts as given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.config.environment_variables import check_no_secret
from testbed.config.flag_types import AUTO
from testbed.config.flags import Asked, checked_like_a_flag
from testbed.config.table import FLAGS
from testbed.errors import InputError
from testbed.io import not_a_file, parse_json, read_regular

# where a file says what a flag also says
FILE_KEY_OF_FLAG = {
    "micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu",),
    "grad_accum_steps": ("gradient_accumulation_steps",),
    "global_batch_size": ("train_batch_size",),
    "max_grad_norm": ("gradient_clipping",),
    "steps_per_print": ("steps_per_print",),
    "zero_stage": ("zero_optimization", "stage"),
    "reduce_bucket_size": ("zero_optimization", "reduce_bucket_size"),
    "allgather_bucket_size": ("zero_optimization", "allgather_bucket_size"),
    "overlap_comm": ("zero_optimization", "overlap_comm"),
    "optimizer": ("optimizer", "type"),
    "learning_rate": ("optimizer", "params", "lr"),
    "adam_eps": ("optimizer", "params", "eps"),
    "weight_decay": ("optimizer", "params", "weight_decay"),
}
# what each value of --offload puts into host memory; the weights are never offloaded without the optimizer state
OFFLOADED = {"none": (), "optimizer": ("offload_optimizer",), "parameters": ("offload_optimizer", "offload_param")}
OLDER_NAMES = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_NUMBERS = {keys[0] for keys in FILE_KEY_OF_FLAG.values() if len(keys) == 1}
# what the testbed decides for every run type alike, so that an optimized run does the work of its baseline
NOT_DECIDED_HERE = {
    "scheduler": "the schedule comes from --learning_rate, --warmup_steps and --lr_decay_steps",
    "torch_autocast": "it follows --precision",
    "pipeline": "ZeRO does not cut the model into stages",
    "data_types": "it follows --precision and --mixed_precision",
    "amp": "it follows --precision",
    "communication_data_type": "gradients are averaged as --precision and --mixed_precision say",
    "prescale_gradients": "gradients are averaged, not summed",
    "gradient_predivide_factor": "gradients are averaged, not summed",
    "sparse_gradients": "gradients are averaged whole",
    "compression_training": "it would train another model",
    "timers": "the testbed times every step itself, and DeepSpeed's timer would wait for the device inside the step",
}
# of the zero_optimization section: what rounds weights or gradients on their way, and would be another computation
QUANTIZING = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


@dataclass(frozen=True)
class DeepSpeedFile:
    """A configuration file as read."""

    path: Path
    sha256: str  # of the file's bytes; the effective configuration has a hash of its own
    content: dict[str, Any]


def read_deepspeed_file(path: Path) -> DeepSpeedFile:
    """Read and check the file, as far as possible without DeepSpeed.

    Raises:
        InputError: it cannot be read, is not a JSON object, or decides what flags must decide.
    """
    if fault := not_a_file(path):
        raise InputError(f"--deepspeed_config {path} {fault}")
    try:
        text = read_regular(path)
    except OSError as error:
        raise InputError(f"--deepspeed_config {path} cannot be read: {error.strerror}") from None
    content = parse_json(text, f"--deepspeed_config {path}")
    if not isinstance(content, dict):
        raise InputError(f"--deepspeed_config {path} must hold one JSON object")
    check_no_secret(f"--deepspeed_config {path}", content)
    for key, reason in NOT_DECIDED_HERE.items():
        if content.get(key) not in (None, AUTO):
            raise InputError(f"--deepspeed_config {path} has a {key!r} section, but {reason}; remove the section")
    content = {key: value for key, value in content.items() if value not in (None, AUTO) or key in _NUMBERS}
    for section in ("optimizer", "zero_optimization", "fp16", "bf16"):
        if not isinstance(content.get(section, {}), dict):
            raise InputError(f"--deepspeed_config {path}: {section} must be a JSON object")
    for section in ("fp16", "bf16"):
        if content.get(section, {}).get("enabled", AUTO) not in (True, False, AUTO):
            raise InputError(f'--deepspeed_config {path}: {section}.enabled must be true, false or "auto"')
    for key in QUANTIZING:
        if content.get("zero_optimization", {}).get(key) not in (None, AUTO, False):
            raise InputError(
                f"--deepspeed_config {path}: zero_optimization.{key} rounds what it sends, so the run would compute "
                "something else than its baseline; remove it"
            )
    optimizer_type = content.get("optimizer", {}).get("type", AUTO)
    if optimizer_type not in ("AdamW", AUTO):
        raise InputError(
            f"--deepspeed_config {path} names the optimizer {optimizer_type!r}, but every run type trains with the "
            "same AdamW or Muon, so that runs stay comparable; remove the type or name AdamW, and give --optimizer"
        )
    return DeepSpeedFile(path, hashlib.sha256(text).hexdigest(), content)


def values_of(file: DeepSpeedFile) -> dict[str, Any]:
    """Return the file's decisions by the names of the flags.

    Raises:
        InputError: a value has the wrong type.
    """
    decided = {}
    for flag, keys in FILE_KEY_OF_FLAG.items():
        value = _look_up(file, keys)
        if value is not None:
            place = f"--deepspeed_config {file.path}: {'.'.join(keys)}"
            decided[flag] = checked_like_a_flag(FLAGS[flag], _as_typed(flag, value, place), place)
    offload = _offload_of(file)
    if offload is not None:
        decided["offload"] = offload
    betas = _look_up(file, ("optimizer", "params", "betas"))
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2:
            raise InputError(f"--deepspeed_config {file.path}: optimizer.params.betas must be a list of two numbers")
        for flag, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            if value != AUTO:
                place = f"--deepspeed_config {file.path}: optimizer.params.betas"
                decided[flag] = checked_like_a_flag(FLAGS[flag], value, place)
    enabled = [name for name in ("fp16", "bf16") if _look_up(file, (name, "enabled")) is True]
    if len(enabled) == 2:
        raise InputError(f"--deepspeed_config {file.path} enables both fp16 and bf16; choose one")
    if enabled:
        decided["precision"] = enabled[0]
    return decided


def _as_typed(flag: str, value: Any, place: str) -> Any:
    """Return a JSON value as the text of its flag."""
    if flag == "optimizer":
        return value.lower()
    if flag == "overlap_comm":
        if not isinstance(value, bool):
            raise InputError(f'{place} must be true, false or "auto", not {value!r}')
        return "on" if value else "off"
    # bucket sizes are commonly written 5e8, which JSON reads as a float
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _offload_of(file: DeepSpeedFile) -> str | None:
    """Return the value of --offload that the file's sections mean; None if they decide nothing."""
    on_cpu: set[str] = set()
    off: set[str] = set()
    for old, section in OLDER_NAMES.items():
        if _look_up(file, ("zero_optimization", old)) is not None:
            raise InputError(
                f"--deepspeed_config {file.path}: zero_optimization.{old} is an older name; write "
                f'"{section}": {{"device": "cpu"}} instead, or leave it out and give --offload'
            )
    for section in OFFLOADED["parameters"]:
        key = f"zero_optimization.{section}.device"
        device = _look_up(file, tuple(key.split(".")))
        if device == "nvme":
            raise InputError(
                f"--deepspeed_config {file.path}: {key} = nvme, but the testbed offloads to host memory only; write "
                '"cpu", or "auto" and give --offload'
            )
        if device not in ("cpu", "none", None):
            raise InputError(f'--deepspeed_config {file.path}: {key} must be "cpu", "none" or "auto", not {device!r}')
        {"cpu": on_cpu, "none": off}.get(device, set()).add(section)
    if "offload_param" in on_cpu and "offload_optimizer" in off:
        raise InputError(
            f"--deepspeed_config {file.path} offloads the weights (offload_param) but not the optimizer state "
            '(offload_optimizer.device = "none"); --offload parameters moves both: write "cpu" or "auto" there'
        )
    if "offload_param" in on_cpu:
        return "parameters"
    return "optimizer" if on_cpu else None


def _look_up(file: DeepSpeedFile, keys: tuple[str, ...]) -> Any:
    value: Any = file.content
    for depth, key in enumerate(keys):
        if not isinstance(value, dict):
            raise InputError(f"--deepspeed_config {file.path}: {'.'.join(keys[:depth])} must be a JSON object")
        value = value.get(key)
        if value is None or value == AUTO:
            return None
    return value


def with_deepspeed_file(asked: Asked, file: DeepSpeedFile) -> Asked:
    """Return the flags, with the file's values for those that were not given.

    Raises:
        InputError: the file and a flag disagree; names both.
    """
    for precision in ("fp16", "bf16"):
        if asked.values["precision"] == precision and _look_up(file, (precision, "enabled")) is False:
            raise InputError(
                f"--precision {precision} contradicts {precision}.enabled = false in --deepspeed_config {file.path}; "
                'change one of them, or write "auto" in the file'
            )
    decided = values_of(file)
    for flag, value in decided.items():
        given = asked.values[flag]
        if flag in asked.explicit and given != value and not (flag == "precision" and given == AUTO):
            raise InputError(
                f"--{flag} {given} contradicts {_said_in_file(file, flag, value)} in --deepspeed_config "
                f'{file.path}; change one of them, or write "auto" in the file'
            )
    return dataclasses.replace(asked.having(decided), from_deepspeed=frozenset(decided))


def _said_in_file(file: DeepSpeedFile, flag: str, value: Any) -> str:
    """Return the file's key and value for a flag."""
    if flag == "precision":
        return f"{value}.enabled = true"
    if flag == "offload":
        return f"zero_optimization.{OFFLOADED[value][-1]}.device = cpu"
    keys = FILE_KEY_OF_FLAG.get(flag, ("optimizer", "params", "betas"))
    return f"{'.'.join(keys)} = {json.dumps(_look_up(file, keys))}"
