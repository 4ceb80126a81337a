"""What ranks agree on: groups and their limits, weights, random numbers, means, and the failure of one."""

from __future__ import annotations

import datetime
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.programs import TINY_RUN, data_flags
from support.settings import typed

from testbed.checkpoint.folders import CheckpointFailed
from testbed.distributed import process_group, tensors
from testbed.distributed.launch import Launch
from testbed.distributed.tensors import RanksDiffer, hashes_of
from testbed.model.gpt2 import GPT2
from testbed.run_folder.run_lock import FolderGone
from testbed.train.run import build

ALONE = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)


@pytest.mark.parametrize(("device", "backend"), [("cuda:0", "nccl"), ("cpu", "gloo")])
def test_a_single_process_binds_its_group_to_the_gpu(monkeypatch, device, backend):
    """Without the device NCCL guesses it from the rank, and a group of its own cannot be split off."""
    asked = {}
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: asked.update(options, backend=name))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert process_group.start_process_group(torch.device(device), ALONE, is_needed=True) == backend
    assert asked["backend"] == backend
    assert asked["device_id"] == (torch.device(device) if backend == "nccl" else None)


def test_nccl_times_out_after_the_watchdog(monkeypatch):
    """NCCL ends a process without a mark, so the thread that marks the run must come first."""
    groups = {"steps": "nccl", "files": "gloo"}
    limits = {}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", groups.__getitem__)
    monkeypatch.setattr(type(dist.distributed_c10d._world), "pg_map", groups)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda limit, group: limits.update({group: limit}))
    monkeypatch.setattr(process_group, "_limit", process_group._limit)
    process_group.limit_waiting(20.0)
    assert limits == {"steps": datetime.timedelta(seconds=50), "files": datetime.timedelta(seconds=20)}
    made = {}
    monkeypatch.setattr(dist, "new_group", lambda **options: made.update(options))
    process_group.new_gloo_group()
    assert made == {"backend": "gloo", "timeout": datetime.timedelta(seconds=20)}, "the limit of later groups too"


def test_a_network_without_a_way_for_gloo_is_named(monkeypatch):
    def refuse(**options):
        raise RuntimeError("[enforce fail at tcp/device.cc:84] rv == 0. -2 vs 0. getaddrinfo failed\nmore")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "new_group", refuse)
    with pytest.raises(RuntimeError, match="GLOO_SOCKET_IFNAME") as caught:
        process_group.new_gloo_group()
    assert "getaddrinfo failed" in str(caught.value) and "\n" not in str(caught.value)


OTHER = {"a bit": {"wte": torch.tensor([1.0, 1.0, 1.0000001])}, "a name": {"wpe": torch.ones(3)}, "nothing": {}}


@pytest.mark.parametrize("theirs", OTHER.values(), ids=OTHER)
def test_a_rank_with_other_weights_ends_the_run_with_a_way_out(monkeypatch, theirs):
    mine = {"wte": torch.ones(3)}
    monkeypatch.setattr(process_group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(process_group.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(process_group, "gather_objects", lambda sent: [sent, hashes_of(mine)])
    process_group.check_identical(mine, "initial weights")
    with pytest.raises(RanksDiffer, match=r"initial weights of rank 1.*--init_from"):
        process_group.check_identical(theirs, "initial weights")


@pytest.mark.parametrize("bucket_bytes", [1, 40, 100, 10**6])
def test_every_tensor_is_averaged_whatever_the_buckets(monkeypatch, bucket_bytes):
    """A group in which each rank holds the same: its mean is half the sum. Sizes below, at and above a bucket's."""
    averaged = [torch.full((size,), float(size)) for size in (3, 10, 1, 25, 7)] + [torch.ones(4, 6).t()]
    expected = [tensor * 0.5 for tensor in averaged]

    def halve(flat, op, group, async_op):
        flat.mul_(0.5)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(tensors, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(process_group.dist, "all_reduce", halve)
    tensors.reduce_(averaged, SimpleNamespace(size=lambda: 2), process_group.dist.ReduceOp.AVG)
    assert all(torch.equal(tensor, mean) for tensor, mean in zip(averaged, expected, strict=True))


def test_the_program_checks_the_weights_and_gives_each_rank_its_dropout(monkeypatch, token_files):
    arguments = [*TINY_RUN, *data_flags(token_files), "--run_type", "baseline"]
    settings = typed(arguments).settings
    checked = []
    monkeypatch.setattr(process_group, "check_identical", lambda tensors, what: checked.append(set(tensors)))
    weights = GPT2(settings.shape).state_dict()
    names, embedding = set(weights), weights["wte.weight"].clone()
    strategy = build(settings, Launch(5, 5, 6, 6), torch.device("cpu"), weights)
    assert checked == [names] and weights == {}, "a rank that trains a part keeps no copy of the whole"
    assert torch.equal(strategy.model.wte.weight, embedding)
    assert torch.initial_seed() == process_group.seed_of_rank(settings.training.seed, 5)
    assert len({process_group.seed_of_rank(seed, rank) for seed in range(20) for rank in range(50)}) == 1000


@pytest.fixture
def of_ranks(monkeypatch):
    """Let the other ranks send these errors, as they come through a collective."""

    def with_errors(*errors: Exception | None) -> None:
        sent = pickle.loads(pickle.dumps(errors))
        monkeypatch.setattr(process_group, "gather_objects", lambda mine: [mine, *sent])

    return with_errors


def test_all_raise_the_error_of_the_lowest_rank_and_one_that_explains_the_others_first(of_ranks):
    of_ranks(None, None)
    process_group.raise_on_any_rank(None)
    of_ranks(None, CheckpointFailed("rank 2: full"), CheckpointFailed("rank 3: full"))
    with pytest.raises(CheckpointFailed, match="rank 2: full"):
        process_group.raise_on_any_rank(None)
    of_ranks(CheckpointFailed("rank 1: no such file"), FolderGone("renamed"))
    cause = OSError("mine")
    with pytest.raises(FolderGone, match="renamed") as caught:
        process_group.raise_on_any_rank(CheckpointFailed("rank 0: no such file"), cause, first=FolderGone)
    assert caught.value.__cause__ is cause
