"""Find locks that a killed build left in PyTorch's cache of extensions. Every later start waits for them silently.

DeepSpeed builds parts of itself (cpu_adam for --offload) when a run starts. No torch.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from testbed.config.run_types import STRATEGIES


def cache_folder() -> Path:
    """Return where PyTorch builds extensions: $TORCH_EXTENSIONS_DIR, else the user's cache."""
    told = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(told) if told else cache / "torch_extensions"


def abandoned_locks(cache: Path) -> list[Path]:
    """Return the locks that no process of this machine has open. Only root sees the processes of other users."""
    locks = sorted({*cache.glob("*/lock"), *cache.glob("*/*/lock")})  # deeper where PyTorch names the version
    if not locks:
        return []
    held = set()
    for process in psutil.process_iter():
        try:
            held |= {file.path for file in process.open_files()}
        except (psutil.Error, OSError):  # gone meanwhile, or another user's
            continue
    return [lock for lock in locks if str(lock.resolve()) not in held]


def warnings_of_locks(run_type: str) -> list[str]:
    """Return a sentence for each abandoned lock that may make this run wait for ever."""
    if STRATEGIES[run_type].engine != "deepspeed":
        return []
    return [
        f"warning: {lock} is left over from a build that was killed: no process of this machine has it open, and "
        f"DeepSpeed would wait for it for ever if it needs that part; if no other machine is building there: rm {lock}"
        for lock in abandoned_locks(cache_folder())
    ]
