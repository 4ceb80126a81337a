"""Read the file of --config by its suffix: JSON, TOML, YAML, or a config of nanoGPT. No torch.

Values are checked by the flags, not here. TOML says numbers and switches as JSON does. A scalar of YAML is kept as the
text that stands there, but for null, true and false: YAML 1.1 would read `on` as true, 1e-4 as text and 1:30 as 90.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from testbed.config.nanogpt_config import nanogpt_flags
from testbed.errors import InputError, one_line
from testbed.io import parse_json, read_whole

_MOST_BYTES = 1 << 16  # of what a person writes; a parser takes hours and all the memory for what a disk holds
_MOST_WORDS = 16  # of a list in YAML
# YAML 1.2, 10.3.2: what plain words mean
_PLAIN = {"~": None, "": None} | {
    form(word): value
    for word, value in (("null", None), ("true", True), ("false", False))
    for form in (str.lower, str.title, str.upper)
}


def read_config(path: Path, name: str, typed: Mapping[str, Any]) -> Any:
    """Return what a file holds. InputError, one sentence that begins with `name`, where it cannot be read.

    Args:
        name: what the file is called in the sentence.
        typed: flags on the command line and their values, to which defaults of nanoGPT give way.
    """
    content, suffix = read_whole(path, name), path.suffix.lower()
    if suffix not in _READERS:
        return parse_json(content, name, keys_once=True)
    kind, read = _READERS[suffix]
    if len(content) > _MOST_BYTES:
        raise InputError(
            f"{name} has {len(content):,} bytes, and {kind} has at most {_MOST_BYTES:,}; keep the settings"
        )
    try:
        found = read(content.decode("utf-8-sig"), typed)
        json.dumps(found, ensure_ascii=False, default=str).encode()
        return found
    # a ValueError: tomllib's error, ours, and that of text that is not UTF-8
    except (ArithmeticError, SyntaxError, ValueError) as error:
        raise InputError(f"{name} is not {kind} that can be read: {one_line(str(error), 200)}") from None
    except (MemoryError, RecursionError):  # the first is of Python's own parser
        raise InputError(f"{name} is not {kind} that can be read: it is nested too deeply") from None


def _flat_yaml(text: str, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return names and values of a YAML mapping. InputError where it is something else, or has a name twice.

    Nothing is constructed, and of what aliases name at most a few words are copied, so that a file can neither run code
    nor grow.
    """
    import yaml  # a tenth of a second that only such a file costs

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise InputError(" ".join(str(error).replace('in "<unicode string>", ', "in ").split())) from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise InputError("it must hold lines of NAME: VALUE")
    found: dict[str, Any] = {}
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise InputError(f"line {key.start_mark.line + 1} has no name before its colon")
        if key.value in found:
            raise InputError(f"{key.value!r} stands there twice; keep one")
        if isinstance(value, yaml.ScalarNode):
            found[key.value] = _PLAIN.get(value.value, value.value) if value.style is None else value.value
        else:  # the caller says what it thinks of sections and lists
            words = value.value if isinstance(value, yaml.SequenceNode) and len(value.value) <= _MOST_WORDS else [None]
            found[key.value] = [word.value if isinstance(word, yaml.ScalarNode) else ... for word in words]
    return found


_READERS: dict[str, tuple[str, Callable[[str, Mapping[str, Any]], Any]]] = {
    ".toml": ("TOML", lambda text, _: tomllib.loads(text)),
    ".yaml": ("YAML", _flat_yaml),
    ".yml": ("YAML", _flat_yaml),
    ".py": ("a config of nanoGPT", nanogpt_flags),
}
