"""Settings that an earlier version recorded, in the terms of today's flags.

Files of runs and checkpoints outlive the flags they were made with. Both are read through here, so that a run counts as
what it did, not as the words in which its version said so.
"""

from __future__ import annotations

from typing import Any

# What runs did before the flag came.
BEFORE_THE_FLAG = {
    "optimizer": "adamw",
    "lr_schedule": "cosine",
    "attention": "auto",
    "compile": False,
    "matmul": "default",
    "async_mode": "disabled",
    "bind_cores": False,
    "run_inference_benchmark": False,
}
_SKIPPED = {True: "all", False: None}  # once a switch


def in_todays_terms(recorded: dict[str, Any]) -> dict[str, Any]:
    """The settings in a checkpoint or in training_metrics.json, with what its version did where it lacked the flags."""
    settings = {**BEFORE_THE_FLAG, **recorded}
    if settings.pop("use_flash_attention", False):
        settings["attention"] = "flash"
    skipped = settings.get("skip_gradient_sync")
    if isinstance(skipped, bool):
        settings["skip_gradient_sync"] = _SKIPPED[skipped]
    return settings
