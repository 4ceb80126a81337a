"""Read, check and write training_metrics.json. Training and analysis share nothing else.

fields/ defines the fields of each version, schema.py makes the JSON schema. A write of 100,000 optimizer steps on two
ranks (28 MB) takes 1.5 to 2 s on one core, of 1,000 steps 25 to 45 ms.
"""

import functools
import importlib.util
import json
import math
import reprlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testbed.errors import InputError
from testbed.io import read_json, write_text
from testbed.metrics.fields.metrics_file import SCHEMA_VERSION

_DEFINITIONS = {"1": "v1", "2.0": "v2_0", SCHEMA_VERSION: "v2_2"}
# What 2.1 called other than 2.0 had: in 2.2 a figure has one name, that of 2.0.
_RENAMED_TIMING = {"step_time_median_s": "step_time_p50_sec", "step_time_p95_s": "step_time_p95_sec"}
_RENAMED_STEP = {"learning_rate": "lr"}
_ROW_LISTS = ("steps", "evaluations", "checkpoints")  # can hold thousands of rows: one line of text each
# The parts of a file that readers of every version look into. Only the schema since 2.1 says what all of them are.
_SECTIONS = ("training_config", "hardware", "settings", "summary")
_OPTIONAL_SECTIONS = ("deepspeed_config", "scheduler")
_TEXTS = ("run_id", "timestamp_utc", "git_commit", "command_line")
_LARGEST_COUNT = 2**63 - 1  # what an array of integers holds
_DEEPEST = 100  # lists and objects inside one another; a real file has six
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
        InputError: `metrics` breaks the schema (checked if jsonschema is installed), or holds NaN or infinity.
        OSError: the disk refuses.
    """
    _check(metrics, SCHEMA_VERSION, is_our_own=True)
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


@functools.cache
def _validator(definition: str) -> Any:
    from testbed.metrics.schema import schema

    try:
        import jsonschema  # 0.15 s, which a program's --help does not owe
    except ModuleNotFoundError:
        raise InputError("it cannot be checked: the package jsonschema is not installed") from None

    # JSON Schema takes 3.0 for an integer. A count that arrives as a float was computed by a division: refuse it.
    strict = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    )
    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=strict)
    return validator({"$ref": f"#/$defs/{definition}", "$defs": schema()["$defs"]})


@functools.cache  # said once
def _schema_can_be_checked() -> bool:
    if importlib.util.find_spec("jsonschema") is not None:
        return True
    said = "training_metrics.json is written without a check against its schema: pip install jsonschema"
    print(f"WARNING: the package jsonschema is not installed, so {said}", file=sys.stderr, flush=True)
    return False


def _check(metrics: Any, version: str, is_our_own: bool = False) -> None:
    rows = metrics.get("steps") if isinstance(metrics, dict) and version == SCHEMA_VERSION else None
    if not isinstance(rows, list):
        rows = []
    document = {**metrics, "steps": []} if rows else metrics
    if not is_our_own or _schema_can_be_checked():
        _check_schema(document, rows, version)
    if version != SCHEMA_VERSION:
        _check_sections(metrics)
    fault = _first_not_finite(document) or (_first_not_finite(metrics) if rows and _has_not_finite(rows) else None)
    if fault:
        raise InputError(fault)
    if rows:
        _check_rows_agree(rows, metrics["hardware"]["world_size"], metrics.get("segments") or [])


def _check_schema(document: Any, rows: list, version: str) -> None:
    _raise_first(_validator(_DEFINITIONS[version]), document, ())
    # One validator call per row would take 24 s for 100,000 rows; the rows' extremes say the same (_extreme_rows).
    samples = _extreme_rows(rows)
    if samples is None or not all(map(_validator("step").is_valid, samples)):
        for index, row in enumerate(rows):
            _raise_first(_validator("step"), row, ("steps", index))


def _check_sections(metrics: dict) -> None:
    """Check the sections that v1 and 2.0 files may add to their schema."""
    for key in (*_SECTIONS, *_OPTIONAL_SECTIONS, *_TEXTS):
        is_optional, value = key not in _SECTIONS, metrics.get(key)
        kind, name = (str, "text") if key in _TEXTS else (dict, "an object")
        if key in metrics and not isinstance(value, kind) and not (value is None and is_optional):
            raise InputError(f"{key} is {reprlib.repr(value)}, it must be {name}")
    selected = (metrics.get("deepspeed_config") or {}).get("selected")
    if not isinstance(selected, dict | None):
        raise InputError(f"deepspeed_config.selected is {reprlib.repr(selected)}, it must be an object")


def _raise_first(validator: Any, instance: Any, prefix: tuple) -> None:
    """Raise InputError for the shallowest error."""
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(instance))
    if error is None:
        return
    where = _place((*prefix, *error.absolute_path)) or "the file"
    value = reprlib.repr(error.instance)
    if error.validator == "type":
        kinds = error.validator_value
        message = f"is {value}, it must be {' or '.join([kinds] if isinstance(kinds, str) else kinds)}"
    elif error.validator == "required":
        missing = next(key for key in error.validator_value if key not in error.instance)
        message = f"lacks {missing!r}"
    elif error.validator == "additionalProperties":
        unknown = sorted(set(error.instance) - set(error.schema["properties"]))
        message = f"has no field {unknown[0]!r} in this version"
    else:
        message = f"is {value}, which breaks the rule {error.validator}: {reprlib.repr(error.validator_value)}"
    raise InputError(f"{where} {message}")


def _place(keys: tuple) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{_printable(key)}" for key in keys).lstrip(".")


def _printable(key: str) -> str:
    """Return a key, quoted if it would break the sentence that names it."""
    return key if key.isprintable() and len(key) <= 80 else reprlib.repr(key)


def _extreme_rows(rows: list) -> list[dict] | None:
    """Return a few made-up rows that are valid exactly if all `rows` are; None if that cannot be told.

    The step schema asks of a column only a type and a minimum, so the smallest value of each type decides. 100,000 rows
    take 0.3 s.
    """
    if not rows:
        return []
    if not all(isinstance(row, dict) for row in rows) or len({tuple(row) for row in rows}) != 1:
        return None
    columns: dict[str, list] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        are_lists = all(type(value) is list for value in values)
        extremes = _extremes([item for value in values for item in value] if are_lists else values)
        if extremes is None:
            return None
        # An empty list is a shape of its own, because the schema may ask for at least one item.
        empty: list[list] = [[]] if are_lists and [] in values else []
        columns[key] = empty + [[item] for item in extremes] if are_lists else extremes
    longest = max(map(len, columns.values()))
    return [{key: values[min(index, len(values) - 1)] for key, values in columns.items()} for index in range(longest)]


def _extremes(values: list) -> list | None:
    """Return the smallest of each type in `values`; None for a type without order."""
    found: list = []
    kinds = set(map(type, values))
    for kind in kinds:
        same = values if len(kinds) == 1 else [value for value in values if type(value) is kind]
        if kind is type(None):
            found.append(None)
        elif kind in (int, float, bool, str):
            found.append(min(same))
        else:
            return None
    return found


def _has_not_finite(rows: list[dict]) -> bool:
    """Return whether `rows` may hold a number that is not finite or too large, so that each must be checked."""
    if len({tuple(row) for row in rows}) != 1:
        return True
    for key in rows[0]:
        values = [row[key] for row in rows if row[key] is not None]
        if values and isinstance(values[0], list):
            values = [item for value in values for item in value]
        try:
            if not all(map(math.isfinite, values)) or max(values, default=0) > _LARGEST_COUNT:
                return True
        except (OverflowError, TypeError):  # a count too large for a float; lists among numbers
            return True
    return False


def _not_finite(value: Any, keys: tuple = ()) -> Iterator[tuple]:
    if len(keys) > _DEEPEST:
        raise InputError(f"{_place(keys[:3])} is nested more than {_DEEPEST} deep")
    if isinstance(value, float | int):
        if not (math.isfinite(value) if isinstance(value, float) else abs(value) <= _LARGEST_COUNT):
            yield (keys, value)
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from _not_finite(member, (*keys, key))
    elif isinstance(value, list | tuple):
        for index, member in enumerate(value):
            yield from _not_finite(member, (*keys, index))


def _first_not_finite(metrics: Any) -> str | None:
    for keys, value in _not_finite(metrics):
        if isinstance(value, int):
            return f"{_place(keys)} is {reprlib.repr(value)}: no count is that large"
        return f"{_place(keys)} is {value}: a number in this file is finite, and what is unknown is null"
    return None


def _check_rows_agree(rows: list[dict], world_size: int, segments: list[dict]) -> None:
    """Check that steps increase, and that rows have an entry for each rank of their start."""
    steps = [row["step"] for row in rows]
    for index in range(1, len(steps)):
        if steps[index] <= steps[index - 1]:
            raise InputError(f"steps[{index}].step is {steps[index]} after {steps[index - 1]}: steps must increase")
    if len({segment["world_size"] for segment in segments} | {world_size}) == 1:
        segments = []
    for index, row in enumerate(rows):
        ranks = next(
            (start["world_size"] for start in reversed(segments) if start["first_step"] <= row["step"]), world_size
        )
        for key, value in row.items():
            if key.startswith("per_rank_") and value is not None and len(value) != ranks:
                whose = "hardware.world_size" if ranks == world_size else "world_size of its segment"
                raise InputError(f"steps[{index}].{key} has {len(value)} entries, {whose} is {ranks}")
