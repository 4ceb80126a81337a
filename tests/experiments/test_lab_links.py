"""Hosts as namespaces: what a link is worth, and that a lab leaves nothing behind and touches nothing but its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.lab_links_cases import (
    NEEDS_PING,
    PING,
    inside,
    needs_lab,
    wait_until,
)
from support.programs import REPOSITORY, run_here

from testbed.experiments.network_lab import lab as lab_module
from testbed.experiments.network_lab import links
from testbed.experiments.network_lab.hosts import command_on, run_on_hosts
from testbed.experiments.network_lab.lab import known_labs, lab, lab_from
from testbed.experiments.network_lab.links import (
    LabError,
    Link,
    Namespace,
    parse_rate,
    set_connected,
    spelled_rate,
    why_impossible,
)


def round_trip_ms(made) -> float:
    said = inside(made.hosts[0], *PING, "10.77.0.2").stdout
    return float(said.rpartition("=")[2].split("/")[1])


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
    code = "from testbed.experiments.network_lab import links; print(links.why_impossible())"
    for capability in ("sys_admin", "net_admin"):
        command = ["setpriv", "--bounding-set", f"-{capability}", sys.executable, "-c", code]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
        said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
        assert "Operation not permitted" in said.stdout, (capability, said.stdout)


@pytest.mark.launches
def test_a_tool_that_hangs_is_ended_and_named(monkeypatch):
    monkeypatch.setattr(links, "TOOL_S", 0.1)
    with pytest.raises(LabError, match="sleep 30 did not end within"):
        links.run_tool("sleep", "30")


def test_what_is_typed_wrong_is_one_sentence():
    for words, telling in (
        (["run", "--rate", "5", "--", "true"], "--rate"),
        (["run", "--hosts", "2"], "after --"),
        (["run", "--seconds", "0", "--", "true"], "--seconds"),
        (["up", "--hosts", "33"], "33 hosts"),
        (["up", "--seconds", "0"], "--seconds"),
        (["down", "testbed-none"], "testbed-none"),
    ):
        said = run_here("scripts/lab/network.py", *words)
        assert said.returncode == 2 and telling in said.stderr and "Traceback" not in said.stderr, (words, said.stderr)


def example_lab(num_hosts: int = 2):
    namespaces = [{"name": f"testbed-x-{number}", "device": 4, "inode": number} for number in range(num_hosts + 1)]
    facts = {"name": "testbed-x", "link": {}, "hosts_file": "/nowhere", "owner": 1, "owner_started_s": 0.0}
    return lab_from({**facts, "switch": namespaces[0], "hosts": namespaces[1:]})


def test_launchers_are_told_their_place_and_what_is_typed_wins(tmp_path):
    made = example_lab()
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
@NEEDS_PING
def test_two_hosts_meet_and_leave_nothing(nothing_left):
    with lab(2, Link()) as made:
        assert made.name in known_labs() and len(made.namespaces) == 3
        assert round_trip_ms(made) < 5
        assert inside(made.hosts[1], *PING, "10.77.0.1").returncode == 0
        set_connected(made.switch, 2, False)
        assert inside(made.hosts[0], *PING, "10.77.0.2").returncode != 0, "the cable is out"
        set_connected(made.switch, 2, True)
        assert wait_until(lambda: inside(made.hosts[0], *PING, "10.77.0.2").returncode == 0)


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
    """The second host is gone; the first one's program is still outside of its namespace."""
    slow = tmp_path / "nsenter"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    started_s = time.monotonic()
    with lab(2, Link()) as made:
        subprocess.run(["ip", "netns", "del", made.hosts[1].name], check=True)
        with pytest.raises(LabError, match="not the namespace that this lab made"):
            run_on_hosts(made, ["true"], tmp_path, 50)
        found = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "100"]]
        assert not [process for process in found if process.ppid() == os.getpid()]
    assert time.monotonic() - started_s < 30


def test_each_namespace_is_on_record_as_soon_as_it_is_made(tmp_path, monkeypatch):
    """This process may be killed between two of them; `down` and the next lab must know what it has left."""
    on_record = []

    def make(name: str) -> Namespace:
        known = [lab_from(json.loads(path.read_text())) for path in tmp_path.glob("*.json")]
        on_record.append([namespace.name[-2:] for found in known for namespace in found.namespaces])
        return Namespace(name, 4, 17)

    monkeypatch.setattr(lab_module, "STATE", tmp_path)
    monkeypatch.setattr(lab_module, "make_namespace", make)
    monkeypatch.setattr(lab_module, "join_by_bridge", lambda *_: None)
    monkeypatch.setattr(lab_module, "why_impossible", lambda: None)
    monkeypatch.setattr(lab_module, "tear_down", lambda _: [])
    monkeypatch.setattr(Namespace, "open", lambda _: os.open(os.devnull, os.O_RDONLY))
    with lab(2, Link()) as made:
        assert on_record == [[], ["-s"], ["-s", "-1"]] and len(made.namespaces) == 3
        assert lab_from(json.loads((tmp_path / f"{made.name}.json").read_text())) == made
    assert list(tmp_path.iterdir()) == []
