"""Check who makes a lab and what takes it away."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.lab_links_cases import (
    NEEDS_PING,
    PING,
    PROGRAM,
    needs_lab,
    network,
)

from testbed.experiments.network_lab.lab import known_labs, lab, take_down
from testbed.experiments.network_lab.links import (
    LabError,
    Link,
)


@needs_lab
def test_the_program_runs_a_command_on_each_host_and_says_who_failed(nothing_left, tmp_path):
    said = network(
        "run", "--hosts", "3", "--log_dir", str(tmp_path), "--", "sh", "-c", "echo I am $RANK; exit $((RANK == 2))"
    )
    assert said.returncode == 1 and said.stderr.splitlines()[1:] == ["network.py: host3 ended with 1"]
    assert re.fullmatch(r"network.py: lab testbed-[0-9a-f]{6}, 3 hosts, unlimited", said.stderr.splitlines()[0])
    assert sorted(said.stdout.splitlines()) == ["[host1] I am 0", "[host2] I am 1", "[host3] I am 2"]
    assert (tmp_path / "host3.log").read_text() == "I am 2\n"


@needs_lab
def test_the_hosts_find_the_python_that_made_the_lab(nothing_left):
    """Under sudo its folder is in no PATH."""
    environment = {**os.environ, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    command = [sys.executable, str(PROGRAM), "run", "--hosts", "1", "--", "sh", "-c", "command -v python"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert said.stdout.strip() == f"[host1] {Path(sys.executable).parent / 'python'}", said.stderr


@pytest.fixture
def stays_up():
    """Start `network.py up`; returns its process and the lab's name. What is still there is killed at the end."""
    started = []

    def start(*words: str) -> tuple[subprocess.Popen, str]:
        command = [sys.executable, str(PROGRAM), "up", *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1], started[-1].stdout.readline().split(":")[0]

    yield start
    for process in started:
        process.kill()
        process.wait()


@needs_lab
def test_a_lab_stays_up_until_it_is_taken_down_by_name_or_its_time_is_over(nothing_left, stays_up):
    process, name = stays_up("--hosts", "2")
    assert name in known_labs() and f"down {name}" in "".join(process.stdout.readline() for _ in range(3))
    said = network("down", name)
    assert said.returncode == 0 and "by the process that made it" in said.stdout and name not in known_labs()
    assert process.wait(10) == 143
    process, name = stays_up("--seconds", "0.5")
    assert process.wait(30) == 0 and name not in known_labs()


@needs_lab
def test_a_lab_whose_process_was_killed_is_still_taken_down(nothing_left, stays_up):
    """kill -9: no line of the program runs any more."""
    process, name = stays_up()
    sleeper = subprocess.Popen(["ip", "netns", "exec", f"{name}-1", "sleep", "100"])
    process.kill()
    process.wait()
    assert "had been killed" in take_down(name)
    assert sleeper.wait(timeout=5) == -signal.SIGTERM


@needs_lab
@NEEDS_PING
def test_the_next_lab_clears_what_a_killed_process_left_and_nothing_else(nothing_left, stays_up):
    (killed, abandoned), (_, kept) = stays_up(), stays_up()
    killed.kill()
    killed.wait()
    with lab(1, Link()):
        assert abandoned not in known_labs() and kept in known_labs()
        reached = subprocess.run(["ip", "netns", "exec", f"{kept}-1", *PING, "10.77.0.2"], capture_output=True)
        assert reached.returncode == 0
    take_down(kept)


@needs_lab
def test_a_name_that_somebody_else_took_costs_them_nothing(nothing_left):
    with lab(2, Link()) as made:
        taken = made.hosts[0]
        subprocess.run(["ip", "netns", "del", taken.name], check=True)
        subprocess.run(["ip", "netns", "add", taken.name], check=True)
        foreign = subprocess.Popen(["ip", "netns", "exec", taken.name, "sleep", "100"])
        with pytest.raises(LabError, match="not the namespace that this lab made"):
            taken.open()
    try:
        assert foreign.poll() is None and taken.path.exists()
        assert not made.hosts[1].path.exists() and not made.switch.path.exists()
    finally:
        foreign.kill()
        foreign.wait()
        subprocess.run(["ip", "netns", "del", taken.name], check=True)
