"""The state of a run as files: tensors by name, written and read by torch.distributed.checkpoint.

    model.NAME                  fp32 weights
    optimizer.state.NAME.KEY    what the optimizer keeps of a weight: exp_avg, exp_avg_sq, step, momentum_buffer
    scaler.KEY                  fp16's loss scale

A name is a parameter's in model.GPT2 and every tensor has the whole model's shape, in whatever pieces the ranks hold
it: a state that some ranks wrote under one strategy is read by others under another. Nothing else is in the files;
learning rates and other hyperparameters are settings of the run.

Reading executes nothing. PyTorch's own reader unpickles its description of the files and all that is no tensor; here
the description may name a few harmless classes only, and what is no tensor is refused.
"""

from __future__ import annotations

import pickle
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from testbed.optimizer import local_tensor

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # not by number: numbers differ between stages
DESCRIPTION_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float64", "float32", "float16", "bfloat16", "int64"),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # since Python 3.13
}
State = dict[str, dict[str, torch.Tensor]]
# one process without a group is no mistake
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> State:
    """This rank's weights and moments: the live tensors, so that reading into them puts a state back. An optimizer that
    has done no step gets its moments first. The scaler's numbers are copies."""
    is_new = not optimizer.state
    weights, of_optimizer = get_state_dict(model, optimizer, options=BY_NAME)
    if is_new:  # PyTorch makes moments by a step without gradients, and counts it
        for moments in optimizer.state.values():
            if "step" in moments:
                moments["step"].zero_()
    by_name = {name: value for name, value in of_optimizer.items() if name.startswith("state.")}
    state = {"model": weights, "optimizer": by_name}
    if scaler is not None and scaler.is_enabled():
        numbers = scaler.state_dict()
        state["scaler"] = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    return state


def put_scaler_back(scaler: torch.amp.GradScaler, state: State) -> None:
    """Give the loss scaler the numbers of a state that was read; those that it lacks (written in another precision, or
    by DeepSpeed, which shares the scale alone) stay what they are."""
    now = scaler.state_dict()
    read = {name: type(now[name])(tensor.item()) for name, tensor in state.get("scaler", {}).items()}
    scaler.load_state_dict({**now, **read})


def file_group() -> dist.ProcessGroup | None:
    """A group of gloo with all ranks, to agree on files while the steps' own groups are busy; None in a process without
    any group. All ranks call it."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


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
    arguments = {"checkpoint_id": directory, "process_group": group, "no_dist": group is None}
    if host_copy is not None:
        return dcp.async_save(state, async_stager=host_copy, **arguments)
    dcp.save(state, **arguments)
    return None


def load(state: State, directory: Path, group: dist.ProcessGroup | None) -> None:
    """Read into the tensors of a state, each rank what it holds. All ranks of the group call it; with None each reads
    alone.

    Raises:
        ValueError: there is no such state.
        CheckpointException: its files are damaged, hold something else than tensors, or lack a tensor of this state or
            have it in another shape. (No Exception; PyTorch collects the ranks' own in it.)
    """
    if not Path(directory, ".metadata").is_file():
        raise ValueError(f"{directory} holds no state of a whole model")
    reader = _Reader(directory)
    if "scaler" in state:  # between DeepSpeed's loss scaler and PyTorch's only the scale moves
        saved = reader.read_metadata().state_dict_metadata
        state["scaler"] = {name: value for name, value in state["scaler"].items() if f"scaler.{name}" in saved}
    dcp.load(state, storage_reader=reader, planner=_TensorsOnly(), process_group=group, no_dist=group is None)


class HostCopy(AsyncStager):
    """What is written in the background: a copy in host memory that training does not touch.

    The memory is kept for the next copy: to get as much anew from the system takes longer than to fill it.
    """

    _synchronize_after_execute = False  # the copy is there when `stage` returns

    def __init__(self):
        self._copies: State = {}

    def stage(self, state_dict: State) -> State:
        return {
            section: {name: self._copy(section, name, tensor) for name, tensor in tensors.items()}
            for section, tensors in state_dict.items()
        }

    def _copy(self, section: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        copies = self._copies.setdefault(section, {})
        if name not in copies:
            copies[name] = tensor.detach().to("cpu", copy=True)
        else:
            for into, piece in zip(_pieces(copies[name]), _pieces(tensor), strict=True):
                into.copy_(piece)
        return copies[name]


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors in which this rank holds a tensor."""
    local = local_tensor(tensor.detach())
    return local.local_shards() if isinstance(local, LocalShardsWrapper) else [local]


class _Reader(dcp.FileSystemReader):
    """Reads what `save` wrote and nothing that names another class or another folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with Path(self._get_metadata_path(kwargs.get("rank"))).open("rb") as file:
            metadata = _DescriptionUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{self.path} is described by something else than torch.distributed.checkpoint's metadata")
        for where in (metadata.storage_data or {}).values():
            if Path(where.relative_path).name != where.relative_path:
                raise ValueError(f"{self.path} names a file outside its folder: {where.relative_path!r}")
        return metadata


class _DescriptionUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in DESCRIPTION_CLASSES.get(module, ()):
            raise ValueError(f"the description of a checkpoint names {module}.{name}, which it has no use for")
        return super().find_class(module, name)


class _TensorsOnly(dcp.DefaultLoadPlanner):
    """Refuses what PyTorch's own planner would unpickle."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor; a state holds tensors only")
