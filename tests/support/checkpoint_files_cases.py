"""Share cases among the tests of checkpoint files."""

from __future__ import annotations

from pathlib import Path


def flip_a_bit(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
