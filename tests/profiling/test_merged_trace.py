"""One timeline of all ranks: valid, on one clock, from little memory. Traces are made up but for one real run."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.programs import REPOSITORY, TINY_RUN, data_flags, run_here

from testbed.analysis.profiles import merged_trace
from testbed.analysis.profiles.clocks import align
from testbed.analysis.profiles.merged_trace import merge
from testbed.errors import InputError

PROGRAM = REPOSITORY / "scripts" / "profiling" / "merge_traces.py"
STEP_US, LATE_US = 10_000.0, 2_000.0


def write_trace(
    folder: Path, rank: int, shift_us: float = 0.0, host: str = "", steps: int = 5, filler: int = 0
) -> Path:
    """A trace of `steps` steps on two ranks: rank 1 comes late to the all-reduce; `shift_us`: of its clock."""
    ours = {"pid": 500 + rank, "tid": 500 + rank}
    events = [{"ph": "M", "name": "process_name", "ts": 0, **ours, "args": {"name": "python"}}]
    for step in range(steps):
        base = step * STEP_US + shift_us

        def span(name: str, begin: float, end: float, base: float = base, **more) -> dict:
            at = {"ts": base + begin, "dur": end - begin}
            return {"ph": "X", "cat": "user_annotation", "name": name, **ours, **at, "args": {}, **more}

        events += [span("gloo:barrier", 10, 100, tid=9), span("gloo:broadcast", 101 if rank else 9000, 9100, tid=9)]
        events += [span("train/step", 200, 8000), span("train/forward", 300, 3000), span("train/backward", 3000, 7000)]
        events += [span("gloo:all_reduce", 3000 + rank * LATE_US, 6000 + rank, tid=9)]
        events += [
            {"ph": kind, "id": step + 1, "cat": "fwdbwd", "name": "fwdbwd", "ts": base + 400, **ours} for kind in "sf"
        ]
        events += [span(f"aten::{number}", 400, 401, cat="cpu_op") for number in range(filler)]
    world = {"rank": rank, "world_size": 2, "pg_config": [{"pg_size": 2, "ranks": [0, 1]}]}
    path = folder / "profiler_logs" / f"rank{rank}.pt.trace.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"schemaVersion": 1, "distributedInfo": world, "host_name": host or f"host{rank}"}
    path.write_text(json.dumps({**head, "baseTimeNanoseconds": 10**18, "traceEvents": events, "traceName": "x"}))
    return path


def check_events(content: dict) -> list[dict]:
    """Check what the trace event format asks for, and that every arrow has both ends inside a span of its thread."""
    events = content["traceEvents"]
    spans: dict[tuple, list[tuple[float, float]]] = {}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and event["ph"] in "XMsfi", event
        if event["ph"] == "X":
            assert event["dur"] >= 0
            spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    flows: dict[tuple, dict[str, dict]] = {}
    for event in events:
        if event["ph"] in "sf":
            ends = flows.setdefault((event["cat"], event["name"], event["id"]), {})
            assert event["ph"] not in ends, "a flow has one start and one end"
            ends[event["ph"]] = event
            if event["cat"] == "collective":
                inside = spans[event["pid"], event["tid"]]
                assert any(begin - 0.01 <= event["ts"] <= end + 0.01 for begin, end in inside), event
    assert all(ends["s"]["ts"] <= ends["f"]["ts"] for ends in flows.values())
    return events


def read(path: Path) -> dict:
    return json.loads(gzip.open(path).read())


def test_ranks_on_clocks_that_are_a_minute_apart_are_put_on_one(tmp_path):
    write_trace(tmp_path, 0)
    write_trace(tmp_path, 1, shift_us=60e6)
    said = merge(tmp_path, tmp_path / "out.json.gz")
    assert "2 ranks" in said and "by 10 collectives of all ranks: each is right within 90 us (rank 1)" in said
    content = read(tmp_path / "out.json.gz")
    clock = content["otherData"]["clocks"][1]
    assert clock["offset_us"] == pytest.approx(60e6, abs=1) and clock["uncertainty_us"] == pytest.approx(90, abs=1)
    events = check_events(content)
    steps = {rank: [e["ts"] for e in events if e["name"] == "train/step" and e["pid"] == rank] for rank in (0, 1)}
    assert steps[0] == pytest.approx(steps[1], abs=1)
    phases = [event for event in events if event["tid"] == merged_trace.PHASES_TRACK and event["ph"] == "X"]
    assert {event["name"] for event in phases} == {"train/step", "train/forward", "train/backward"}
    assert len(phases) == 2 * 5 * 3, "each phase of both ranks once"
    late = [e for e in events if e.get("cat") == "collective" and e["name"] == "all_reduce" and e["ph"] == "s"]
    assert len(late) == 5 and {event["pid"] for event in late} == {1}, "the arrow comes from the rank that came last"
    assert not [e for e in events if e.get("cat") == "collective" and e["name"] == "broadcast"], (
        "its root does not wait"
    )


def test_ranks_of_one_machine_share_its_clock(tmp_path):
    write_trace(tmp_path, 0, host="one")
    write_trace(tmp_path, 1, host="one", shift_us=40.0)  # within what the collectives allow
    merge(tmp_path, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["otherData"]["clocks"][1]["offset_us"] == 0.0
    write_trace(tmp_path, 1, host="one", shift_us=500.0)  # two machines of one name
    merge(tmp_path, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["otherData"]["clocks"][1]["offset_us"] == pytest.approx(
        500, abs=1
    )


def test_the_true_offset_is_within_the_bound():
    random = np.random.default_rng(0)
    for offset in (0.0, 5.0, -2.0, 1e4):
        begins = np.sort(random.uniform(0, 10, 500))[:, None] + random.uniform(0, 0.01, (500, 2))
        ends = begins.max(axis=1)[:, None] + random.exponential(1e-3, (500, 2))
        mine, reference = (np.stack([begins[:, rank], ends[:, rank]], axis=1) for rank in (1, 0))
        clock = align(mine + offset, reference, shares_clock=False)
        assert abs(clock.offset_us - offset) <= clock.uncertainty_us < 0.02
        assert (align(mine + offset, reference, shares_clock=True).offset_us == 0) is (offset == 0)
    assert align(np.empty((0, 2)), np.empty((0, 2)), shares_clock=True).uncertainty_us is None


def test_without_a_group_only_what_lies_between_the_steps_is_matched(tmp_path):
    for rank in (0, 1):
        path = write_trace(tmp_path, rank)
        content = json.loads(path.read_text())
        content["distributedInfo"] |= {"world_size": 4, "pg_config": [{"pg_size": 4}, {"pg_size": 2}]}
        path.write_text(json.dumps(content))
    merge(tmp_path, tmp_path / "out.json.gz")
    flows = [event for event in check_events(read(tmp_path / "out.json.gz")) if event.get("cat") == "collective"]
    assert {event["name"] for event in flows} == {"barrier"}


@pytest.mark.parametrize(
    "content",
    [
        b'{"traceEvents": [{"ph": "X", "na', b'{"traceEvents": [{"ph": "X"}, 5]}', b'{"traceEvents": [5]}',
        b'{"traceEvents": []}', b'{"steps": []}', b"\xff\xfe\x00", b"",
        b'{"traceEvents": [{"ph": "X", "name": "train/step", "cat": "user_annotation", "ts": NaN, "dur": 9}]}',
        b'{"traceEvents": [{"ph": "X", "name": "train/step", "cat": "user_annotation", "ts": 0, "dur": 9}, '
        b'{"ph": "i", "name": "x", "ts": 1e999}]}',
        b'{"traceEvents": [{"ph": "X", "name": "train/step", "cat": "user_annotation", "ts": 0, "dur": 9}, '
        b'{"ph": "X", "name": "nccl", "cat": "kernel", "ts": 1, "args": null}]}',
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_one_sentence_that_names_it(tmp_path, content):
    write_trace(tmp_path, 0)
    path = write_trace(tmp_path, 1)
    path.write_bytes(content)
    done = run_here("scripts/profiling/merge_traces.py", tmp_path, "--out", tmp_path / "out.json.gz")
    assert done.returncode == 2 and "rank1.pt.trace.json" in done.stderr.replace(f"{tmp_path}: ", "")
    assert not (tmp_path / "out.json.gz").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_folder_without_traces_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError):
            merge(folder, tmp_path / "out.json")


@pytest.mark.launches
def test_memory_does_not_grow_with_the_ranks(tmp_path):
    """Four traces of 3 MB take at most 20 MB more than two. VmHWM: ru_maxrss has the parent's too."""
    peaks = []
    for num in (2, 4):
        for rank in range(num):
            path = write_trace(tmp_path / str(num), rank, filler=6000)
        words = [sys.executable, str(PROGRAM), str(tmp_path / str(num)), "--out", str(tmp_path / f"{num}.json.gz")]
        code = "import runpy, sys; sys.argv = sys.argv[1:]\n"
        code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        code += (
            "finally: print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
        )
        done = subprocess.run([words[0], "-c", code, *words[1:]], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]))
    assert path.stat().st_size > 3e6 and peaks[1] - peaks[0] < 20_000, (path.stat().st_size, peaks)


