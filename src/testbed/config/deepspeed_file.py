"""Read and check DeepSpeed's configuration file. No torch.

"auto" in it means that flags decide. A value that contradicts a flag is refused; a value for which no flag was given
counts as given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.config.deepspeed_keys import KEYS, faults_of_keys, passed_on
from testbed.config.deepspeed_scheduler import Decision, OpenEnd, flags_of_scheduler, shown
from testbed.config.environment_variables import check_no_secret
from testbed.config.flag_types import AUTO
from testbed.config.flags import ParsedFlags, checked_like_a_flag
from testbed.config.table import FLAGS
from testbed.errors import InputError
from testbed.io import not_a_file, parse_json, read_regular

# where a file says what one flag also says, in a value of its own
FILE_KEY_OF_FLAG = {
    fate.said: tuple(key.split("."))
    for key, fate in KEYS.items()
    if fate.what == "flag" and fate.said in FLAGS and fate.said not in ("precision", "offload", "lr_schedule")
}
# what each value of --offload puts into host memory; the weights are never offloaded without the optimizer state
OFFLOADED = {"none": (), "optimizer": ("offload_optimizer",), "parameters": ("offload_optimizer", "offload_param")}
MOST_BYTES = 1 << 20  # of the file; DeepSpeed's own examples have a few thousand
MOST_NAMED = 50  # of what cannot be taken
_TEXTS = ("optimizer", "overlap_comm")  # flags whose values are not numbers
_ADAMW = ("adamw", "adam")  # DeepSpeed's "Adam" is AdamW too, unless adam_w_mode is false, which is refused
_NUMBERS = {keys[0] for keys in FILE_KEY_OF_FLAG.values() if len(keys) == 1}


@dataclass(frozen=True)
class DeepSpeedFile:
    """A configuration file as read."""

    path: Path
    sha256: str  # of the file's bytes; the effective configuration has a hash of its own
    content: dict[str, Any]  # without the scheduler, which is in `decided`
    decided: dict[str, Decision]  # by the names of the flags
    open_end: OpenEnd | None = None  # of its schedule, where flags decide the rest

    def origin_of(self, refusal: str) -> str:
        """Return where the file says what a refusal names as a flag's value, to follow it; empty where it does not."""
        said = [each.said for flag, each in self.decided.items() if f"--{flag} {each.value} " in refusal]
        if not said or str(self.path) in refusal:
            return ""
        return f"; {' and '.join(said)} in --deepspeed_config {self.path}"


def read_deepspeed_file(path: Path) -> DeepSpeedFile:
    """Read and check the file, as far as possible without DeepSpeed."""
    if fault := not_a_file(path):
        raise InputError(f"--deepspeed_config {path} {fault}")
    try:
        text = read_regular(path, MOST_BYTES)
    except OSError as error:
        raise InputError(f"--deepspeed_config {path} cannot be read: {error.strerror}") from None
    content = parse_json(text, f"--deepspeed_config {path}", keys_once=True)
    if not isinstance(content, dict):
        raise InputError(f"--deepspeed_config {path} must hold one JSON object")
    check_no_secret(f"--deepspeed_config {path}", content)
    faults = list(faults_of_keys({key: value for key, value in content.items() if key != "scheduler"}))
    if isinstance(content.get("scheduler"), dict):
        faults += faults_of_keys({"scheduler": {**content["scheduler"], "params": None}})
    content = {key: value for key, value in content.items() if value not in (None, AUTO) or key in _NUMBERS}
    scheduler = content.pop("scheduler", None)  # flags_of_scheduler checks its parameters
    decided: dict[str, Decision] = {}
    open_end = None
    for flag, keys in FILE_KEY_OF_FLAG.items():
        with _noting(faults):
            decided |= _value_of(content, flag, keys)
    for decide in (_offload_of, _betas_of, _precision_of):
        with _noting(faults):
            decided |= decide(content)
    if scheduler is not None:
        schedule, open_end, inexpressible = flags_of_scheduler(scheduler, decided.get("learning_rate"))
        decided |= schedule
        faults += inexpressible
    _refuse(path, list(dict.fromkeys(faults)))
    return DeepSpeedFile(path, hashlib.sha256(text).hexdigest(), passed_on(content), decided, open_end)


def _refuse(path: Path, faults: Sequence[str]) -> None:
    if len(faults) == 1:
        raise InputError(f"--deepspeed_config {path}: {faults[0]}")
    if faults:
        named = [f"({number}) {fault}" for number, fault in enumerate(faults[:MOST_NAMED], start=1)]
        more = [f"and {len(faults) - MOST_NAMED:,} more"] if len(faults) > MOST_NAMED else []
        raise InputError(
            f"--deepspeed_config {path} holds {len(faults):,} things that cannot be taken: {'; '.join(named + more)}"
        )


@contextlib.contextmanager
def _noting(faults: list[str]) -> Iterator[None]:
    """Add what is refused inside to `faults`: a user should meet all of it at once."""
    try:
        yield
    except InputError as error:
        faults.append(str(error))


