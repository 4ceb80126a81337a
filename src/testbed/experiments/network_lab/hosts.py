"""Run a program on every host of a lab, each in its namespace and under a host name of its own.

A launcher is told its place: `torchrun` and `deepspeed` get the flags for several nodes, a plain program the variables
that a launcher would set for one rank per host. What is typed wins over what is filled in.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.distributed.launch import Launch
from testbed.distributed.processes import start
from testbed.experiments.network_lab.lab import Lab
from testbed.experiments.network_lab.links import KILL_WAIT_S, LabError, Namespace, address_of, end_processes_in

MASTER_PORT = 29500  # every lab has its own network: the port is always free
POLL_S = 0.1
PATIENCE_S = (
    30.0  # how long the others run on once the first host has ended: torchrun's would wait 300 s for a dead one
)
GRACE_S = 25.0  # between SIGTERM and SIGKILL; gpt2.py gives itself 20 s to save and end
OUTSIDE_S = 0.5  # for a program that was ended inside its namespace to be seen as ended
STARTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


@dataclass(frozen=True)
class HostEnd:
    """The end of the program of host 1, 2, ...: its exit code, negative for a signal. `ended_by_us`: the lab did it,
    because another host had ended, the time was over, or it was asked to."""

    host: int
    exit_code: int
    seconds: float
    ended_by_us: bool


@dataclass
class _Running:
    host: int
    process: subprocess.Popen
    log: Path
    shown: int = 0
    end: HostEnd | None = None


def command_on(host: int, lab: Lab, command: Sequence[str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return what host 1, 2, ... of a lab runs, and the variables it gets, for a command that was typed once.

    Args:
        folder: where deepspeed's hostfile may be written.
    """
    variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "eth0")
    num_hosts, master = len(lab.hosts), address_of(1)
    launcher = _end_of_launcher(command)
    if launcher is None:
        own = Launch(host - 1, 0, num_hosts, 1).as_variables(master, MASTER_PORT)
        return list(command), {**variables, **own}
    words, rest = list(command[:launcher]), list(command[launcher:])
    if "deepspeed" in Path(words[-1]).name:
        hostfile = folder / "hostfile"
        hostfile.write_text("".join(f"host{number} slots=1\n" for number in range(1, num_hosts + 1)))
        flags = {"hostfile": str(hostfile), "node_rank": host - 1, "master_addr": master, "master_port": MASTER_PORT}
        flags |= {"no_ssh": None}
    else:
        flags = {"nnodes": num_hosts, "node_rank": host - 1, "master_addr": master, "master_port": MASTER_PORT}
    typed = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in rest if word.startswith("--")}
    if typed & {"rdzv_endpoint", "rdzv_backend", "standalone"}:
        flags = {name: value for name, value in flags.items() if name == "nnodes"}
    for name, value in flags.items():
        if name not in typed:
            words += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    return [*words, *rest], variables


def _end_of_launcher(command: Sequence[str]) -> int | None:
    """Return where the launcher's own flags begin, None where there is no launcher before the first script."""
    for index, word in enumerate(command):
        if Path(word).name in ("torchrun", "deepspeed") or word in (
            "torch.distributed.run",
            "deepspeed.launcher.runner",
        ):
            return index + 1
        if word.endswith(".py"):
            return None
    return None


def run_on_hosts(
    lab: Lab,
    command: Sequence[str],
    folder: Path,
    timeout_s: float,
    is_stopped: Callable[[], bool] = lambda: False,
    on_output: Callable[[int, str], None] = lambda host, line: None,
    patience_s: float = PATIENCE_S,
) -> list[HostEnd]:
    """Run a command on every host of the lab until all have ended, and see to it that they do.

    Args:
        folder: gets a log per host, host1.log and so on.
        is_stopped: asked ten times a second whether to end early.
        on_output: gets every line that a host says, while it runs.

    Returns how the program of each host ended that was started: all of them unless `is_stopped` said so before.

    Raises:
        LabError: a host's namespace is gone, or its program does not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    running: list[_Running] = []
    started_s = time.perf_counter()
    try:
        for host, namespace in enumerate(lab.hosts, start=1):
            if is_stopped():
                break
            running.append(_start(host, namespace, lab, command, folder))
        _wait(running, started_s, timeout_s, is_stopped, on_output, patience_s)
        # asked to end, late, or alone: all of what is inside, for a launcher's ranks are no children of ours
        end_processes_in(lab.hosts, term_wait_s=GRACE_S)
    except BaseException:
        end_processes_in(lab.hosts, term_wait_s=GRACE_S)
        raise
    finally:
        for each in running:
            _end_outside(each)
            _follow(each, on_output)
    taken_s = time.perf_counter() - started_s
    return [each.end or HostEnd(each.host, each.process.returncode, taken_s, ended_by_us=True) for each in running]


def path_with_this_python() -> str:
    """Return PATH with the folder of this Python first: under sudo an environment that is active is not in it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _start(host: int, namespace: Namespace, lab: Lab, command: Sequence[str], folder: Path) -> _Running:
    words, variables = command_on(host, lab, command, folder)
    log = folder / f"host{host}.log"
    descriptor = namespace.open()
    try:
        with log.open("wb") as output:
            inside = ["nsenter", f"--net=/proc/self/fd/{descriptor}", "unshare", "--uts", "--mount"]
            process = start(
                [*inside, "sh", "-c", STARTER, f"host{host}", str(lab.hosts_file), *words],
                output,
                env={**os.environ, "PATH": path_with_this_python(), "PYTHONUNBUFFERED": "1", **variables},
                pass_fds=[descriptor],
            )
    finally:
        os.close(descriptor)
    return _Running(host, process, log)


def _end_outside(each: _Running) -> None:
    """End a program that has not been ended inside its namespace: it had not entered it yet. It leads a session."""
    try:
        each.process.wait(OUTSIDE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)
        try:
            each.process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            raise LabError(f"process {each.process.pid} of host{each.host} does not end") from None


def _wait(
    running: Sequence[_Running],
    started_s: float,
    timeout_s: float,
    is_stopped: Callable[[], bool],
    on_output: Callable[[int, str], None],
    patience_s: float,
) -> None:
    """Wait until all have ended, or one long enough ago, or it is time to end them."""
    first_end_s = None
    while True:
        now_s = time.perf_counter() - started_s
        for each in running:
            if each.end is None and each.process.poll() is not None:
                each.end = HostEnd(each.host, each.process.returncode, now_s, ended_by_us=False)
                first_end_s = now_s if first_end_s is None else first_end_s
            _follow(each, on_output)
        has_waited = first_end_s is not None and now_s - first_end_s > patience_s
        if all(each.end for each in running) or has_waited or now_s > timeout_s or is_stopped():
            return
        time.sleep(POLL_S)


def _follow(each: _Running, on_output: Callable[[int, str], None]) -> None:
    """Pass on the lines that are whole by now; after the end also the last one."""
    with each.log.open("rb") as said:
        said.seek(each.shown)
        new = said.read()
    if each.process.returncode is None:
        new = new[: new.rfind(b"\n") + 1]
    each.shown += len(new)
    for line in new.decode(errors="replace").splitlines():
        on_output(each.host, line)
