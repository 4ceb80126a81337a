"""Make the JSON schema of training_metrics.json, and the tables of docs/metrics_file.md, from the classes in fields/.

A field's type carries the rules for its values. A field without a meaning shares the row of the field before it.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from testbed.metrics.fields.earlier import MetricsFile1, MetricsFile20
from testbed.metrics.fields.metrics_file import SCHEMA_VERSION, SECTIONS, TrainingMetrics
from testbed.metrics.fields.types import Rule

_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
# The reason stands in a file exactly when the run failed.
_FAILURE_HAS_A_REASON = {
    "if": {"properties": {"status": {"const": "failed"}}},
    "then": {"properties": {"failure": {"type": "object"}}},
    "else": {"properties": {"failure": {"type": "null"}}},
}


@dataclass(frozen=True)
class Field:
    """A field of a class, taken apart."""

    name: str
    kind: Any  # without what follows
    is_optional: bool
    is_nullable: bool
    rules: dict[str, Any]
    meaning: str | None

    @property
    def row_class(self) -> Any:
        """Return the class of the rows that a list holds, or of the object itself; None for plain values."""
        kind = get_args(self.kind)[0] if get_origin(self.kind) is list else self.kind
        return kind if is_typeddict(kind) else None


def fields_of(kind: type) -> list[Field]:
    """Return the fields of a class, in their order."""
    return [_field(name, hint) for name, hint in get_type_hints(kind, include_extras=True).items()]


def schema() -> dict[str, Any]:
    """Return the JSON schema of all versions; `$defs/step` is a row of `steps`."""
    ours = _with_version(object_schema(TrainingMetrics), SCHEMA_VERSION) | _FAILURE_HAS_A_REASON
    steps = ours["properties"]["steps"]
    step, steps["items"] = steps["items"], {"$ref": "#/$defs/step"}
    name = "v" + SCHEMA_VERSION.replace(".", "_")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "training_metrics.json",
        "description": "The version that $ref names is written, the others are only read.",
        "$ref": f"#/$defs/{name}",
        "$defs": {
            name: ours,
            "step": step,
            "v2_0": _with_version(object_schema(MetricsFile20, is_open=True), "2.0"),
            "v1": object_schema(MetricsFile1, is_open=True),
        },
    }


def _field(name: str, hint: Any) -> Field:
    is_optional = get_origin(hint) is NotRequired
    if is_optional:
        (hint,) = get_args(hint)
    kind, notes = _without_notes(hint)
    is_nullable = get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)
    if is_nullable:
        (value,) = (each for each in get_args(kind) if each is not type(None))
        kind, of_value = _without_notes(value)
        notes += of_value
    return Field(
        name=name,
        kind=kind,
        is_optional=is_optional,
        is_nullable=is_nullable,
        rules={note.name: note.value for note in notes if isinstance(note, Rule)},
        meaning=next((note for note in notes if isinstance(note, str)), None),
    )


def _without_notes(hint: Any) -> tuple[Any, list[Any]]:
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        return kind, notes
    return hint, []


def object_schema(kind: type, is_open: bool = False) -> dict[str, Any]:
    """Return the JSON schema of a TypedDict whose fields may carry rules."""
    fields = fields_of(kind)
    required = [field.name for field in fields if not field.is_optional]
    return {
        "type": "object",
        **({} if is_open else {"additionalProperties": False}),
        **({"required": required} if required else {}),
        "properties": {field.name: _value(field, is_open) for field in fields},
    }


def _with_version(of_file: dict[str, Any], version: str) -> dict[str, Any]:
    of_file["properties"]["schema_version"] = {"const": version}
    return of_file


def _value(field: Field, is_open: bool) -> dict[str, Any]:
    """Return the schema of a field's values."""
    if field.kind is Any:
        return {}
    if get_origin(field.kind) is Literal:
        return {"enum": [*get_args(field.kind), *([None] if field.is_nullable else [])]}
    if is_typeddict(field.kind):
        found = object_schema(field.kind, is_open)
    else:
        found = {"type": _KINDS[get_origin(field.kind) or field.kind], **field.rules}
        if found["type"] == "array":
            found["items"] = _value(_field("", get_args(field.kind)[0]), is_open)
        elif get_args(field.kind)[1:] not in ((), (Any,)):  # dict[str, ...]
            found["additionalProperties"] = _value(_field("", get_args(field.kind)[1]), is_open)
    if field.is_nullable:
        found["type"] = [found["type"], "null"]
    return found


def sections() -> str:
    """Return the tables of all fields, as docs/metrics_file.md has them."""
    lines: list[str] = []
    rows: list[tuple[list[str], str]] = []
    for field in fields_of(TrainingMetrics):
        if field.name in SECTIONS:
            lines += [*_table(rows), ""] if rows else []
            title, sentence = SECTIONS[field.name]
            lines += [f"### {title}", "", *([sentence, ""] if sentence else [])]
            rows = []
        for name, each in _with_members("", field):
            shown = f"`{name}`" + "†" * each.is_optional
            if each.meaning is None:
                rows[-1][0].append(shown)
            else:
                rows.append(([shown], each.meaning))
    return "\n".join([*lines, *_table(rows)]) + "\n"


def _table(rows: list[tuple[list[str], str]]) -> list[str]:
    return ["| field | meaning |", "|---|---|", *(f"| {', '.join(names)} | {meaning} |" for names, meaning in rows)]


def _with_members(prefix: str, field: Field) -> Iterator[tuple[str, Field]]:
    """Yield a field and the fields inside it, with the names that the page gives them."""
    yield prefix + field.name, field
    if field.row_class is not None:
        is_list = get_origin(field.kind) is list
        for member in fields_of(field.row_class):
            yield from _with_members(f"{prefix}{field.name}{'[]' if is_list else ''}.", member)
