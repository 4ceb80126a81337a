"""JSON out of a file that anybody may have written: what it holds, or one sentence that says what is wrong with it."""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testbed.regular_file import read_regular
from testbed.typed_paths import missing

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # JSON can spell one half alone, which no text can be written with


def read_json(path: Path, name: str | None = None) -> Any:
    """Whatever a JSON file holds. ValueError, one sentence that begins with `name`, when it cannot be read as JSON.

    Args:
        name: what the file is called in the sentence (default: its path).
    """
    name = str(path) if name is None else name
    try:
        content = read_regular(Path(path))
    except FileNotFoundError:
        raise ValueError(f"{name} {missing(Path(path))}") from None
    except IsADirectoryError:
        raise ValueError(f"{name} is a folder, not a file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ValueError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse_json(content, name)


def parse_json(content: bytes, name: str) -> Any:
    """The value that the bytes of a JSON text stand for; a byte order mark may come first. Errors as in `read_json`."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not JSON: it is not UTF-8 text") from None
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError:
        raise ValueError(f"{name} is not JSON that can be read: it holds half of a surrogate pair") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError:  # Python reads no number of more than 4,300 digits
        raise ValueError(f"{name} cannot be read: it holds a number with thousands of digits") from None
    except RecursionError:
        raise ValueError(f"{name} is not JSON that can be read: it is nested too deeply") from None


@contextlib.contextmanager
def holding_together(name: object) -> Iterator[None]:
    """Whatever a file without a schema does to the code that uses its content becomes one sentence that names the file.

    A ValueError that names it already passes as it is.

    Raises:
        ValueError: the content is not what the code inside needs.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, ValueError) and str(name) in str(error):
            raise
        if isinstance(error, KeyError):
            fault = f"lacks {reprlib.repr(error.args[0])}"
        else:
            fault = f"does not hold together ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise ValueError(f"{name} {fault}") from None
