"""Break copies of real files in random ways, and count what the audit does not survive."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from testbed.audit.claims import audit
from testbed.errors import Failure, InputError
from testbed.experiments.field_audit.material import COMPANION, Material

LONGEST = 64 << 10  # bytes of a file that are kept
HEAD = 16 << 10  # of them from its beginning, where a log says what it is
SLOW_S = 10.0
MOST_MUTATIONS = 4
OF_FOLDERS = ("mlflow", "wandb", "lightning")  # kinds whose reader looks at the files around


def mutate(materials: Sequence[Material], folder: Path, number: int, seed: int) -> dict[str, Any]:
    """Audit `number` broken files, and return how many were read or refused, and each traceback or slow file."""
    rng = random.Random(seed)
    wholes = [material for material in materials if material.kind != COMPANION]
    counted: dict[str, Any] = {"files": 0, "read": 0, "refused": 0, "tracebacks": [], "slow": []}
    for _ in range(number):
        material = rng.choice(wholes)
        counted["files"] += 1
        with TemporaryDirectory() as temporary:
            path = _copy(material, folder, Path(temporary), rng)
            typed = path if rng.random() < 0.5 else Path(temporary)
            where, start = f"{material.repository}/{material.path}", time.monotonic()
            try:
                audit([typed])
                counted["read"] += 1
            except (InputError, Failure):
                counted["refused"] += 1
            except Exception as error:  # what is counted
                counted["tracebacks"].append(f"{where}: {type(error).__name__}: {error}")
            if time.monotonic() - start > SLOW_S:
                counted["slow"].append(where)
    return counted


def _copy(material: Material, folder: Path, temporary: Path, rng: random.Random) -> Path:
    """Copy a file, and those around it where its reader looks at them; break one of the copies."""
    source = material.place(folder)
    into = temporary / "run"
    if material.kind in OF_FOLDERS:
        shutil.copytree(source.parent, into)
    else:
        into.mkdir()
    (into / source.name).write_bytes(_window(source.read_bytes(), rng))
    broken = rng.choice(sorted(path for path in into.rglob("*") if path.is_file()))
    content = broken.read_bytes()
    for _ in range(rng.randint(1, MOST_MUTATIONS)):
        content = rng.choice(MUTATIONS)(content, rng)
    broken.write_bytes(content)
    return into / source.name


def _window(content: bytes, rng: random.Random) -> bytes:
    if len(content) <= LONGEST:
        return content
    start = rng.randrange(HEAD, len(content) - (LONGEST - HEAD) + 1)
    return content[:HEAD] + content[start : start + LONGEST - HEAD]


def _flip(content: bytes, rng: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(rng.randint(1, 20) if found else 0):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def _cut(content: bytes, rng: random.Random) -> bytes:
    ends = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return content[ends[0] : ends[1]] if rng.random() < 0.3 else content[: ends[0]] + content[ends[1] :]


def _lines(change: Callable[[list[bytes], random.Random], None]) -> Callable[[bytes, random.Random], bytes]:
    def mutation(content: bytes, rng: random.Random) -> bytes:
        lines = content.split(b"\n")
        for _ in range(rng.randint(1, 10)):
            change(lines, rng)
        return b"\n".join(lines)

    return mutation


def _drop(lines: list[bytes], rng: random.Random) -> None:
    if lines:
        del lines[rng.randrange(len(lines))]


def _double(lines: list[bytes], rng: random.Random) -> None:
    if lines:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))


def _swap(lines: list[bytes], rng: random.Random) -> None:
    if lines:
        one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[one], lines[other] = lines[other], lines[one]


def _digits(content: bytes, rng: random.Random) -> bytes:
    return content.replace(b"%d" % rng.randrange(10), rng.choice((b"", b"9" * 30, b"-", b".", b"nan", b"1e999", b"0")))


def _utf_16(content: bytes, rng: random.Random) -> bytes:
    return content.decode("utf-8", errors="replace").encode(rng.choice(("utf-16", "utf-16-le", "utf-32")))


def _line_ends(content: bytes, rng: random.Random) -> bytes:
    return content.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\x00", b"", b"\n\n")))


def _noise(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    noise = rng.choice((b"\x00" * 100, b"\xff\xfe", b"|" * 300, b"\x1b[31m", b"9" * 500, b"\xef\xbb\xbf", b"{" * 2000))
    return content[:place] + noise + content[place:]


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip, _cut, _lines(_drop), _lines(_double), _lines(_swap), _digits, _utf_16, _line_ends, _noise,
)  # fmt: skip
