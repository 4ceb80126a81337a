"""DeepSpeed: data parallelism that shards optimizer state (ZeRO 1), gradients (2) and weights (3) over the ranks."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from testbed.errors import InputError
from testbed.model.gpt2 import GPT2
from testbed.optim.optimizer import build_optimizer, clip_gradients_, global_grad_norm, set_learning_rate
from testbed.profiling.step_clock import phase
from testbed.step import MicroBatch, StepResult
from testbed.strategies import deepspeed_state, state_files
from testbed.strategies.deepspeed_config import effective_config

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings


CHECKPOINT_TAG = "deepspeed"
FULL_STATE = "full_state"  # beside it: the same state in the form that all strategies read


class DeepSpeedZero:
    """`deepspeed.initialize` around the same model and the same optimizer as the baseline's.

    DeepSpeed divides by the accumulation and averages over the ranks itself. So that this gives the mean over the
    global batch, each micro batch brings its loss sum over the target tokens that a micro batch has on average.
    """

    saves_in_background = False  # its engine writes while the ranks wait

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        deepspeed = import_deepspeed(device)
        self.settings = settings
        self.device = device
        self.data_rank = dist.get_rank()
        self.data_world_size = dist.get_world_size()
        # DeepSpeed moves the model after it has cast it, so that a device needs no room for the weights in fp32.
        self.optimizer = build_optimizer(model, settings)
        self._linear = torch.nn.functional.linear
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.optimizer,
            config=effective_config(settings),
            dist_init_required=False,
        )
        deepspeed_state.load_only_tensors(self.engine)
        self._gathered_parameters = deepspeed.zero.GatheredParameters
        self._master_weight = deepspeed.utils.safe_get_full_fp32_param

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        self.engine.train()
        set_learning_rate(self.engine.optimizer, learning_rate)
        loss_sum = torch.zeros((), device=self.device)
        grad_norm = None
        for micro_batch in micro_batches:
            with phase("forward"):
                micro_loss_sum = self.engine(micro_batch.inputs, micro_batch.targets)
            assert micro_batch.loss_divisor is not None, "a micro batch to train on"
            with phase("backward"):
                self.engine.backward(micro_loss_sum / (micro_batch.loss_divisor / self.settings.batch.grad_accum_steps))
            loss_sum += micro_loss_sum.detach()
            with phase("optimizer"):
                if self.settings.deepspeed.zero_stage == 0 and self.engine.is_gradient_accumulation_boundary():
                    grad_norm = self._clip_averaged_gradients()
                self.engine.step()
        if grad_norm is None:
            norm = self.engine.get_global_grad_norm()
            grad_norm = torch.as_tensor(norm, dtype=torch.float64, device=self.device)
        return StepResult(loss_sum, sum(micro_batch.num_target_tokens for micro_batch in micro_batches), grad_norm)

    def _clip_averaged_gradients(self) -> torch.Tensor:
        """Stage 0 keeps plain gradients, averaged over the ranks by now, and reports no norm: ours is used to clip."""
        parameters = list(self.engine.module.parameters())
        grad_norm = global_grad_norm(parameter.grad for parameter in parameters)
        clip_gradients_(parameters, self.settings.optimizer.max_grad_norm, grad_norm)
        return grad_norm

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self.engine.eval()
        loss_sum = torch.zeros((), device=self.device)
        for micro_batch in micro_batches:
            loss_sum += self.engine(micro_batch.inputs, micro_batch.targets)
        return StepResult(loss_sum, sum(micro_batch.num_target_tokens for micro_batch in micro_batches), None)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        weights = {}
        # one at a time: no rank ever holds more than the model itself
        for name, parameter in self.engine.module.named_parameters():
            if parameter.dtype != torch.float32:  # bf16 or fp16 weights: the fp32 masters lie in shards, at every stage
                master = self._master_weight(parameter)
                if dist.get_rank() == 0:
                    weights[name] = master.cpu()
                continue
            is_sharded = self.settings.deepspeed.zero_stage == 3
            with self._gathered_parameters([parameter]) if is_sharded else contextlib.nullcontext():
                if dist.get_rank() == 0:
                    weights[name] = parameter.detach().to("cpu", copy=True)
        return weights

    def model_states(self) -> dict[str, list[torch.Tensor]]:
        """Whole allocations, each under the first kind that names it, padding included.

        Besides the seam's kinds there is "buffers": what DeepSpeed keeps to communicate or to convert, first of all the
        fp32 copy of the gradients that the update reads, made for one parameter group at a time.
        """
        stage = self.settings.deepspeed.zero_stage
        assert stage is not None
        held = STATES_OF_STAGE[stage](self.engine)
        held["optimizer"] += [value for state in self.optimizer.state.values() for value in state.values()]
        seen: set[int] = set()
        return {kind: _whole_allocations(tensors, seen) for kind, tensors in held.items()}

    def save_checkpoint(self, directory: Path, in_background: bool = False) -> Future | None:
        """DeepSpeed's own files, for as many ranks and the same stage, and the whole state by name for any others."""
        deepspeed_state.save_own_files(self.engine, directory, CHECKPOINT_TAG, self.file_group)
        deepspeed_state.save(self.engine, directory / FULL_STATE, self.file_group)
        return None

    def load_checkpoint(self, directory: Path) -> None:
        path, _ = self.engine.load_checkpoint(str(directory), tag=CHECKPOINT_TAG)
        if path is None:
            raise InputError(f"DeepSpeed found no checkpoint in {directory}")
        deepspeed_state.check_finite(self.engine, directory / CHECKPOINT_TAG)

    def load_full_state(self, directory: Path) -> None:
        deepspeed_state.load(self.engine, directory, self.file_group)

    @functools.cached_property
    def file_group(self) -> dist.ProcessGroup | None:
        return state_files.file_group()

    def close(self) -> None:
        self.engine.destroy()
        # stage 3 puts its own linear layer into PyTorch for the whole process, and leaves it there
        torch.nn.functional.linear = self._linear


