"""Settings that an earlier version recorded, in the terms of today's flags.

Files of runs and checkpoints outlive the flags they were made with. Both are read through here, so that a run counts as
what it did, not as the words in which its version said so.
"""

from __future__ import annotations

from typing import Any

from testbed.config.table import FLAGS, OLDER_SWITCHES

BEFORE_THE_FLAG = {name: flag.before for name, flag in FLAGS.items() if flag.before is not None}
_SKIPPED = {True: "all", False: None}  # once a switch


def in_todays_terms(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in a checkpoint or in training_metrics.json, with what its version did where it lacked the
    flags (`before` in the table)."""
    settings = {**BEFORE_THE_FLAG, **recorded}
    for switch, (name, value) in OLDER_SWITCHES.items():
        if settings.pop(switch, False):
            settings[name] = value
    skipped = settings.get("skip_gradient_sync")
    if isinstance(skipped, bool):
        settings["skip_gradient_sync"] = _SKIPPED[skipped]
    return settings
