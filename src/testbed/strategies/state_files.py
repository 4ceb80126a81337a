"""The state of a run as files: tensors by name, written and read by torch.distributed.checkpoint.

    model.NAME                  fp32 weights
    optimizer.state.NAME.KEY    what the optimizer keeps of a weight: exp_avg, exp_avg_sq, step, momentum_buffer
    scaler.KEY                  fp16's loss scale

A name is a parameter's in model.GPT2 and every tensor has the whole model's shape, in whatever pieces the ranks hold
it: a state that some ranks wrote under one strategy is read by others under another. Nothing else is in the files;
learning rates and other hyperparameters are settings of the run.

Reading executes nothing. PyTorch's own reader unpickles its description of the files and all that is not a tensor; here
the description is JSON (see `description`), and what is not a tensor is refused.
"""

from __future__ import annotations

import functools
import io
import os
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from testbed.distributed import process_group
from testbed.distributed.tensors import RanksDiffer, first_difference, hashes_of
from testbed.errors import InputError
from testbed.io import is_within, open_regular, write_text
from testbed.model.tensor_archive import check_finite, load_tensors
from testbed.optim.optimizer import local_tensor
from testbed.strategies.description import DESCRIPTION, DTYPES, check_described, in_json, read_description

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # not by number: numbers differ between stages
State = dict[str, dict[str, torch.Tensor]]
# one process without a group is not a mistake
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> State:
    """Return this rank's weights and moments: the live tensors, so that reading into them puts a state back. An
    optimizer that has done no step gets its moments first. The scaler's numbers are copies."""
    is_new = not optimizer.state
    weights, of_optimizer = get_state_dict(model, optimizer, options=BY_NAME)
    if is_new:  # PyTorch makes moments by a step without gradients, and counts it
        for moments in optimizer.state.values():
            if "step" in moments:
                moments["step"].zero_()
    by_name = {name: value for name, value in of_optimizer.items() if name.startswith("state.")}
    state = cast("State", {"model": weights, "optimizer": by_name})
    if scaler is not None and scaler.is_enabled():
        numbers = scaler.state_dict()
        state["scaler"] = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    return state


def check_replicated(state: State) -> None:
    """Compare what several ranks hold under one name, by hash. All ranks call it, outside a step.

    Of such a tensor one rank's values are saved; if the others' differ, a resumed run would be another one. A DTensor
    says by itself which part a rank has, and is not compared.

    Raises:
        RanksDiffer: on every rank.
    """
    if not dist.is_initialized():
        return
    plain = {
        f"{section}.{name}": tensor
        for section, tensors in state.items()
        for name, tensor in tensors.items()
        if type(tensor.detach()) is torch.Tensor
    }
    # not over the `file_group`: a checkpoint may be being written in the background, whose thread uses that one
    hashes = process_group.gather_objects(hashes_of(plain))
    if difference := first_difference(hashes, all_have_all=False):  # a stage has its own layers
        name, *ranks = difference
        raise RanksDiffer(
            f"ranks {ranks[0]} and {ranks[1]} hold different values of {name}, which this run type says are equal, so "
            "one rank's would be lost; nothing is saved. Resume from the last checkpoint; a strategy whose ranks are "
            'meant to differ has state_layout="per_rank" in config/run_types.py'
        )


def of_rank(state: State, rank: int) -> State:
    """Return the same tensors under names of a rank's own, where ranks hold different values of one name."""
    return {f"{section}_of_rank_{rank}": tensors for section, tensors in state.items()}


def put_scaler_back(scaler: torch.amp.GradScaler, state: State) -> None:
    """Give the loss scaler the numbers of a state that was read; those that it lacks (written in another precision, or
    by DeepSpeed, which shares the scale alone) stay what they are."""
    now = scaler.state_dict()
    read = {name: type(now[name])(tensor.item()) for name, tensor in state.get("scaler", {}).items()}
    scaler.load_state_dict({**now, **read})


def file_group() -> dist.ProcessGroup | None:
    """Return a group of gloo with all ranks, to agree on files while the steps' own groups are busy; None in a process
    without any group. All ranks call it."""
    return process_group.new_gloo_group()


def save(
    state: State, directory: Path, group: dist.ProcessGroup | None, host_copy: HostCopy | None = None
) -> Future | None:
    """Write a state; what several ranks hold alike is written once. All ranks of the group call it.

    Args:
        group: of `file_group`; None: this process alone.
        host_copy: return as soon as the state is in it. What it held before must have been written.

    Returns:
        With `host_copy` a future; rank 0's is done when every rank has written its part.
    """
    writer, is_alone = _Writer(directory), group is None
    if host_copy is None:
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=is_alone)
        return None
    future = dcp.async_save(state, storage_writer=writer, process_group=group, no_dist=is_alone, async_stager=host_copy)
    assert isinstance(future, Future), "a stager that stages at once is answered with one future"
    return future


