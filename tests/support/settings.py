"""Make settings and refusals from a command line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.programs import TINY_RUN, data_flags
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.config.settings import PLACES, CheckedRun, RunSettings
from testbed.distributed.launch import Launch


def launch(world_size: int = 1) -> Launch:
    return Launch(rank=0, local_rank=0, world_size=world_size, local_world_size=world_size)


def typed(arguments: list[str], world_size: int = 1) -> CheckedRun:
    """Return what gpt2.py would run for this command line."""
    return check_run(parse_command_line(arguments), launch(world_size))


def checked_run(token_files, *flags: str, world_size: int = 1) -> CheckedRun:
    return typed([*TINY_RUN, *data_flags(token_files), *flags], world_size)


def settings_of(token_files, *flags: str, world_size: int = 1) -> RunSettings:
    return checked_run(token_files, *flags, world_size=world_size).settings


def refusal(token_files, *flags: str, world_size: int = 1) -> str:
    with pytest.raises(ValueError) as caught:
        settings_of(token_files, *flags, world_size=world_size)
    message = str(caught.value)
    assert "\n" not in message
    return message


def stand_in(**values: Any) -> SimpleNamespace:
    """Return settings that hold only these values, each by the name of its flag. Other names stand outside groups."""
    groups: dict[str, SimpleNamespace] = {}
    outside = {name: value for name, value in values.items() if name not in PLACES}
    for name in values.keys() - outside.keys():
        group, field = PLACES[name]
        setattr(groups.setdefault(group, SimpleNamespace()), field, values[name])
    return SimpleNamespace(**groups, **outside)
