"""Read back what the real libraries of --track hold of one run, in their offline modes."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testbed.metrics.trackers import PROJECT, WANDB_STEP

Metrics = dict[str, dict[int, float]]  # name -> step -> value, the last one where a step was trained twice
Stored = tuple[Metrics, dict[str, Any], dict[str, str]]  # metrics, configuration, texts of files


def without_credentials(monkeypatch, home: Path) -> None:
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(home))


def of_tensorboard(folder: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: {each.step: each.value for each in events.Scalars(name)} for name in events.Tags()["scalars"]}, {}, {}


def of_mlflow(folder: Path) -> Stored:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{(folder / 'trackers' / 'mlflow.db').absolute()}")
    (run,) = client.search_runs([client.get_experiment_by_name(PROJECT).experiment_id])
    assert run.info.status == "FINISHED"
    known = run.info.run_id
    paths = [Path(client.download_artifacts(known, file.path)) for file in client.list_artifacts(known)]
    metrics = {name: {m.step: m.value for m in client.get_metric_history(known, name)} for name in run.data.metrics}
    return metrics, run.data.params, {path.name: path.read_text() for path in paths}


def records_of_wandb(start: Path) -> Iterator[Any]:
    """The records of a start's .wandb file: LevelDB's log format (blocks of 32 KiB, a record in one piece or several),
    behind seven bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = b"".join(file.read_bytes() for file in start.glob("*.wandb")), 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:  # no room for a header: padding
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole, or the last piece
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def of_starts(folder: Path) -> list[list[Any]]:
    """The records of each start of each run; none before the first."""
    starts = sorted((folder / "trackers" / "wandb").glob("offline-run-*"))
    return [list(records_of_wandb(start)) for start in starts] or [[]]


def of_wandb(folder: Path) -> Stored:
    found: Metrics = {}
    config: dict[str, Any] = {}
    runs = set()
    for record in itertools.chain(*of_starts(folder)):
        if record.WhichOneof("record_type") == "run":
            runs.add((record.run.run_id, record.run.resume))
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = row.pop(WANDB_STEP)
            for name, value in row.items():
                if not name.startswith("_"):
                    found.setdefault(name, {})[step] = value
    assert [resumes for _, resumes in runs] == [True], "one run, in which `wandb sync` puts a start behind the other"
    files = sorted((folder / "trackers" / "wandb").glob("offline-run-*/files/*.json"))
    attached = {path.name: path.read_text() for path in files if not path.is_symlink()}
    return found, config, attached


def of_trackio(folder: Path) -> Stored:
    """TRACKIO_DIR must name the run's folder when trackio is imported, once in a process."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs(PROJECT)
    found: Metrics = {}
    for row in SQLiteStorage.get_logs(PROJECT, run.name):
        for name in row.keys() - {"step", "timestamp"}:
            found.setdefault(name, {})[row["step"]] = row[name]
    files = (folder / "trackers" / "trackio").glob("**/files/**/*.json")
    return found, run.config, {path.name: path.read_text() for path in files}


READERS = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}
