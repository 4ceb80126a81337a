"""Make several hosts on one machine: namespaces with links of a chosen rate, and runs in them. Root only.

A host is a process that holds namespaces of network, host name, mounts and processes. It ends with the process that
made the lab, even by kill -9, and then the kernel ends all that runs on the host and removes its links. Nothing is made
outside: both ends of a link are born inside, and the machine's own network stays as it was.

A launcher is told its place: `torchrun` and `deepspeed` get the flags for several nodes, a plain program the variables
that a launcher would set for one rank per host. What is typed wins over what is filled in.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from testbed.distributed.launch import Launch
from testbed.distributed.processes import start
from testbed.errors import Failure, InputError

MOST_HOSTS = 32
PORT_OF_SWITCH = 254  # the switch's own address on the bridge ends with it
# what a lab needs, tried in namespaces that end with the command
TRIAL = """
hostname trial
ip link add br0 type bridge
ip link add p1 type veth peer name eth0
ip link set p1 master br0 up
tc qdisc add dev eth0 root tbf rate 100mbit burst 250000b latency 50ms
"""
OWN_NAMESPACES = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
HOLD = 'hostname "$0" && mount --bind "$1" /etc/hosts && echo ready && exec sleep infinity'
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl
REFUSED = (
    "this kernel or container does not let root make namespaces with links (a container needs the capabilities "
    "NET_ADMIN and SYS_ADMIN)"
)
NEEDED = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
TOOL_S = 20.0  # ip and tc take milliseconds
MASTER_PORT = 29500  # every lab has its own network: the port is always free
POLL_S = 0.1
PATIENCE_S = 30.0  # for the others once the first host has ended: torchrun's would wait 300 s for a dead one
GRACE_S = 25.0  # between SIGTERM and SIGKILL; gpt2.py gives itself 20 s to save and end
KILL_WAIT_S = 10.0
OUTSIDE_S = 0.5  # for a program that was ended inside its namespaces to be seen as ended


class LabError(Failure):
    """The lab cannot be made, or did not go away. One sentence."""


@dataclass(frozen=True)
class Link:
    """The link between every host and the switch, in both directions. Rate: bit/s, None: no limit."""

    rate_bit_per_s: int | None = None

    @property
    def burst_bytes(self) -> int:
        """Return the size of the token bucket: 20 ms of the rate within bounds. A packet of the kernel's segmentation
        must fit into it (64 KiB), and below 4 ms of the rate the timer cannot keep up."""
        assert self.rate_bit_per_s is not None, "only a rate needs a bucket"
        rate = self.rate_bit_per_s / 8  # bytes per second
        return int(min(max(0.020 * rate, 64 * 1024), max(512 * 1024, 0.004 * rate)))

    def __str__(self) -> str:
        return "unlimited" if self.rate_bit_per_s is None else spelled_rate(self.rate_bit_per_s)


def parse_rate(text: str) -> int | None:
    """Return `100mbit`, `1gbit`, `unlimited` in bit/s as tc spells them. InputError says what is understood."""
    if text == "unlimited":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.lower())
    bits = 0 if found is None else round(float(found[1]) * UNITS[found[2]])
    if not 10**4 <= bits <= 10**12:
        raise InputError(
            f"rate {text!r} is not unlimited, nor a number from 10kbit to 1000gbit with its unit, such as 100mbit"
        )
    return bits


def spelled_rate(bits_per_s: int) -> str:
    """Return `100 Mbit/s`."""
    unit = next(name for name in reversed(UNITS) if bits_per_s >= UNITS[name])
    return f"{bits_per_s / UNITS[unit]:g} {unit.capitalize()}/s"


def address_of(host: int) -> str:
    """Return the address of host 1, 2, ... on eth0."""
    return f"10.77.0.{host}"


def why_impossible() -> str | None:
    """Return why no lab can be made here, with the kernel's own words; None where one can. It is tried once."""
    if os.geteuid() != 0:
        return "network namespaces are made by root only; run it with sudo, or in a container of your own"
    missing = sorted({NEEDED[name] for name in NEEDED if shutil.which(name) is None})
    if missing:
        return f"{' and '.join(missing)} is missing; apt-get install {' '.join(missing)}"
    return _refusal()


