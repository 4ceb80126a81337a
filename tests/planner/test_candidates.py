"""Candidates are the runs that the program accepts, and their commands start exactly them."""

from __future__ import annotations

import dataclasses
import random

import pytest
from support.plans import read_back

from testbed.config.run_types import STRATEGIES
from testbed.memory_model.devices import Device, Link
from testbed.memory_model.job import Job, Machine
from testbed.model.shape import MODEL_SIZES
from testbed.planner.candidates import possible
from testbed.planner.command import command_of
from testbed.planner.machines import cpu_core
from testbed.planner.plan import Failures
from testbed.planner.question import WORK

LINK = Link(name="link", latency_s=1e-5, bytes_per_s=1e10)
GPU = Device(
    name="gpu", memory_bytes=8e10, peak_flops={"bf16": 1e15, "fp32": 6e13, "fp8": 2e15}, memory_bytes_per_s=3e12
)
CORE = dataclasses.replace(GPU, name="core", peak_flops={"fp32": 1e11, "bf16": 1e11}, kind="cpu")
GPT2 = MODEL_SIZES["gpt2"]


def machine(devices: int, per_node: int = 8, device: Device = GPU) -> Machine:
    return Machine(device=device, devices=devices, per_node=per_node, within_node=LINK, between_nodes=LINK)


def candidates(*asked) -> list[Job]:
    return possible(*asked)[0]


@pytest.mark.parametrize(
    ("devices", "given"),
    [
        (1, {}),
        (8, {}),
        (8, {"precision": "fp32", "dropout": 0.1, "optimizer": "muon"}),
        (8, {"mixed_precision": "native"}),
        (4, {"precision": "fp16", "offload": "optimizer", "overlap_comm": "off", "compile": True}),
        (64, {"run_type": "mesh", "pipeline_stages": 8, "pipeline_schedule": "interleaved_1f1b", "num_layers": 62}),
        (16, {"matmul": "fp8", "attention": "math"}),
        (32, {"run_type": "mesh", "context_parallel_size": 4}),
        (32, {"run_type": "mesh", "context_parallel_size": 4, "context_parallel_method": "allgather"}),
        (4, {"run_type": "mesh", "context_parallel_size": 4}),
        (16, {"run_type": "mesh", "pipeline_stages": 2, "pipeline_schedule": "zero_bubble", "shard_size": 4}),
    ],
)
def test_the_command_of_a_job_starts_that_job(devices, given):
    there = machine(devices)
    shape = dataclasses.replace(GPT2, num_layers=given.get("num_layers", GPT2.num_layers))
    jobs = candidates(shape, 1024, 64, there, given)
    flags = {"model": "gpt2", "seq_length": 1024, "global_batch_size": 64} | given
    work = tuple(word for name, value in flags.items() if name in WORK for word in (f"--{name}", str(value)))
    assert len(jobs) > 5
    for job in random.Random(1).sample(jobs, min(150, len(jobs))):
        assert read_back(job, there, work) == job
        assert job.global_batch == 64
        assert job.layout.devices == devices


def test_a_strategy_that_does_other_work_is_a_candidate_only_by_name(monkeypatch):
    other = dataclasses.replace(STRATEGIES["allreduce"], equals_baseline=False, differs_because="weights are averaged")
    monkeypatch.setitem(STRATEGIES, "allreduce", other)
    for given, is_there in (({}, False), ({"run_type": "allreduce"}, True)):
        found = {job.run_type for job in candidates(GPT2, 1024, 64, machine(4), given)}
        assert ("allreduce" in found) == is_there


def test_a_run_type_without_a_candidate_says_why():
    jobs, refused = possible(MODEL_SIZES["gpt2-xl"], 1024, 512, machine(8))
    assert "tensor" not in {job.run_type for job in jobs}
    assert "--num_heads 25" in str(refused["tensor"])
    assert not set(refused) & {job.run_type for job in jobs}


def test_what_is_given_does_not_vary():
    given = {
        "run_type": "optimized",
        "zero_stage": 2,
        "activation_checkpointing": "block",
        "micro_batch_size_per_gpu": 2,
    }
    (job,) = candidates(GPT2, 1024, 64, machine(8), given)
    assert (job.layout.zero_stage, job.recompute, job.micro_batch, job.accumulation) == (2, "full", 2, 4)


def test_launchers_are_those_of_the_readme():
    of = {job.run_type: command_of(job, machine(8)) for job in candidates(GPT2, 1024, 64, machine(8))}
    assert of["ddp"][:5] == ["torchrun", "--nproc-per-node", "8", "src/gpt2.py", "--run_type"]
    assert of["optimized"][:4] == ["deepspeed", "--num_gpus", "8", "src/gpt2.py"]
    assert of["dp"][:2] == ["python", "src/gpt2.py"]
    two_nodes = next(job for job in candidates(GPT2, 1024, 64, machine(16)) if job.run_type == "optimized")
    assert command_of(two_nodes, machine(16))[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "8"]


def test_goodput_is_daly_s():
    day = Failures(between_s=86400, save_s=60, restart_s=300)
    assert day.interval_s == pytest.approx(3160, rel=0.02)  # Young: sqrt(2 x 60 x 86400) = 3220, less the save
    assert day.goodput == pytest.approx(0.96, abs=0.003)  # lost: 60/3160 saving, half a cycle and a restart per failure
    assert Failures(between_s=60, save_s=200, restart_s=300).goodput < 0.01
    assert Failures(between_s=1e12, save_s=30).goodput == pytest.approx(1, abs=1e-4)


def test_more_ranks_than_cores_share_them(monkeypatch):
    monkeypatch.setattr("testbed.planner.machines.usable_cores", lambda: 2)
    alone, full, crowded = (cpu_core(ranks) for ranks in (1, 2, 8))
    assert alone.fastest == pytest.approx(2 * full.fastest)
    assert 8 * crowded.fastest == pytest.approx(2 * full.fastest)
    assert 8 * crowded.memory_bytes_per_s == pytest.approx(2 * full.memory_bytes_per_s)
    assert crowded.name.startswith("0.25 core of")
