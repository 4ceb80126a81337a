"""Read a program's settings from the YAML files of W&B, MLflow and Lightning."""

from __future__ import annotations

import re

_LINE = re.compile(r"( *)([^\s:#-][^:\n]*):(?: +(.*))?")


def read_settings(text: str) -> dict[str, str]:
    """Return the scalars of block mappings by dotted name, as text: `training: {batch: 8}` gives training.batch.

    This is no reader of YAML. These programs write the numbers that matter as one `name: value` a line, among tags of
    Python classes that a safe reader refuses and tables of thousands of lines that it takes seconds for.
    """
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            continue
        while above and above[-1][0] >= len(match[1]):
            above.pop()
        above.append((len(match[1]), match[2].strip("'\" ")))
        if match[3] and len(above) < 20:
            found[".".join(name for _, name in above)] = match[3].strip("'\"")
    return found
