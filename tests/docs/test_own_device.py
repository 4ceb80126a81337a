"""A run on a CPU leaves the GPUs of its machine alone: code asks for the run's device, not for what the machine has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from support.checkpoint_folders import Folder
from support.programs import REPOSITORY

from testbed.checkpoint import load, writer
from testbed.distributed.launch import Launch
from testbed.profiling.step_clock import StepClock

ASKING = ("is_available", "is_initialized", "device_count", "current_device", "current_accelerator")
# file and function that may ask the machine, and what for
ALLOWED = {
    "scripts/slurm/check_node.py _missing_devices": "whether the node has the GPUs that Slurm gave",
    "src/testbed/autotune/device.py device_type": "what --device auto becomes",
    "src/testbed/autotune/device.py choose_device": "whether dp has two devices",
    "src/testbed/autotune/device.py _own_gpu": "which GPU is this rank's",
    "src/testbed/autotune/memory_check.py memory_here": "how many ranks share a GPU's memory, on CUDA",
    "src/testbed/experiments/calibration/worker.py facts": "devices to calibrate",
    "src/testbed/experiments/calibration/worker.py device_of": "which GPU is this rank's",
    "src/testbed/metrics/environment.py hardware": "a fact of the machine, recorded",
    "src/testbed/metrics/facts.py _num_devices": "the devices of dp, on CUDA",
    "src/testbed/strategies/data_parallel.py __init__": "the devices of dp, on CUDA",
    "src/testbed/strategies/state_files.py stage": "only a run on CUDA has initialised it",
    "src/testbed/sweep/request.py facts_of_machine": "the devices that a sweep may use",
}


def asks(path: Path) -> list[str]:
    """Return the functions in which a file asks PyTorch what the machine has, "" for the module itself."""
    found: list[str] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        words = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.ImportFrom)) else ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value  # a program that is passed on as text
        if any(f"{module}.{name}" in words for module in ("cuda", "accelerator") for name in ASKING) or (
            isinstance(node, ast.ImportFrom) and node.module in ("torch.cuda", "torch.accelerator")
        ):
            found.append(function)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child, function)

    text = path.read_text(encoding="utf-8")
    if any(name in text for name in ("cuda", "accelerator")):
        visit(ast.parse(text), "")
    return found


def test_the_machine_is_asked_in_the_named_places_only():
    sources = [path for folder in ("src", "scripts") for path in (REPOSITORY / folder).rglob("*.py")]
    sources += REPOSITORY.glob("*.py")
    found = {f"{path.relative_to(REPOSITORY)} {function}" for path in sources for function in asks(path)}
    assert found == ALLOWED.keys(), "ask for settings.compute.device or device.type, or say here why not"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ndef f():\n    return torch.cuda.is_available()",
        "from torch import cuda\ndef f():\n    if cuda.device_count() > 1:\n        pass",
        "def f():\n    from torch.cuda import is_available",
        "import torch\ndef f():\n    return torch.accelerator.is_available()",
        "def f():\n    run('python', '-c', 'import torch; torch.cuda.device_count()')",
    ],
)
def test_a_new_place_is_found(tmp_path, source):
    path = tmp_path / "new.py"
    path.write_text(source)
    assert asks(path) == ["f"]


@pytest.fixture
def gpus(monkeypatch):
    """A machine with a GPU, which must not be touched."""

    def touched(*_):
        raise AssertionError("a run on the CPU opened a context on a GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", touched)


@pytest.mark.usefixtures("gpus")
def test_a_run_on_the_cpu_keeps_random_numbers_of_the_cpu_alone(token_files, tmp_path):
    folder = Folder(token_files, tmp_path / "run")
    folder.train(range(1, 4), {2})
    (saved,) = folder.checkpoints.glob("step_*")
    torch.manual_seed(1)
    assert load._restore_random_state(saved, Launch(0, 0, 1, 1), "cpu")
    assert torch.load(saved / "random_state_rank0.pt", weights_only=True).keys() == {"cpu"}
    assert not load._restore_random_state(saved, Launch(0, 0, 1, 1), "cuda"), "a GPU's are not in it"


def test_a_run_on_cuda_keeps_those_of_its_gpu_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    assert writer._random_state("cuda").keys() == {"cpu", "cuda"}


@pytest.mark.usefixtures("gpus")
def test_a_clock_of_the_cpu_marks_nothing_for_nsight():
    with StepClock(torch.device("cpu"), emits_nvtx=True) as clock:
        pass
    assert not clock.emits_nvtx and StepClock(torch.device("cuda"), emits_nvtx=True).emits_nvtx
