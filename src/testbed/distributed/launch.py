"""Read the launcher's variables, and end a refused start: the only reader of RANK, WORLD_SIZE and LOCAL_RANK. No torch.

Launchers differ in what they forward. `deepspeed` on SIGTERM dies at once and leaves its child and the ranks running;
`torchrun` on kill -9 leaves the ranks. So every rank watches the processes above it and takes their death for SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import InputError, one_line, say
from testbed.io import write_text

_BEGAN_S = time.monotonic()  # this module is loaded before PyTorch
REFUSAL_WAIT_S = 3.0  # longer than rank 0 needs to print, far under every launcher's own patience


@dataclass(frozen=True)
class Launch:
    """This process's place among the ranks, as the launcher set it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def num_nodes(self) -> int:
        return max(1, self.world_size // self.local_world_size)

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    def as_variables(self, master_address: str, master_port: int) -> dict[str, str]:
        """Return what a launcher sets for this rank; `read_launch` reads it."""
        numbers = {"RANK": self.rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.world_size}
        numbers |= {"LOCAL_WORLD_SIZE": self.local_world_size, "MASTER_PORT": master_port}
        return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": master_address}


def read_launch(variables: Mapping[str, str] = os.environ) -> Launch:
    """Read the variables that torchrun, deepspeed and Slurm wrappers set; none of them means one process. Raises
    InputError.
    """
    values = {}
    # torchrun says LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE; without either all ranks are on this node
    local_size_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in variables else "LOCAL_SIZE"
    world_size = variables.get("WORLD_SIZE", "1")
    for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), (local_size_name, world_size)):
        text = variables.get(name, default)
        number = whole_number(text)
        if number is None or (name.endswith("SIZE") and number == 0):
            raise InputError(
                f"the environment variable {name}={one_line(repr(text), 80)} is not a number that a launcher sets; "
                "unset it or use torchrun"
            )
        values[name] = number
    launch = Launch(values["RANK"], values["LOCAL_RANK"], values["WORLD_SIZE"], values[local_size_name])
    if launch.rank >= launch.world_size:
        raise InputError(
            f"the environment says RANK={launch.rank} of WORLD_SIZE={launch.world_size}, and ranks count from 0; "
            "unset both to run one process, or start with torchrun or deepspeed"
        )
    if launch.local_rank >= launch.local_world_size:  # the one that prints refusals would not be among the ranks
        raise InputError(
            f"the environment says LOCAL_RANK={launch.local_rank} of {local_size_name}={launch.local_world_size} on "
            "this node, and ranks count from 0; unset it to run one process, or start with torchrun or deepspeed"
        )
    return launch


def whole_number(text: str) -> int | None:
    """Return the number that a variable holds in at most nine plain digits; None if it holds none."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def launcher(variables: Mapping[str, str] = os.environ) -> str:
    """Return what started this process: torchrun, deepspeed, another (Slurm, a script), or python without ranks."""
    if "TORCHELASTIC_RUN_ID" in variables:
        return "torchrun"
    if "CROSS_RANK" in variables:  # DeepSpeed's number of the node
        return "deepspeed"
    return "another" if "RANK" in variables else "python"


def command_of_start(launch: Launch, words: Sequence[str], variables: Mapping[str, str] = os.environ) -> str:
    """Return the command that starts these ranks again, launcher included, quoted for a shell.

    On several nodes it is to be pasted on each; a Slurm job or a script of its own is given as torchrun's equivalent.

    Args:
        words: sys.argv.
    """
    ranks, nodes = str(launch.local_world_size), str(launch.num_nodes)
    match launcher(variables):
        case "python":
            start = ["python"]
        case "deepspeed":
            start = ["deepspeed", "--num_gpus", ranks] + (["--num_nodes", nodes] if launch.num_nodes > 1 else [])
        case _:
            start = ["torchrun", "--nproc-per-node", ranks]
            if launch.num_nodes > 1:
                first = variables.get("MASTER_ADDR", "localhost")
                start += ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29500"]
    # deepspeed adds --local_rank
    return shlex.join([*start, *(word for word in words if not word.startswith("--local_rank"))])


def refuse(launch: Launch | None, message: str) -> int:
    """Say on local rank 0 why the run cannot start, and return 2, the exit code for what the user typed.

    The others wait, so that the launcher does not kill rank 0 before it prints.
    """
    if launch is None or launch.local_rank == 0:
        say(f"gpt2.py: error: {message}", file=sys.stderr, flush=True)
        tell_torchrun(message)
    else:
        time.sleep(REFUSAL_WAIT_S)
    return 2


def seconds_since_start() -> float:
    """Return how long this process has run, but for the interpreter's own start."""
    return time.monotonic() - _BEGAN_S


def tell_torchrun(message: str) -> None:
    """Leave the sentence where torchrun looks for it: its own forty lines about a failed rank close with it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        content = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}  # noqa: TID251 - a moment, for people
        with contextlib.suppress(OSError):  # whole or not at all: of half a file torchrun would die itself
            write_text(Path(path), json.dumps({"message": content}))


def threads_per_rank(launch: Launch) -> int:
    """CPU threads: what OMP_NUM_THREADS says, else this node's usable cores shared out evenly over its ranks."""
    return whole_number(os.environ.get("OMP_NUM_THREADS", "")) or max(1, usable_cores() // launch.local_world_size)


def usable_cores() -> int:
    """Cores that this process may run on; macOS cannot restrict them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# GNU's libgomp. At the end of every parallel region a thread looks this often for the others before it sleeps.
SPINS = "10000"
USER_OVERRIDES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_gomp_spinning() -> None:
    """Let threads that wait for each other go to sleep early, unless the environment says how they shall wait.

    libgomp's own 300,000 looks take milliseconds. Beside other work they use up the time slices that the other threads
    need, so steps take longer. docs/measuring.md has the numbers.
    """
    if not any(os.environ.get(name) for name in USER_OVERRIDES):
        os.environ["GOMP_SPINCOUNT"] = SPINS
