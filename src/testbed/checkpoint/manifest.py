"""Write and check the manifest of a checkpoint: size and SHA-256 of every file in its folder. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from testbed.errors import InputError, one_line, say
from testbed.io import is_within, open_regular, parse_json, read_regular, write_text

MANIFEST = "manifest.json"
HASHING_THREADS = 8  # files read at once: hashlib releases the interpreter's lock


def write_manifest(folder: Path) -> int:
    """List every file of a folder that is complete but for the manifest. Returns the sum of their bytes."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = hashes_of(folder, names)
    write_text(folder / MANIFEST, json.dumps({"files": files}, indent=1) + "\n")
    return sum(entry["bytes"] for entry in files.values())


def why_damaged(folder: Path) -> str | None:
    """Say why a folder is not the one that was written, by its manifest. None: it is whole.

    Sizes first, then SHA-256, several files at a time. A manifest can be forged with its files: so nothing in the
    folder, listed or not, may be a link that leads out or anything but a file.

    Raises:
        OSError: a file is there but cannot be read.
    """
    try:
        for path in folder.rglob("*"):
            if not path.is_dir() and not path.is_file() and path.exists():
                return f"{one_line(str(path.relative_to(folder)))} is a FIFO or a device, not a file"
            if path.is_symlink() and not is_within(path, folder):
                return f"{one_line(str(path.relative_to(folder)))} is a link that leads out of the checkpoint"
        recorded = _read_manifest(folder / MANIFEST)
        for name, entry in recorded.items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{one_line(name)} has {size:,} bytes, {MANIFEST} says {entry['bytes']:,}"
        total = sum(entry["bytes"] for entry in recorded.values())
        say(f"checking {len(recorded)} files, {total / 1e6:,.1f} MB, of {folder}", flush=True)
        for name, entry in hashes_of(folder, recorded).items():
            if entry["sha256"] != recorded[name]["sha256"]:
                return f"{one_line(name)} holds other bytes than were written (SHA-256)"
    except FileNotFoundError as error:
        return f"{one_line(Path(error.filename).name)} is missing"
    except ValueError as error:
        return str(error)
    return None


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return name -> {"bytes", "sha256"}. InputError: it is not a manifest. OSError: it cannot be read."""
    try:
        content = parse_json(read_regular(path), MANIFEST)
    except FileNotFoundError:
        raise InputError(f"{MANIFEST} is missing, so it was not finished") from None
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise InputError(f"{MANIFEST} does not list the files of a checkpoint")
    for name, entry in files.items():
        is_inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not is_inside or not isinstance(entry, dict) or type(entry.get("bytes")) is not int or "sha256" not in entry:
            raise InputError(f"{MANIFEST}: {name!r:.80} is not a file of a checkpoint with its size and hash")
    return files


def hashes_of(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of files, several at a time: name -> {"bytes", "sha256"}."""
    names = list(names)
    with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1), "hash") as pool:
        return dict(zip(names, pool.map(lambda name: _hash_of(directory / name), names), strict=True))


def _hash_of(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
