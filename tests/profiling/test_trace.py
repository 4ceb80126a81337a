"""Interval arithmetic on traces: against brute force, and on traces made by hand whose answer is known."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.profiling.trace import (
    Collective,
    TraceUnreadable,
    bus_bytes,
    intersect,
    read_trace,
    subtract,
    total_us,
    union,
)

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda s: (s[0], s[0] + s[1])), max_size=12)


def as_set(intervals) -> set[int]:
    return {moment for begin, end in intervals for moment in range(int(begin), int(end))}


@given(SPANS, SPANS)
def test_sets_of_intervals_behave_like_sets_of_moments(left, right):
    a, b = union(left), union(right)
    assert as_set(a) == as_set(left)
    assert as_set(intersect(a, b)) == as_set(left) & as_set(right)
    assert as_set(subtract(a, b)) == as_set(left) - as_set(right)
    assert total_us(a) == len(as_set(left))
    for result in (a, intersect(a, b), subtract(a, b)):
        assert (np.diff(result.ravel()) >= 0).all(), "sorted and disjoint"


def event(category: str, name: str, begin_ms: float, end_ms: float, thread: int = 1, **arguments) -> dict:
    times = {"ts": begin_ms * 1000, "dur": (end_ms - begin_ms) * 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times, "args": arguments}


def save(tmp_path, events: list[dict], **more):
    path = tmp_path / "rank1.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": 1, "world_size": 4}, **more}))
    return path


def ranges(*spans: tuple[str, float, float]) -> list[dict]:
    return [event("user_annotation", f"train/{name}", begin, end) for name, begin, end in spans]


def gloo(name: str, begin_ms: float, end_ms: float, elements: int, thread: int = 9) -> dict:
    shapes = {"Input Dims": [[elements // 10, 10]], "Input type": ["float"]}
    return event("user_annotation", f"gloo:{name}", begin_ms, end_ms, thread, **shapes)


HOST_STEP = [
    *ranges(("step", 0, 100), ("dataload", 0, 10), ("forward", 10, 30), ("backward", 30, 70), ("synchronise", 70, 80)),
    *ranges(("optimizer_step", 80, 95)),
    event("cpu_op", "aten::mm", 10, 29.95),
    event("cpu_op", "aten::mm", 30, 50),
    event("cpu_op", "autograd::engine::evaluate_function: X", 30, 70),  # holds the waiting too: not computation
    event("cpu_op", "aten::mm", 60, 70),
    event("cpu_op", "aten::_fused_adamw_", 80, 95),
    event("cpu_op", "c10d::allreduce_", 60, 62),  # in another operator's time: the thread waits there
    gloo("all_reduce", 45, 65, 1000),
    gloo("all_reduce", 48, 62, 500, thread=10),  # beside the other: time counts once, bytes add up
    gloo("all_reduce", 70, 78, 100),
]


def test_a_step_on_the_host_is_taken_apart_exactly(tmp_path):
    trace = read_trace(save(tmp_path, HOST_STEP))
    (step,) = trace.steps
    assert (trace.rank, trace.world_size, trace.timeline, trace.schedule_s) == (1, 4, "host", [])
    assert step.step_time_s == pytest.approx(0.100)
    assert step.data_wait_s == pytest.approx(0.010)
    assert step.forward_s == pytest.approx(0.020)
    # no operator from 50 to 60, nor in the call of the collective up to 62, and 65 is past that: 12 ms exposed
    assert step.backward_s == pytest.approx(0.040 - 0.012)
    assert step.exposed_communication_s == pytest.approx(0.012 + 0.010), "and the whole synchronisation"
    assert step.optimizer_s == pytest.approx(0.015)
    assert step.idle_s == pytest.approx(0.005)
    assert step.communication_s == pytest.approx(0.020 + 0.008)
    assert (step.num_collectives, step.collective_bytes) == (3, 4 * 1600)
    assert trace.collectives == [Collective("all_reduce", None, 3, 6400, pytest.approx(0.042))]


def test_a_short_pause_between_operators_is_not_waiting(tmp_path):
    """0.05 ms of Python between two operators while a collective is under way; 0.2 ms are waiting."""
    steps = ranges(("step", 0, 20), ("backward", 0, 20))
    operators = [event("cpu_op", "aten::mm", *span) for span in ((0, 10), (10.05, 15), (15.2, 20))]
    (step,) = read_trace(save(tmp_path, [*steps, *operators, gloo("all_reduce", 0, 20, 10)])).steps
    assert step.exposed_communication_s == pytest.approx(0.0002)


def test_waiting_for_another_stage_is_the_bubble_and_no_communication(tmp_path):
    events = [
        *ranges(("step", 0, 100), ("schedule", 0, 80), ("forward", 20, 40), ("backward", 50, 80)),
        event("cpu_op", "aten::mm", 20, 40),
        event("cpu_op", "aten::mm", 50, 80),
        gloo("recv", 0, 20, 100),
        gloo("send", 38, 60, 100),
    ]
    trace = read_trace(save(tmp_path, events))
    (step,) = trace.steps
    assert (trace.schedule_s, trace.passes_s) == (pytest.approx([0.080]), pytest.approx([0.050]))
    assert step.exposed_communication_s == 0
    assert (step.forward_s, step.backward_s) == pytest.approx((0.020, 0.030))
    assert step.idle_s == pytest.approx(0.050)
    assert step.communication_s == pytest.approx(0.042), "it is in flight all the same"


def launched(name: str, begin_ms: float, end_ms: float, launch_ms: float, number: int, **arguments) -> list[dict]:
    """A kernel and the call on the host that launched it."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", launch_ms, launch_ms + 0.01, correlation=number),
        event("kernel", name, begin_ms, end_ms, thread=7, correlation=number, **arguments),
    ]


