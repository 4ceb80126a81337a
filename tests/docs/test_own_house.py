"""Check what the suite promises of itself: ranks that fail alone, and a marker on every test that starts processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from support.programs import REPOSITORY
from support.ranks import RanksFailed

pytestmark = pytest.mark.launches
WORKER = "support.odd_worker"


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("raise", "rank 1 of 2 ended with 1.*ValueError: what the rank said"),
        ("die", "rank 1 of 2 ended with -9"),
        ("hang", "rank 0 of 2 did not end in time"),
    ],
)
def test_ranks_that_fail_fail_their_own_request_only(ranks, tmp_path, does, said):
    """The other rank, which waits for the one that failed, is ended with it; the next request is served."""
    with pytest.raises(RanksFailed, match=f"(?s){said}"):
        ranks.run(WORKER, tmp_path / "failing", [{"does": does, "rank": 1}], 2, timeout_s=2 if does == "hang" else 60)
    assert ranks.run(WORKER, tmp_path / "sound", [{"does": "end"}], 2) == ["2"]


def test_every_request_gets_fresh_ranks_and_a_dead_server_is_replaced(ranks, tmp_path):
    seen = set()
    for number in range(3):
        folder = tmp_path / str(number)
        assert ranks.run(WORKER, folder, [{"does": "end"}], 1) == ["1"]
        seen.add((folder / "process_0").read_text())
        if number == 1:
            ranks.server.kill()
            ranks.server.wait()
    assert len(seen) == 3


TESTS = """
import subprocess, sys
import pytest

def start():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.fixture(scope="module")
def started():
    start()

def test_a_starts(): start()
def test_b_starts_by_a_fixture(started): pass
def test_c_shares_the_fixture(started): pass
def test_d_starts_none(): subprocess.run(["git", "--version"], check=True)
@pytest.mark.launches
def test_e_says_so(started): start()
"""


def test_a_test_that_starts_processes_without_the_marker_fails(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    shutil.copy(REPOSITORY / "tests" / "conftest.py", tmp_path)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(REPOSITORY / name) for name in ("src", "tests"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_some.py"],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120,
    )  # fmt: skip
    failed = {line.split("::")[1].split(" ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert failed == {"test_a_starts", "test_b_starts_by_a_fixture", "test_c_shares_the_fixture"}, done.stdout
