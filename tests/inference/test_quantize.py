"""Quantized models: what they weigh, counted and by arithmetic; what they compute; what is refused."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from support.programs import REPOSITORY
from torch import nn

from testbed.inference import quantize as module
from testbed.inference.cached_model import CachedModel
from testbed.inference.kv_cache import KVCache
from testbed.inference.quantize import bytes_in_memory, check_scheme, expected_bytes, quantize
from testbed.inference.schemes import SCHEMES, TORCHAO, chosen_schemes
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

CPU = torch.device("cpu")
# most of its weights in linear layers, and a vocabulary that is padded
SHAPE = ModelShape(num_layers=3, num_heads=4, embedding_size=128, vocab_size=500, max_position_embeddings=64)


@pytest.fixture(scope="module")
def model() -> GPT2:
    torch.manual_seed(0)
    model = GPT2(SHAPE).eval()
    for block in model.h.values():  # a fresh model's biases are zero, which would hide a lost one
        nn.init.normal_(block.attn.c_attn.bias, std=0.1)
    return model


@pytest.fixture(scope="module")
def quantized(model):
    return {scheme: quantize(model, scheme) for scheme in SCHEMES}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_are_what_the_bit_widths_say(quantized, scheme):
    """Within 5 %: counted in memory, in a file, and by arithmetic written down here a second time, in bits."""
    channels, layers = SHAPE.embedding_size, SHAPE.num_layers
    rows, weights = 9 * channels * layers, 12 * channels**2 * layers
    rest = (512 + 64) * channels + layers * (9 + 4) * channels + 2 * channels  # 512: the vocabulary, padded
    bits = {
        "none": 32 * (weights + rest),
        "bf16": 16 * (weights + rest),
        "int8_dynamic": 8 * weights + 40 * rows + 32 * rest,
        "int8_weight_only": 8 * weights + 40 * rows + 32 * rest,
        "int4_weight_only": 4 * weights + 64 * weights / 128 + 32 * rest,
        "torch_dynamic": 8 * weights + 32 * rest,
    }[scheme]
    found = quantized[scheme]
    assert found.size["bytes_expected"] == bits / 8
    assert found.size["bytes_in_memory"] == pytest.approx(bits / 8, rel=0.05)
    assert found.size["bytes_on_disk"] == pytest.approx(bits / 8, rel=0.05)


def test_int4_on_cuda_is_expected_with_padded_rows_in_bf16():
    """GPT-2 124M: rows of 768 become 1,024, rows of 3,072 stay; by hand."""
    shape = ModelShape(num_layers=12, num_heads=12, embedding_size=768, vocab_size=50257, max_position_embeddings=1024)
    padded = 12 * (8 * 768 * 1024 + 768 * 3072)
    rest = (shape.padded_vocab_size + 1024) * 768 + 12 * 13 * 768 + 2 * 768
    assert expected_bytes(shape, "int4_weight_only", "cuda") == padded / 2 + padded / 128 * 4 + 2 * rest
    assert "on CUDA the rest in bf16" in SCHEMES["int4_weight_only"].summary


@pytest.mark.parametrize("scheme", SCHEMES)
def test_coverage_leaves_out_the_tied_head(quantized, scheme):
    found, weights = quantized[scheme], 12 * 128**2 * 3
    assert found.size["num_products"] == 4 * 3 + 1
    expected = {"none": (0, 0), "bf16": (13, SHAPE.num_parameters)}.get(scheme, (12, weights))
    assert (found.size["num_quantized_products"], found.size["num_quantized_parameters"]) == expected


def test_four_bits_in_a_byte_each_are_not_taken_for_int4(model):
    """torchao's IntxWeightOnlyConfig calls itself int4 and keeps int8: counting the tensors finds that."""
    import copy

    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    unpacked = copy.deepcopy(model)
    quantize_(unpacked, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(128)))
    assert bytes_in_memory(unpacked) > 1.3 * expected_bytes(SHAPE, "int4_weight_only", "cpu")


def test_the_model_itself_is_not_changed(model, quantized):
    assert quantized["none"].model is model
    assert all(type(weight.data) is torch.Tensor and weight.dtype == torch.float32 for weight in model.parameters())
    assert bytes_in_memory(model) == expected_bytes(SHAPE, "none", "cpu")


