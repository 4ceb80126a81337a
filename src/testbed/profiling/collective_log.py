"""Tell receivers when this rank enters and leaves each collective, and log it (--log_collectives), a line of JSON each.

The hooks are in PyTorch's dispatcher, which all collectives pass: torch.distributed's, DDP's from C++, FSDP's,
DeepSpeed's, and those of DTensor and of compiled code, whose functional collectives call the same operators below
autograd. So the hook is at BackendSelect, the last key before the device's kernel. Without a receiver nothing is
registered. The other receiver is collective_watch.py.

The file is collectives_rank0_1.jsonl (docs/evidence.md): rank, and number of the start in that folder.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as c10d

from testbed.config.environment_variables import EVIDENCE_DIR
from testbed.distributed.launch import Launch
from testbed.errors import say_if_read
from testbed.io import now_utc

FOLDER = "evidence"  # in the run's, where no launcher named another
_NAMESPACE, _FUNCTIONAL = "c10d", "_c10d_functional"
ALL_RANKS = "0"  # name of the default group
_MEANING = {
    "enter": "this rank calls it",
    "return": "the call is back; what was started may still be under way",
    "started": "as return, of gloo's collectives and transfers that do not tell their end",
    "waits": "this rank begins to wait for one that was started",
    "done": "the collective, or the wait for it, is over on this rank: of gloo alone; when one of NCCL is over, only "
    "the device knows",
}


class Receiver(Protocol):
    """What is told of each collective. `enter` returns what `leave` is called with."""

    def enter(self, name: str, arguments: tuple) -> Any:
        """Take that this rank calls a collective; `sizes_of` and `group_of` read the arguments."""

    def leave(self, event: str, number: Any) -> None:
        """Take "return", and on gloo "done", perhaps from another thread; or "started", "waits" and "done" in turn."""


class CollectiveLog:
    """One rank's file. A line is one write, so a killed rank leaves all that it had entered."""

    def __init__(self, folder: Path, launch: Launch, backend: str | None):
        """Raises OSError where the folder cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file: int | None
        self._file, self.path = _new_file(folder, launch.rank)
        self._numbers = itertools.count(1)
        start = {"rank": launch.rank, "world_size": launch.world_size, "backend": backend, "process": os.getpid()}
        start |= {"host": socket.gethostname(), "started_utc": now_utc()}
        start["launcher_restarts"] = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        self._write({"event": "start", **start, "clock": "seconds of CLOCK_MONOTONIC", "meaning": _MEANING})

    def enter(self, name: str, arguments: tuple) -> int:
        """Note that a collective begins; returns its number on this rank."""
        number, group = next(self._numbers), group_of(arguments)
        self._write({"event": "enter", "number": number, "name": name, "group": group, "bytes": sizes_of(arguments)})
        return number

    def leave(self, event: str, number: int) -> None:
        """Note an event of the collective with this number."""
        self._write({"event": event, "number": number})

    def _write(self, line: dict[str, Any]) -> None:
        """Write a line. A full disk ends the log, not the collective that this rank is about to call."""
        if self._file is None:
            return
        try:
            os.write(self._file, (json.dumps({"s": round(time.monotonic(), 6), **line}) + "\n").encode())
        except OSError as error:
            self._file = None
            say_if_read(f"note: {self.path} ends here: {error.strerror}")


def _new_file(folder: Path, rank: int) -> tuple[int, Path]:
    """Create the first free name: a launcher that restarts its ranks uses the same folder."""
    for start in itertools.count(1):
        path = folder / f"collectives_rank{rank}_{start}.jsonl"
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644), path
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


_Numbers = Sequence[tuple[Receiver, Any]]
_KEY = torch._C.DispatchKey.BackendSelect
_AFTER_KEY = torch._C._dispatch_keyset_full_after(_KEY)
MOST_WAITED_FOR = 1000  # what nobody waits for is forgotten, with its tensors
_wait = c10d.Work.wait
_registered: list[torch.library.Library] = []  # as long as they live, collectives are received
_waited_for: dict[c10d.Work, tuple[set[int], _Numbers]] = {}  # what does not tell its end, with its outputs' addresses


def log_in(directory: Path, launch: Launch, backend: str | None) -> CollectiveLog:
    """Open the log of this process in the launcher's folder of evidence, else in DIRECTORY/evidence."""
    return CollectiveLog(Path(os.environ.get(EVIDENCE_DIR) or directory / FOLDER), launch, backend)


