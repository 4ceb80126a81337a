"""Share fixtures among the tests of this room."""

from __future__ import annotations

import subprocess

import psutil
import pytest
from support.endings import wait_for

from testbed.experiments.network_lab import OWN_NAMESPACES


def what_labs_make() -> tuple[list[int], str]:
    """The processes that hold hosts, and the network of this machine."""
    processes = psutil.process_iter(["cmdline"])
    held = [each.pid for each in processes if tuple(each.info["cmdline"] or ())[:8] == OWN_NAMESPACES]
    return held, subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def nothing_left():
    """What a test of labs must leave as it was."""
    before = what_labs_make()
    yield
    wait_for(lambda: what_labs_make() == before)  # the kernel takes a moment
