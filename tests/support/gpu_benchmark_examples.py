"""Machines, steps and steps.json for the tests of the benchmark of a GPU machine."""

from __future__ import annotations

from testbed.experiments.gpu_benchmark import packages, record
from testbed.experiments.gpu_benchmark.steps import Machine, Step

EVERYTHING = frozenset(package.module for package in packages.OPTIONAL)


def machine(device: str = "cuda", gpus: int = 1, **changes) -> Machine:
    found = {"name": "NVIDIA H100 80GB HBM3", "torch_version": "2.11.0", "packages": EVERYTHING}
    return Machine(device, gpus=gpus, **{**found, "nanogpt_dir": "nanoGPT", **changes})


def content_of(steps: list[Step], **of_machine) -> dict:
    return record.beginning("python scripts/more/benchmark_gpu.py", machine(**of_machine), steps)


def done_rows(content: dict, *names: str) -> dict:
    for row in content["steps"]:
        if row["name"] in names:
            row.update(status=record.DONE, seconds=3.0, exit_code=0, machine=content["machine"], started_utc="now")
    return content
