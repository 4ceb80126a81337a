"""Say what this machine is, for a calibration to be compared with. No torch."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from testbed.distributed.launch import cpu_name, usable_cores


def facts_here() -> dict[str, Any]:
    """Return the facts of calibration.MUST_MATCH that can be had without PyTorch: all but the device's name."""
    try:
        torch: str | None = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return {"cpu": cpu_name(), "cores": usable_cores(), "torch": torch}
