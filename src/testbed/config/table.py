"""The table of flags by name, and its groups. No torch.

--config files, records, rules for resuming, equal work and names of configurations follow from it, and docs/flags.md.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from testbed.config.flag import Flag
from testbed.config.run_types import ALL_OPTIONS
from testbed.config.system_flags import Checkpointing, Compute, DataParallel, DeepSpeed, Measuring, ModelParallel
from testbed.config.training_flags import Batch, Data, Model, Optimizer, Training


@dataclass(frozen=True, kw_only=True)
class FlagGroups:
    """The value of every flag, in the groups and order of --help."""

    training: Training
    model: Model
    data: Data
    batch: Batch
    optimizer: Optimizer
    compute: Compute
    data_parallel: DataParallel
    deepspeed: DeepSpeed
    model_parallel: ModelParallel
    checkpointing: Checkpointing
    measuring: Measuring


GROUPS: dict[str, type] = typing.get_type_hints(FlagGroups)


def _rows() -> Iterator[Flag]:
    """Yield every row with its name and its place, in the order of the table."""
    for group, held_by in GROUPS.items():
        fields = {field.name: field for field in dataclasses.fields(held_by)}
        for name in held_by.__annotations__:
            is_field = name in fields
            flag = fields[name].metadata["flag"] if is_field else getattr(held_by, name)
            yield dataclasses.replace(flag, name=flag.name or name, group=group, field=name if is_field else "")


FLAGS: dict[str, Flag] = {flag.name: flag for flag in _rows()}


def flags_where(condition: Callable[[Flag], bool]) -> frozenset[str]:
    """Return the names of the flags whose rows meet a condition."""
    return frozenset(name for name, flag in FLAGS.items() if condition(flag))


# what runs did before a flag existed, so that the settings in earlier files compare with those of today
LEGACY_DEFAULTS: dict[str, Any] = {name: flag.before for name, flag in FLAGS.items() if flag.before is not None}


def upgrade_settings(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return recorded settings of any version under the names and values of today."""
    settings = {**LEGACY_DEFAULTS, **recorded}
    if settings.pop("use_flash_attention", False):
        settings["attention"] = "flash"
    if isinstance(skipped := settings.get("skip_gradient_sync"), bool):
        settings["skip_gradient_sync"] = "all" if skipped else None
    return settings


if (_options := flags_where(lambda flag: flag.is_option)) != ALL_OPTIONS:
    raise AssertionError(
        f"{', '.join(sorted(_options ^ ALL_OPTIONS))}: a flag of some run types only needs a row with "
        "default=OF_RUN_TYPE in training_flags.py or system_flags.py, and its default among the options in run_types.py"
    )
