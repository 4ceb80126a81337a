"""Share cases among the tests of lab links."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import pytest

from support.programs import REPOSITORY
from testbed.experiments.network_lab.links import (
    Namespace,
    why_impossible,
)

PROGRAM = REPOSITORY / "scripts" / "lab" / "network.py"


PING = ["ping", "-c", "3", "-i", "0.05", "-W", "1"]


def needs_lab(test):
    """Labs are seen by the whole machine, so nothing that makes others may run at the same time."""
    is_missing = pytest.mark.skipif(why_impossible() is not None, reason=f"no lab here: {why_impossible()}")
    return pytest.mark.launches(pytest.mark.alone(is_missing(test)))


NEEDS_PING = pytest.mark.skipif(shutil.which("ping") is None, reason="no ping here: apt-get install iputils-ping")


def network(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True, timeout=60)


def inside(namespace: Namespace, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", "netns", "exec", namespace.name, *words], capture_output=True, text=True, timeout=30)


def network_of_this_machine() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def wait_until(is_so, wait_s: float = 10) -> bool:
    deadline_s = time.monotonic() + wait_s
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return is_so()
