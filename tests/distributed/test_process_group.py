"""How groups are made and limited, with PyTorch's own functions replaced where they would need a GPU."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from testbed.distributed import process_group
from testbed.distributed.launch import Launch

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