def steps_of(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """The distance between neighbouring values of a quantized (N, K) weight, by the definition of the scheme."""
    from torchao.utils import should_reduce_range

    if scheme == "int4_weight_only":
        groups = weight.view(len(weight), -1, 128)
        steps = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
        return steps.repeat_interleave(128, dim=1)
    if scheme == "torch_dynamic":
        return weight.abs().max() / 127 * torch.ones_like(weight)
    levels = 63 if scheme == "int8_dynamic" and should_reduce_range(CPU) else 127
    return weight.abs().amax(1, keepdim=True) / levels * torch.ones_like(weight)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme not in ("none", "bf16")])
def test_each_weight_is_the_nearest_of_its_few_values(model, quantized, scheme):
    """The identity through a layer gives its weights back: none is further off than half a step, and most are off."""
    for name in ("h.0.attn.c_attn", "h.2.mlp.c_proj"):
        layer, original = quantized[scheme].model.get_submodule(name), model.get_submodule(name)
        with torch.no_grad():
            restored = (layer(torch.eye(original.in_features)) - original.bias).T
        error, step = (restored - original.weight.detach()).abs(), steps_of(original.weight.detach(), scheme)
        # rounding to nearest is half a step at most; 1 of 127 more where the activations are rounded, too
        assert (error <= 0.51 * step + original.weight.detach().abs() / 100).all()
        assert error.mean() > 0.2 * step.mean()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_model_generates_what_its_forward_pass_says(model, quantized, scheme):
    """Prefill and decode with the cache against the whole sequence without. torch_dynamic scales all activations of a
    call together, so there it holds roughly only. int8_dynamic rounds activations: one that lies on the edge between
    two integers may go either way, which depends on the processor and moves the logits, but by no more than quantizing
    does. A fault of the cache moves every sequence, so that a third of twelve are equal shows that there is none."""
    found, tolerance = quantized[scheme].model, {"bf16": 0.05, "torch_dynamic": 0.03}.get(scheme, 1e-4)
    cached = CachedModel(found).eval()
    distances, moved = [], []
    for seed in range(1, 13):
        ids = torch.randint(0, SHAPE.vocab_size, (1, 20), generator=torch.Generator().manual_seed(seed))
        cache = KVCache(SHAPE, 1, 32, CPU, next(found.parameters()).dtype)
        with torch.inference_mode():
            first = cached(ids[:, :-1], cache, 0, [19]).float()
            second = cached(ids[:, -1:], cache, 0, [20]).float()
            whole = found(ids)[0].float()
            unquantized = model(ids)[0]
        distances.append(float((torch.cat([first, second]) - whole[-2:]).abs().max()))
        moved.append(float((whole - unquantized).abs().max()))
    if scheme == "int8_dynamic":
        assert all(distance <= by for distance, by in zip(distances, moved, strict=True)), (distances, moved)
        assert sorted(distances)[3] < tolerance, distances
    else:
        assert max(distances) < tolerance, distances


def test_what_does_not_run_here_is_one_sentence(monkeypatch):
    odd = ModelShape(num_layers=1, num_heads=2, embedding_size=40, vocab_size=300, max_position_embeddings=16)
    with pytest.raises(ValueError, match="multiple of 32, and this model's is 40"):
        check_scheme("int4_weight_only", odd, CPU)
    with pytest.raises(ValueError, match="--quantize torch_dynamic runs on cpu only, not on cuda"):
        check_scheme("torch_dynamic", SHAPE, torch.device("cuda"))
    monkeypatch.setattr(torch.ao.quantization, "quantize_dynamic", None)  # as when torch has dropped it
    with pytest.raises(ValueError, match="--quantize torch_dynamic does not run here"):
        check_scheme("torch_dynamic", SHAPE, CPU)
    failing = SimpleNamespace(quantize_=None)
    monkeypatch.setattr(module, "_import_torchao", lambda: failing)
    with pytest.raises(ValueError, match="--quantize int8_dynamic does not run here"):
        check_scheme("int8_dynamic", SHAPE, CPU)
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "torchao" else importlib.util.find_spec(name))
    with pytest.raises(ValueError, match="needs torchao; install it with: pip install torchao=="):
        check_scheme("int8_weight_only", SHAPE, CPU)


def test_names_of_schemes():
    assert chosen_schemes("all") == list(SCHEMES)
    assert chosen_schemes("bf16, int8_dynamic,bf16") == ["none", "bf16", "int8_dynamic"]
    with pytest.raises(ValueError, match="'int3' is not one of all, none"):
        chosen_schemes("none,int3")
    assert TORCHAO in (REPOSITORY / "requirements.txt").read_text().splitlines()  # what the refusal says to install
