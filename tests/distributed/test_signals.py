"""What a signal does to a process, without a run: floods of them, Ctrl-C once and twice."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.programs import REPOSITORY

from testbed.distributed.signals import INTERRUPT_HEARD

pytestmark = [pytest.mark.launches, pytest.mark.skipif(not Path("/proc").is_dir(), reason="signals as Linux has them")]
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

LOADS = """
import time
from testbed.distributed import signals as stops
stops.end_on_signals()
print("ready", flush=True)
time.sleep(600)
"""
# the interpreter puts the default handlers back before it takes its modules apart, which may take its time
ENDS = """
import sys, time
from testbed.distributed import signals as stops
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)
slow = Slow()
signals = stops.StopSignals(60, print)
try:
    signals.interrupt()
    print("ready", flush=True)
    time.sleep(600)
except stops.RunStopped as stop:
    signals.defer()
    stops.ignore_signals_until_exit()
    sys.exit(stop.exit_code)
"""
# It sends itself what a terminal sends, and its clock stands still until the second signal has been weighed: however
# busy the machine is, that one comes within SAME_SIGNAL_S, and the third after it.
TRAINS = """
import os, signal, time
from testbed.distributed import signals as stops
class Clock:
    now, looks = 0.0, 0
    def monotonic(self):
        now = self.now
        self.looks += 1
        return now
    def __getattr__(self, name):
        return getattr(time, name)
clock = stops.time = Clock()
def press(looks):
    os.kill(os.getpid(), signal.SIGINT)
    while clock.looks < looks:
        time.sleep(0.001)
signals = stops.StopSignals(60, lambda stop: print(stop.reason, flush=True), is_speaking=True)
signals.interrupt()
signals.defer()
press(3)  # both deadlines, and how long to wait
print("noted", signals.as_exception().exit_code, flush=True)
press(5)  # whether it is the same stop, and how long to wait; launchers pass it on, and a terminal sends it to all
print("the same", flush=True)
clock.now += stops.SAME_SIGNAL_S + 1
press(6)
time.sleep(600)
"""
STUCK = """
import os, signal, time
from testbed.distributed import signals as stops
signals = stops.StopSignals(0.01, lambda stop: print(stop.reason, flush=True))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(600)
"""
BEFORE = """
import os, signal
from testbed.distributed import signals as stops
signals = stops.StopSignals(60, print)
os.kill(os.getpid(), signal.SIGTERM)
try:
    signals.interrupt()
except stops.RunStopped as stop:
    os._exit(stop.exit_code)
"""


def begin(script: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-u", "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    if "ready" in script:
        assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("script", [LOADS, ENDS], ids=["loads", "ends"])
@pytest.mark.parametrize("first", STOPS)
def test_a_flood_of_signals_ends_with_143(script, first):
    process = begin(script)
    kinds = itertools.chain([first], itertools.cycle(STOPS))
    deadline_s = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline_s:
        process.send_signal(next(kinds))
        time.sleep(0.001)
    said = process.communicate(timeout=10)
    assert process.returncode == 143, said


def test_a_stop_before_it_can_be_caught_is_not_lost():
    process = begin(BEFORE)
    assert process.wait(30) == 143


def test_the_grace_bounds_a_stop_that_does_not_come_to_an_end():
    process = begin(STUCK)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert said == "terminated (SIGTERM), and this rank had not ended after --grace_seconds 0.01\n"


def test_ctrl_c_is_noted_and_a_second_one_ends_at_once():
    process = begin(TRAINS)
    said, heard = process.communicate(timeout=60)
    assert process.returncode == 130
    again = "interrupted (SIGINT, Ctrl-C), and a second time, so this rank ended at once"
    assert said.splitlines() == ["noted 130", "the same", again]
    assert heard.strip() == INTERRUPT_HEARD
