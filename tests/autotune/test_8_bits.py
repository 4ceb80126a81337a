"""Check what multiplies in 8 bits, and who refuses to."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from support.settings import launch, refusal, settings_of

from testbed.autotune.device import check_float8, choose_device
from testbed.model.float8 import convert_to_float8_
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape


def test_a_device_that_does_not_multiply_in_8_bits_is_refused_before_ranks_meet(token_files, monkeypatch):
    settings = settings_of(token_files).with_values(matmul="fp8")
    with pytest.raises(ValueError, match="--matmul fp8 with --device cpu: no CPU"):
        choose_device(settings, launch())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    for capability, is_refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        if is_refused:
            with pytest.raises(ValueError, match=r"Old GPU has 8\.0"):
                check_float8(settings, torch.device("cuda"))
        else:
            check_float8(settings, torch.device("cuda"))


def test_8_bits_without_the_package_are_refused_with_what_to_install(token_files, monkeypatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else plain(name))
    message = refusal(token_files, "--matmul", "fp8", "--device", "auto", "--precision", "auto")
    assert "torchao" in message and "pip install" in message


def test_8_bits_are_recorded_as_other_mathematics_with_the_rest_in_bf16(token_files, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    settings = settings_of(token_files, "--matmul", "fp8", "--device", "auto", "--precision", "auto")
    assert settings.compute.precision == "bf16"
    assert settings.plan.math_changes == ("the linear layers of the blocks multiply in fp8",)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao, an extra, is not installed")
def test_exactly_the_linear_layers_of_the_blocks_multiply_in_8_bits():
    """Emulated: rounded as float8 is. The model still learns the same function, roughly, under the same names."""
    shape = ModelShape(num_layers=2, num_heads=2, embedding_size=32, vocab_size=50, max_position_embeddings=16)
    torch.manual_seed(0)
    plain = GPT2(shape)
    model = GPT2(shape)
    model.load_state_dict(plain.state_dict())
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert sorted(convert_to_float8_(model, emulate=True)) == [f"h.{n}.{name}" for n in range(2) for name in layers]
    converted = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert converted == {f"h.{n}.{name}" for n in range(2) for name in layers}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in plain.state_dict().items()
    }
    ids = torch.arange(32).view(2, 16)
    ours, exact = (each(ids, ids) / ids.numel() for each in (model, plain))
    assert 0 < (ours - exact).abs().item() < 0.01
    ours.backward()
    exact.backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        away = (parameter.grad - other.grad).norm() / other.grad.norm()
        assert away < 0.3 or name.endswith("c_attn.bias"), name
