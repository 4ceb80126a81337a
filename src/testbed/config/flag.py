"""Define a row of the table of flags. The rows are in training_flags.py and system_flags.py. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """Treatment of a flag in which two compared runs differ."""

    WORK = "what is computed: must be equal"
    PARALLELISM = "how work is spread over ranks: may differ, names the configuration"
    EXECUTION = "how a rank computes: may differ, names the configuration, with a warning"
    OUTPUT = "files, printing, profiling: never matters"


class Resume(Enum):
    """Freedom of a resumed run to change a flag."""

    FREE = "may change"
    ROUNDING = "may change: losses move by rounding, and the change is recorded"
    MATHEMATICS = "as ROUNDING if the mathematics stay the same, else as CONSENT"
    CONSENT = "may change with --allow-setting-change"
    NEVER = "may not change: the checkpoint's tensors would not fit"


class Filled(Enum):
    """Value that the files of a run hold for a flag that was not given."""

    KEPT = "the default"
    DERIVED = "null: follows from other flags, again where the file is used"
    BY_RANKS = "null: follows from the number of ranks"
    DECIDED = "the value; null in effective_config.json, as it follows from the device"


_RESUME = {
    Kind.WORK: Resume.CONSENT,
    Kind.PARALLELISM: Resume.ROUNDING,
    Kind.EXECUTION: Resume.CONSENT,
    Kind.OUTPUT: Resume.FREE,
}
OF_RUN_TYPE = object()  # default of a flag of some run types only; run_types.py has the real one


@dataclass(frozen=True, eq=False)
class Flag:
    """One row.

    Attributes:
        default: None: filled in when the settings are worked out.
        help: ends with the default; "%(default)s" stands for it.
        type: text to value, raises argparse.ArgumentTypeError. None: text, or a switch if the default is False.
        const: value of the bare flag.
        takes_several: words with commas between them, which a file may hold as a list.
        also: older spellings.
        spelled: spelling in --help, if not --name.
        of_one_start: it belongs to one start of the run: neither --config files nor records hold it.
        recorded: False: files do not hold it, as it always follows from other flags.
        needs: another flag, and the values of it with which this one has an effect.
        before: what runs did before the flag existed. None: unknown.
        in_config: its name in `training_config` of the metrics file. None: only `settings` has it.
        compared_as: the field of equal work that holds it, if not its own name.
        is_task: runs that are timed to a loss must agree in it; other WORK may be what they compare.
        names_arm: runs that differ in it get it into their name. Default: PARALLELISM and EXECUTION.
        varies: repeats of one configuration may differ in it.
        is_instrument: it changes the timing of steps, so the run is marked as instrumented.
    """

    help: str | None
    kind: Kind
    resume: Resume
    names_arm: bool
    default: Any = None
    type: Callable[[str], Any] | None = None
    choices: Sequence[Any] | None = None
    const: Any = None
    metavar: str | None = None
    takes_several: bool = False
    also: tuple[str, ...] = ()
    spelled: str | None = None
    filled: Filled = Filled.KEPT
    of_one_start: bool = False
    recorded: bool = True
    needs: tuple[str, tuple[str, ...]] | None = None
    before: Any = None
    in_config: str | None = None
    compared_as: str | None = None
    is_task: bool = False
    varies: bool = False
    is_instrument: bool = False
    # set by table.py from the place of the row
    name: str = ""
    group: str = ""  # of the settings
    field: str = ""  # of the group

    @property
    def is_switch(self) -> bool:
        return self.default is False and self.type is None

    @property
    def is_option(self) -> bool:
        """Return True if only some run types have it."""
        return self.default is OF_RUN_TYPE

    @property
    def option_strings(self) -> list[str]:
        return [self.spelled or f"--{self.name}", *self.also]


def row(help: str | None, kind: Kind, *, name: str = "", resume: Resume | None = None, **columns: Any) -> Flag:
    """Return a row that is not a field of the settings."""
    named = columns.pop("names_arm", kind in (Kind.PARALLELISM, Kind.EXECUTION))
    return Flag(help, kind, resume or _RESUME[kind], named, name=name, **columns)


def flag(help: str | None, kind: Kind, **columns: Any) -> Any:
    """Return a field of a group of settings, with its row. `name`: the flag's name, if it is not the field's."""
    return dataclasses.field(metadata={"flag": row(help, kind, **columns)})
