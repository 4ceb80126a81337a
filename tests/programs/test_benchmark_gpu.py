"""scripts/more/benchmark_gpu.sh with DEVICE=cpu: all that a CPU can do runs, and it goes on where it was stopped."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.programs import REPOSITORY

from testbed.experiments.gpu_benchmark import record
from testbed.io import read_json
from testbed.metrics import file
from testbed.metrics.file import read_metrics, write_metrics

RUN = REPOSITORY / "docs" / "results" / "quickstart" / "baseline"
VARIABLES = ("ONLY", "NANOGPT_DIR", "WHEELS", "DEADLINE_S", "PEER_ROUNDS")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # DeepSpeed in a test before leaves some of them
DONE_BEFORE = 3  # steps, when it is stopped


@dataclass
class Call:
    """One call of the benchmark: its exit code, what it said, and what its folder held afterwards."""

    code: int
    said: str
    rows: dict[str, dict]
    summary: dict
    packed: set[str]


def rows_of(folder: Path) -> dict[str, dict]:
    return {row["name"]: row for row in record.STEPS_FILE.read(folder)["steps"]}


def call(folder: Path, is_stopped: bool) -> Call:
    """Run it to its end, or stop it with SIGINT while the step after DONE_BEFORE others runs."""
    kept = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, *LAUNCHERS)}
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", str(REPOSITORY / "scripts" / "more" / "benchmark_gpu.sh"), str(folder)],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**kept, "PYTHON": sys.executable, "DEVICE": "cpu"},
        )  # fmt: skip
    try:
        while is_stopped and process.poll() is None:
            time.sleep(0.1)
            if (folder / "steps.json").exists():
                statuses = [row["status"] for row in rows_of(folder).values()]
                if statuses.count(record.DONE) == DONE_BEFORE:
                    time.sleep(1.0)  # into the next one
                    os.killpg(process.pid, signal.SIGINT)
                    break
        process.wait(timeout=1500)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    with tarfile.open(folder / "results.tar.gz") as packed:
        names = set(packed.getnames())
    return Call(process.returncode, log.read_text(), rows_of(folder), read_json(folder / "summary.json"), names)


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> tuple[Call, Call]:
    """The benchmark stopped in the middle of a step, and called again."""
    folder = tmp_path_factory.mktemp("benchmark") / "out"
    return call(folder, is_stopped=True), call(folder, is_stopped=False)


@pytest.mark.slow
@pytest.mark.launches
def test_stopped_in_the_middle_it_says_so_and_keeps_what_it_has(calls):
    stopped, _ = calls
    statuses = [row["status"] for row in stopped.rows.values()]
    assert stopped.code == 130, stopped.said
    assert (statuses.count(record.DONE), statuses.count(record.INTERRUPTED)) == (DONE_BEFORE, 1)
    (interrupted,) = [name for name, row in stopped.rows.items() if row["status"] == record.INTERRUPTED]
    assert stopped.summary["failed"] == [interrupted] and stopped.summary["pending_parts"]
    assert {"steps.json", "summary.json", "logs/corpus.log", f"logs/{interrupted}.log"} <= stopped.packed


@pytest.mark.slow
@pytest.mark.launches
def test_called_again_it_goes_on_and_everything_that_a_cpu_can_do_runs_and_agrees(calls):
    stopped, ended = calls
    assert ended.code == 0, ended.said
    for name, row in stopped.rows.items():
        if row["status"] == record.DONE:
            assert ended.rows[name] == row, "not run again"
    assert {row["status"] for row in ended.rows.values()} == {record.DONE, record.LEFT_OUT}
    assert all(row["reason"] for row in ended.rows.values() if row["status"] == record.LEFT_OUT)
    assert ended.summary["failed"] == [] and ended.summary["pending_parts"] == []
    compared = [check for check in ended.summary["agreement"] if check["holds"] is not None]
    assert len(compared) > 10 and all(check["compared_steps"] > 2 for check in compared)
    assert {"saved_async", "resumed", "fp32_compiled", "zero3_1rank"} <= {check["run"] for check in compared}
    checks = {check["run"]: check for check in ended.summary["agreement"]}
    bits = checks["deterministic_resumed"]
    assert (bits["largest_loss_difference"], bits["largest_norm_difference"]) == (0, 0)
    assert ended.summary["runs"]["ddp_2ranks_gloo"]["ranks"] == 2
    assert "peers_transformers/peers.json" in ended.packed
    assert not any("safetensors" in name or name.startswith(("data/", "compiled/")) for name in ended.packed)


def test_a_bare_machine_writes_its_runs_unchecked_and_says_so_but_reads_none(tmp_path, monkeypatch, capsys):
    """NaN is refused there too. A file may come from anywhere, so without the schema none is read."""
    metrics = read_metrics(RUN / "training_metrics.json")
    real = builtins.__import__

    def without_jsonschema(name, *rest):
        if name.split(".")[0] == "jsonschema":
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_jsonschema)
    monkeypatch.setattr(file.importlib.util, "find_spec", lambda name: None)
    file._schema_can_be_checked.cache_clear()
    file._validator.cache_clear()
    try:
        for _ in range(2):
            write_metrics(tmp_path / "training_metrics.json", metrics)
        assert capsys.readouterr().err.count("written without a check against its schema") == 1
        with pytest.raises(ValueError, match="finite"):
            write_metrics(
                tmp_path / "x.json", {**metrics, "timing": {**metrics["timing"], "startup_time_s": float("nan")}}
            )
        with pytest.raises(ValueError, match="the package jsonschema is not installed"):
            read_metrics(tmp_path / "training_metrics.json")
    finally:
        file._schema_can_be_checked.cache_clear()
