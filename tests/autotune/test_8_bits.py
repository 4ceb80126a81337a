"""Check what multiplies in 8 bits, and who refuses to."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.automatic_choices_cases import ALONE
from support.programs import (
    REPOSITORY,
    python_command,
    script,
)
from support.settings import refusal, settings_of

from testbed.autotune.device import check_float8, choose_device
from testbed.config.flags import parse_command_line
from testbed.model.float8 import convert_to_float8_
from testbed.model.gpt2 import GPT2
from testbed.model.shape import MODEL_SIZES, ModelShape


def test_a_device_that_does_not_multiply_in_8_bits_is_refused_before_ranks_meet(token_files, monkeypatch):
    settings = settings_of(token_files).with_values(matmul="fp8")
    with pytest.raises(ValueError, match=r"--matmul fp8.*compute capability 8\.9.*CPU"):
        choose_device(settings, ALONE)
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


@pytest.mark.launches
def test_the_gpu_benchmark_prints_its_plan_and_runs_nothing(tmp_path):
    script = REPOSITORY / "scripts" / "benchmark_gpu.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    done = subprocess.run(
        ["bash", str(script), "--dry_run", str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    names = [line.split()[0] for line in done.stdout.splitlines()]
    for name in "tokens agree_fp32 agree_ddp peers largest compile_on attention_cudnn fp8 time_to_loss_muon".split():
        assert name in names
    assert not (tmp_path / "out").exists()
    program = python_command()[-1]
    for line in done.stdout.splitlines():  # what it would type is what gpt2.py takes
        words = line.split()
        if "src/gpt2.py" in words:
            parse_command_line(words[words.index("src/gpt2.py") + 1 :])
    assert Path(program).exists()
    wrong = subprocess.run(["bash", str(script), "--quick"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "--dry_run" in wrong.stderr


@pytest.mark.launches
def test_a_failed_step_or_a_loss_that_does_not_agree_fails_the_benchmark(tmp_path):
    (tmp_path / "steps.tsv").write_text("a\tdone\t3\t0\t\tpython a\nb\tskipped\t0\t-\tno time\tpython b\n")
    (tmp_path / "checks.tsv").write_text("a\tb\t1e-4\n")
    command = ["python", "--device", "cpu", "--seconds", "3", "--deadline_s", "9", str(tmp_path)]
    command[:1] = [python_command()[0], str(REPOSITORY / "scripts" / "summarise_benchmark.py")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    with (tmp_path / "steps.tsv").open("a") as steps:
        steps.write("c\tfailed\t9\t124\tlonger than its 9 s\tpython c\n")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["failed"] == ["c"] and found["agreement"][0]["holds"] is None
    runs = {
        name: SimpleNamespace(status="complete", train_losses=np.array([3.0, last]))
        for name, last in (("a", 2.0), ("b", 2.00005), ("c", 2.1), ("d", float("nan")))
    }
    held = [script("summarise_benchmark.py").agreement(runs, "a", name, 1e-4)["holds"] for name in ("b", "c", "d", "e")]
    assert held == [True, False, False, None]


def test_sizes_are_divisible_for_8_bits():
    assert all(shape.embedding_size % 16 == 0 for shape in MODEL_SIZES.values())
