"""The collective that a rank is in, from PyTorch's recorder of a real gloo group and from entries as NCCL's are."""

from __future__ import annotations

import threading

import pytest

from testbed.distributed import flight_recorder
from testbed.distributed.flight_recorder import _first_open, collective_under_way


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
    later = [
        entry(collective_seq_id=42, time_created_ns=2000),
        entry(process_group=["1", "files"], time_created_ns=3000),
    ]
    assert _first_open([*later, *over, entry()]) == (
        "nccl:_reduce_scatter_base (4096 Float), collective 41 of process group 0 default_pg, with 2 more behind it"
    )
    sent = entry(
        profiling_name="nccl:send 0->1", is_p2p=True, input_sizes=[[2, 32, 8]], process_group=["2", "undefined"]
    )
    assert _first_open([sent]) == "nccl:send 0->1 (2x32x8 Float), p2p 3 of process group 2"
    assert _first_open(over) is None and _first_open([]) is None


def test_without_a_group_there_is_nothing_to_read():
    assert collective_under_way() is None


def test_a_recorder_that_does_not_answer_keeps_no_rank_from_ending(monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(flight_recorder, "PATIENCE_S", 0.01)
    monkeypatch.setattr(flight_recorder, "_recorded", lambda: [entry()] * never.wait())
    assert collective_under_way() is None
    never.set()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_format_that_is_not_known_is_no_answer(monkeypatch):
    monkeypatch.setattr(flight_recorder, "_recorded", lambda: [{"of": "the future"}])
    assert collective_under_way() is None
