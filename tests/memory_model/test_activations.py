"""What a block keeps for its backward pass: formulas against what autograd saves of tensors without memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from testbed.memory_model.activations import block_tensors, kept_tensors
from testbed.memory_model.job import DenseModel, Job, Layout
from testbed.model.gpt2 import Block
from testbed.model.shape import ModelShape

BATCH, SEQUENCE, CHANNELS, HEADS = 2, 256, 256, 4


class GroupedSwiGLU(nn.Module):
    """A block like a Llama's: rotated queries and keys, fewer heads of keys and values, gated MLP."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.q, self.o = (nn.Linear(CHANNELS, CHANNELS, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(CHANNELS, CHANNELS // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(CHANNELS, 3 * CHANNELS, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * CHANNELS, CHANNELS, bias=False)
        self.rotation = torch.empty(1, 1, SEQUENCE, CHANNELS // HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.norm_1(x)
        query, key, value = (
            matrix(normal).view(*x.shape[:2], -1, CHANNELS // HEADS).transpose(1, 2)
            for matrix in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            query * self.rotation, key * self.rotation, value, is_causal=True, enable_gqa=True
        )
        x = x + self.o(mixed.transpose(1, 2).reshape(x.shape))
        normal = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


@contextlib.contextmanager
def made_in(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors in a dtype."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def saved_bytes(module: nn.Module, x: torch.Tensor, context) -> int:
    """Return the bytes of all storages that autograd keeps, weights and their casts not counted."""
    weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    shapes = {tuple(parameter.shape) for parameter in module.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and tuple(tensor.shape) not in shapes and tensor.numel() > 1:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), context:
        result = module(x)
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def job_for(**values) -> Job:
    model = DenseModel.of_gpt2(ModelShape(1, HEADS, CHANNELS, 100, SEQUENCE), SEQUENCE)
    job = Job(model=model, layout=Layout(), micro_batch=BATCH, accumulation=1, run_type="baseline", precision="fp32")
    return dataclasses.replace(job, **values)


def predicted(job: Job) -> float:
    return BATCH * SEQUENCE * sum(tensor.bytes_per_token for tensor in kept_tensors(job))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
def test_a_block_of_gpt2_keeps_what_the_formula_says(precision, recompute):
    """64, 36 and 32 bytes per token and channel; a block that is computed again, its input alone."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with FakeTensorMode(), made_in(dtype):
        checkpointing = "block" if recompute == "full" else "none"
        block = Block(ModelShape(1, HEADS, CHANNELS, 100, SEQUENCE), 0.0, checkpointing)
        x = torch.empty(BATCH, SEQUENCE, CHANNELS, requires_grad=True) * 1
        is_autocast = precision == "autocast"
        found = saved_bytes(block, x, torch.autocast("cpu", torch.bfloat16, enabled=is_autocast))
    job = job_for(
        precision="fp32" if precision == "fp32" else "bf16", has_16_bit_weights=precision == "bf16", recompute=recompute
    )
    if recompute == "none":
        assert found == pytest.approx(predicted(job), rel=0.005)
        per_channel = predicted(job) / (BATCH * SEQUENCE * CHANNELS)
        assert per_channel == pytest.approx({"fp32": 64, "autocast": 36, "bf16": 32}[precision], abs=0.2)
    else:
        assert predicted(job) == x.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_with_a_gate_and_grouped_heads_keeps_what_the_formula_says(dtype):
    with FakeTensorMode(), made_in(dtype):
        block = GroupedSwiGLU()
        x = torch.empty(BATCH, SEQUENCE, CHANNELS, requires_grad=True) * 1
        found = saved_bytes(block, x, contextlib.nullcontext())
    model = dataclasses.replace(job_for().model, kv_heads=HEADS // 2, ffn=3 * CHANNELS, gated=True)
    is_16_bit = dtype == torch.bfloat16
    job = job_for(model=model, precision="bf16" if is_16_bit else "fp32", has_16_bit_weights=is_16_bit)
    rotation = block.rotation.untyped_storage().nbytes()
    assert found - rotation == pytest.approx(predicted(job), rel=0.005)


def test_selective_attention_keeps_all_but_the_scores_and_a_fused_gate_less():
    eager = job_for(attention="eager", recompute="selective_attention")
    names = [tensor.name for tensor in kept_tensors(eager)]
    assert "scores" not in names and len(names) == len(list(block_tensors(eager))) - 1
    gated = job_for(model=dataclasses.replace(eager.model, gated=True))
    fused = dataclasses.replace(gated, compiled=True)
    assert predicted(gated) - predicted(fused) == 4 * BATCH * SEQUENCE * gated.model.ffn
