"""Take the flags that were not typed from the record of the run that --resume continues. No torch."""

from __future__ import annotations

from pathlib import Path

from testbed.config.flag_types import AUTO
from testbed.config.flags import ParsedFlags, checked_like_a_flag
from testbed.config.run_types import ALL_OPTIONS, STRATEGIES
from testbed.config.table import FLAGS, flags_where
from testbed.errors import InputError
from testbed.io import read_json
from testbed.run_folder import EFFECTIVE_CONFIG

# where the run lies now, where this start is to stop, and what only measured an earlier start
_NOT_TAKEN = frozenset({"run_type", "checkpoint_path", "stop_at_step"}) | flags_where(lambda flag: flag.is_instrument)
_TAKEN = flags_where(lambda flag: bool(flag.field) and flag.recorded and not flag.of_one_start) - _NOT_TAKEN


def with_recorded_flags(asked: ParsedFlags) -> tuple[ParsedFlags, Path | None]:
    """Return the flags of a start that resumes a run, with recorded values for those that were not given.

    Returns:
        The flags, and the file that they are from; None where no run is resumed, it has not begun, or the
        file is not a record of a run.

    Raises:
        InputError: the record cannot be used; the sentence names it.
    """
    file = _record_of(asked)
    if file is None:
        return asked, None
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
    taken["run_type"] = run_type
    return asked.configured_with(taken), file


def _record_of(asked: ParsedFlags) -> Path | None:
    """Return the effective_config.json of the run that is resumed, which may be named by one of its checkpoints."""
    resume = asked.values["resume"]
    if resume is None:
        return None
    own_folder = asked.values["checkpoint_path"] or f"checkpoint/{asked.values['run_type']}"
    path = Path(own_folder if resume == AUTO else resume)
    files = (folder / EFFECTIVE_CONFIG for folder in (path, path.absolute().parent.parent))
    return next((file for file in files if file.is_file()), None)
