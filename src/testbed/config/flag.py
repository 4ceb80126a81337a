"""A row of the table of flags: all that the testbed knows of one flag of `src/gpt2.py`. No torch.

The rows stand in training_flags.py and system_flags.py, one field of a dataclass each; table.py reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """Say how a comparison of runs treats a flag in which they differ."""

    WORK = "what is computed: must be equal to compare"
    SPREAD = "how the work is spread over ranks: may differ, names the arm"
    HOW = "how a rank computes its part: may differ, names the arm, and a comparison warns of it"
    LOOK = "files, printing, profiling: never matters"


class Resume(Enum):
    """Say what a start that resumes may do with a flag."""

    FREE = "may change"
    SPREAD = "may change: losses move by rounding, and the metrics file says so"
    MATHEMATICS = "as SPREAD where the mathematics stay the same, else as CONSENT"
    CONSENT = "may change with --allow-setting-change"
    NEVER = "may not change: a checkpoint's tensors would not fit"


class Filled(Enum):
    """Say what the files of a run hold where no flag was given."""

    KEPT = "the value, which a --config file repeats"
    DERIVED = "null: it follows from other flags, and follows again where the file is used"
    BY_RANKS = "null: it follows from the number of ranks"
    DECIDED = "the value; null in effective_config.json, as the program decides for each device"


_RESUME = {Kind.WORK: Resume.CONSENT, Kind.SPREAD: Resume.SPREAD, Kind.HOW: Resume.CONSENT, Kind.LOOK: Resume.FREE}
OF_RUN_TYPE = (
    object()
)  # default of a flag that only some run types have: run_types.py says which, and its default there


@dataclass(frozen=True, eq=False)
class Flag:
    """One row.

    Attributes:
        default: None: open, and filled in when the settings are worked out.
        help: ends with the default; "%(default)s" stands for it.
        type: text to value, raises argparse.ArgumentTypeError. None: text, or a switch where the default is False.
        choices: the values that exist.
        const: the value of the flag without a word after it.
        also: further spellings, from older commands.
        spelled: how --help writes it, where that is not --name.
        sets: an older switch that stands for another flag and its value.
        of_one_start: it belongs to a start, not to the run: --config files do not hold it, nor does a record.
        recorded: False: files do not hold it, as it follows from other flags in every case.
        needs: the flag, and the values of it, without which nothing reads this one.
        before: what runs did before the flag came, for files of earlier versions. None: they do not say.
        in_config: its name in `training_config` of the metrics file; None: only `settings` has it.
        compared_as: the field of equal work that holds it, where that is not its own name.
        is_task: a time to loss asks for it too; the rest of the work may be what is compared.
        names_arm: runs that differ in it are called by it. Default: SPREAD and HOW.
        varies: repeats of one configuration may differ in it.
        is_instrument: it slows a step down or changes its timing, so the run enters no headline.
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
    also: tuple[str, ...] = ()
    spelled: str | None = None
    sets: tuple[str, Any] | None = None
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
    # filled in by table.py, from the place of the row
    name: str = ""
    group: str = ""  # of the settings
    field: str = ""  # of the group

    @property
    def is_switch(self) -> bool:
        return self.default is False and self.type is None

    @property
    def is_option(self) -> bool:
        """Return whether only some run types have it."""
        return self.default is OF_RUN_TYPE

    @property
    def option_strings(self) -> list[str]:
        return [self.spelled or f"--{self.name}", *self.also]


def row(help: str | None, kind: Kind, *, name: str = "", resume: Resume | None = None, **columns: Any) -> Flag:
    """Return a row that is no field of the settings: only a start reads it."""
    named = columns.pop("names_arm", kind in (Kind.SPREAD, Kind.HOW))
    return Flag(help, kind, resume or _RESUME[kind], named, name=name, **columns)


def flag(help: str | None, kind: Kind, **columns: Any) -> Any:
    """Return the field of a group of settings, with its row. `name`: of the flag, where the field has another."""
    return dataclasses.field(metadata={"flag": row(help, kind, **columns)})
