"""Make the tables of docs/metrics_file.md from the classes in fields/.

A field without a meaning shares the row of the field before it.
"""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from testbed.metrics.fields.metrics_file import SECTIONS, TrainingMetrics


@dataclass(frozen=True)
class Field:
    """A field of a class, taken apart."""

    name: str
    kind: Any  # without what follows
    is_optional: bool
    meaning: str | None

    @property
    def row_class(self) -> Any:
        """Return the class of the rows that a list holds, or of the object itself; None for plain values."""
        kind = get_args(self.kind)[0] if get_origin(self.kind) is list else self.kind
        return kind if is_typeddict(kind) else None


def fields_of(kind: type) -> list[Field]:
    """Return the fields of a class, in their order."""
    return [_field(name, hint) for name, hint in get_type_hints(kind, include_extras=True).items()]


def _field(name: str, hint: Any) -> Field:
    is_optional = get_origin(hint) is NotRequired
    if is_optional:
        (hint,) = get_args(hint)
    kind, notes = _without_notes(hint)
    if get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind):
        (value,) = (each for each in get_args(kind) if each is not type(None))
        kind, of_value = _without_notes(value)
        notes += of_value
    return Field(name, kind, is_optional, meaning=next((note for note in notes if isinstance(note, str)), None))


def _without_notes(hint: Any) -> tuple[Any, list[Any]]:
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        return kind, notes
    return hint, []


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