def _states_of_stage_0(engine) -> dict[str, list]:
    """Plain PyTorch: gradients hang on the weights."""
    parameters = list(engine.module.parameters())
    return {"parameters": parameters, "gradients": [p.grad for p in parameters], "optimizer": [], "buffers": []}


def _states_of_stage_1_2(engine) -> dict[str, list]:
    """Weights are views of one flat buffer per group. The masters are a clone of this rank's part, in fp32 too."""
    zero = engine.optimizer
    parameters = list(engine.module.parameters())
    # Whole gradients hang on the weights between the micro batches of stage 1. The last backward moves this rank's part
    # into a buffer of its own, of which the lists below hold views, and lets go of the rest, in stage 1 as well.
    gradients = [gradient for p in parameters for gradient in (p.grad, getattr(p, "grad_accum", None))]
    for groups in (zero.averaged_gradients, zero.all_grad_tensors):
        gradients += [tensor for group in groups.values() for tensor in group or ()]
    masters = zero.single_partition_of_fp32_groups
    update_reads = [master.grad for master in masters]
    buffers = [tensor for bucket in zero.ipg_buckets.values() for tensor in bucket.buffer]
    if zero.cpu_offload:
        gradients += update_reads  # there the gradients live in host memory, in fp32, with nothing beside them
        gradients += zero.accumulated_grads_in_cpu.values()
        buffers += zero.param_buffer_of_bit16_for_cpu_offload_groups
        buffers += [zero.temp_grad_buffer_for_cpu_offload, zero.temp_grad_buffer_for_gpu_offload]
    return {
        "parameters": zero.bit16_groups_flat,
        "gradients": gradients,
        "optimizer": list(masters),
        "buffers": buffers + update_reads,
    }


def _states_of_stage_3(engine) -> dict[str, list]:
    """Weights, gradients and masters are flat partitions; in fp32 too the masters are a clone of the weights."""
    zero = engine.optimizer
    parameters = list(engine.module.parameters())
    masters = zero.fp32_partitioned_groups_flat
    return {
        # beside its partition, a weight is whole while it is gathered, or always when it is small ("persistent")
        "parameters": [tensor for p in parameters for tensor in (p.ds_tensor, p.data)],
        "gradients": [zero.grad_partitions_flat_buffer, *(p.grad for p in parameters)],  # the buffer lives all the time
        "optimizer": list(masters),
        "buffers": [master.grad for master in masters] + [bucket.buffer for bucket in zero.ipg_buckets.values()],
    }


STATES_OF_STAGE = (_states_of_stage_0, _states_of_stage_1_2, _states_of_stage_1_2, _states_of_stage_3)


def _whole_allocations(tensors: Iterable[torch.Tensor | None], seen: set[int]) -> list[torch.Tensor]:
    """Return one tensor over each allocation that these are, or are views of, but for those seen before."""
    found = []
    for tensor in tensors:
        if tensor is None or tensor.untyped_storage().nbytes() == 0:  # a weight whose partition is all that is here
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:  # an allocation without memory, as check_mesh.py has them, lies at no address
            seen.add(storage._cdata)
            found.append(torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(storage))
    return found


def import_deepspeed(device: torch.device):
    """Import DeepSpeed for this device, without its banner and without a build that training does not need."""
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    if device.type == "cpu":
        # Start-up would compile a shared-memory all-reduce for inference: 30 to 100 s, and a build that was killed
        # leaves a lock that makes every later start hang. Training uses gloo.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed
