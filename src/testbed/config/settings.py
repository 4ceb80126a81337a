"""Settings of a run, filled in and checked. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testbed.config.deepspeed_file import DeepSpeedFile
from testbed.config.flag import Filled
from testbed.config.flags import ParsedFlags
from testbed.config.table import FLAGS, GROUPS, FlagGroups, flags_where
from testbed.data.token_file import TokenFile
from testbed.distributed.mesh import MeshSizes
from testbed.model.shape import ModelShape

# Of --run_inference_benchmark: v1's 100 greedy tokens, after a prompt from the training data, which equal work shares.
BENCHMARK_PROMPT_TOKENS, BENCHMARK_NEW_TOKENS = 16, 100
_RECORDED = flags_where(lambda flag: bool(flag.field) and flag.recorded and not flag.of_one_start)
_FOLLOWS = flags_where(lambda flag: flag.filled in (Filled.DERIVED, Filled.BY_RANKS)) & _RECORDED
_DECIDED = flags_where(lambda flag: flag.filled is Filled.DECIDED)
_INSTRUMENTS = [name for name, flag in FLAGS.items() if flag.is_instrument]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Values that follow from flags, ranks and data."""

    mesh: MeshSizes
    math_changes: tuple[str, ...]  # what makes the run compute something else than the baseline does
    data_world_size: int
    steps_per_epoch: int
    total_steps: int  # optimizer steps that the schedule is made for
    deepspeed_file: DeepSpeedFile | None = dataclasses.field(
        default=None, compare=False
    )  # as checked; None: no DeepSpeed


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Flags that are not defaults, by where their values come from."""

    given: frozenset[str] = frozenset()  # by a person, or by DeepSpeed's file
    chosen: frozenset[str] = frozenset()  # by autotune/choices.py
    typed: frozenset[str] = frozenset()  # of those given, the ones on the command line


@dataclass(frozen=True, kw_only=True)
class RunSettings(FlagGroups):
    """Settings of one run. Open flags are filled in; a flag that the run type does not have is None."""

    plan: Plan
    origin: Origin = dataclasses.field(compare=False)

    @classmethod
    def of_flags(cls, values: Mapping[str, Any], plan: Plan, origin: Origin) -> RunSettings:
        """Return the settings with a value for every flag."""
        groups = {
            group: held_by(
                **{flag.field: values[flag.name] for flag in FLAGS.values() if flag.group == group and flag.field}
            )
            for group, held_by in GROUPS.items()
        }
        return cls(**groups, plan=plan, origin=origin)

    def with_values(self, **values: Any) -> RunSettings:
        """Return the settings with other values, by flag, or by field of `plan` or `origin`."""
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            group, field = PLACES[name]
            changed.setdefault(group, {})[field] = value
        return dataclasses.replace(
            self, **{group: dataclasses.replace(getattr(self, group), **fields) for group, fields in changed.items()}
        )

    def value(self, name: str) -> Any:
        """Return one value, by flag, or by field of `plan` or `origin`."""
        group, field = PLACES[name]
        return getattr(getattr(self, group), field)

    def by_flag(self) -> dict[str, Any]:
        """Return the value of every flag by its name."""
        return {flag.name: self.value(flag.name) for flag in FLAGS.values() if flag.field}

    @property
    def shape(self) -> ModelShape:
        return ModelShape(**{field.name: self.value(field.name) for field in dataclasses.fields(ModelShape)})

    @property
    def finds_micro_batch(self) -> bool:
        """Return whether the micro batch is still to be found on the device, and with it the accumulation."""
        return self.batch.micro_batch_size_per_gpu is None

    @property
    def last_step(self) -> int:
        """Last optimizer step of this start of the run."""
        if self.training.eval_only:
            return 0
        return min(self.plan.total_steps, self.training.stop_at_step or self.plan.total_steps)

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch_size * self.data.seq_length

    @property
    def instruments(self) -> list[str]:
        """Flags that change the timing of steps: the run is marked as instrumented."""
        return [f"--{name}" for name in _INSTRUMENTS if self.value(name)]

    def as_config(self) -> dict[str, Any]:
        """Return the settings as a flat --config file.

        A value that was not given and follows from ranks, steps or device is null, so that it follows again where the
        file is used.
        """
        return self.as_recorded() | dict.fromkeys(_DECIDED & self.origin.chosen)

    def as_recorded(self) -> dict[str, Any]:
        """Return the settings as the metrics file has them: like `as_config`, with what was chosen on this device."""
        return self.as_dict() | dict.fromkeys(_FOLLOWS - self.origin.given)

    def as_dict(self) -> dict[str, Any]:
        """Return every flag that belongs to the run."""
        return {name: value for name, value in self.by_flag().items() if name in _RECORDED}


# the name of a flag, or of a field of `plan` or `origin` -> the group of RunSettings that holds it, and its field there
PLACES: dict[str, tuple[str, str]] = {name: (flag.group, flag.field) for name, flag in FLAGS.items() if flag.field} | {
    field.name: (group, field.name)
    for group, held_by in (("plan", Plan), ("origin", Origin))
    for field in dataclasses.fields(held_by)
}


@dataclass(frozen=True)
class CheckedRun:
    """All that is known before torch is imported."""

    asked: ParsedFlags
    settings: RunSettings
    train_file: TokenFile
    val_file: TokenFile
    notes: tuple[str, ...] = ()  # to say when the run begins
    flags_sha256: str | None = None  # of what --run_type auto or --resume took from a file; all ranks compare it
