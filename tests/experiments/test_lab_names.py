"""Check who makes a lab and what takes it away."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.lab_links_cases import (
    NEEDS_PING,
    NO_SWITCH,
    PING,
    PROGRAM,
    inside,
    needs_lab,
    network,
    wait_until,
)

from testbed.experiments.network_lab.keeper import bring_up, known_labs, lab, take_down
from testbed.experiments.network_lab.links import (
    LabError,
    Link,
)


def kill(process: int) -> None:
    found = psutil.Process(process)
    found.kill()
    found.wait(10)


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


@needs_lab
def test_a_lab_that_stays_up_is_taken_down_by_name(nothing_left):
    said = network("up", "--hosts", "2", "--seconds", "60")
    name = said.stdout.split(":")[0]
    assert said.returncode == 0 and name in known_labs()
    assert f"down {name}" in said.stdout
    said = network("down", name)
    assert said.returncode == 0 and name not in known_labs(), said.stderr


@needs_lab
def test_the_lab_goes_when_its_time_is_over_and_takes_its_processes_along(nothing_left):
    with pytest.raises(LabError, match="time of 5 s was over"), lab(2, Link(), 5) as made:
        sleeper = subprocess.Popen(["ip", "netns", "exec", made.hosts[0].name, "sleep", "100"])
        assert sleeper.wait(timeout=15) == -signal.SIGTERM


@needs_lab
def test_who_dies_leaves_no_lab(nothing_left):
    """kill -9: no line of the program runs any more."""
    others = set(known_labs())
    command = [sys.executable, str(PROGRAM), "run", "--", "sh", "-c", "echo up; sleep 100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert "up" in process.stdout.readline()
    (name,) = set(known_labs()) - others
    process.kill()
    process.wait()
    assert wait_until(lambda: name not in known_labs())


@needs_lab
@NO_SWITCH
def test_a_lab_whose_keeper_was_killed_is_still_taken_down(nothing_left):
    made = bring_up(2, Link(None, 0.001), 60)
    sleeper = subprocess.Popen(["ip", "netns", "exec", made.hosts[0].name, "sleep", "100"])
    kill(made.keeper)
    assert "had been killed" in take_down(made.name)
    assert sleeper.wait(timeout=5) == -signal.SIGTERM


@needs_lab
@NEEDS_PING
def test_the_next_lab_clears_what_a_killed_keeper_left_and_nothing_else(nothing_left):
    abandoned, kept = bring_up(2, Link(), 60), bring_up(2, Link(), 60)
    kill(abandoned.keeper)
    with lab(2, Link(), 60):
        assert abandoned.name not in known_labs() and kept.name in known_labs()
        assert inside(kept.hosts[0], *PING, "10.77.0.2").returncode == 0
    take_down(kept.name)


@needs_lab
def test_a_name_that_somebody_else_took_costs_them_nothing(nothing_left):
    made = bring_up(2, Link(), 60)
    taken = made.hosts[0]
    subprocess.run(["ip", "netns", "del", taken.name], check=True)
    subprocess.run(["ip", "netns", "add", taken.name], check=True)
    foreign = subprocess.Popen(["ip", "netns", "exec", taken.name, "sleep", "100"])
    try:
        with pytest.raises(LabError, match="not the namespace that this lab made"):
            taken.open()
        take_down(made.name)
        assert foreign.poll() is None and taken.path.exists()
        assert not made.hosts[1].path.exists() and not made.switch.path.exists()
    finally:
        foreign.kill()
        foreign.wait()
        subprocess.run(["ip", "netns", "del", taken.name], check=True)
