"""Read from PyTorch's flight recorder how long collectives took on this rank's GPU (--watch_collectives every_step).

The host does not know when a collective of NCCL begins or ends. PyTorch's recorder keeps the last collectives of a
process, and with TORCH_NCCL_ENABLE_TIMING how long each was on its stream: a rank that comes early waits inside it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d as c10d

from testbed.profiling.timed_collectives import Call

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings

MOST = 4000  # collectives that are kept: 400 steps of DDP, 100 of FSDP
_OTHER_NAMES = {"byte": torch.uint8, "char": torch.int8}  # of dtypes; the rest are called as in torch


def times_on_device(settings: RunSettings, device: torch.device) -> bool:
    return settings.measuring.watch_collectives == "every_step" and device.type == "cuda"


def turn_on() -> None:
    """Let PyTorch keep and time collectives, as far as the environment does not say it already. Call it before the
    process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(MOST))
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")


def recorded_calls(ranks_of_group: Callable[[str], Sequence[int]]) -> list[Call]:
    """Return this rank's last collectives that are over and were timed, the oldest first."""
    dump = c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False)  # type: ignore[attr-defined]
    return calls_of(json.loads(dump), ranks_of_group)


def calls_of(dump: Mapping[str, Any], ranks_of_group: Callable[[str], Sequence[int]]) -> list[Call]:
    """Return the timed collectives of a dump. Transfers between two ranks and what has no time are left out."""
    calls, known = [], {}
    for entry in dump.get("entries", []):
        if entry["is_p2p"] or not entry.get("duration_ms"):
            continue
        group = entry["process_group"][0]
        if group not in known:
            known[group] = tuple(ranks_of_group(group))
        name = entry["profiling_name"].rpartition(":")[2]
        sizes = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
        num_bytes = sum(math.prod(size) * _bytes_of(dtype) for size, dtype in sizes)
        number, began_s = entry["collective_seq_id"], entry["time_created_ns"] / 1e9
        calls.append(Call((group, known[group], number, name, num_bytes), began_s, entry["duration_ms"] / 1e3))
    return calls


def _bytes_of(dtype: str) -> int:
    """Return the size of an element of a dtype as C++ calls it ("Float", "BFloat16"); 1 of one that is not known."""
    found = _OTHER_NAMES.get(dtype.lower(), getattr(torch, dtype.lower(), None))
    return found.itemsize if isinstance(found, torch.dtype) else 1
