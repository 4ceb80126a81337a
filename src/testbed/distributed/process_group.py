"""Start and stop the process group, and exchange small things between ranks. Rank numbers come from launch.py."""

from __future__ import annotations

import datetime
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from testbed.distributed import watchdog
from testbed.distributed.launch import Launch
from testbed.distributed.rendezvous import (
    LOOK_EVERY_S,
    WAY_OUT,
    check_addresses,
    is_held_here,
    listen,
    no_answer,
    wait_for_ranks,
    where_ranks_meet,
)
from testbed.distributed.tensors import RanksDiffer, first_difference, hashes_of
from testbed.errors import InputError, first_line

ASK_EVERY_S = 2.0
Held = TypeVar("Held")
Result = TypeVar("Result")
NCCL_SPARE_S = 30.0  # its timeout ends a process without a word, so the watchdog must be earlier
# Of a collective until ranks train; rendezvous.py finds dead ranks of this machine sooner.
START_TIMEOUT = datetime.timedelta(minutes=10)
_limit = START_TIMEOUT  # of groups that are made from now on


def start_process_group(
    device: torch.device,
    launch: Launch,
    is_needed: bool,
    patience_s: float = START_TIMEOUT.total_seconds(),
    backend: str = "auto",
    on_all_here: Callable[[list[tuple[str, int]]], None] | None = None,
) -> str | None:
    """Join the other ranks. A single process that needs a group (DeepSpeed) gets one without a network.

    Returns the backend, or None where no group was needed. Raises RankMissing or Unreachable.

    Args:
        patience_s: how long to wait for a rank to come.
        on_all_here: told every rank's `this_process` once all have come. One that dies while they connect to each other
            would be waited for until START_TIMEOUT.
    """
    if not (launch.is_distributed or is_needed):
        return None
    # PyTorch 2.13 renamed them; FSDP2 and DeepSpeed call the old names, and PyTorch 2.11 has no others
    renamed = ".*(all_gather_into_tensor|reduce_scatter_tensor).*"
    warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if launch.is_distributed:
        store = _store_of_this_start(launch, patience_s)
        processes = wait_for_ranks(store, launch, patience_s)
        if on_all_here is not None:
            on_all_here(processes)
        check_addresses(store, launch)
    else:
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed insists on it
        store = dist.HashStore()
    dist.init_process_group(
        backend,
        store=store,
        timeout=START_TIMEOUT,
        device_id=device if backend == "nccl" else None,
        rank=launch.rank,
        world_size=launch.world_size,
    )
    return backend


def _store_of_this_start(launch: Launch, patience_s: float) -> dist.Store:
    """Open the store where the ranks find each other.

    torchrun keeps one store through --max-restarts, with the addresses of ranks that died in it. So each start has its
    own prefix there. Several nodes count their restarts apart and share none: docs/faults.md says what to set.
    """
    address, port = where_ranks_meet()
    patience = datetime.timedelta(seconds=patience_s)
    try:
        if is_held_here(launch) and port is not None:
            # PyTorch alone would listen at all addresses of the machine, and name no rank that does not come
            listener = listen(address, port).detach()
            store: dist.Store = dist.TCPStore(
                address,
                port,
                is_master=True,
                timeout=patience,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener,
            )
        else:
            if port is not None:
                wait_for_store(patience_s)  # PyTorch alone would wait twice as long, and print forty lines
            store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    except dist.DistError as error:
        raise no_answer(str(error).partition("\n")[0], patience_s) from error
    store.set_timeout(START_TIMEOUT)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if launch.num_nodes == 1 else "of_all"
    return dist.PrefixStore(f"start_{start}", store)


def wait_for_store(patience_s: float) -> None:
    """Wait until somebody answers where the store is. Raises RankMissing."""
    deadline_s = time.monotonic() + patience_s
    while (trouble := _why_no_store()) is not None:
        if time.monotonic() > deadline_s:
            raise no_answer(trouble, patience_s)
        time.sleep(LOOK_EVERY_S)


def is_store_held() -> bool:
    """Return whether a process, or the kernel for it, answers where the store is."""
    return _why_no_store() is None


def _why_no_store() -> str | None:
    address, port = where_ranks_meet()
    try:
        socket.create_connection((address, port or 0), timeout=ASK_EVERY_S).close()
    except OSError as error:
        return f"{address}:{port}: {error.strerror or error}"
    return None


def limit_waiting(timeout_s: float) -> None:
    """Set the timeout of the collectives of every group there is.

    Afterwards gloo raises in the rank that waited. NCCL's watchdog ends its process NCCL_SPARE_S later
    (TORCH_NCCL_ASYNC_ERROR_HANDLING, on by default), when `watchdog.Watch` has left a mark. Groups get their timeout
    when they are made, and those of meshes, pipelines and DeepSpeed would have PyTorch's own, up to half an hour.
    """
    global _limit
    _limit = datetime.timedelta(seconds=timeout_s)
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            spare_s = NCCL_SPARE_S if dist.get_backend(group) == "nccl" else 0.0
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s + spare_s), group)


