"""What outside a run's settings slows its steps down or changes their timing: variables of the environment. No torch.

A run with any of them is marked as instrumented, as one under a profiler is, and enters no headline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# exported by scripts/slurm/evidence.sh: the names of its toggles that are on, and the folder of this start's evidence
EVIDENCE_TOGGLES, EVIDENCE_DIR = "EVIDENCE_TOGGLES", "EVIDENCE_DIR"
# The values with which each variable costs time. NCCL_DEBUG=WARN and VERSION write nothing while a run is well.
_COSTS_TIME = {
    "NCCL_DEBUG": ("INFO", "TRACE"),
    "TORCH_DISTRIBUTED_DEBUG": ("INFO", "DETAIL"),
    "TORCH_NCCL_DESYNC_DEBUG": ("1", "Y", "YES", "T", "TRUE", "ON"),
    "TORCH_NCCL_ENABLE_TIMING": ("1", "Y", "YES", "T", "TRUE", "ON"),
    "CUDA_LAUNCH_BLOCKING": ("1",),
}
_NSIGHT = "NSYS_PROFILING_SESSION_ID"  # set by nsys in what it runs


def instruments_in(environment: Mapping[str, Any]) -> list[str]:
    """What these variables switch on, each as "NAME=value"; empty: nothing. Values may be of any file: not only text
    is borne."""
    values = {name: str(environment.get(name) or "").upper() for name in _COSTS_TIME}
    found = [f"{name}={value}" for name, value in values.items() if value in _COSTS_TIME[name]]
    if environment.get(_NSIGHT):
        found.append("nsys")
    return found + [f"{toggle}=1" for toggle in str(environment.get(EVIDENCE_TOGGLES) or "").split()]