def test_a_step_on_a_device_counts_kernels_to_the_phase_that_launched_them(tmp_path):
    """The host runs ahead: it has launched everything by 12 ms, the device is busy until 90."""
    nccl = {"Collective name": "_allgather_base", "In msg nelems": 1000, "dtype": "BFloat16", "Group size": 8}
    events = [
        *ranges(
            ("step", 0, 100), ("dataload", 0, 4), ("forward", 4, 6), ("backward", 6, 10), ("optimizer_step", 10, 12)
        ),
        *launched("gemm", 5, 30, 5, 1),
        *launched("gemm", 30, 60, 7, 2),
        *launched("ncclDevKernel_AllGather_RING_LL", 50, 80, 8, 3, **nccl),
        *launched("gemm", 66, 70, 9, 4),
        *launched("adamw", 80, 90, 11, 5),
    ]
    trace = read_trace(save(tmp_path, events))
    (step,) = trace.steps
    assert trace.timeline == "device"
    assert step.data_wait_s == pytest.approx(0.004)
    assert step.forward_s == pytest.approx(0.025)
    assert step.backward_s == pytest.approx(0.034)
    assert step.exposed_communication_s == pytest.approx(0.006 + 0.010), "60 to 66 and 70 to 80"
    assert step.optimizer_s == pytest.approx(0.010)
    assert step.idle_s == pytest.approx(0.011), "4 to 5, and 90 to 100"
    assert step.communication_s == pytest.approx(0.030)
    assert trace.collectives == [Collective("allgather", 8, 1, 2000, pytest.approx(0.030))]


def test_on_a_device_too_a_transfer_between_stages_is_waiting_and_no_communication(tmp_path):
    events = [
        *ranges(("step", 0, 100), ("schedule", 0, 80), ("forward", 20, 40)),
        *launched("gemm", 30, 50, 25, 1),
        *launched("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 0, 30, 1, 2),
    ]
    (step,) = read_trace(save(tmp_path, events)).steps
    assert (step.exposed_communication_s, step.forward_s, step.idle_s) == pytest.approx((0.0, 0.020, 0.080))


SPAN = st.tuples(st.floats(0, 95), st.floats(0.01, 30)).map(lambda s: (s[0], min(100.0, s[0] + s[1])))


@given(st.lists(SPAN, max_size=8), st.lists(SPAN, max_size=8), st.booleans())
def test_the_rows_add_up_whatever_lies_over_what(computing, communicating, on_device):
    """Every instant of a step is in exactly one row, also on a device with overlapping streams."""
    import tempfile
    from pathlib import Path

    events = ranges(
        ("step", 0, 100), ("dataload", 1, 5), ("forward", 5, 30), ("backward", 30, 75), ("synchronise", 75, 80)
    )
    events += ranges(("optimizer_step", 80, 95))
    if on_device:
        events += [row for n, span in enumerate([*computing, (6, 7)]) for row in launched("gemm", *span, span[0], n)]
        events += [row for n, span in enumerate(communicating) for row in launched("ncclKernel", *span, 40, 100 + n)]
    else:
        events += [event("cpu_op", "aten::mm", *span) for span in computing]
        events += [gloo("all_reduce", *span, 10) for span in communicating]
    with tempfile.TemporaryDirectory() as folder:
        (step,) = read_trace(save(Path(folder), events)).steps
    parts = [
        step.data_wait_s,
        step.forward_s,
        step.backward_s,
        step.optimizer_s,
        step.exposed_communication_s,
        step.idle_s,
    ]
    assert sum(parts) == pytest.approx(step.step_time_s, rel=1e-9)
    assert min(parts) >= 0
    assert step.exposed_communication_s <= step.step_time_s


@pytest.mark.parametrize(
    ("name", "expected"),
    [("all_reduce", 150), ("allgather", 300), ("reduce_scatter", 75), ("broadcast", 100), ("send", 100), ("recv", 0)],
)
def test_bus_bytes_are_those_of_nccl_tests(name, expected):
    """4 ranks, 100 bytes put in by each: 2 x 3/4 of an all-reduce; a gather sends them to three others."""
    assert bus_bytes(name, 100, 4) == expected
    assert bus_bytes("all_reduce", 100, 1) == 0


def test_a_compressed_trace_is_read_like_a_plain_one(tmp_path):
    plain = save(tmp_path, HOST_STEP)
    packed = tmp_path / "rank1.pt.trace.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed) == read_trace(plain)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [{"ph": "X"}]}', "null"])
def test_what_is_no_trace_is_one_sentence(tmp_path, content):
    path = tmp_path / "rank0.pt.trace.json"
    path.write_text(content)
    with pytest.raises(TraceUnreadable, match=r"rank0\.pt\.trace\.json"):
        read_trace(path)
    with pytest.raises(TraceUnreadable, match="no train/step range"):
        read_trace(save(tmp_path, [event("cpu_op", "aten::mm", 0, 1)]))
