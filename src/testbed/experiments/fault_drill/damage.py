"""Damage files: a checkpoint, the metrics, halves left behind, a disk that is full."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from testbed.checkpoint.manifest import MANIFEST
from testbed.experiments.fault_drill.faults import Fault
from testbed.run_files import CHECKPOINTS, METRICS

TMPFS, FILE_SIZE_LIMIT = "tmpfs", "RLIMIT_FSIZE"
LEAST_ROOM = 64 * 1024  # bytes: less, and not even the first lines of a log would fit
_CHECKPOINT = re.compile(r"step_\d+")


def damage_files(fault: Fault, directory: Path) -> str | None:
    """Do to the files of an ended run what the fault says. Returns what was done, None where nothing was there."""
    saved = _saved(directory)
    if fault.kind == "corrupt_metrics":
        return _damage(directory / METRICS, fault.form, fault) if (directory / METRICS).exists() else None
    if not saved:
        return None
    if fault.kind == "half_written_temporary":
        return _leave_halves(saved[-1], directory, fault)
    files = sorted(path for path in saved[-1].rglob("*") if path.is_file())
    return _damage(files[int(fault.shares[0] * len(files))], fault.form, fault)


def _saved(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / CHECKPOINTS).glob("step_*") if _CHECKPOINT.fullmatch(path.name))


def newest_but_one(directory: Path) -> int | None:
    """Return the step of the last checkpoint before the newest, None where that is the only one."""
    steps = [int(path.name.removeprefix("step_")) for path in _saved(directory)]
    return steps[-2] if len(steps) > 1 else None


def _damage(path: Path, form: str | None, fault: Fault) -> str:
    content = path.read_bytes()
    place = int(fault.shares[1] * len(content))
    said = f"{path.parent.name}/{path.name}: {form}"
    if form == "removed":
        path.unlink()
    elif form == "one bit":
        bit = int(fault.shares[1] * len(content) * 8) % 8
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        said += f", bit {bit} of byte {place:,} of {len(content):,}"
    else:
        damaged = {
            # the manifest's hash stands nowhere, and without its last line feed it would still be the same JSON
            "1 byte shorter": content[:-2] + content[-1:] if path.name == MANIFEST else content[:-1],
            "half": content[:place],
            "empty": b"",
            "garbage": bytes(255 - byte for byte in content),
            "other JSON": json.dumps({"steps": "none"}).encode(),
        }
        assert form is not None, "a fault of a file has a form"
        path.write_bytes(damaged[form])
        said += f", {len(damaged[form]):,} of {len(content):,} bytes"
    return said


def _leave_halves(newest: Path, directory: Path, fault: Fault) -> str:
    """Leave what a kill in the middle of a write leaves: a checkpoint of the next step, and a metrics file, cut off."""
    step = int(newest.name.rpartition("_")[2]) + 1
    temporary = newest.with_name(f".step_{step:06d}.tmp")
    shutil.copytree(newest, temporary, dirs_exist_ok=True)
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    kept = int(fault.shares[0] * len(files))
    for path in files[kept + 1 :]:
        path.unlink()
    os.truncate(files[kept], int(fault.shares[1] * files[kept].stat().st_size))
    metrics = directory / METRICS
    content = metrics.read_bytes() if metrics.exists() else b"{}"
    half = directory / f".{METRICS}.999999.tmp"  # a process number that no machine of today has given out
    half.write_bytes(content[: int(fault.shares[1] * len(content))])
    return f"{temporary.name} with {kept + 1} of {len(files)} files, {half.name} with {half.stat().st_size:,} bytes"


class SmallDisk:
    """Make a folder with room for `num_bytes`, until `make_room`.

    `method` tmpfs: a file system of that size, mounted on the folder; writing ends with ENOSPC as on any full disk.
    RLIMIT_FSIZE, where mounting is not allowed: no file may be longer, and writing ends with EFBIG.
    """

    def __init__(self, directory: Path, num_bytes: int, method: str):
        self.directory = directory
        self.method = method
        self.num_bytes = max(LEAST_ROOM, num_bytes)

    @property
    def file_size_limit(self) -> int | None:
        return self.num_bytes if self.method == FILE_SIZE_LIMIT else None

    def __enter__(self) -> SmallDisk:
        self.directory.mkdir(parents=True)
        if self.method == TMPFS:
            _mount(f"size={self.num_bytes // 1024}k,mode=700", self.directory)
        return self

    def make_room(self) -> None:
        """Let everything fit from now on."""
        if self.method == TMPFS:
            _mount("remount,size=4g", self.directory)
        else:
            self.method = "none"

    def __exit__(self, *_: object) -> None:
        if self.method == TMPFS:
            subprocess.run(["umount", "--lazy", str(self.directory)], check=True, capture_output=True)


def _mount(options: str, directory: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "fault_drill", str(directory)]
    subprocess.run(command, check=True, capture_output=True)


def disk_full_backend() -> str:
    """Return tmpfs where this process may mount one, else RLIMIT_FSIZE."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(OSError, subprocess.CalledProcessError),
        SmallDisk(Path(folder) / "disk", LEAST_ROOM, TMPFS),
    ):
        return TMPFS
    return FILE_SIZE_LIMIT


@contextlib.contextmanager
def folder_of_run(fault: Fault, directory: Path, needed_bytes: int, method: str) -> Iterator[SmallDisk | None]:
    """Yield the small disk that holds the run's folder, None where the fault is no full disk."""
    if fault.kind != "disk_full":
        directory.mkdir(parents=True)
        yield None
        return
    with SmallDisk(directory, int(fault.shares[0] * needed_bytes), method) as disk:
        yield disk