@pytest.mark.launches
def test_a_real_run_on_two_ranks(ranks, token_files, tmp_path):
    words = ["--run_type", "ddp", *TINY_RUN, "--global_batch_size", "4", "--sample_tokens", "0", "--max_val_steps", "0"]
    words += ["--max_train_steps", "4", "--timing_warmup_steps", "1", "--profile_steps", "3", "--profile"]
    words += [*data_flags(token_files), "--checkpoint_path", str(tmp_path / "run")]
    done = ranks.run_program(words, tmp_path / "ranks", 2)
    assert done.returncode == 0, done.stderr[-2000:]
    said = merge(tmp_path / "run", tmp_path / "trace.json.gz")
    events = check_events(read(tmp_path / "trace.json.gz"))
    assert "clocks are aligned to rank 0's" in said
    phases = [event for event in events if event["tid"] == merged_trace.PHASES_TRACK and event["ph"] == "X"]
    assert {event["pid"] for event in phases} == {0, 1}
    assert sum(event["name"] == "train/step" for event in phases) == 6
    flows = [event["name"] for event in events if event.get("cat") == "collective" and event["ph"] == "f"]
    assert {"all_reduce", "barrier", "all_gather"} <= set(flows)


def test_two_traces_of_one_rank_are_refused(tmp_path):
    path = write_trace(tmp_path, 0)
    path.with_name("rank1.pt.trace.json").write_bytes(path.read_bytes())
    done = run_here("scripts/profiling/merge_traces.py", tmp_path, "--out", tmp_path / "out.json")
    assert done.returncode == 2 and "are both of one rank" in done.stderr and not (tmp_path / "out.json").exists()


