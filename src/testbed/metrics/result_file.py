"""Read, check and write a JSON file of results whose fields stand in a class."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed import typed_json
from testbed.errors import InputError
from testbed.io import result_head, write_text


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
        return typed_json.read_checked(path / self.name if path.is_dir() else path, self.check)

    def write(self, path: Path, content: dict[str, Any]) -> None:
        """Add the derived fields, check the whole, and replace `path` in one move."""
        content = {**content, **self.derived(content)}
        self.check(content)
        write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def check(self, content: Any) -> None:
        """Raise InputError, one sentence that names the place, unless `content` is a whole file of this version."""
        typed_json.check(content, self.fields)
        typed_json.check_finite(content)
        if content["schema_version"] != self.version:
            raise InputError(f"schema_version is {content['schema_version']!r}, known is {self.version}")
        self.check_rows(content)