def _value_of(content: Mapping[str, Any], flag: str, keys: tuple[str, ...]) -> dict[str, Decision]:
    """Return what one key decides; nothing where it is left to the flag. InputError: the value has the wrong type."""
    value, place = _look_up(content, keys), ".".join(keys)
    if value is None:
        return {}
    typed = checked_like_a_flag(FLAGS[flag], _as_typed(flag, value, place), place)
    return {flag: Decision(typed, f"{place} = {shown(value) if flag not in _TEXTS else json.dumps(value)}")}


def _as_typed(flag: str, value: Any, place: str) -> Any:
    """Return a JSON value as the text of its flag."""
    if flag == "optimizer":
        if not isinstance(value, str) or value.lower() not in _ADAMW:
            raise InputError(
                f"{place} = {shown(value)}, but every run type trains with the same AdamW or Muon, so that runs stay "
                "comparable; remove the type or name AdamW, and give --optimizer"
            )
        return "adamw"
    if flag == "overlap_comm":
        if not isinstance(value, bool):
            raise InputError(f'{place} must be true, false or "auto", not {shown(value)}')
        return "on" if value else "off"
    if isinstance(value, bool | str | list | dict):
        raise InputError(f'{place} cannot be {shown(value)}: write a number without quotes, or "auto"')
    # bucket sizes are commonly written 5e8, which JSON reads as a float
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _betas_of(content: Mapping[str, Any]) -> dict[str, Decision]:
    place = "optimizer.params.betas"
    betas = _look_up(content, tuple(place.split(".")))
    if betas is None:
        return {}
    if not isinstance(betas, list) or len(betas) != 2:
        raise InputError(f"{place} must be a list of two numbers")
    if any(isinstance(value, bool | list | dict) or (isinstance(value, str) and value != AUTO) for value in betas):
        raise InputError(f"{place} cannot be {shown(betas)}: write two numbers without quotes")
    return {
        flag: Decision(checked_like_a_flag(FLAGS[flag], value, place), f"{place} = {json.dumps(betas)}")
        for flag, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True)
        if value != AUTO
    }


def _precision_of(content: Mapping[str, Any]) -> dict[str, Decision]:
    enabled = {name: _look_up(content, (name, "enabled")) for name in ("fp16", "bf16")}
    for name, value in enabled.items():
        if not isinstance(value, bool | None):
            raise InputError(f'{name}.enabled must be true, false or "auto", not {shown(value)}')
    found = [name for name, value in enabled.items() if value]
    if len(found) == 2:
        raise InputError("it enables both fp16 and bf16; choose one")
    return {"precision": Decision(found[0], f"{found[0]}.enabled = true")} if found else {}


def _offload_of(content: Mapping[str, Any]) -> dict[str, Decision]:
    """Return the --offload that the file's sections mean; nothing if they decide nothing."""
    on_cpu: set[str] = set()
    off: set[str] = set()
    for section in OFFLOADED["parameters"]:
        key = f"zero_optimization.{section}.device"
        device = _look_up(content, tuple(key.split(".")))
        if device == "nvme":
            raise InputError(
                f'{key} = nvme, but the testbed offloads to host memory only; write "cpu", or "auto" and give --offload'
            )
        if device not in ("cpu", "none", None):
            raise InputError(f'{key} must be "cpu", "none" or "auto", not {shown(device)}')
        if device is not None:
            (on_cpu if device == "cpu" else off).add(section)
    if "offload_param" in on_cpu and "offload_optimizer" in off:
        raise InputError(
            "it offloads the weights (offload_param) but not the optimizer state (offload_optimizer.device = "
            '"none"); --offload parameters moves both: write "cpu" or "auto" there'
        )
    if not on_cpu:
        return {}
    value = "parameters" if "offload_param" in on_cpu else "optimizer"
    return {"offload": Decision(value, f"zero_optimization.{OFFLOADED[value][-1]}.device = cpu")}


def _look_up(content: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    value: Any = content
    for depth, key in enumerate(keys):
        if not isinstance(value, Mapping):
            raise InputError(f"{'.'.join(keys[:depth])} must be a JSON object")
        value = value.get(key)
        if value is None or value == AUTO:
            return None
    return value


def with_deepspeed_file(asked: ParsedFlags, file: DeepSpeedFile) -> ParsedFlags:
    """Return the flags, with the file's values for those that were not given."""
    for precision in ("fp16", "bf16"):
        if asked.values["precision"] == precision and _look_up(file.content, (precision, "enabled")) is False:
            raise InputError(
                f"--precision {precision} contradicts {precision}.enabled = false in --deepspeed_config {file.path}; "
                'change one of them, or write "auto" in the file'
            )
    for flag, decision in file.decided.items():
        given = asked.values[flag]
        if flag in asked.explicit and given != decision.value and not (flag == "precision" and given == AUTO):
            raise InputError(
                f"--{flag} {given} contradicts {decision.said} in --deepspeed_config "
                f'{file.path}; change one of them, or write "auto" in the file'
            )
    if file.open_end is not None and file.open_end.flag in asked.explicit:
        raise InputError(
            f"--{file.open_end.flag} {asked.values[file.open_end.flag]} contradicts {file.open_end.said} in "
            f"--deepspeed_config {file.path}; change one of them"
        )
    decided = {flag: decision.value for flag, decision in file.decided.items()}
    return dataclasses.replace(asked.replace(decided), from_deepspeed=frozenset(decided))
