"""Command line and --config file of `src/gpt2.py`. No torch, so that --help is quick.

A default that depends on world size, model or data is None here; config/check.py fills it in.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from testbed.config.config_file import read_config
from testbed.config.environment_variables import check_no_secret
from testbed.config.flag import Flag
from testbed.config.flag_parser import MOST_UNKNOWN, FlagParser
from testbed.config.flag_types import AUTO
from testbed.config.run_types import ALL_OPTIONS, HOW_AXES_WORK, STRATEGIES
from testbed.config.table import FLAGS, GROUPS, flags_where
from testbed.errors import InputError, one_line
from testbed.io import read_json
from testbed.run_folder import EFFECTIVE_CONFIG, is_converted

DATA_SHA256 = "data_sha256"  # in effective_config.json, beside the flags
# What --resume does not take from the run's record: where the run lies now, where this start is to stop, and what only
# measured an earlier start.
_NOT_TAKEN = frozenset({"run_type", "checkpoint_path", "stop_at_step"}) | flags_where(lambda flag: flag.is_instrument)
_LENGTHS = frozenset({"max_train_steps", "max_tokens"})  # of which one says how long to train
_TAKEN = flags_where(lambda flag: bool(flag.field) and flag.recorded and not flag.of_one_start) - _NOT_TAKEN


@dataclass(frozen=True)
class ParsedFlags:
    """The flags of a start, and where their values come from.

    Attributes:
        values: by flag; None for an open one that was not given.
        typed: flags on the command line.
        configured: flags from the --config file only.
        from_deepspeed: flags from DeepSpeed's file.
        data_sha256: of the token files that the --config file was recorded with, under "train" and "val".
    """

    values: Mapping[str, Any]
    typed: frozenset[str]
    configured: frozenset[str] = frozenset()
    from_deepspeed: frozenset[str] = frozenset()
    data_sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def explicit(self) -> frozenset[str]:
        """Flags given on the command line or in the --config file."""
        return self.typed | self.configured

    @property
    def given(self) -> frozenset[str]:
        """Flags that are not defaults."""
        return self.explicit | self.from_deepspeed

    def replace(self, values: Mapping[str, Any]) -> ParsedFlags:
        """Return the same with other values for some flags."""
        return dataclasses.replace(self, values={**self.values, **values})

    def configured_with(self, values: Mapping[str, Any]) -> ParsedFlags:
        """Return the same with other values for some flags, as if the --config file had them."""
        return dataclasses.replace(self.replace(values), configured=self.configured | values.keys() - self.typed)


def parse_command_line(arguments: list[str]) -> ParsedFlags:
    """Return the given flags: the command line wins over the --config file, the file over the defaults."""
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"{word!r} is not UTF-8, in which a run's files are written; rename what it names, or set a UTF-8 "
                "locale"
            ) from None
    parser = build_parser()
    values = vars(parser.parse_args(arguments))
    typed = frozenset(_typed(arguments) & values.keys())
    given = {name: values[name] for name in typed}
    from_file, data_sha256 = _read_config_file(Path(values["config"]), given) if values["config"] else ({}, {})
    merged = {**values, **{name: value for name, value in from_file.items() if name not in typed}}
    configured = frozenset(name for name, value in from_file.items() if value is not None) - typed
    return ParsedFlags(merged, typed, configured, data_sha256=data_sha256)


def _typed(arguments: list[str]) -> set[str]:
    """Return the flags on the command line, by parsing it without defaults."""
    parser = build_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(arguments)))


def _read_config_file(path: Path, typed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read settings, check each like its flag, and return them with the hashes of the recorded data."""
    content = read_config(path, f"--config {path}", typed)
    if not isinstance(content, dict):
        raise InputError(f"--config {path} must hold flag names and values, as one object of JSON has them")
    check_no_secret(f"--config {path}", content)
    checked, sha256 = {}, content.pop(DATA_SHA256, None) or {}
    if not isinstance(sha256, dict) or any(not isinstance(value, str) for value in sha256.values()):
        raise InputError(f"--config {path}: {DATA_SHA256} must hold the SHA-256 of train and val; leave it out")
    if unknown := [name for name in content if name not in FLAGS]:
        parser = build_parser()
        named = [f"{one_line(repr(name), 80)} is not a setting{parser.meant_by(f'--{name}')}" for name in unknown]
        more = [f"and {len(named) - MOST_UNKNOWN} more"] if len(named) > MOST_UNKNOWN else []
        said = "; ".join([*named[:MOST_UNKNOWN], *more])
        raise InputError(f"--config {path}: {said}; the names are those of the flags, see --help")
    for name, value in content.items():
        flag = FLAGS[name]
        if flag.of_one_start:
            raise InputError(f"--config {path}: {name} is for one start alone; type it as --{name}")
        if flag.takes_several and isinstance(value, list) and all(isinstance(word, str) for word in value):
            value = ",".join(value)
        if isinstance(value, dict | list):
            raise InputError(
                f"--config {path}: {name} is a section or a list; write each flag by itself, with one value"
            )
        checked[name] = checked_like_a_flag(flag, value, f"--config {path}: {name}")
    return checked, sha256