def test_a_trace_is_not_written_over(tmp_path):
    path = write_trace(tmp_path, 0)
    before = path.read_bytes()
    done = run_here("scripts/profiling/merge_traces.py", tmp_path, "--out", path)
    assert done.returncode == 2 and "is one of the traces" in done.stderr and path.read_bytes() == before


def test_ranks_without_a_trace_are_said_and_arrows_of_the_others_stay_apart(tmp_path):
    for number, rank in ((0, 0), (1, 2)):
        path = write_trace(tmp_path, number)
        content = json.loads(path.read_text())
        content["distributedInfo"] |= {"world_size": 4, "pg_config": [{"pg_size": 4}], "rank": rank}
        path.unlink()
        path.with_name(f"rank{rank}.pt.trace.json").write_text(json.dumps(content))
    assert merge(tmp_path, tmp_path / "out.json.gz").endswith(
        "2 of 4 ranks left a trace: arrows begin at the last of these alone"
    )
    check_events(read(tmp_path / "out.json.gz"))


def test_traces_of_two_runs_are_not_said_to_be_on_one_clock(tmp_path):
    write_trace(tmp_path, 0)
    path = write_trace(tmp_path, 1)
    content = json.loads(path.read_text())
    for event in content["traceEvents"]:
        event["ts"] *= 1.5
    path.write_text(json.dumps(content))
    assert "the clocks of rank 1 cannot be aligned" in merge(tmp_path, tmp_path / "out.json")
