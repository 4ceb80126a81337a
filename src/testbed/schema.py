"""Whether a result file is what its JSON Schema, one of those beside this module, says. training_metrics.json has rules
of its own (metrics_file.py): it is read in four versions and holds thousands of rows."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from testbed.json_file import read_json

LONGEST_MESSAGE = 160  # jsonschema prints the value that breaks a rule, however long it is


def check_schema(content: Any, schema_file: str) -> None:
    """Raise ValueError, one sentence that names the place, unless `content` follows the schema and is finite.

    Args:
        schema_file: its name beside this module, such as "peers.schema.json".
    """
    from jsonschema.exceptions import best_match

    error = best_match(_validator(schema_file).iter_errors(content))
    if error is not None:
        message = error.message if len(error.message) < LONGEST_MESSAGE else f"breaks the rule {error.validator}"
        raise ValueError(f"{'.'.join(map(str, error.absolute_path)) or 'the file'}: {message}")
    try:
        json.dumps(content, allow_nan=False)  # NaN and infinity are numbers to a schema, and no JSON
    except ValueError:
        raise ValueError("it holds a number that is not finite") from None


def read_checked(path: Path, check: Callable[[Any], None]) -> Any:
    """A JSON file that passes `check`. ValueError, one sentence that begins with the path, when it cannot be read or
    does not."""
    content = read_json(path)
    try:
        check(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return content


@functools.cache
def _validator(schema_file: str) -> Any:
    import jsonschema  # 0.15 s, which a program's --help does not owe

    schema = json.loads(resources.files("testbed").joinpath(schema_file).read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema)
