"""Read from PyTorch's flight recorder which collective this rank is in.

The recorder is part of PyTorch's NCCL and gloo groups and keeps the last 2,000 collectives (TORCH_FR_BUFFER_SIZE). It
is read in memory, as JSON, so no file of another process is opened.
"""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

PATIENCE_S = 2.0  # NCCL's recorder asks CUDA about events, and a driver that hangs does not answer


def collective_under_way() -> str | None:
    """Name the first collective that this rank has entered and that is not over. None: there is none, or no answer.

    Ranks that name different operations under the same number and group did not call alike.
    """
    answer: list[str | None] = []

    def ask() -> None:
        with contextlib.suppress(KeyError, TypeError, ValueError, RuntimeError):  # another version's format
            answer.append(_first_open(_recorded()))

    thread = threading.Thread(target=ask, name="flight-recorder", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return answer[0] if answer else None


def _recorded() -> list[dict[str, Any]]:
    """Return the recorder's entries of NCCL's and of gloo's groups, each from the oldest on."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)  # a build without CUDA has no NCCL
        entries += [] if dump is None else json.loads(dump(includeCollectives=True)).get("entries", [])
    return entries


def _first_open(entries: list[dict[str, Any]]) -> str | None:
    """Return the words for the oldest entry that the group still waits for.

    Args:
        entries: as PyTorch's versions 2.10 of the format have them.
    """
    waiting = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    if not waiting:
        return None
    first = min(waiting, key=lambda entry: entry["time_created_ns"])
    kind, number = ("p2p", "p2p_seq_id") if first["is_p2p"] else ("collective", "collective_seq_id")
    tensors = ", ".join(
        f"{'x'.join(map(str, size)) or 'scalar'} {dtype}"
        for size, dtype in zip(first["input_sizes"], first["input_dtypes"], strict=False)
    )
    group, description = first["process_group"]
    return (
        f"{first['profiling_name']} ({tensors}), {kind} {first[number]} of process group {group}"
        + (f" {description}" if description not in ("", "undefined", group) else "")
        + (f", with {len(waiting) - 1} more behind it" if len(waiting) > 1 else "")
    )
