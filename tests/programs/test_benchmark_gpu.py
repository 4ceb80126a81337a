"""scripts/benchmark_gpu.sh: its plan fits, what it cannot do is said and not passed over, and it ends when told."""

from __future__ import annotations

import builtins
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest
from support.programs import REPOSITORY, script

from testbed.config.flags import parse_command_line
from testbed.metrics import file
from testbed.metrics.file import read_metrics, write_metrics

SCRIPT = REPOSITORY / "scripts" / "benchmark_gpu.sh"
RUN = REPOSITORY / "docs" / "results" / "quickstart" / "baseline"


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("ONLY", "NANOGPT_DIR", "WHEELS")}
    return {**kept, "PYTHON": sys.executable, "DEVICE": "cpu", **changes}


def plan(**changes: str) -> dict[str, tuple[int, list[str]]]:
    """Name of each step that would run -> its estimate and its words, and "" -> the sum that the script prints."""
    command = ["bash", str(SCRIPT), "--dry_run", "nowhere"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(**changes)).stdout
    rows = re.findall(r"^(\S+) +(\d+) s  (.*)$", said, re.MULTILINE)
    found = {name: (int(seconds), words.split()) for name, seconds, words in rows}
    return {**found, "": (int(re.search(r"estimated: (\d+) s of 520 s", said).group(1)), [])}


@pytest.mark.launches
@pytest.mark.parametrize("changes", [{}, {"NANOGPT_DIR": "nanoGPT"}, {"ONLY": "peers", "PEER_ROUNDS": "5"}])
def test_the_estimates_fit_into_the_deadline(changes):
    steps = plan(DEVICE="cuda", **changes)
    total, _ = steps.pop("")
    assert total == sum(seconds for seconds, _ in steps.values()) <= 520


@pytest.mark.launches
def test_the_plan_puts_first_what_matters_and_leaves_nothing_to_a_default():
    steps = plan(DEVICE="cuda")
    names = list(steps)
    assert names[names.index("agree_fp32") + 1] == "peers", "right after the device was shown to compute right"
    settings = {
        name: parse_command_line(words[words.index("src/gpt2.py") + 1 :]).values
        for name, (_, words) in steps.items()
        if "src/gpt2.py" in words
    }
    assert all(values["precision"] != "auto" for values in settings.values())
    assert {settings[f"attention_{name}"]["precision"] for name in ("flash", "cudnn", "efficient")} == {"bf16"}
    assert {settings[f"time_to_loss_{name}"]["compile"] for name in ("adamw", "muon")} == {False}
    assert "transformers-compiled" in " ".join(steps["peers"][1])


@pytest.mark.launches
def test_what_no_longer_fits_is_named_and_is_no_pass(tmp_path):
    done = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path / "out")],
        capture_output=True, text=True, check=False, env=environment(DEADLINE_S="1"),
    )  # fmt: skip
    assert done.returncode == 1 and "did not pass: corpus" in done.stdout, done.stderr
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["failed"] == ["corpus"]


@pytest.mark.launches
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once_and_leaves_what_there_is_in_one_file(tmp_path, number, code):
    """The first step would take 100 s and is ended by its limit after 42; nothing of it is left."""
    started = tmp_path / "started"
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f'#!/bin/sh\n[ "$1" = download_data.py ] || exec {sys.executable} "$@"\necho $$ >{started}\nexec sleep 100\n'
    )
    stand_in.chmod(0o755)
    process = subprocess.Popen(
        ["bash", str(SCRIPT), str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(PYTHON=str(stand_in)),
        start_new_session=True,
    )  # fmt: skip
    try:
        while not (started.exists() and started.read_text().strip()):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
        os.killpg(process.pid, number)
        said, _ = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, said
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [step["status"] for step in found["steps"]] == ["interrupted"] and found["failed"] == ["corpus"]
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as packed:
        assert {"./summary.json", "./steps.tsv", "./logs/corpus.log"} <= set(packed.getnames())


def test_the_summary_compares_each_run_with_the_measured_matrix_rate(tmp_path):
    shutil.copytree(RUN, tmp_path / "runs" / "baseline")
    metrics = read_metrics(RUN / "training_metrics.json")
    precision, speed = metrics["training_config"]["precision"], metrics["flops"]
    (tmp_path / "matrix_rate.json").write_text(json.dumps({precision: {"flops_per_s": 4e11, "source": "measured"}}))
    (run,) = script("summarise_benchmark.py").summary(tmp_path)["runs"].values()
    tokens_per_s = metrics["summary"]["mean_tokens_per_sec_global"]
    assert run["mfu_of_matrix_rate"] == pytest.approx(tokens_per_s * speed["per_token_palm"] / 4e11)
    assert run["mfu"] == pytest.approx(speed["mfu"]) and run["mfu_peak_source"] == speed["peak_source"]
    (tmp_path / "matrix_rate.json").unlink()
    assert script("summarise_benchmark.py").summary(tmp_path)["runs"]["baseline"]["mfu_of_matrix_rate"] is None


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
