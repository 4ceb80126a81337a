"""FSDP2: weights, gradients and optimizer state lie in shards; each block's weights are gathered while it computes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from testbed.distributed.process_group import hybrid_mesh
from testbed.model.gpt2 import GPT2
from testbed.strategies.baseline import Baseline

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings


class FSDP(Baseline):
    """One group per block, one for embeddings and final LayerNorm. Gradients are reduced into shards with every micro
    batch, so that they too never lie whole on a rank."""

    keeps_casts = False  # a whole model in bf16 is what sharding is to avoid

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        self._is_native = settings.compute.mixed_precision == "native"
        options = {"mesh": hybrid_mesh(settings.plan.mesh, device)}
        if self._is_native:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.h.values():
            fully_shard(block, reshard_after_forward=settings.data_parallel.reshard_after_forward == "on", **options)
        # embedding and head are one matrix: what forward ends with, backward begins with, so it stays gathered
        fully_shard(model, reshard_after_forward=False, **options)
        super().__init__(settings, model, device)
        self.data_rank = dist.get_rank()
        self.data_world_size = dist.get_world_size()

    def accumulation(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Between the copies of a hybrid mesh, over the slower network, gradients travel once per step."""
        self.model.set_requires_all_reduce(is_last)
        return contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager:
        """Native mixed precision needs none: weights arrive in bf16."""
        if self._is_native:
            return torch.autocast(self.device.type, enabled=False)
        return super().autocast()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