def checked_like_a_flag(flag: Flag, value: Any, place: str) -> Any:
    """Return a value from a file, checked by the rules of its flag."""
    if value is None:
        return default_of(flag)
    if flag.is_switch:
        if not isinstance(value, bool):
            raise InputError(f"{place} must be true or false, not {one_line(repr(value), 80)}")
        return value
    if isinstance(value, str) and "\0" in value:
        raise InputError(f"{place} cannot be {one_line(repr(value), 80)}: it holds a NUL character")
    try:
        typed = flag.type(str(value)) if flag.type else str(value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise InputError(f"{place} cannot be {one_line(repr(value), 80)} ({one_line(str(error), 200)})") from None
    if flag.choices is not None and typed not in flag.choices:
        raise InputError(f"{place} {one_line(repr(value), 80)} is not one of {', '.join(map(str, flag.choices))}")
    return typed


def default_of(flag: Flag) -> Any:
    """Return the value of a flag that is not on the command line."""
    return None if flag.is_option else flag.default


class RaisingParser(FlagParser):
    """Raises InputError in place of exiting, so that only one rank prints it."""

    def refuse(self, sentence: str) -> NoReturn:
        raise InputError(sentence)


def build_parser() -> FlagParser:
    """Return the command line of `src/gpt2.py`, with the groups of the table."""
    parser = RaisingParser(
        prog="gpt2.py",
        description="Train GPT-2 under one way of spreading the work over devices, and measure it.",
        epilog="Start with python, torchrun or deepspeed. Guides: README.md, docs/.",
        allow_abbrev=False,
    )
    groups = {name: parser.add_argument_group(held_by.__doc__) for name, held_by in GROUPS.items()}
    for name, flag in FLAGS.items():
        add_flag(groups[flag.group], name)
    # as older commands spell --attention flash
    parser.add_argument(
        "--use_flash_attention", dest="attention", action="store_const", const="flash", help=argparse.SUPPRESS
    )
    return parser


def add_flag(group: argparse._ArgumentGroup, name: str) -> None:
    """Add a row of the table to a program's command line, with its spellings, help and rules."""
    flag = FLAGS[name]
    group.add_argument(*flag.option_strings, dest=flag.name, help=flag.help, **_form(flag))


def _form(flag: Flag) -> dict[str, Any]:
    """Return how argparse reads the flag's value."""
    if flag.is_switch:
        return {"action": "store_true"}
    form = {"default": default_of(flag), "choices": flag.choices, "metavar": flag.metavar}
    form |= {"type": flag.type} if flag.type else {}
    return form | ({"nargs": "?", "const": flag.const} if flag.const is not None else {})


def with_recorded_flags(asked: ParsedFlags) -> tuple[ParsedFlags, Path | None]:
    """Return the flags of a start that resumes a run, with recorded values for those that were not given.

    Returns:
        The flags, and the file that they are from; None where no run is resumed, it has not begun, or the
        file is not a record of a run.
    """
    file = _record_of(asked)
    if file is None:
        start = next(filter(is_converted, _folders_of_resumed(asked)), None)
        if start is None or "init_from" in asked.explicit:
            return asked, None
        return asked.configured_with({"init_from": str(start)}), None  # which says the model's shape
    content = read_json(file, f"--resume: {file}")
    run_type = content.get("run_type") if isinstance(content, dict) else None
    if not isinstance(run_type, str) or run_type not in STRATEGIES:
        if asked.values["run_type"] != AUTO:
            return asked, None  # not a run of ours; checkpoint/folder_owner.py says what the folder holds
        raise InputError(f"--resume: {file} names no run type that is known; give --run_type")
    if "run_type" in asked.explicit and asked.values["run_type"] != AUTO:
        run_type = asked.values["run_type"]
    foreign = ALL_OPTIONS - STRATEGIES[run_type].options.keys()
    taken = {
        name: checked_like_a_flag(FLAGS[name], content[name], f"--resume: {file}: {name}")
        for name in sorted(_TAKEN - foreign - asked.explicit)
        if content.get(name) is not None
    }
    for axis, flags in HOW_AXES_WORK.items():
        if axis in asked.explicit and asked.values[axis] == 1:  # they are of the axis that the run had
            taken = {name: value for name, value in taken.items() if name not in flags}
    if asked.explicit & _LENGTHS:
        taken = {name: value for name, value in taken.items() if name not in _LENGTHS}
    taken["run_type"] = run_type
    return asked.configured_with(taken), file


def _record_of(asked: ParsedFlags) -> Path | None:
    """Return the effective_config.json of the run that is resumed."""
    files = (folder / EFFECTIVE_CONFIG for folder in _folders_of_resumed(asked))
    return next((file for file in files if file.is_file()), None)


def _folders_of_resumed(asked: ParsedFlags) -> tuple[Path, ...]:
    """Return where the run that is resumed may lie: what --resume names, or the folder that has it as a checkpoint."""
    resume = asked.values["resume"]
    if resume is None:
        return ()
    own_folder = asked.values["checkpoint_path"] or f"checkpoint/{asked.values['run_type']}"
    path = Path(own_folder if resume == AUTO else resume)
    return path, path.absolute().parent.parent
