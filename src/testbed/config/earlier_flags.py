"""Upgrade settings that earlier versions recorded to the flags of today."""

from __future__ import annotations

from typing import Any

from testbed.config.table import FLAGS, OLDER_SWITCHES
from testbed.model.shape import MODEL_SIZES

LEGACY_DEFAULTS = {name: flag.before for name, flag in FLAGS.items() if flag.before is not None}
_NAMES = {str([size.num_layers, size.num_heads, size.embedding_size]): name for name, size in MODEL_SIZES.items()}
_SKIPPED = {True: "all", False: None}  # once a switch


def upgrade_settings(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return recorded settings under the names and values of today, with what the version did before a flag existed
    (`before` in the table)."""
    settings = {**LEGACY_DEFAULTS, **recorded}
    for switch, (name, value) in OLDER_SWITCHES.items():
        if settings.pop(switch, False):
            settings[name] = value
    skipped = settings.get("skip_gradient_sync")
    if isinstance(skipped, bool):
        settings["skip_gradient_sync"] = _SKIPPED[skipped]
    if settings.get("init_from", "scratch") != "scratch":  # with a folder's weights --model said nothing
        dimensions = [settings.get(name) for name in ("num_layers", "num_heads", "embedding_size")]
        settings["model"] = _NAMES.get(str(dimensions), settings.get("model"))
    return settings