@functools.cache
def _refusal() -> str | None:
    try:
        run_tool(*OWN_NAMESPACES, "sh", "-ec", TRIAL)
    except LabError as error:
        return f"{REFUSED}: {str(error).partition(' failed: ')[2] or error}"
    return None


def run_tool(*words: str) -> str:
    """Run ip or tc and return what it said; LabError with its own words when it fails, or does not end."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=TOOL_S
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{words[0]} failed: {' '.join(words)} did not end within {TOOL_S:g} s") from None
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(f"{' '.join(words)} failed: {reason}")
    return done.stdout


class Host:
    """A host, or the switch between them: namespaces that live as long as a process that holds them.

    Attributes:
        name: its host name.
    """

    def __init__(self, name: str, hosts_file: Path):
        self.name = name
        command = [*OWN_NAMESPACES, "sh", "-c", HOLD, name, str(hosts_file)]
        self._holder = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL),
        )  # fmt: skip
        assert self._holder.stdout is not None  # a pipe
        said = self._holder.stdout.readline().strip()
        if said != "ready":
            self._holder.kill()
            raise LabError(f"{name} cannot be made: {said}")
        (first,) = psutil.Process(self._holder.pid).children()
        self._first, self._namespace = first.pid, _namespace_of(first.pid)

    @property
    def inside(self) -> list[str]:
        """Return the words before a command that put it on this host."""
        place = self._holder.pid
        namespaces = ["--net", "--uts", "--mount", f"--pid=/proc/{place}/ns/pid_for_children"]
        return ["nsenter", f"--target={place}", *namespaces]

    def tool(self, *words: str) -> None:
        """Run ip or tc in this host's network alone, so that it may name other hosts by their processes."""
        run_tool("nsenter", f"--target={self._holder.pid}", "--net", *words)

    def connect(self, other: Host, port: str, link: Link) -> None:
        """Make a link from `port` of the bridge of this switch to eth0 of another host."""
        netns = str(other._holder.pid)
        self.tool("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", netns)
        self.tool("ip", "link", "set", port, "master", "br0", "up")
        # what a host sends leaves through its own end, what it gets through the switch's
        for end, interface in ((other, "eth0"), (self, port)):
            if link.rate_bit_per_s is not None:  # at most 50 ms of the rate wait in its queue
                bucket = ("rate", f"{link.rate_bit_per_s}bit", "burst", f"{link.burst_bytes}b", "latency", "50ms")
                end.tool("tc", "qdisc", "add", "dev", interface, "root", "tbf", *bucket)

    def processes(self) -> list[int]:
        """Return the programs that run on this host."""
        numbers = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        here = [number for number in numbers if number != self._first and _namespace_of(number) == self._namespace]
        return [number for number in here if _lives(number)]

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all programs on this host. The kernel lets it reach nothing else."""
        subprocess.run([*self.inside, "sh", "-c", f"kill -{number:d} -1"], check=False, capture_output=True)

    def close(self) -> None:
        """End the host and all that runs on it.

        Raises:
            LabError: something does not end.
        """
        self._holder.kill()
        self._holder.wait()
        deadline_s = time.monotonic() + KILL_WAIT_S
        while left := self.processes():
            if time.monotonic() > deadline_s:
                raise LabError(f"of {self.name} is left: {', '.join(f'process {number}' for number in left)}")
            time.sleep(POLL_S)


def _namespace_of(process: int) -> str | None:
    try:
        return os.readlink(f"/proc/{process}/ns/pid")  # noqa: PTH115 - no path, a name
    except OSError:  # gone, or a zombie
        return None


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Lab:
    """Hosts that are up, and the switch that joins them."""

    link: Link
    switch: Host
    hosts: tuple[Host, ...]

    def __str__(self) -> str:
        return f"{len(self.hosts)} hosts, {self.link}"

    def set_connected(self, host: int, is_connected: bool) -> None:
        """Pull the cable of host 1, 2, ... out, or put it back."""
        self.switch.tool("ip", "link", "set", f"p{host}", "up" if is_connected else "down")


@contextlib.contextmanager
def lab(num_hosts: int, link: Link) -> Iterator[Lab]:
    """Yield hosts for as long as the block runs.

    Raises:
        InputError: such a lab makes no sense.
        LabError: it cannot be made here, or something of it was left at the end.
    """
    if not 1 <= num_hosts <= MOST_HOSTS:
        raise InputError(f"{num_hosts} hosts are not from 1 to {MOST_HOSTS}")
    if (reason := why_impossible()) is not None:
        raise LabError(reason)
    names = {f"host{number}": address_of(number) for number in range(1, num_hosts + 1)}
    with contextlib.ExitStack() as held:
        hosts_file = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="lab-"))) / "hosts"
        hosts_file.write_text("".join(f"{at} {name}\n" for name, at in {"localhost": "127.0.0.1", **names}.items()))

        def make(name: str) -> Host:
            host = Host(name, hosts_file)
            held.callback(host.close)
            return host

        switch = make("switch")
        switch.tool("ip", "link", "set", "lo", "up")
        switch.tool("ip", "link", "add", "br0", "type", "bridge")
        switch.tool("ip", "addr", "add", f"{address_of(PORT_OF_SWITCH)}/24", "dev", "br0")
        switch.tool("ip", "link", "set", "br0", "up")
        hosts = []
        for number, (name, address) in enumerate(names.items(), start=1):
            hosts.append(make(name))
            switch.connect(hosts[-1], f"p{number}", link)
            for words in (("link", "set", "lo", "up"), ("addr", "add", f"{address}/24", "dev", "eth0")):
                hosts[-1].tool("ip", *words)
            hosts[-1].tool("ip", "link", "set", "eth0", "up")
        yield Lab(link, switch, tuple(hosts))


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
        LabError: a host is gone, or its program does not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    running: list[_Running] = []
    started_s = time.perf_counter()
    try:
        for number, host in enumerate(lab.hosts, start=1):
            if is_stopped():
                break
            running.append(_start(number, host, lab, command, folder))
        _wait(running, started_s, timeout_s, is_stopped, on_output, patience_s)
    finally:
        # asked to end, late, or alone: all of what is inside, for a launcher's ranks are not children of ours
        end_programs(lab.hosts)
        for each in running:
            _end_outside(each)
            _follow(each, on_output)
    taken_s = time.perf_counter() - started_s
    return [each.end or HostEnd(each.host, each.process.returncode, taken_s, ended_by_us=True) for each in running]


def end_programs(hosts: Sequence[Host]) -> None:
    """SIGTERM to all programs on these hosts, and SIGKILL to those that are there after GRACE_S; wait for their end."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, KILL_WAIT_S)):
        deadline_s = time.monotonic() + wait_s
        busy = [host for host in hosts if host.processes()]
        for host in busy:
            host.signal_all(number)
        while any(host.processes() for host in busy) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)


def path_with_this_python() -> str:
    """Return PATH with the folder of this Python first: under sudo an environment that is active is not in it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _start(number: int, host: Host, lab: Lab, command: Sequence[str], folder: Path) -> _Running:
    words, variables = command_on(number, lab, command, folder)
    log = folder / f"host{number}.log"
    with log.open("wb") as output:
        environment = {**os.environ, "PATH": path_with_this_python(), "PYTHONUNBUFFERED": "1", **variables}
        # nsenter goes to the root folder with the namespace
        process = start(
            [*host.inside, "sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *words], output, env=environment
        )
    return _Running(number, process, log)


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
