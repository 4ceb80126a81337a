"""Hosts as namespaces: what a link is worth, and that a lab leaves nothing behind and touches nothing but its own."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.endings import wait_for
from support.programs import REPOSITORY, run_here

from testbed.experiments import network_lab
from testbed.experiments.network_lab import (
    Host,
    Lab,
    LabError,
    Link,
    command_on,
    lab,
    parse_rate,
    run_on_hosts,
    spelled_rate,
    why_impossible,
)

PROGRAM = REPOSITORY / "scripts" / "lab" / "network.py"
KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=1)
except ConnectionRefusedError:  # the host answers that nobody listens
    pass
"""


def needs_lab(test):
    """Labs are seen by the whole machine, so nothing that makes others may run at the same time."""
    is_missing = pytest.mark.skipif(why_impossible() is not None, reason=f"no lab here: {why_impossible()}")
    return pytest.mark.launches(pytest.mark.alone(is_missing(test)))


def test_rates_are_read_and_spelled_as_tc_does():
    assert parse_rate("unlimited") is None
    assert [parse_rate(text) for text in ("100mbit", "1gbit", "2.5Gbit", "64kbit")] == [10**8, 10**9, 25 * 10**8, 64000]
    assert [spelled_rate(rate) for rate in (10**8, 25 * 10**8, 64000)] == ["100 Mbit/s", "2.5 Gbit/s", "64 Kbit/s"]
    for wrong in ("100", "fast", "0mbit", "100mb", "-1gbit", "9999gbit"):
        with pytest.raises(ValueError, match="100mbit"):
            parse_rate(wrong)


def test_a_link_says_what_it_is_and_its_bucket_suits_its_rate():
    assert [str(link) for link in (Link(), Link(10**9))] == ["unlimited", "1 Gbit/s"]
    assert [Link(rate).burst_bytes for rate in (10**6, 10**8, 10**9, 10**10)] == [65536, 250_000, 524_288, 5_000_000]


