"""The collective that a rank is in, from PyTorch's recorder of a real gloo group and from entries as NCCL's are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from testbed.distributed import flight_recorder
from testbed.distributed.flight_recorder import _first_open, collective_under_way
from testbed.run_folder import marks


@pytest.mark.launches
def test_a_rank_names_the_collective_that_another_is_late_for(ranks, tmp_path):
    before, meanwhile, after = ranks.run("support.flight_worker", tmp_path, [], 2)
    assert before is None and after is None, "what is over is not waited for"
    assert meanwhile == "gloo:all_reduce (3x4 BFloat16), collective 2 of process group 1, with 1 more behind it"


def entry(**changed) -> dict:
    """An entry of an NCCL group, as version 2.10 of the format has it."""
    return {
        "record_id": 5, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 41, "p2p_seq_id": 3,
        "op_id": 44, "profiling_name": "nccl:_reduce_scatter_base", "time_created_ns": 1000, "state": "started",
        "input_sizes": [[4096]], "input_dtypes": ["Float"], "output_sizes": [[2048]], "output_dtypes": ["Float"],
        "timeout_ms": 150000, "is_p2p": False, "retired": False, "time_discovered_started_ns": 1500,
        "time_discovered_completed_ns": 0, "thread_id": "1", "thread_name": "pt_main_thread", **changed,
    }  # fmt: skip


def test_the_oldest_that_is_not_over_is_named():
    over = [entry(retired=True, state="completed", time_created_ns=1), entry(state="completed", time_created_ns=2)]
    later = [entry(collective_seq_id=42, time_created_ns=2000), entry(time_created_ns=3000)]
    assert _first_open([*later, *over, entry()]) == (
        "nccl:_reduce_scatter_base (4096 Float), collective 41 of process group 0 default_pg, with 2 more behind it"
    )
    sent = entry(
        profiling_name="nccl:send 0->1", is_p2p=True, input_sizes=[[2, 32, 8]], process_group=["2", "undefined"]
    )
    assert _first_open([sent]) == "nccl:send 0->1 (2x32x8 Float), p2p 3 of process group 2"
    barrier = entry(profiling_name="gloo:barrier", input_sizes=[], input_dtypes=[])
    assert _first_open([barrier]) == "gloo:barrier, collective 41 of process group 0 default_pg"
    assert _first_open(over) is None and _first_open([]) is None
    batch = [entry(is_p2p=True, state="scheduled", process_group=["2", ""], time_created_ns=7)]  # stays so for ever
    batch += [entry(profiling_name="nccl:coalesced", state="completed", retired=True, process_group=["2", ""])]
    assert _first_open(batch) is None and "collective 41" in _first_open([*batch, entry(time_created_ns=2000)])
    sent = entry(profiling_name="nccl:send 1->2", is_p2p=True)  # beside it what another rank has sent arrived
    arrived = entry(profiling_name="nccl:recv 1<-0", is_p2p=True, state="completed", time_created_ns=2000)
    assert "nccl:send 1->2" in _first_open([sent, arrived])


# As NCCL's recorder with a driver that hangs: PyDLL keeps the interpreter's lock during the call.
HANGS = """
import ctypes, sys
from pathlib import Path
from types import SimpleNamespace
from testbed.distributed import flight_recorder
from testbed.distributed.launch import Launch
from testbed.train.ending import RunEnding
from testbed.train.other_ranks import OtherRanks

flight_recorder.PATIENCE_S = 0.5
flight_recorder.recorded = lambda: ctypes.PyDLL(None).sleep(600)
ending = object.__new__(RunEnding)
ending.launch, ending.recorder, ending.signals = Launch(0, 0, 2, 2), None, SimpleNamespace(number=0)
ending.ranks = OtherRanks(ending.launch, 60, ending.end_from_thread)
ending.ranks.directory = Path(sys.argv[1])
ending.ranks.end_for_stuck_rank("rank 1 is late")
"""


@pytest.mark.launches
def test_a_recorder_that_hangs_with_the_interpreter_s_lock_costs_neither_the_mark_nor_the_end(tmp_path):
    ended = subprocess.run([sys.executable, "-c", HANGS, tmp_path], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "rank 0 failed: rank 1 is late; rank 0 waited in" in ended.stderr
    assert "in collective_under_way" in ended.stderr, "faulthandler's stacks"
    assert (tmp_path / "RUN_FAILED.txt").read_text().startswith("[Rank 0] RUN_FAILED reason=rank 1 is late; rank 0 ")


def test_the_collective_is_added_to_the_mark_of_the_rank_that_wrote_it(tmp_path):
    marks.mark_failed(tmp_path, 1, "rank 0 is late")
    before = (tmp_path / "RUN_FAILED.txt").read_text()
    marks.add_to_failure(tmp_path, 0, "rank 0 was inside another one")
    assert (tmp_path / "RUN_FAILED.txt").read_text() == before
    marks.add_to_failure(tmp_path, 1, "rank 1 was inside gloo:all_reduce")
    reason, _, timestamp = before.partition(" timestamp_utc=")
    added = f"{reason}; rank 1 was inside gloo:all_reduce timestamp_utc={timestamp}"
    assert (tmp_path / "RUN_FAILED.txt").read_text() == added


def test_a_format_that_is_not_known_is_no_answer(monkeypatch):
    assert collective_under_way() is None, "without a group there is nothing to read"
    monkeypatch.setattr(flight_recorder, "recorded", lambda: [{"of": "the future"}])
    assert collective_under_way() is None
