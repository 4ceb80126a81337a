"""The process group: start, stop, what every rank says to every other. Rank numbers come from launch.py."""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from testbed.distributed.launch import Launch
from testbed.distributed.mesh import MeshSizes
from testbed.distributed.store_port import is_held_here, is_loopback, listen, where_ranks_meet

ASK_EVERY_S = 2.0
Result = TypeVar("Result")
START_TIMEOUT = datetime.timedelta(minutes=10)  # of one collective; meeting.py finds the dead sooner


def start_process_group(device: torch.device, launch: Launch, is_needed: bool) -> str | None:
    """Join the other ranks. A single process that needs a group (DeepSpeed) gets one without a network.

    Returns:
        The backend, or None where no group was needed.
    """
    if not (launch.is_distributed or is_needed):
        return None
    backend = "nccl" if device.type == "cuda" else "gloo"
    if launch.is_distributed:
        store, device_id = _store_of_this_start(launch), device if backend == "nccl" else None
    else:
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed insists on it
        store, device_id = dist.HashStore(), None
    dist.init_process_group(
        backend,
        store=store,
        timeout=START_TIMEOUT,
        device_id=device_id,
        rank=launch.rank,
        world_size=launch.world_size,
    )
    return backend


def _store_of_this_start(launch: Launch) -> dist.Store:
    """Where the ranks find each other. torchrun keeps one store through --max-restarts, with the addresses of the ranks
    that died in it, so each start has names of its own there.

    Several nodes count their restarts apart and have no such name in common; docs/faults.md has what to set instead.
    """
    address, port = where_ranks_meet()
    if is_held_here(launch) and is_loopback(address) and port is not None:
        # PyTorch alone would listen at all addresses of the machine, for anybody who reaches it
        listener = listen(address, port).detach()
        store: dist.Store = dist.TCPStore(
            address,
            port,
            launch.world_size,
            is_master=True,
            timeout=START_TIMEOUT,
            multi_tenant=True,
            master_listen_fd=listener,
        )
    else:
        store, _, _ = next(dist.rendezvous("env://", timeout=START_TIMEOUT))
    store.set_timeout(START_TIMEOUT)
    return _names_of_this_start(store, launch)


def second_connection(launch: Launch) -> dist.Store:
    """To the same store, for a thread: the first one is busy as long as this rank waits for the others.

    Raises:
        OSError, RuntimeError: nobody holds the store yet, or any more.
    """
    address, port = _probe_store()  # PyTorch would report each vain attempt
    patience = datetime.timedelta(seconds=ASK_EVERY_S)
    store = dist.TCPStore(address, port, is_master=False, timeout=patience, wait_for_workers=False)
    return _names_of_this_start(store, launch)


def is_store_held() -> bool:
    """Whether anybody, or the kernel for it, answers where the store is; without a launcher that holds it, rank 0."""
    try:
        _probe_store()
    except (OSError, ValueError):
        return False
    return True


def _probe_store() -> tuple[str, int]:
    """Address and port of the store; OSError, which names both, where nobody answers."""
    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    try:
        socket.create_connection((address, port), timeout=ASK_EVERY_S).close()
    except OSError as error:
        raise OSError(f"{address}:{port}: {error.strerror or error}") from None
    return address, port


def _names_of_this_start(store: dist.Store, launch: Launch) -> dist.Store:
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if launch.num_nodes == 1 else "of_all"
    return dist.PrefixStore(f"start_{start}", store)


def limit_waiting(timeout_s: float) -> None:
    """From now on no collective waits longer than this for another rank, in any group there is: then gloo raises in the
    rank that waited, and NCCL's own watchdog ends its process (TORCH_NCCL_ASYNC_ERROR_HANDLING, on by default).

    Groups get their timeout when they are made, and those of meshes, pipelines and DeepSpeed would get PyTorch's own,
    up to half an hour.
    """
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)


def stop_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def device_mesh(mesh: MeshSizes, device: torch.device) -> DeviceMesh:
    """The mesh with the axes "pipeline", "data" and "tensor"; tensor ranks are neighbours."""
    return init_device_mesh(
        device.type, (mesh.pipeline, mesh.data, mesh.tensor), mesh_dim_names=("pipeline", "data", "tensor")
    )


def hybrid_mesh(mesh: MeshSizes, device: torch.device) -> DeviceMesh:
    """The data ranks as replicas of shards, or as shards alone; the ranks that share a copy are neighbours."""
    if mesh.replicate == 1:
        return init_device_mesh(device.type, (mesh.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (mesh.replicate, mesh.shard), mesh_dim_names=("replicate", "shard"))


def seed_of_rank(seed: int, rank: int) -> int:
    """The seed of one rank's dropout: no two ranks of a run share their random numbers, and none depends on the
    others."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0])


class RanksDiffer(Exception):
    """Ranks that must hold the same do not: training them together would be another experiment."""


def agree_on_stop(stop: int, device: torch.device) -> int:
    """What any rank was asked to stop for, 0 for nothing; the same on every rank. All ranks call it, and not in a
    step."""
    return int(max(row[0] for row in gather_rows(torch.tensor([float(stop)], device=device))))


def gather_rows(mine: torch.Tensor) -> list[list[float]]:
    """Every rank's vector of numbers, in the order of the ranks. All ranks call it."""
    if not dist.is_initialized():
        return [mine.tolist()]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).tolist()


def gather_objects(mine: object) -> list:
    """Every rank's small Python object, in the order of the ranks. All ranks call it."""
    if not dist.is_initialized():
        return [mine]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def start_on_rank_0(work: Callable[[], Result]) -> Future[Result] | None:
    """Begin on rank 0, in a thread, what may take longer than a collective is given; `wait_for_work` waits for it. All
    ranks call it; None on the others."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return None
    # OpenMP keeps the number of threads per thread, and this one is new
    thread = ThreadPoolExecutor(1, "rank-0", torch.set_num_threads, (torch.get_num_threads(),))
    mine = thread.submit(work)
    thread.shutdown(wait=False)
    return mine


def by_rank_0(work: Callable[[], Result]) -> Result | None:
    """What rank 0 alone does while the others wait, however long it takes. All ranks call it.

    Returns:
        What the work gave, on rank 0; None on the others.
    """
    mine = start_on_rank_0(work)
    wait_for_work(mine)
    return None if mine is None else mine.result()


def wait_for_work(mine: Future | None) -> None:
    """Wait until the work of every rank that has any is done, well or not. All ranks call it.

    It may take longer than any collective is given, so the ranks ask each other every ASK_EVERY_S.
    """
    is_done = False
    while not is_done:
        if mine is not None:
            wait([mine], ASK_EVERY_S)
        is_done = all(gather_objects(mine is None or mine.done()))


def check_identical(tensors: dict[str, torch.Tensor], what: str) -> None:
    """Compare every rank's tensors by hash. All ranks call it.

    Raises:
        RanksDiffer: a rank holds other numbers.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return  # hashing half a gigabyte takes its time
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    digests = gather_objects(digest.hexdigest())
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise RanksDiffer(
                f"the {what} of rank {rank} are not those of rank 0 ({other[:12]}, {digests[0][:12]}): their PyTorch "
                "draws other random numbers; start every rank from the same file with --init_from"
            )


def log_rank0(message: str) -> None:
    """A line that one rank says for all."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def wait_for_everyone() -> None:
    if dist.is_initialized():
        dist.barrier()
