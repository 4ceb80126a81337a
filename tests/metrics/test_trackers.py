"""--track: rows in queues, trackers that fail or hang, and how a run ends in the real libraries."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.endings import wait_for
from support.programs import REPOSITORY
from support.settings import refusal
from support.tracked_runs import of_starts, without_credentials
from support.tracker_study import sentences

from testbed.config.flags import parse_command_line
from testbed.config.tracker_names import trackers_of
from testbed.errors import InputError
from testbed.metrics import trackers as module
from testbed.metrics.trackers import TrackedRun, Trackers

STEPS = 12


def tracked(folder, run_id: str = "20261128T120000Z-0a1b2c3d") -> TrackedRun:
    files = (folder / "a.json", folder / "missing.json")
    return TrackedRun(run_id, "run", folder / "tensorboard", folder / "trackers", 0, {"seed": 42}, files)


def started(names, run, say=print) -> Trackers:
    settings = SimpleNamespace(tokens_per_step=100, measuring=SimpleNamespace(track=",".join(names), tensorboard=False))
    return Trackers(settings, run, is_writer=True, say=say)


def train(trackers: Trackers, first: int = 1, last: int = STEPS) -> dict[int, float]:
    """Give a few steps and a validation, as a run does. Returns the losses by step."""
    losses = {}
    for step in range(first, last + 1):
        losses[step] = 4 - step / 10
        norm = math.inf if step == 2 else 1.5  # fp16 skipped the update
        trackers.add_step(step, SimpleNamespace(loss=losses[step], grad_norm=norm, step_time_s=0.5), 1e-3)
    trackers.add_validation(last, 3.25)
    return losses


class _Fake:
    def __init__(self, run):
        self.rows, self.closed = [], None

    def log(self, rows):
        self.rows += rows

    def close(self, files, exit_code):
        self.closed = ([file.name for file in files], exit_code)


def plant(monkeypatch, name: str, opener) -> None:
    """Put a tracker in the place of a library, which need not be installed."""
    monkeypatch.setitem(module.OPENERS, name, opener)
    monkeypatch.setitem(module.LIBRARIES, name, "json")


@pytest.fixture
def fake(monkeypatch):
    made = []
    plant(monkeypatch, "wandb", lambda run: made.append(_Fake(run)) or made[-1])
    return made


def test_a_tracker_gets_every_row_and_the_files(tmp_path, fake):
    trackers = started(["wandb"], tracked(tmp_path))
    losses = train(trackers)
    trackers.add_validation(99, 3.0, {"accuracy": {"by_token": {"value": 0.3, "low": 0.2, "high": 0.4}}})
    (tmp_path / "a.json").write_text("{}")
    trackers.close(0)
    trackers.close(1)  # a second call does nothing
    (tracker,) = fake
    assert tracker.closed == (["a.json"], 0) and not trackers.may_hold_up_exit
    assert (99, {"validation/loss": 3.0, "validation/multiple_choice_by_token": 0.3}) in tracker.rows
    assert {step: values["train/loss"] for step, values in tracker.rows if "train/loss" in values} == losses
    assert "train/grad_norm" not in tracker.rows[1][1] and tracker.rows[0][1]["train/grad_norm"] == 1.5
    assert tracker.rows[2][1]["train/tokens"] == 300 and tracker.rows[2][1]["speed/tokens_per_s"] == 200
    assert tracker.rows[-2] == (STEPS, {"validation/loss": 3.25})


def test_other_ranks_have_none(tmp_path, fake):
    settings = SimpleNamespace(tokens_per_step=100, measuring=SimpleNamespace(track="wandb", tensorboard=True))
    trackers = Trackers(settings, tracked(tmp_path), is_writer=False, say=print)
    train(trackers)
    trackers.close(0)
    assert fake == []


def test_a_run_that_did_not_end_well_has_no_final_files(tmp_path, fake):
    (tmp_path / "a.json").write_text("{}")
    started(["wandb"], tracked(tmp_path)).close(143)
    assert fake[0].closed == ([], 143)


@pytest.mark.parametrize("place", ["open", "log", "close"])
@pytest.mark.parametrize("kind", [ConnectionError, SystemExit])
def test_a_tracker_that_fails_is_one_warning_and_no_more(tmp_path, monkeypatch, place, kind):
    def fail(*_):
        raise kind("no route to host")

    opener = (
        fail
        if place == "open"
        else lambda run: SimpleNamespace(**{"log": lambda rows: None, "close": fail, place: fail})
    )
    plant(monkeypatch, "mlflow", opener)
    said: list[str] = []
    trackers = started(["mlflow"], tracked(tmp_path), said.append)
    for _ in range(20):
        train(trackers)
        time.sleep(0.01)
    trackers.close(1)
    assert len(said) == 1 and said[0].startswith("warning: --track mlflow ended (") and "no route to host" in said[0]
    assert trackers.may_hold_up_exit, "W&B's library waits a minute for a server that does not answer"


def test_a_tracker_that_hangs_costs_no_step_and_a_bounded_end(tmp_path, monkeypatch):
    release = threading.Event()
    plant(monkeypatch, "wandb", lambda run: release.wait(60))
    monkeypatch.setattr(module, "LEAVE_S", 0.2)
    monkeypatch.setattr(module, "MOST_WAITING", 5050)
    for last, expected in ((5000, "did not take all rows in time"), (5100, "ended (5,050 rows wait for it)")):
        said: list[str] = []
        trackers = started(["wandb"], tracked(tmp_path), said.append)
        start_s = time.perf_counter()
        train(trackers, last=last)
        assert (time.perf_counter() - start_s) / last < 0.001, "seconds of a step"
        trackers.close(1)
        assert trackers.may_hold_up_exit
        assert time.perf_counter() - start_s < 6 and len(said) == 1 and expected in said[0]
    release.set()


def test_no_end_waits_for_a_call_that_hung_before(tmp_path, monkeypatch):
    release, said = threading.Event(), []
    plant(monkeypatch, "wandb", lambda run: release.wait(60))
    monkeypatch.setattr(module, "HANGING_S", 0.3)
    trackers = started(["wandb"], tracked(tmp_path), said.append)
    time.sleep(0.3)
    start_s = time.perf_counter()
    trackers.close(0)
    assert time.perf_counter() - start_s < 5 and len(said) == 1, "CLOSE_S is 30"
    release.set()


def test_a_slow_tracker_that_works_is_waited_for(tmp_path, monkeypatch):
    """Its rows take longer together than a call may, and none of them alone."""
    taken, release, said = [], threading.Event(), []

    def log(rows) -> None:
        for row in rows:
            time.sleep(0.01)
            taken.append(row)

    opened = SimpleNamespace(log=log, close=lambda files, exit_code: None)
    plant(monkeypatch, "wandb", lambda run: release.wait(60) and opened)
    monkeypatch.setattr(module, "HANGING_S", 1.0)
    trackers = started(["wandb"], tracked(tmp_path), said.append)
    train(trackers, last=150)
    release.set()
    trackers.close(0)
    assert said == [] and len(taken) == 151


def test_flags_name_them_once_and_unknown_ones_are_refused():
    assert parse_command_line(["--track", "wandb, tensorboard,wandb"]).values["track"] == "wandb,tensorboard"
    for wrong in ("comet", ",", "wandb,comet"):
        with pytest.raises(InputError, match="--track"):
            parse_command_line(["--track", wrong])
    assert trackers_of("wandb,tensorboard", True) == ("tensorboard", "wandb") and trackers_of(None, False) == ()


def test_a_wandb_that_overwrites_resumed_runs_is_refused(token_files, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.30.0" if name == "wandb" else version(name))
    monkeypatch.setattr("testbed.config.check.check_installed", lambda names: None)
    assert "--track wandb needs wandb 0.31 or newer" in refusal(token_files, "--track", "wandb")


def test_no_tracker_begins_while_another_library_is_imported(tmp_path, monkeypatch):
    """Two threads that import got `partially initialized module 'mlflow' has no attribute 'version'`."""
    done = []
    monkeypatch.setattr("importlib.import_module", lambda name: time.sleep(0.1) or done.append(name))
    for name in ("wandb", "mlflow"):
        plant(monkeypatch, name, lambda run, name=name: done.append(name) or _Fake(run))
    started(["wandb", "mlflow"], tracked(tmp_path)).close(0)
    assert done[:2] == ["json", "json"] and sorted(done[2:]) == ["mlflow", "wandb"]


def test_a_library_that_cannot_be_imported_is_one_warning(tmp_path, monkeypatch, fake):
    def fail(name):
        raise AttributeError("a half of a library")

    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    monkeypatch.setattr("importlib.import_module", fail)
    said: list[str] = []
    trackers = started(["wandb"], tracked(tmp_path), said.append)
    train(trackers)
    trackers.close(0)
    assert len(said) == 1 and "ended (AttributeError: a half of a library)" in said[0] and fake == []
    assert "TRACKIO_DIR" not in os.environ


def test_the_variable_of_trackio_is_the_users_and_not_of_other_processes(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("importlib.import_module", lambda name: seen.append(os.environ["TRACKIO_DIR"]))
    plant(monkeypatch, "trackio", _Fake)
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    started(["trackio"], tracked(tmp_path)).close(0)
    assert seen == [str(tmp_path / "trackers" / "trackio")] and "TRACKIO_DIR" not in os.environ
    monkeypatch.setenv("TRACKIO_DIR", "theirs")
    started(["trackio"], tracked(tmp_path)).close(0)
    assert seen[1] == os.environ["TRACKIO_DIR"] == "theirs"


@pytest.mark.slow
def test_a_start_that_is_killed_leaves_no_half_of_mlflows_tables(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="pip install mlflow")
    from mlflow.tracking import MlflowClient

    with monkeypatch.context() as ends, pytest.raises(SystemExit):
        ends.setattr(Path, "replace", lambda *_: sys.exit("killed"))
        module._make_tables(tmp_path / "killed" / "mlflow.db")
    assert not (tmp_path / "killed" / "mlflow.db").exists()
    file = tmp_path / "trackers" / "mlflow.db"
    file.parent.mkdir()
    file.with_name("mlflow.db.making").write_bytes(b"a half")
    module._make_tables(file)
    assert list(file.parent.iterdir()) == [file]
    assert MlflowClient(f"sqlite:///{file}").get_experiment_by_name("Default") is not None


@pytest.mark.slow
@pytest.mark.launches  # W&B starts a process
def test_how_a_run_ended_and_what_overflowed_in_mlflow_and_wandb(tmp_path, monkeypatch):
    for name in ("wandb", "mlflow"):
        pytest.importorskip(name, reason=f"pip install {name}")
    without_credentials(monkeypatch, tmp_path)
    for name in ("CLOSE_S", "HANGING_S", "LEAVE_S"):
        monkeypatch.setattr(module, name, 120.0)  # on a busy machine MLflow makes its tables for longer than 30 s
    monkeypatch.setattr(module, "FLUSH_S", 1.0)
    said: list[str] = []
    expected = {0: "FINISHED", 1: "FAILED", 143: "KILLED"}
    for exit_code in expected:
        trackers = started(["wandb", "mlflow"], tracked(tmp_path, f"run-{exit_code}"), said.append)
        losses = train(trackers)
        if exit_code == 0:  # in W&B's file before the end, which a killed run never reaches
            wait_for(lambda: sum(record.HasField("history") for record in of_starts(tmp_path)[0]) > STEPS, 120)
        trackers.close(exit_code)
    assert said == []
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'trackers' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name(module.PROJECT).experiment_id])
    assert {run.data.tags["testbed.run_id"]: run.info.status for run in runs} == {
        f"run-{exit_code}": status for exit_code, status in expected.items()
    }
    norms = client.get_metric_history(runs[0].info.run_id, "train/grad_norm")
    assert [metric.step for metric in norms] == [step for step in losses if step != 2]
    assert [records[-1].exit.exit_code for records in of_starts(tmp_path)] == list(expected)


def test_the_page_of_the_hanging_server_says_what_its_file_holds():
    folder = REPOSITORY / "docs" / "results" / "trackers"
    runs = [json.loads(line) for line in (folder / "overhead.jsonl").read_text().splitlines()]
    said, page = sentences(runs), " ".join((folder / "README.md").read_text().split())
    assert len(said) == 2
    for words in said:
        assert words in page
        assert max(float(share) for share in re.findall(r" to ([+-][\d.]+)%", words)) < 1.0
