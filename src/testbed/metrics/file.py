"""Read, check and write training_metrics.json. Training and analysis share nothing else.

fields/ defines the fields of each version. A write of 100,000 optimizer steps on two
ranks (28 MB) takes 1.5 to 2 s on one core, of 1,000 steps 25 to 45 ms.
"""

import json
import reprlib
from pathlib import Path
from typing import Any

from testbed import typed_json
from testbed.errors import InputError
from testbed.io import read_json, write_text
from testbed.metrics.fields.earlier import MetricsFile1, MetricsFile20
from testbed.metrics.fields.metrics_file import SCHEMA_VERSION, TrainingMetrics

_TYPES = {"1": MetricsFile1, "2.0": MetricsFile20, SCHEMA_VERSION: TrainingMetrics}
# What 2.1 called other than 2.0 had: in 2.2 a figure has one name, that of 2.0.
_RENAMED_TIMING = {"step_time_median_s": "step_time_p50_sec", "step_time_p95_s": "step_time_p95_sec"}
_RENAMED_STEP = {"learning_rate": "lr"}
_ROW_LISTS = (
    "steps",
    "evaluations",
    "checkpoints",
    "watched_steps",
)  # can hold thousands of rows: one line of text each
_V1_KEYS = ("train_time_per_epoch", "train_loss_per_epoch")  # v1 carries no version; these two are always there


def metrics_version(metrics: Any) -> str:
    """Return the version of a loaded file: "1", "2.0", "2.1" or "2.2". InputError when it is none of them."""
    if isinstance(metrics, dict):
        version = metrics.get("schema_version")
        if version is None and all(key in metrics for key in _V1_KEYS):
            return "1"
        if version in ("2.0", "2.1", SCHEMA_VERSION):
            return version
        if version is not None:
            raise InputError(f"schema_version is {reprlib.repr(version)}, known are 2.0, 2.1 and {SCHEMA_VERSION}")
    raise InputError(
        f"no schema_version and none of v1's keys ({', '.join(_V1_KEYS)}): this is not a training_metrics.json"
    )


def check_metrics(metrics: dict) -> None:
    """Check a file of the current version. Raises InputError, one sentence that names the place."""
    _check(metrics, SCHEMA_VERSION)


def write_metrics(path: Path, metrics: dict) -> None:
    """Replace `path` by `metrics` in one move; if that fails, the earlier file stays whole.

    Raises:
        InputError: `metrics` is not what the types say, or holds NaN or infinity.
        OSError: the disk refuses.
    """
    _check(metrics, SCHEMA_VERSION)
    write_text(Path(path), _to_json(metrics))


def read_metrics(path: Path) -> dict:
    """Load and check a file of any version. One of 2.1 comes with the names of 2.2.

    Raises:
        InputError: one sentence that names the file and the fault.
    """
    path = Path(path)
    metrics = read_json(path)
    try:
        if metrics_version(metrics) == "2.1":
            metrics = _from_2_1(metrics)
        if metrics_version(metrics) != SCHEMA_VERSION:  # which watched nothing
            metrics = {name: value for name, value in metrics.items() if not name.startswith(("watched", "timed"))}
        _check(metrics, metrics_version(metrics))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    return metrics


def _from_2_1(metrics: dict) -> dict:
    """Return a file of 2.1 with the names of 2.2. What is malformed stays so, for the check to refuse."""
    rows = metrics.get("steps")
    if isinstance(rows, list):
        rows = [_renamed(row, _RENAMED_STEP) for row in rows]
    changes = {
        "schema_version": SCHEMA_VERSION,
        "steps": rows,
        "timing": _renamed(metrics.get("timing"), _RENAMED_TIMING),
    }
    return {name: changes.get(name, value) for name, value in metrics.items()}


def _renamed(section: Any, names: dict[str, str]) -> Any:
    return {names.get(name, name): value for name, value in section.items()} if isinstance(section, dict) else section


def _to_json(metrics: dict) -> str:
    """Return indented JSON, with one line per row of the long lists."""
    encode_row = json.JSONEncoder(allow_nan=False).encode
    members = []
    for key, value in metrics.items():
        if key in _ROW_LISTS and value:
            text = "[\n    " + ",\n    ".join(map(encode_row, value)) + "\n  ]"
        else:
            text = json.dumps(value, indent=2, allow_nan=False).replace("\n", "\n  ")
        members.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(members) + "\n}\n"


def _check(metrics: Any, version: str) -> None:
    typed_json.check(metrics, _TYPES[version], may_hold_more=version != SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        typed_json.check_finite(metrics)
        return
    typed_json.check_finite({**metrics, "steps": []})  # of rows the type says all, and there are thousands
    if (metrics["status"] == "failed") != (metrics["failure"] is not None):
        raise InputError(f"failure is {reprlib.repr(metrics['failure'])} in a file with status {metrics['status']!r}")
    world_size, segments = metrics["hardware"]["world_size"], metrics.get("segments") or []
    for name in ("steps", "watched_steps"):
        _check_rows_agree(name, metrics.get(name) or [], world_size, segments)
    watched = [row["rank"] for row in metrics["watched"]["per_rank"]] if "watched" in metrics else []
    ranks = segments[-1]["world_size"] if segments else world_size
    if watched and watched != list(range(ranks)):
        raise InputError(f"watched.per_rank is of ranks {reprlib.repr(watched)}, and the last start had {ranks}")
    for times in metrics.get("timed_collectives", {"per_rank_s": []})["per_rank_s"]:
        if len(times) != ranks:
            raise InputError(f"timed_collectives has {len(times)} times for {ranks} ranks")


def _check_rows_agree(name: str, rows: list[dict], world_size: int, segments: list[dict]) -> None:
    """Check that steps increase, and that rows have an entry for each rank of their start."""
    steps = [row["step"] for row in rows]
    for index in range(1, len(steps)):
        if steps[index] <= steps[index - 1]:
            raise InputError(f"{name}[{index}].step is {steps[index]} after {steps[index - 1]}: steps must increase")
    if len({segment["world_size"] for segment in segments} | {world_size}) == 1:
        segments = []
    for index, row in enumerate(rows):
        ranks = next(
            (start["world_size"] for start in reversed(segments) if start["first_step"] <= row["step"]), world_size
        )
        for key, value in row.items():
            if key.startswith("per_rank_") and value is not None and len(value) != ranks:
                whose = "hardware.world_size" if ranks == world_size else "world_size of its segment"
                raise InputError(f"{name}[{index}].{key} has {len(value)} entries, {whose} is {ranks}")
