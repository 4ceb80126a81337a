"""Break every file that describes runs, profiles and results.

Each is read, or refused in one sentence, and left as it is.
training_metrics.json and what the audit reads have tests/metrics/test_metrics_fuzz.py.
"""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from support import nsys_examples
from support.fuzz import (
    OS_ERRORS,
    READ,
    REFUSED,
    Reader,
    Refused,
    break_in_every_way,
    run_in_process,
)
from support.metrics_examples import example_metrics, save
from support.mutations import broken_bytes, broken_words
from support.nccl_examples import one_host, write_logs
from support.nsight_cases import chrome_trace, run_folder, text_file
from support.programs import REPOSITORY
from support.sweep_cases import as_sweep, finish, request, write_sweep_json

from testbed.analysis.profiles.nccl_logs import find_logs, read_logs
from testbed.analysis.profiles.nsight import read_stats
from testbed.analysis.profiles.summary import summary_text, write_summary
from testbed.analysis.profiles.trace_operators import read_operators
from testbed.analysis.runs.verify import as_tsv, verify
from testbed.analysis.scaling.report import report_on_directory
from testbed.errors import InputError
from testbed.profiling.trace import TraceUnreadable, read_trace
from testbed.sweep.state import shortfalls, take_over

SCRIPTS = REPOSITORY / "scripts"


ASKED = request(repeats=1)


def planned_sweep(folder: Path) -> None:
    sweep = as_sweep(ASKED)
    sweep.write(folder)
    finish(next(cell for cell in sweep.cells if cell.status == "pending"), folder, num_steps=3, warmup_steps=1)


def go_on_with_sweep(folder: Path) -> None:
    sweep = as_sweep(ASKED)
    take_over(sweep, folder, allow_mismatch=False)
    shortfalls(sweep.cells)


def analysed_sweep(folder: Path) -> None:
    cells = [
        {"run_type": name, "ranks": 2, "folder": f"{name}_1/run_1", "command": ["src/gpt2.py", "--run_type", name]}
        for name in ("ddp", "fsdp")
    ]
    write_sweep_json(folder, cells)
    save(folder / "ddp_1" / "run_1", example_metrics(num_steps=3, warmup_steps=1))


def analyse_sweep(folder: Path) -> None:
    as_tsv(verify(folder))
    json.dumps(report_on_directory(folder))


def launcher_file(folder: Path) -> None:
    analysed_sweep(folder)
    content = {"world_size": 2, "nccl_env": {"NCCL_DEBUG": "INFO"}, "hosts": "a\nb", "slurm": {"job_id": "7"}}
    (folder / "ddp_1" / "run_1" / "launcher_metadata.json").write_text(json.dumps(content))
    (folder / "ddp_1" / "run_1" / "RUN_COMPLETE.txt").write_text(
        "[Rank 0] RUN_COMPLETE checkpoint_path=x world_size=2 tokens_per_sec=2560.00 total_wall_time_sec=5.00"
    )


def read_launcher(folder: Path) -> None:
    as_tsv(verify(folder))


def profiled_run(folder: Path) -> None:
    metrics = example_metrics(num_steps=3, warmup_steps=1)
    run_folder(folder, text=nsys_examples.stats_text("us"), metrics=metrics)
    (folder / "launcher_metadata.json").write_text(
        json.dumps({"world_size": 2, "nccl_env": {"NCCL_DEBUG": "INFO"}, "hosts": "a\nb", "slurm": {"job_id": "7"}})
    )


def profile_summary(folder: Path) -> None:
    for name in ("a", "b"):
        run_folder(folder / name, text=nsys_examples.stats_text("us"), metrics=example_metrics(num_steps=3))
        write_summary(folder / name)


def summarise_profile(folder: Path) -> None:
    """As scripts/profiling/parse_nsys_stats.py does; what it writes goes again."""
    path = folder / "profiles" / "profile_summary.json"
    try:
        _, summary = write_summary(folder)
        summary_text(summary)
        json.loads(path.read_text(encoding="utf-8"))
    finally:
        path.unlink(missing_ok=True)


def attribute_trace(folder: Path) -> None:
    read_trace(folder / "profiler_logs" / "rank0.pt.trace.json")
    read_operators(folder / "profiler_logs" / "rank0.pt.trace.json")


def packed_trace(folder: Path) -> None:
    (folder / "rank0.pt.trace.json.gz").write_bytes(gzip.compress(chrome_trace(folder).read_bytes()))


def nsys_csv() -> str:
    name = ":train/step"
    header = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range"
    rows = [f"75.0,300,3,100.0,100.0,90,110,10.0,PushPop,{name}", '25.0,100,1,100.0,100.0,100,100,0.0,PushPop,":a,b"']
    return "\n".join([header, *rows]) + "\n"


def both(content: bytes) -> Any:
    return st.one_of(broken_words(content), broken_bytes(content))


READERS = {
    "sweep.json of a sweep that goes on": Reader(planned_sweep, "sweep.json", go_on_with_sweep, is_named=False),
    "sweep.json that is analysed": Reader(analysed_sweep, "sweep.json", analyse_sweep, is_named=False),
    "launcher_metadata.json": Reader(
        launcher_file, "ddp_1/run_1/launcher_metadata.json", read_launcher, outcomes=(READ,)
    ),
    "RUN_COMPLETE.txt": Reader(
        launcher_file, "ddp_1/run_1/RUN_COMPLETE.txt", read_launcher, broken=both, outcomes=(READ,)
    ),
    "launcher_metadata.json of a profile": Reader(
        profiled_run, "launcher_metadata.json", summarise_profile, is_named=False
    ),
    "trace of torch.profiler": Reader(
        partial(chrome_trace, distributedInfo={"rank": 0, "world_size": 2}),
        "profiler_logs/rank0.pt.trace.json",
        attribute_trace,
        errors=(TraceUnreadable, InputError),
    ),
    "packed trace": Reader(
        packed_trace,
        "rank0.pt.trace.json.gz",
        lambda folder: read_operators(folder / "rank0.pt.trace.json.gz"),
        broken=broken_bytes,
        outcomes=(REFUSED,),
    ),
    "log of NCCL": Reader(
        lambda folder: write_logs(folder, [one_host(0)]),
        "nccl_rank_host_100.log",
        lambda folder: read_logs(find_logs(folder / "nccl_rank_host_100.log")),
        broken=both,
        os_errors=OS_ERRORS,
        outcomes=(READ,),
        in_pieces=True,
    ),
    "text of nsys stats": Reader(
        lambda folder: text_file(folder, nsys_examples.stats_text("indian")),
        "nsys_stats_node0.txt",
        lambda folder: read_stats(folder / "nsys_stats_node0.txt"),
        broken=both,
        os_errors=OS_ERRORS,
        outcomes=(REFUSED,),
    ),
    "CSV of nsys stats": Reader(
        lambda folder: text_file(folder, nsys_csv(), "nsys_17_node0_nvtx_sum.csv"),
        "nsys_17_node0_nvtx_sum.csv",
        lambda folder: read_stats(folder / "nsys_17_node0_nvtx_sum.csv"),
        broken=both,
        os_errors=OS_ERRORS,
        outcomes=(REFUSED,),
    ),
    "profile_summary.json": Reader(
        profile_summary,
        "a/profiles/profile_summary.json",
        lambda folder: run_in_process(SCRIPTS / "profiling" / "diff_profiles.py", folder / "a", folder / "b"),
        errors=(Refused,),
        is_named=False,
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_no_file_breaks_its_reader(tmp_path, name):
    break_in_every_way(name, READERS[name], tmp_path / "files")
