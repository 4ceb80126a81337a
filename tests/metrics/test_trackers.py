"""--track: rows in queues, trackers that fail or hang, and the real libraries in their offline modes."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.programs import REPOSITORY
from support.tracker_study import sentences

from testbed.config.flags import parse_command_line
from testbed.config.tracker_names import trackers_of
from testbed.errors import InputError
from testbed.metrics import trackers as module
from testbed.metrics.trackers import TrackedRun, Trackers

STEPS = 12


CONFIG = {"seed": 42, "run_type": "baseline", "env": {"torch": "2", "python": "3"}, "nothing": None}


def tracked(folder, first_step: int = 0) -> TrackedRun:
    return TrackedRun(
        "20261128T120000Z-0a1b2c3d", "run", folder / "tensorboard", folder / "trackers", first_step, CONFIG
    )


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

    def close(self, files, is_complete):
        self.closed = ([file.name for file in files], is_complete)


@pytest.fixture
def fake(monkeypatch):
    made = []
    monkeypatch.setitem(module.OPENERS, "wandb", lambda run: made.append(_Fake(run)) or made[-1])
    return made


def test_a_tracker_gets_every_row_and_the_files(tmp_path, fake):
    trackers = started(["wandb"], tracked(tmp_path))
    losses = train(trackers)
    trackers.add_validation(99, 3.0, {"accuracy": {"by_token": {"value": 0.3, "low": 0.2, "high": 0.4}}})
    (tmp_path / "a.json").write_text("{}")
    trackers.close([tmp_path / "a.json", tmp_path / "missing.json"], is_complete=True)
    trackers.close()  # a second call does nothing
    (tracker,) = fake
    assert tracker.closed == (["a.json"], True) and not trackers.may_hold_up_exit
    assert (99, {"validation/loss": 3.0, "validation/multiple_choice_by_token": 0.3}) in tracker.rows
    assert {step: values["train/loss"] for step, values in tracker.rows if "train/loss" in values} == losses
    assert "train/grad_norm" not in tracker.rows[1][1] and tracker.rows[0][1]["train/grad_norm"] == 1.5
    assert tracker.rows[2][1]["train/tokens"] == 300 and tracker.rows[2][1]["speed/tokens_per_s"] == 200
    assert tracker.rows[-2] == (STEPS, {"validation/loss": 3.25})


def test_other_ranks_have_none(tmp_path, fake):
    settings = SimpleNamespace(tokens_per_step=100, measuring=SimpleNamespace(track="wandb", tensorboard=True))
    trackers = Trackers(settings, tracked(tmp_path), is_writer=False, say=print)
    train(trackers)
    trackers.close()
    assert fake == []


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
    monkeypatch.setitem(module.OPENERS, "mlflow", opener)
    said: list[str] = []
    trackers = started(["mlflow"], tracked(tmp_path), said.append)
    for _ in range(20):
        train(trackers)
        time.sleep(0.01)
    trackers.close()
    assert len(said) == 1 and said[0].startswith("warning: --track mlflow ended (") and "no route to host" in said[0]
    assert trackers.may_hold_up_exit, "W&B's library waits a minute for a server that does not answer"


def test_a_tracker_that_hangs_costs_no_step_and_a_bounded_end(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setitem(module.OPENERS, "wandb", lambda run: release.wait(60))
    monkeypatch.setattr(module, "LEAVE_S", 0.2)
    monkeypatch.setattr(module, "MOST_WAITING", 5050)
    for last, expected in ((5000, "did not take all rows in time"), (5100, "ended (5,050 rows wait for it)")):
        said: list[str] = []
        trackers = started(["wandb"], tracked(tmp_path), said.append)
        start_s = time.perf_counter()
        train(trackers, last=last)
        assert (time.perf_counter() - start_s) / last < 0.001, "seconds of a step"
        trackers.close()
        assert trackers.may_hold_up_exit
        assert time.perf_counter() - start_s < 6 and len(said) == 1 and expected in said[0]
    release.set()


def test_no_end_waits_for_a_call_that_hung_before(tmp_path, monkeypatch):
    release, said = threading.Event(), []
    monkeypatch.setitem(module.OPENERS, "wandb", lambda run: release.wait(60))
    monkeypatch.setattr(module, "HANGING_S", 0.3)
    trackers = started(["wandb"], tracked(tmp_path), said.append)
    time.sleep(0.3)
    start_s = time.perf_counter()
    trackers.close(is_complete=True)
    assert time.perf_counter() - start_s < 5 and len(said) == 1, "CLOSE_S is 30"
    release.set()


def test_a_slow_tracker_that_works_is_waited_for(tmp_path, monkeypatch):
    """Its rows take longer together than a call may, and none of them alone."""
    taken, release, said = [], threading.Event(), []

    def log(rows) -> None:
        for row in rows:
            time.sleep(0.01)
            taken.append(row)

    opened = SimpleNamespace(log=log, close=lambda files, is_complete: None)
    monkeypatch.setitem(module.OPENERS, "wandb", lambda run: release.wait(60) and opened)
    monkeypatch.setattr(module, "HANGING_S", 1.0)
    trackers = started(["wandb"], tracked(tmp_path), said.append)
    train(trackers, last=150)
    release.set()
    trackers.close(is_complete=True)
    assert said == [] and len(taken) == 151


def test_flags_name_them_once_and_unknown_ones_are_refused():
    assert parse_command_line(["--track", "wandb, tensorboard,wandb"]).values["track"] == "wandb,tensorboard"
    for wrong in ("comet", ",", "wandb,comet"):
        with pytest.raises(InputError, match="--track"):
            parse_command_line(["--track", wrong])
    assert trackers_of("wandb,tensorboard", True) == ("tensorboard", "wandb") and trackers_of(None, False) == ()


Stored = tuple[dict[str, dict[int, float]], dict[str, Any], dict[str, str]]  # metrics, configuration, texts of files


def of_tensorboard(folder) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: {each.step: each.value for each in events.Scalars(name)} for name in events.Tags()["scalars"]}, {}, {}


def of_mlflow(folder) -> Stored:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'trackers' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name(module.PROJECT).experiment_id])
    assert run.info.status == "FINISHED"
    known = run.info.run_id
    paths = [Path(client.download_artifacts(known, file.path)) for file in client.list_artifacts(known)]
    metrics = {name: {m.step: m.value for m in client.get_metric_history(known, name)} for name in run.data.metrics}
    return metrics, run.data.params, {path.name: path.read_text() for path in paths}


def records_of_wandb(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB, a record in one piece or several), behind
    seven bytes of its own."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:  # no room for a header: padding
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole, or the last piece
            yield whole
            whole = b""


def of_wandb(folder) -> Stored:
    from wandb.proto import wandb_internal_pb2

    found: dict[str, dict[int, float]] = {}
    config: dict[str, Any] = {}
    starts = sorted((folder / "trackers" / "wandb").glob("offline-run-*"))
    for data in (
        data for start in starts for file in start.glob("*.wandb") for data in records_of_wandb(file.read_bytes())
    ):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            assert record.run.run_group == tracked(folder).run_id
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = row.pop(module.WANDB_STEP)
            for name, value in row.items():
                if not name.startswith("_"):
                    found.setdefault(name, {})[step] = value
    attached = {path.name: path.read_text() for start in starts for path in (start / "files").glob("a.json")}
    return found, config, attached


def of_trackio(folder) -> Stored:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs(module.PROJECT)
    found: dict[str, dict[int, float]] = {}
    for row in SQLiteStorage.get_logs(module.PROJECT, run.name):
        for name in row.keys() - {"step", "timestamp"}:
            found.setdefault(name, {})[row["step"]] = row[name]
    files = (folder / "trackers" / "trackio").glob("**/files/**/*.json")
    return found, run.config, {path.name: path.read_text() for path in files}


READERS = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}


@pytest.mark.slow
@pytest.mark.launches  # W&B starts a process
@pytest.mark.parametrize("name", READERS)
def test_each_library_gives_back_rows_configuration_and_files_also_after_a_resume(tmp_path, monkeypatch, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackers" / "trackio"))
    monkeypatch.setenv("HOME", str(tmp_path))  # no credentials
    monkeypatch.setattr(module, "CLOSE_S", 120.0)
    monkeypatch.setattr(module, "HANGING_S", 120.0)  # on a busy machine MLflow makes its tables for longer than 30 s
    monkeypatch.setattr(module, "LEAVE_S", 120.0)
    (tmp_path / "a.json").write_text('{"status": "complete"}')
    said: list[str] = []
    first = started([name], tracked(tmp_path), said.append)
    losses = train(first)
    first.close()  # it was killed, and its last checkpoint is of two steps before
    second = started([name], tracked(tmp_path, first_step=STEPS - 2), said.append)
    losses |= train(second, STEPS - 1, STEPS + 4)
    second.close([tmp_path / "a.json"], is_complete=True)
    assert said == []
    deadline_s = time.monotonic() + 20  # on a busy machine W&B's file once lacked the second start's rows
    while len((stored := READERS[name](tmp_path))[0].get("train/loss", ())) < len(losses):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    found, config, files = stored
    assert found["train/loss"] == pytest.approx(losses, rel=1e-6)
    assert sorted(found["train/grad_norm"]) == [step for step in losses if step != 2]
    assert found["validation/loss"][STEPS + 4] == 3.25  # TensorBoard drops that of a step that is trained again
    assert found["train/tokens"] == pytest.approx({step: 100.0 * step for step in losses})
    if name != "tensorboard":  # which has the curves alone
        expected = {key: str(value) for key, value in CONFIG.items()} if name == "mlflow" else CONFIG
        assert {key: value for key, value in config.items() if key in expected} == expected
        assert files == {"a.json": '{"status": "complete"}'}


def test_the_page_of_the_hanging_server_says_what_its_file_holds():
    folder = REPOSITORY / "docs" / "results" / "trackers"
    runs = [json.loads(line) for line in (folder / "overhead.jsonl").read_text().splitlines()]
    said, page = sentences(runs), " ".join((folder / "README.md").read_text().split())
    assert len(said) == 2
    for words in said:
        assert words in page
        assert max(float(share) for share in re.findall(r" to ([+-][\d.]+)%", words)) < 1.0