def load(state: State, source: Path | Reader, group: dist.ProcessGroup | None) -> None:
    """Read into the tensors of a state, each rank what it holds. All ranks of the group call it; with None each reads
    alone.

    Args:
        source: the folder, or its reader where a state is read in parts.

    Raises:
        InputError: there is no such state, or it is of an earlier version.
        CheckpointException: its files are damaged, hold something else than tensors of finite numbers, or lack a tensor
            of this state or have it in another shape. (No Exception; PyTorch collects the ranks' own in it.)
    """
    reader = source if isinstance(source, Reader) else Reader(source)
    check_described(Path(reader.path))
    if "scaler" in state:  # between DeepSpeed's loss scaler and PyTorch's only the scale moves
        saved = reader.read_metadata().state_dict_metadata
        state["scaler"] = {name: value for name, value in state["scaler"].items() if f"scaler.{name}" in saved}
    dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)


class HostCopy(AsyncStager):
    """Copy of the state in host memory, to write in the background while training continues.

    The memory is kept for the next copy: to get new memory from the system takes longer than to fill it.
    """

    _synchronize_after_execute = False  # the copy is there when `stage` returns

    def __init__(self) -> None:
        self._copies: State = {}

    def synchronize_staging(self) -> None:
        """Do nothing: the copy is there."""

    def close(self) -> None:
        """Do nothing: the memory goes with the object."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        copies = {
            section: {name: self._copy(section, name, tensor) for name, tensor in tensors.items()}
            for section, tensors in state_dict.items()
        }
        if torch.cuda.is_initialized():  # copies into pinned memory may still be under way
            torch.cuda.synchronize()
        return copies

    def _copy(self, section: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        copies = self._copies.setdefault(section, {})
        if name not in copies and type(tensor.detach()) is torch.Tensor and tensor.is_cuda:
            copies[name] = torch.empty_like(tensor.detach(), device="cpu", pin_memory=True)
        if name not in copies:
            copies[name] = tensor.detach().to("cpu", copy=True)
        else:
            for into, piece in zip(_pieces(copies[name]), _pieces(tensor), strict=True):
                into.copy_(piece, non_blocking=True)
        return copies[name]


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors in which this rank holds a tensor."""
    local = local_tensor(tensor.detach())
    return local.local_shards() if isinstance(local, LocalShardsWrapper) else [local]


class _Files(FileSystem):
    def mkdir(self, path: str | os.PathLike) -> None:
        """And not its parents: the folder of a run that has vanished is not made again."""
        Path(path).mkdir(exist_ok=True)


class _Writer(dcp.FileSystemWriter):
    """Writes tensors as PyTorch does, and their description as JSON in place of a pickle."""

    def __init__(self, directory: Path):
        # Copying ahead would wait for the training stream once per tensor, host copies included, and open a context on
        # GPU 0 in every rank's thread.
        super().__init__(directory, per_thread_copy_ahead=0)
        self.fs = _Files()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index: result.storage_data for of_rank in results for result in of_rank}
        write_text(Path(self.path, DESCRIPTION), in_json(metadata, written))


class Reader(dcp.FileSystemReader):
    """Reads what `save` wrote. It unpickles tensors alone, and only with torch.load(weights_only=True)."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._fault: Exception | None = None

    @functools.cached_property
    def description(self) -> Metadata:
        return read_description(Path(self.path))

    def read_metadata(self) -> Metadata:
        """Once: ZeRO's shards are read one parameter after the other. What is wrong with it is told where PyTorch
        collects the ranks' faults: here it would print a traceback and ask for another description."""
        try:
            return self.description
        except (OSError, ValueError) as fault:
            self._fault = fault
            return Metadata({}, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._fault is not None:
            raise self._fault
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            path = Path(self.path, name)
            if not is_within(path, Path(self.path)):
                raise InputError(f"{path} is a link that leads out of the checkpoint")
            with open_regular(path) as file:
                for item in items:
                    where, tensor = self.storage_data[item.storage_index], planner.resolve_tensor(item).detach()
                    tensor.copy_(_piece_of(file, where.offset, where.length, item, f"{item.dest_index.fqn} in {path}"))
                    planner.commit_tensor(item, tensor)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


def _piece_of(file: BinaryIO, start: int, length: int, item: ReadItem, name: str) -> torch.Tensor:
    """Return the part that an item asks for of a piece, which lies in `length` bytes of a file."""
    if not 0 < length <= os.fstat(file.fileno()).st_size - start:
        raise InputError(f"{name} is cut off: the file ends before it")
    file.seek(start)
    tensor = load_tensors(io.BytesIO(file.read(length)), name)
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.dtype not in DTYPES.values():
        raise InputError(f"{name} is not a plain tensor; a state holds tensors only")
    box = list(zip(item.storage_offsets, item.lengths, strict=True))
    if tensor.dim() != len(box) or any(
        offset + size > whole for (offset, size), whole in zip(box, tensor.shape, strict=True)
    ):
        raise InputError(f"{name} has the shape {list(tensor.shape)}, not the one that its description says")
    for dimension, (offset, size) in enumerate(box):
        tensor = tensor.narrow(dimension, offset, size)
    check_finite(tensor, name)
    return tensor