def test_only_root_makes_a_lab(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root only" in why_impossible()
    with pytest.raises(LabError, match="root only"), lab(2, Link()):
        pass


@needs_lab
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv here: apt-get install util-linux")
def test_without_the_capability_the_reason_is_the_kernels():
    """As in a container that was not given it: the tests of labs skip with this instead of failing."""
    code = "from testbed.experiments import network_lab; print(network_lab.why_impossible())"
    for capability in ("sys_admin", "net_admin"):
        command = ["setpriv", "--bounding-set", f"-{capability}", sys.executable, "-c", code]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
        said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
        assert "Operation not permitted" in said.stdout, (capability, said.stdout)


@pytest.mark.launches
def test_a_tool_that_hangs_is_ended_and_named(monkeypatch):
    monkeypatch.setattr(network_lab, "TOOL_S", 0.1)
    with pytest.raises(LabError, match="sleep 30 did not end within"):
        network_lab.run_tool("sleep", "30")


def test_what_is_typed_wrong_is_one_sentence():
    for words, telling in (
        (["run", "--rate", "5", "--", "true"], "--rate"),
        (["run", "--hosts", "2"], "after --"),
        (["run", "--seconds", "0", "--", "true"], "--seconds"),
        (["up", "--hosts", "33"], "33 hosts"),
        (["up", "--seconds", "0"], "--seconds"),
    ):
        said = run_here("scripts/lab/network.py", *words)
        assert said.returncode == 2 and telling in said.stderr and "Traceback" not in said.stderr, (words, said.stderr)


@pytest.fixture
def made(monkeypatch) -> Lab:
    """Two hosts without namespaces."""
    monkeypatch.setattr(Host, "__init__", lambda self, name: setattr(self, "name", name))
    return Lab(Link(), Host("switch"), (Host("host1"), Host("host2")))


def test_launchers_are_told_their_place_and_what_is_typed_wins(made, tmp_path):
    words, variables = command_on(
        2, made, ["torchrun", "--nproc-per-node", "2", "src/gpt2.py", "--seed", "1"], tmp_path
    )
    assert words == [
        *("torchrun", "--nnodes", "2", "--node_rank", "1", "--master_addr", "10.77.0.1", "--master_port", "29500"),
        *("--nproc-per-node", "2", "src/gpt2.py", "--seed", "1"),
    ]
    assert variables["GLOO_SOCKET_IFNAME"] == "eth0" and "MASTER_ADDR" not in variables
    words, _ = command_on(1, made, ["python", "-m", "torch.distributed.run", "--master-port=5", "x.py"], tmp_path)
    assert words[:3] == ["python", "-m", "torch.distributed.run"] and "29500" not in words and "--nnodes" in words
    words, _ = command_on(1, made, ["torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=host1:1", "x.py"], tmp_path)
    assert words[1:3] == ["--nnodes", "2"] and "--master_addr" not in words
    words, _ = command_on(2, made, ["deepspeed", "src/gpt2.py"], tmp_path)
    assert words[-2:] == ["--no_ssh", "src/gpt2.py"] and words[words.index("--node_rank") + 1] == "1"
    assert Path(words[words.index("--hostfile") + 1]).read_text() == "host1 slots=1\nhost2 slots=1\n"
    words, variables = command_on(2, made, ["python", "src/gpt2.py"], tmp_path)
    assert words == ["python", "src/gpt2.py"]
    assert [variables[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")] == [
        "1",
        "2",
        "0",
        "10.77.0.1",
    ]


@needs_lab
def test_two_hosts_meet_and_leave_nothing(nothing_left):
    def reaches(made: Lab, one: int, other: int) -> bool:
        command = [*made.hosts[one - 1].inside, sys.executable, "-c", KNOCK, f"10.77.0.{other}"]
        return subprocess.run(command, capture_output=True).returncode == 0

    with lab(2, Link()) as made:
        assert reaches(made, 1, 2) and reaches(made, 2, 1)
        made.set_connected(2, False)
        assert not reaches(made, 1, 2), "the cable is out"
        made.set_connected(2, True)
        wait_for(lambda: reaches(made, 1, 2))


TRANSFER = """
import os, socket, time
if os.environ["RANK"] == "0":
    with socket.create_server(("10.77.0.1", 5000)) as server:
        connection, _ = server.accept()
        size, started_s = 0, time.perf_counter()
        while got := connection.recv(1 << 16):
            size += len(got)
        print("bytes_per_s", size / (time.perf_counter() - started_s))
else:
    for _ in range(100):
        try:
            connection = socket.create_connection(("10.77.0.1", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    connection.sendall(bytes(4_000_000))
"""


@needs_lab
def test_a_link_carries_what_its_rate_says(nothing_left, tmp_path):
    said = []
    with lab(2, Link(parse_rate("40mbit"))) as made:
        command = [sys.executable, "-c", TRANSFER]
        ends = run_on_hosts(made, command, tmp_path, 30, on_output=lambda host, line: said.append((host, line)))
    assert [(end.exit_code, end.ended_by_us) for end in ends] == [(0, False)] * 2
    ((host, line),) = said
    # headers take 4 % of what an MTU of 1500 carries, the bucket gives 100 kB of 4 MB at once
    assert host == 1 and 0.8 * 5e6 < float(line.split()[1]) < 1.08 * 5e6


EXCHANGE = """
import statistics, time
import torch, torch.distributed as dist
from testbed.distributed.tensors import pass_on
dist.init_process_group("gloo")
other, seconds = 1 - dist.get_rank(), []
for _ in range(9):
    dist.barrier()
    start_s = time.perf_counter()
    arrived, works = pass_on(torch.full((1_000_000,), float(dist.get_rank())), dist.group.WORLD, other, other)
    for work in works:
        work.wait()
    seconds.append(time.perf_counter() - start_s)
    assert (arrived == other).all()
print("seconds", statistics.mean(seconds))
"""


@needs_lab
def test_two_ranks_that_pass_on_use_both_directions_of_a_link_at_once(nothing_left, tmp_path):
    """4 MB each way at 12.5 MB/s take 0.33 s, and mostly 0.66 s where the two send before they receive."""
    said = []
    with lab(2, Link(parse_rate("100mbit"))) as made:
        command = [sys.executable, "-c", EXCHANGE]
        ends = run_on_hosts(made, command, tmp_path, 60, on_output=lambda host, line: said.append(line))
    assert [end.exit_code for end in ends] == [0, 0], said
    seconds = [float(line.split()[1]) for line in said if line.startswith("seconds")]
    assert len(seconds) == 2 and max(seconds) < 0.42, said


@needs_lab
def test_hosts_have_names_of_their_own_and_the_others_end_with_the_first(nothing_left, tmp_path):
    said = []
    with lab(2, Link()) as made:
        script = 'hostname; getent hosts host2 | cut -d" " -f1; [ "$RANK" = 0 ] && exit 3; sleep 100'
        ends = run_on_hosts(
            made, ["sh", "-c", script], tmp_path, 30, on_output=lambda *line: said.append(line), patience_s=0.2
        )
    assert sorted(said) == [(1, "10.77.0.2"), (1, "host1"), (2, "10.77.0.2"), (2, "host2")]
    assert (ends[0].exit_code, ends[0].ended_by_us) == (3, False)
    assert (ends[1].exit_code, ends[1].ended_by_us) == (-signal.SIGTERM, True) and ends[1].seconds < 10
    assert socket.gethostname() not in ("host1", "host2")


@needs_lab
def test_who_is_asked_to_stop_before_the_start_is_not_waited_for(nothing_left, tmp_path):
    """Asked before the first host, and once the first program was started: it is not in its namespace yet."""
    for num_started in (0, 1):
        answers = iter([False] * num_started + [True] * 1000)
        started_s = time.monotonic()
        with lab(2, Link()) as made:
            ends = run_on_hosts(made, ["sleep", "100"], tmp_path, 50, is_stopped=lambda left=answers: next(left))
        assert time.monotonic() - started_s < 20
        assert [(end.host, end.exit_code < 0, end.ended_by_us) for end in ends] == [(1, True, True)] * num_started


@needs_lab
def test_a_program_that_never_entered_its_host_is_ended_too(nothing_left, tmp_path, monkeypatch):
    """The second host is gone; the first one's program is still outside of its namespaces."""
    started_s = time.monotonic()
    with lab(2, Link()) as made:
        slow = tmp_path / "nsenter"
        slow.write_text("#!/bin/sh\nexec sleep 100\n")
        slow.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(network_lab, "path_with_this_python", lambda: os.environ["PATH"])
        ends = run_on_hosts(made, ["true"], tmp_path, timeout_s=0.5)
        assert [(end.exit_code, end.ended_by_us) for end in ends] == [(-signal.SIGKILL, True)] * 2
    assert time.monotonic() - started_s < 30


def network(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True, timeout=60)


@needs_lab
def test_the_program_runs_a_command_on_each_host_and_says_who_failed(nothing_left, tmp_path, monkeypatch):
    """Each finds the Python that made the lab: under sudo its folder is in no PATH."""
    monkeypatch.setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    script = "echo I am $RANK; command -v python; exit $((RANK == 2))"
    said = network("run", "--hosts", "3", "--log_dir", str(tmp_path), "--", "sh", "-c", script)
    assert said.returncode == 1
    assert said.stderr.splitlines() == ["network.py: 3 hosts, unlimited", "network.py: host3 ended with 1"]
    python = Path(sys.executable).parent / "python"
    assert (tmp_path / "host3.log").read_text() == f"I am 2\n{python}\n"
    names = [f"[host{number}]" for number in (1, 2, 3)]
    expected = [f"{name} I am {rank}" for rank, name in enumerate(names)] + [f"{name} {python}" for name in names]
    assert sorted(said.stdout.splitlines()) == sorted(expected)


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lab_ends_with_the_process_that_made_it_and_so_does_what_runs_there(nothing_left, number):
    """Also by kill -9, after which no line of the program runs any more."""
    command = [sys.executable, str(PROGRAM), "up", "--hosts", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "2 hosts, unlimited, for 3600 s\n"
        enter = process.stdout.readline().partition(": ")[2].removesuffix(" COMMAND\n")
        sleeper = subprocess.Popen([*shlex.split(enter), "sh", "-c", "echo on $(hostname); exec sleep 100"],
                                   stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert sleeper.stdout.readline() == "on host1\n"
        process.send_signal(number)
        assert process.wait(10) == (143 if number == signal.SIGTERM else -number)
        assert sleeper.wait(10) == -signal.SIGKILL
        sleeper.stdout.close()


@needs_lab
def test_a_lab_ends_when_its_time_is_over(nothing_left):
    assert network("up", "--seconds", "0.5").returncode == 0