def receive_collectives(receivers: Sequence[Receiver], backend: str | None, waits_in_python: bool = False) -> None:
    """Tell the receivers of every collective of this process from now on, in place of any before; none: of nothing.

    Args:
        receivers: whom to tell.
        backend: of the process group; gloo alone tells the end of a collective.
        waits_in_python: whether Python waits for each that it needs, as everything but DDP does, so that the end of the
            wait is end enough. It costs much less: gloo's threads, which would tell the end, have to take Python's lock
            for it, from this thread and again from each other.
    """
    global _registered, _wait
    _registered = []
    _waited_for.clear()
    if c10d.Work.wait is _wait_for_one:
        c10d.Work.wait = _wait  # type: ignore[method-assign]
    if not receivers:
        return
    library, knows_the_end = torch.library.Library(_NAMESPACE, "IMPL"), backend == "gloo"
    for name in _collectives():
        received = _received(name, receivers, knows_the_end, knows_the_end and not waits_in_python)
        library.impl(name, received, _KEY.name, with_keyset=True)
    _registered.append(library)
    if knows_the_end:
        functional = torch.library.Library(_FUNCTIONAL, "IMPL")
        functional.impl("wait_tensor", _wait_for_tensor, _KEY.name, with_keyset=True)
        _registered.append(functional)
        _wait = c10d.Work.wait
        c10d.Work.wait = _wait_for_one  # type: ignore[method-assign, assignment]


def _collectives() -> Iterable[str]:
    """Yield the operators of torch.distributed that return a Work, alone or last."""
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace == _NAMESPACE:
            returned = getattr(torch.ops.c10d, name).default._schema.returns
            if returned and "c10d.Work" in str(returned[-1].type):
                yield name


def _received(name: str, receivers: Sequence[Receiver], knows_the_end: bool, tells_its_end: bool) -> Callable:
    operator, plain_name = getattr(torch.ops.c10d, name).default, name.strip("_")

    def received(keys: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        nonlocal tells_its_end
        numbers = [(receiver, receiver.enter(plain_name, arguments)) for receiver in receivers]
        returned = operator.redispatch(keys & _AFTER_KEY, *arguments)
        if not knows_the_end:
            _leave("return", numbers)
            return returned
        work = c10d.Work.unbox(returned[-1] if isinstance(returned, tuple | list) else returned)
        if tells_its_end:
            try:
                future = work.get_future()
            except RuntimeError:  # gloo's sends, receives and reductions that scatter have none
                tells_its_end = False
            else:
                _leave("return", numbers)
                future.add_done_callback(lambda _: _leave("done", numbers))
                return returned
        for oldest in list(_waited_for)[: len(_waited_for) + 1 - MOST_WAITED_FOR]:
            _waited_for.pop(oldest, None)
        _waited_for[work] = (_addresses(arguments[0]), numbers)
        _leave("started", numbers)
        return returned

    return received


def _leave(event: str, numbers: _Numbers) -> None:
    for receiver, number in numbers:
        receiver.leave(event, number)


def _addresses(outputs: Any) -> set[int]:
    tensors = outputs if isinstance(outputs, list) else [outputs]
    return {tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}


def _wait_for_one(work: c10d.Work, *arguments: Any, **named: Any) -> Any:
    """Do what Work.wait does, which whoever calls torch.distributed from Python calls."""
    return _while_waiting(work, lambda: _wait(work, *arguments, **named))


def _wait_for_tensor(keys: torch._C.DispatchKeySet, tensor: torch.Tensor) -> torch.Tensor:
    """Do what the wait of functional collectives does, which names an output of the work."""
    operator, work = torch.ops._c10d_functional.wait_tensor.default, None
    if _waited_for:
        address = tensor.data_ptr()
        work = next((one for one, (outputs, _) in list(_waited_for.items()) if address in outputs), None)
    return _while_waiting(work, lambda: operator.redispatch(keys & _AFTER_KEY, tensor))


def _while_waiting(work: c10d.Work | None, wait: Callable[[], Any]) -> Any:
    found = None if work is None else _waited_for.pop(work, None)
    if found is None:  # it tells its end by itself, or another thread waits for it
        return wait()
    _leave("waits", found[1])
    try:
        return wait()
    finally:
        _leave("done", found[1])


def group_of(arguments: tuple) -> str | None:
    """Return the process group's name in torch.distributed."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return c10d.ProcessGroup.unbox(argument).group_name
    return None


def sizes_of(arguments: tuple) -> list[int]:
    """Return the bytes of each argument that holds tensors, inputs and outputs."""
    sizes = [(one, _num_bytes(one)) for one in arguments if isinstance(one, torch.Tensor | list)]
    return [size for one, size in sizes if size or isinstance(one, torch.Tensor)]


def _num_bytes(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.nbytes
    return sum(map(_num_bytes, argument)) if isinstance(argument, list) else 0
