"""The state of a DeepSpeed engine in the form that all strategies read, and DeepSpeed's own files read safely.

ZeRO keeps fp32 masters and moments as flat pieces that cut through matrices, so a rank holds no whole tensor.
Each parameter is put together on all ranks, one after the other, and kept by one rank until it is written; it is read
back one after the other too. No rank ever holds more than its share of the whole, and one parameter.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from testbed import io
from testbed.errors import InputError
from testbed.model import tensor_archive
from testbed.strategies import state_files

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's; Muon's momentum is refused where ZeRO shards
SCALE = "scale"  # of PyTorch's loss scaler, and what DeepSpeed's has in common with it


def save(engine: Any, directory: Path, group: dist.ProcessGroup | None) -> None:
    """Write the whole state. All ranks call it.

    Args:
        engine: what `deepspeed.initialize` returned.
        group: of state_files.file_group.
    """
    state_files.save(_whole_state(engine) if _is_sharded(engine) else _plain_state(engine), directory, group)


def load(engine: Any, directory: Path, group: dist.ProcessGroup | None) -> None:
    """Read the whole state of any strategy on any number of ranks into an engine that has done no step. All ranks call
    it.

    Raises:
        InputError, CheckpointException: as state_files.load.
    """
    if _is_sharded(engine):
        _load_sharded(engine, directory)
    else:
        state_files.load(_plain_state(engine), directory, group)


def load_only_tensors(engine: Any) -> None:
    """Let the engine's own loader unpickle tensors, plain containers and three harmless classes of DeepSpeed's. Left as
    it is, it runs whatever code a file names. Where DeepSpeed reads past its loader (universal checkpoints), PyTorch is
    told to do the same."""
    engine.checkpoint_engine.load = _load_tensors
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"


def check_finite(engine: Any, directory: Path) -> None:
    """Check what DeepSpeed has read: only it knows which bytes of its files are padding. All ranks call it.

    Raises:
        InputError: a weight or a moment holds NaN. All ranks have met by then.
    """
    state = _whole_state(engine) if _is_sharded(engine) else _plain_state(engine)
    for tensors in state.values():
        for name, tensor in tensors.items():
            tensor_archive.check_finite(tensor, f"{name} in {directory}")


def save_own_files(engine: Any, directory: Path, tag: str, group: dist.ProcessGroup | None) -> None:
    """Write DeepSpeed's own files, which resume the same stage on the same ranks. All ranks call it.

    DeepSpeed's ranks meet once all have written: a rank whose disk is full must come there too, or the others wait for
    it and the cause is lost.

    Raises:
        OSError: on every rank, when one could not write its file.
    """
    faults: list[str] = []
    write = engine.checkpoint_engine.save

    def write_or_note(state_dict: dict, path: str) -> None:
        try:
            write(state_dict, path)
        except (OSError, RuntimeError) as error:  # RuntimeError: PyTorch's own writer, which loses the cause
            faults.append(f"{Path(path).name} could not be written: {error}")

    engine.checkpoint_engine.save = write_or_note
    engine._copy_recovery_script = lambda folder: None  # rank 0's alone, and full_state/ needs no recovery
    try:
        engine.save_checkpoint(str(directory), tag=tag, save_latest=False)  # rank 0's alone too; we name the tag
    finally:
        engine.checkpoint_engine.save = write
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, faults, group=group)
    if found := [fault for of_rank in of_ranks for fault in of_rank]:
        raise OSError(found[0])


def _load_tensors(path: str, map_location: Any = None) -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.utils.tensor_fragment import fragment_address

    stage = (int, "deepspeed.runtime.zero.config.ZeroStageEnum")  # a file could write into the members of the enum
    of_early_python = (_stage_named, "builtins.getattr")  # Python 3.11.0 to 3.11.3 save a member of an enum by name
    also = (DynamicLossScaler, LossScaler, fragment_address, stage, of_early_python)
    with io.open_regular(Path(path)) as file:
        return tensor_archive.load_tensors(file, path, also=also, map_location=map_location)


def _stage_named(enum: type, name: str) -> int:
    """Return the number of a ZeRO stage. It stands for `getattr` in a file, which could name anything else."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if enum is not int:
        raise InputError("it names builtins.getattr for another class than ZeRO's stages")
    return int(ZeroStageEnum[name])


def _is_sharded(engine: Any) -> bool:
    return engine.zero_optimization_stage() > 0


def _plain_state(engine: Any) -> state_files.State:
    """Return the state of stage 0, where the optimizer holds whole tensors as in plain PyTorch."""
    return state_files.state_of(engine.module, engine.basic_optimizer)


