"""What choosing a device does to the process: which cores it keeps to."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from testbed.autotune.device import keep_to_own_cores
from testbed.distributed.launch import Launch

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot bind a process to cores"
)


@pytest.fixture
def cores():
    """The cores of this process; every thread has them again afterwards."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core, so there is nothing to share out")
    yield cores
    for thread in threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, cores)


def threads() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]


def test_a_rank_and_all_its_threads_keep_to_their_share_of_the_cores(cores):
    is_over = threading.Event()
    waiting = threading.Thread(target=is_over.wait)  # as those that a library has started before
    waiting.start()
    keep_to_own_cores(1, Launch(1, 1, 2, 2))
    share = len(cores) // 2
    try:
        assert len(threads()) > 1
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads()} == {
            frozenset(cores[share : 2 * share])
        }
    finally:
        is_over.set()
        waiting.join()


def test_more_threads_than_cores_are_refused_and_nothing_is_bound(cores):
    words = f"--bind_cores: each of 2 ranks would have {len(cores) // 2} of the {len(cores)} cores"
    with pytest.raises(ValueError, match=words):
        keep_to_own_cores(len(cores), Launch(0, 0, 2, 2))
    assert sorted(os.sched_getaffinity(0)) == cores
