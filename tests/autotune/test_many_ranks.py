"""Groups and meshes of 64 ranks, built as a cluster would build them, without the cluster."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.programs import TINY_MODEL, data_flags
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.testing._internal.distributed.fake_pg import FakeStore

from testbed.autotune import check_mesh
from testbed.autotune.check_mesh import BuiltRank, build_ranks, role_ranks
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.distributed.launch import Launch
from testbed.memory_model.job import DenseModel, Job, Layout
from testbed.memory_model.stages import stages_of
from testbed.model.gpt2 import GPT2
from testbed.strategies import build_strategy

pytestmark = pytest.mark.launches

RANKS = 64
ROLES = [0, 1, RANKS - 1]
# name -> flags, data ranks, sizes of the groups but those of all ranks and of one
CASES = {
    "allreduce": ("--run_type allreduce", 64, set()),
    "ddp": ("--run_type ddp", 64, set()),
    "fsdp": ("--run_type fsdp", 64, set()),
    "fsdp, hybrid": ("--run_type fsdp --shard_size 8", 64, {8}),
    **{f"ZeRO {stage}": (f"--run_type optimized --zero_stage {stage}", 64, set()) for stage in range(4)},
    "model_parallel": ("--run_type model_parallel --pipeline_stages 4", 16, {4, 16}),
    "pipeline": ("--run_type pipeline --pipeline_stages 8", 8, {8}),
    "tensor": ("--run_type tensor --tensor_parallel_size 4", 16, {4, 16}),
    "mesh": (
        "--run_type mesh --shard_size 4 --tensor_parallel_size 4 --context_parallel_size 2 --pipeline_stages 2",
        *(4, {2, 4}),
    ),
}
SHARDED = ("fsdp", "fsdp, hybrid", "ZeRO 3", "model_parallel", "pipeline", "tensor", "mesh")


def work_of(token_files) -> list[str]:
    work = [*TINY_MODEL, "--num_layers", "14", "--num_heads", "4", "--seq_length", "32", "--precision", "fp32"]
    return [*work, "--device", "cpu", "--global_batch_size", "64", *data_flags(token_files)]


@pytest.fixture(scope="module")
def built(token_files) -> dict[str, list[BuiltRank]]:
    """What the first, the second and the last of 64 ranks are made of, by case."""
    tasks = [[*work_of(token_files), *flags.split()] for flags, *_ in CASES.values()]
    return dict(zip(CASES, build_ranks(tasks, [ROLES] * len(tasks), RANKS, per_node=8), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_strategy_builds_its_groups_for_64_ranks(built, name):
    _, data_ranks, group_sizes = CASES[name]
    for strategy in built[name]:
        assert strategy.fault is None
        assert strategy.data_world_size == data_ranks
        assert set(strategy.group_sizes) - {1, RANKS} == group_sizes
        whole = built["ddp"][0].parameter_bytes
        assert (strategy.parameter_bytes == whole) == (name not in SHARDED)
        assert strategy.parameter_bytes < 0.6 * whole or name not in SHARDED
    first, _, last = built[name]
    assert (first.data_rank, last.data_rank) == (0, data_ranks - 1)


CUTTING = ("fsdp", "fsdp, hybrid", "pipeline", "tensor", "mesh")


@pytest.mark.parametrize("name", CUTTING)
def test_no_device_is_given_more_than_its_rank_keeps(token_files, monkeypatch, name):
    """The model comes on the host; a device that had to hold all of it for a moment could train nothing larger."""
    moved: list[int] = []
    move = nn.Module.to

    def recorded(module: nn.Module, device: torch.device) -> nn.Module:
        moved.append(sum(each.numel() for each in module.parameters() if each.device.type == "cpu"))
        return move(module, device)

    launch = Launch(RANKS - 1, 7, RANKS, 8)
    for variable, value in launch.as_variables("localhost", 1).items():
        monkeypatch.setenv(variable, value)
    dist.init_process_group("fake", store=FakeStore(), rank=launch.rank, world_size=RANKS)
    try:
        flags = [*work_of(token_files), *CASES[name][0].split()]
        settings = check_run(parse_command_line(flags), launch).settings
        model = GPT2(settings.shape, 0.0, "none")
        whole = sum(each.numel() for each in model.parameters())
        monkeypatch.setattr(nn.Module, "to", recorded)
        monkeypatch.setattr(_fsdp_init, "_move_states_to_device", as_fsdp_moves)
        with check_mesh._meta_torch():
            strategy = build_strategy(settings, model, check_mesh.META)
        assert all(each.device.type == "meta" for each in strategy.model.parameters())
        strategy.close()
    finally:
        dist.destroy_process_group()
    assert sum(moved) < 0.6 * whole


def as_fsdp_moves(parameters: list[nn.Parameter], buffers: list[torch.Tensor], device: torch.device) -> None:
    """Move one module's tensors as FSDP does, whose own way PyTorch refuses for the meta device."""
    for tensor in [*parameters, *buffers]:
        if tensor.device != device:
            torch.utils.swap_tensors(tensor, type(tensor)(tensor.to(device)))


def test_roles_are_the_ends_of_what_holds_the_same():
    def roles(vocab: int = 50304, layers: int = 6, **layout: int) -> list[int]:
        model = DenseModel(layers=layers, hidden=96, heads=6, seq_length=32, vocab=vocab)
        job = Job(model=model, layout=Layout(**layout), micro_batch=1, accumulation=1, run_type="mesh")
        return role_ranks(job)

    assert roles(data=1024) == [0, 1023]
    assert roles(data=4, context=2) == [0, 7]
    # a stage after the other, in it the data ranks, of each its tensor ranks
    assert roles(data=3, pipeline=2, tensor=2) == [0, 1, 4, 5, 6, 7, 10, 11]
    # stages between the ends have as many blocks; then one with fewer
    assert roles(pipeline=6, layers=6 * 4, vocab=64) == [0, 1, 4, 5]
    assert len(stages_of(DenseModel(layers=7, hidden=96, heads=6, seq_length=32, vocab=64), 4)[1].blocks) == 2
    assert roles(pipeline=4, layers=7, vocab=64) == [0, 1, 2, 3]
    # 2 rows of the vocabulary each, then 1, then none
    assert roles(tensor=8, vocab=11) == [0, 4, 5, 6, 7]


def test_what_would_end_a_start_is_said(token_files):
    flags = [*TINY_MODEL, "--seq_length", "32", *data_flags(token_files), "--run_type", "pipeline"]
    flags += ["--pipeline_stages", "8", "--global_batch_size", "64"]
    ((refused,), (built,)) = build_ranks([flags, [*flags, "--num_layers", "14"]], [[0], [0]], 64, per_node=8)
    assert built.fault is None
    assert refused.fault is not None and "--num_layers 2" in refused.fault


def test_deepspeed_is_not_told_what_the_checking_machine_cannot_do(monkeypatch):
    """A plan for V100s in fp16 is checked on a CPU, whose accelerator may know no fp16."""
    monkeypatch.setattr(check_mesh, "import_deepspeed", lambda device: None)  # it wants a process group
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with check_mesh._fake_deepspeed():
        from deepspeed.accelerator import get_accelerator

        assert get_accelerator().is_fp16_supported()