def _whole_state(engine: Any) -> state_files.State:
    """Return whole tensors, each kept in host memory by one rank."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    zero = engine.optimizer
    _link_moments(zero)
    step = zero.optimizer.state[_masters(zero)[0]]["step"].cpu()  # one number: all parameters are updated together
    weights, moments = {}, {}
    for number, (name, parameter) in enumerate(engine.module.named_parameters()):
        is_kept = number % dist.get_world_size() == dist.get_rank()
        whole = safe_get_full_fp32_param(parameter)
        if is_kept:
            weights[name] = whole.cpu()
            moments[f"state.{name}.step"] = step
        for moment in MOMENTS:
            whole = safe_get_full_optimizer_state(parameter, moment)
            if is_kept:
                moments[f"state.{name}.{moment}"] = whole.cpu()
    return {"model": weights, "optimizer": moments, **_scale_of(zero)}


def _scale_of(zero: Any) -> state_files.State:
    """Return fp16's loss scale; an empty dict in other precisions."""
    if not zero.loss_scaler.dynamic:
        return {}
    return {"scaler": {SCALE: torch.tensor(zero.loss_scaler.cur_scale, dtype=torch.float64)}}


def _load_sharded(engine: Any, directory: Path) -> None:
    zero = engine.optimizer
    is_partitioned = engine.zero_optimization_stage() == 3
    if is_partitioned:
        zero.checkpoint_event_prologue()  # else small weights, which every rank keeps whole, would stay what they are
    _link_moments(zero)
    scale, reader = _scale_of(zero), state_files.Reader(directory)
    for name, parameter in engine.module.named_parameters():
        shape = parameter.ds_shape if is_partitioned else parameter.shape
        read = {
            "model": {name: torch.empty(shape)},
            "optimizer": {f"state.{name}.{moment}": torch.empty(shape) for moment in MOMENTS},
            **scale,
        }
        read["optimizer"][f"state.{name}.step"] = step = torch.empty(())
        state_files.load(read, reader, group=None)
        set_part = _set_partition if is_partitioned else _set_fragment
        set_part(parameter, read["model"][name], None)
        for moment in MOMENTS:
            set_part(parameter, read["optimizer"][f"state.{name}.{moment}"], moment)
    for master in _masters(zero):
        zero.optimizer.state[master]["step"].copy_(step)
    for number in scale.get("scaler", {}).values():
        zero.loss_scaler.cur_scale = number.item()
    if not is_partitioned:
        zero.update_lp_params()
        return
    for group in range(len(_masters(zero))):
        zero._reassign_or_swap_out_partitioned_parameters(group)  # what a step ends with: the weights from the masters
    zero.checkpoint_event_epilogue()


def _masters(zero: Any) -> list[torch.Tensor]:
    """Return this rank's fp32 masters, a flat tensor per parameter group: what the optimizer inside updates."""
    is_partitioned = hasattr(zero, "fp32_partitioned_groups_flat")
    return zero.fp32_partitioned_groups_flat if is_partitioned else zero.single_partition_of_fp32_groups


def _link_moments(zero: Any) -> None:
    """Make moments where no step has made them yet, and tell each parameter of stages 1 and 2 where its own lie."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for master in _masters(zero):
        state = zero.optimizer.state[master]
        if not state:
            state["step"] = torch.zeros((), device=master.device)
            state.update({moment: torch.zeros_like(master) for moment in MOMENTS})
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        for members, master in zip(zero.bit16_groups, _masters(zero), strict=True):
            lazy_init_hp_params_optimizer_state(members, master, zero.optimizer.state)


def _set_fragment(parameter: torch.nn.Parameter, whole: torch.Tensor, moment: str | None) -> None:
    """Set, in stages 1 and 2, this rank's fragment of a master, or of its moment; it may have none."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    if moment is None:
        safe_set_full_fp32_param(parameter, whole)
    else:
        safe_set_full_optimizer_state(parameter, whole, moment)


def _set_partition(parameter: Any, whole: torch.Tensor, moment: str | None) -> None:
    """Stage 3: this rank's partition. DeepSpeed pads a parameter to equal partitions; its function for whole tensors
    does not, and fails on the last rank."""
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    size = parameter.ds_tensor.numel()
    padded = torch.nn.functional.pad(whole.flatten(), (0, size * dist.get_world_size() - whole.numel()))
    part = padded.narrow(0, size * dist.get_rank(), size)
    if moment is None:
        safe_set_local_fp32_param(parameter, part)
    else:
        safe_set_local_optimizer_state(parameter, part, moment)
