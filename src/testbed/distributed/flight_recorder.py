"""Read from PyTorch's flight recorder which collectives this rank was in, and which it is in.

The recorder is part of PyTorch's NCCL and gloo groups and keeps the last 2,000 collectives (TORCH_FR_BUFFER_SIZE). It
is read in memory, as JSON, so no file of another process is opened.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

PATIENCE_S = 5.0  # a busy machine answers later; NCCL asks CUDA about events, and a driver that hangs never answers
STDERR = 2
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # its name now, and its earlier one
MOST_TIMED = 4000  # collectives


def collective_under_way() -> str | None:
    """Name the first collective that this rank has entered and that is not over. None: none is known.

    If ranks name different operations under the same number and group, they issued collectives in different orders.

    Call it when all else is written: a recorder that has not answered after PATIENCE_S ends the process with exit code
    1 and the threads' stacks on stderr. It keeps the interpreter's lock while it asks CUDA, so that no Python code
    could continue. Only faulthandler's thread needs no lock.
    """
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True, file=STDERR)
    try:
        return _first_open(recorded())
    except (KeyError, TypeError, ValueError, RuntimeError):  # another version's format
        return None
    finally:
        faulthandler.cancel_dump_traceback_later()


def time_collectives() -> None:
    """Let NCCL's groups time their collectives on the GPU, and keep more of them, as far as the environment does not
    say it already. Call it before a group is made."""
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    if not any(name in os.environ for name in SIZES):
        os.environ[SIZES[0]] = str(MOST_TIMED)


def recorded() -> list[dict[str, Any]]:
    """Return the recorder's entries of NCCL's and of gloo's groups, each from the oldest on."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)  # a build without CUDA has no NCCL
        entries += [] if dump is None else json.loads(dump(includeCollectives=True)).get("entries", [])
    return entries


def named(entry: Mapping[str, Any]) -> str:
    """Return an operation with the sizes and types of its inputs, as in "nccl:all_reduce (25x1000 Float)"."""
    tensors = ", ".join(
        f"{'x'.join(map(str, size)) or 'scalar'} {dtype}"
        for size, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    )
    return entry["profiling_name"] + (f" ({tensors})" if tensors else "")  # gloo's barrier has none


def _stream_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["process_group"][0], entry["profiling_name"] if entry["is_p2p"] else ""


def _first_open(entries: list[dict[str, Any]]) -> str | None:
    """Return the words for the oldest entry that the group still waits for.

    Args:
        entries: as PyTorch's versions 2.10 of the format have them.
    """
    # what came before a group's last of its kind that is over is over too, though in a batch of NCCL's its state never
    # changes; single sends and receives have a stream for each pair of ranks, so each kind counts alone
    over: dict[tuple[str, str], int] = {}
    for entry in entries:
        if entry["retired"] or entry["state"] == "completed":
            over[_stream_of(entry)] = entry["time_created_ns"]
            if entry["profiling_name"].endswith(":coalesced"):
                over[(entry["process_group"][0], "batch")] = entry["time_created_ns"]
    waiting = [
        entry
        for entry in entries
        if entry["time_created_ns"] > over.get(_stream_of(entry), -1)
        and not (entry["is_p2p"] and entry["time_created_ns"] <= over.get((entry["process_group"][0], "batch"), -1))
    ]
    if not waiting:
        return None
    first = min(waiting, key=lambda entry: entry["time_created_ns"])
    kind, number = ("p2p", "p2p_seq_id") if first["is_p2p"] else ("collective", "collective_seq_id")
    group, description = first["process_group"]
    return (
        named(first)
        + f", {kind} {first[number]} of process group {group}"
        + (f" {description}" if description not in ("", "undefined", group) else "")
        + (f", with {len(waiting) - 1} more behind it" if len(waiting) > 1 else "")
    )
