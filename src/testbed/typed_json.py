"""Check the content of a JSON file against a type: one sentence names the place of the first fault. No torch.

The types are TypedDicts, lists and unions whose values may carry a `msgspec.Meta`, such as those in metrics/fields/.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from testbed.errors import InputError
from testbed.io import read_json

LARGEST_COUNT = 2**63 - 1  # what an array of integers holds
_DEEPEST = 100  # lists and objects inside one another; a real file has six
_WORDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "an object",
}  # fmt: skip
_KEY = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[\]]+)")


def check(content: Any, kind: Any, may_hold_more: bool = False) -> Any:
    """Check what a JSON file holds, which takes less time than parsing it did.

    Args:
        kind: the type that it must have.
        may_hold_more: accept fields that `kind` does not name.

    Returns:
        The content as `kind`: an object of it where it is a dataclass, without the fields that it does not name.

    Raises:
        InputError: one sentence that begins with the place of a fault.
    """
    try:
        converted = msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise InputError(_sentence(content, kind, str(error))) from None
    if not may_hold_more and converted != content:
        for keys, name in _unknown_fields(content, converted):
            raise InputError(f"{_place(keys) or 'the file'} has no field {reprlib.repr(name)} in this version")
    return converted


def check_finite(content: Any) -> None:
    """Refuse numbers that JSON does not have, or that no array of integers holds, where no type says anything of them.

    Raises:
        InputError: one sentence that names the first.
    """
    for keys, value in _not_finite(content):
        raise InputError(f"{_place(keys)} is {_words_of_not_finite(value)}")


def read_checked(path: Path, check: Callable[[Any], None]) -> Any:
    """Return a JSON file that passes `check`. InputError, one sentence that begins with the path, when it cannot be
    read or does not."""
    content = read_json(path)
    try:
        check(content)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    return content


def _sentence(content: Any, kind: Any, message: str) -> str:
    """Say what msgspec found, with the value and in the words of JSON."""
    found = re.fullmatch(r"(.*?)(?: - at (`key` in )?`\$(.*)`)?", message, re.DOTALL)
    assert found is not None
    fault, is_of_a_key, path = found[1], found[2], found[3] or ""
    keys, value = _resolved(content, kind, message, _KEY.findall(path))
    where = _place(keys) or "the file"
    if is_of_a_key:
        return f"{where} has a field whose name is none of those it may have ({fault})"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", fault):
        return f"{where} lacks {missing[1]!r}"
    if type(value) in (int, float) and not _is_usable(value):
        return f"{where} is {_words_of_not_finite(value)}"
    wanted = re.fullmatch(r"Expected (.*?)(, got `.*`)?", fault)
    rule = f"it must be {_in_words(wanted[1])}" if wanted else "which is none of the values of this field"
    return f"{where} is {reprlib.repr(value)}, {rule}"


def _in_words(types: str) -> str:
    """Return msgspec's names of types, `float | null`, in the words of a sentence."""
    return re.sub("`(.*?)`", lambda found: " or ".join(_WORDS.get(each, each) for each in found[1].split(" | ")), types)


def _resolved(content: Any, kind: Any, message: str, found: list[tuple[str, str]]) -> tuple[tuple, Any]:
    """Return the keys that lead to a fault, and the value there. msgspec names no key of an object of equal values."""
    keys: list[Any] = []
    value = content
    for index, name in found:
        key: Any = int(index) if index.isdigit() else name
        if index == "...":
            place = tuple(keys)
            key = next((key for key in value if _fault_with(content, kind, place, {key: value[key]}) == message), index)
        keys.append(key)
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):  # a key that itself holds a dot or a bracket
            break
    return tuple(keys), value


def _fault_with(content: Any, kind: Any, keys: tuple, value: Any) -> str:
    try:
        msgspec.convert(_replaced(content, keys, value), kind)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _replaced(content: Any, keys: tuple, value: Any) -> Any:
    """Return `content` with another value at the place that `keys` lead to."""
    if not keys:
        return value
    copy = content.copy()
    copy[keys[0]] = _replaced(content[keys[0]], keys[1:], value)
    return copy


def _unknown_fields(content: Any, converted: Any, keys: tuple = ()) -> Iterator[tuple[tuple, str]]:
    """Yield the fields that msgspec left out, as no type names them."""
    if isinstance(content, dict):
        for name in content.keys() - converted.keys() if len(content) != len(converted) else ():
            yield keys, name
        members: Any = ((name, content[name], each) for name, each in converted.items())
    else:
        members = ((index, *pair) for index, pair in enumerate(zip(content, converted, strict=True)))
    for key, value, each in members:
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict | list)):
            yield from _unknown_fields(value, each, (*keys, key))


def _not_finite(value: Any, keys: tuple = ()) -> Iterator[tuple]:
    if len(keys) > _DEEPEST:
        raise InputError(f"{_place(keys[:3])} is nested more than {_DEEPEST} deep")
    if isinstance(value, float | int):
        if not _is_usable(value):
            yield (keys, value)
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from _not_finite(member, (*keys, key))
    elif isinstance(value, list | tuple):
        for index, member in enumerate(value):
            yield from _not_finite(member, (*keys, index))


def _is_usable(value: float) -> bool:
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= LARGEST_COUNT


def _words_of_not_finite(value: float) -> str:
    if isinstance(value, int):
        return f"{reprlib.repr(value)}: no count is that large"
    return f"{value}: a number in this file is finite, and what is unknown is null"


def _place(keys: tuple) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{_printable(key)}" for key in keys).lstrip(".")


def _printable(key: str) -> str:
    """Return a key, quoted if it would break the sentence that names it."""
    return key if key.isprintable() and len(key) <= 80 else reprlib.repr(key)
