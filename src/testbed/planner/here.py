"""Say what this machine is, for a calibration to be compared with. No torch."""

from __future__ import annotations

from typing import Any

from testbed.config.device_name import cpu_name, torch_version
from testbed.distributed.launch import usable_cores


def facts_here() -> dict[str, Any]:
    """Return the facts of calibration.MUST_MATCH that can be had without PyTorch: all but the device's name."""
    return {"cpu": cpu_name(), "cores": usable_cores(), "torch": torch_version()}
