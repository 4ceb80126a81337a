"""Read, check and write a JSON file of results whose fields stand in a class."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.io import check_with, read_checked, result_head, write_text
from testbed.metrics.schema import object_schema


@dataclass(frozen=True)
class ResultFile:
    """A kind of file.

    Attributes:
        fields: a TypedDict with the types and rules of the fields (`metrics.fields.types`).
        derived: returns the fields that follow from the others; they are worked out again at each write.
        check_rows: raises InputError for what no type can say.
    """

    name: str
    version: str
    fields: type
    derived: Callable[[dict[str, Any]], dict[str, Any]]
    check_rows: Callable[[dict[str, Any]], None] = lambda content: None

    def head(self, command_line: str) -> dict[str, Any]:
        """Return the first fields of a new file."""
        return result_head(self.version, command_line)

    def read(self, path: Path) -> dict[str, Any]:
        """Return the content of a file, or of the one in a folder. InputError, one sentence that names the file."""
        return read_checked(path / self.name if path.is_dir() else path, self.check)

    def write(self, path: Path, content: dict[str, Any]) -> None:
        """Add the derived fields, check the whole, and replace `path` in one move."""
        content = {**content, **self.derived(content)}
        self.check(content)
        write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def check(self, content: Any) -> None:
        """Raise InputError, one sentence that names the place, unless `content` is a whole file of this version."""
        check_with(_validator(self.fields, self.version), content)
        self.check_rows(content)


@functools.cache
def _validator(fields: type, version: str) -> Any:
    import jsonschema  # 0.15 s, which a program's --help does not owe

    schema = object_schema(fields)
    schema["properties"]["schema_version"] = {"const": version}
    return jsonschema.Draft202012Validator(schema)