def new_gloo_group() -> dist.ProcessGroup | None:
    """Make a group of all ranks on the CPU. All ranks call it. None in a process without any group. Raises
    RuntimeError.
    """
    if not dist.is_initialized():
        return None
    try:
        return dist.new_group(backend="gloo", timeout=_limit)
    except RuntimeError as error:
        raise RuntimeError(
            f"the ranks do not reach each other over TCP to agree on files ({first_line(error)}); {WAY_OUT}"
        ) from error


def ranks_of_group(name: str) -> list[int]:
    """Return the ranks of the group with this name in torch.distributed."""
    return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(dist.GroupName(name)))


def size_of_group(name: str) -> int:
    """Return the number of ranks of the group with this name; 0 of one that is gone."""
    try:
        return len(ranks_of_group(name))
    except RuntimeError:
        return 0


def stop_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_of_rank(seed: int, rank: int, *step: int) -> int:
    """Return the seed of one rank's dropout, whatever the number of ranks. `step`: where it resumes without its own."""
    return int(np.random.SeedSequence([seed, rank, *step]).generate_state(1, np.uint64)[0])


def agree_on_stop(stop: int, device: torch.device) -> int:
    """Return what any rank was asked to stop for, or 0. All ranks call it, outside a step, and get the same."""
    return int(max(row[0] for row in gather_rows(torch.tensor([float(stop)], device=device))))


def gather_rows(mine: torch.Tensor) -> list[list[float]]:
    """Return every rank's vector of numbers, by rank. All ranks call it."""
    if not dist.is_initialized():
        return [mine.tolist()]
    if dist.get_backend() == "gloo":  # it gathers in host memory only
        mine = mine.cpu()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).tolist()


def gather_objects(mine: object) -> list:
    """Return every rank's small Python object, by rank. All ranks call it."""
    if not dist.is_initialized():
        return [mine]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def gather_on_rank_0(mine: object) -> list:
    """Return every rank's Python object on rank 0, by rank, and nothing elsewhere. All ranks call it, in a group."""
    everyone: list = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(mine, everyone or None)
    return everyone


def place() -> tuple[int, int]:
    """Return this rank's number and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def from_rank_0(held: Held) -> Held:
    """Return rank 0's Python object on every rank. All ranks call it."""
    box = [held]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


@torch.no_grad()
def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the numbers that rank 0 has, in place. All ranks call it, with tensors of the same sizes."""
    if dist.is_initialized():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def start_on_rank_0(work: Callable[[], Result]) -> Future[Result] | None:
    """Start work on rank 0, in a thread. All ranks call it, and then `wait_for_work`. The others get None."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return None
    # OpenMP keeps the number of threads per thread, and this one is new
    thread = ThreadPoolExecutor(1, "rank-0", torch.set_num_threads, (torch.get_num_threads(),))
    mine = thread.submit(work)
    thread.shutdown(wait=False)
    return mine


def by_rank_0(work: Callable[[], Result]) -> Result | None:
    """Do work on rank 0 while the others wait, however long it takes. All ranks call it. The others get None."""
    mine = start_on_rank_0(work)
    wait_for_work(mine)
    return None if mine is None else mine.result()


def wait_for_work(mine: Future | None) -> None:
    """Wait until every rank's work has ended. It may outlast a collective's timeout, so ranks ask each other."""
    is_done = False
    while not is_done:
        if mine is not None:
            wait([mine], ASK_EVERY_S)
        is_done = all(gather_objects(mine is None or mine.done()))


def check_identical(tensors: dict[str, torch.Tensor], what: str) -> None:
    """Compare every rank's tensors by hash. All ranks call it. Raises RanksDiffer."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return  # hashing half a gigabyte takes its time
    if difference := first_difference(gather_objects(hashes_of(tensors)), all_have_all=True):
        name, *ranks = difference
        raise RanksDiffer(
            f"the {what} of rank {ranks[1]} are not those of rank {ranks[0]} ({name} differs): their PyTorch draws "
            "other random numbers; start every rank from the same file with --init_from"
        )


def log_rank0(message: str) -> None:
    """Print a line on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def wait_for_everyone(before_step: int | None = None) -> None:
    """Wait until every rank has come here. `before_step`: the step, counted from 1, that begins afterwards."""
    if before_step is not None:
        watchdog.enter("barrier", before_step)
    if dist.is_initialized():
        dist.barrier()


def raise_on_any_rank(
    error: Exception | None,
    cause: BaseException | None = None,
    first: type[Exception] | tuple[type[Exception], ...] = (),
) -> None:
    """Raise the error of the lowest rank that has one, on every rank. All ranks call it.

    Args:
        error: this rank's error, with one sentence that every rank can show; None: this rank has done its part. It is
            pickled.
        cause: what went wrong on this rank, for its own traceback.
        first: errors of this type go before those of lower ranks.
    """
    errors = [other for other in gather_objects(error) if other is not None]
    if errors:
        raise min(errors, key=lambda other: not isinstance(other, first)) from cause


def root_cause(error: BaseException) -> str:
    """Return the first line of an error, also of one in PyTorch's distributed checkpoint, and its kind if not ours."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    words = next(iter(str(error).splitlines()), "")
    if isinstance(error, InputError):
        return words  # a sentence of ours
    if "inline_container" in words:  # PyTorch's writer tells how far it came, not what the system said
        words = f"the disk took only a part of a file ({words})"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
