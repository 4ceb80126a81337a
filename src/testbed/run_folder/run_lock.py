"""The folder that a run writes into, held from its start to its end. No torch.

A lock keeps a second run out, and a handle tells whether the path still leads to the folder.

A path is only a name. Whoever renames or deletes the folder of a running run, or mounts something over it, would
else have it written anew, without its lock, where nobody looks for it or where another run has begun.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from testbed.errors import InputError, one_line, say

LOCK = ".lock"
LOCK_WAIT_S = 5.0
_HOLDER = b"process "  # how a lock file begins that says who holds it
_HANDLES = Path("/proc/self/fd")
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_handles: dict[Path, int] = {}  # folder -> the folder itself, opened
_locks: dict[Path, int] = {}  # folder -> the open file that its lock hangs on


class FolderGone(Exception):
    """The path of a run's folder leads to another one now, or nowhere."""


def acquire(directory: Path) -> None:
    """Create the run's folder, hold it and lock it until this process ends. Only rank 0 calls it.

    The kernel releases the lock of a process that is killed.

    Raises:
        InputError: the folder cannot be written, or another run is writing into it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        hold(directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe of that name must not be waited for
        _locks[directory] = os.open(by_handle(directory) / LOCK, flags, 0o644)
    except OSError as error:
        release(directory)
        raise InputError(
            f"--checkpoint_path {directory} cannot be written ({error.strerror or error}); choose another folder"
        ) from None
    if not _is_locked(directory):
        holder = _words_in(_locks[directory]).decode(errors="replace").strip() or "another process"
        release(directory)
        raise InputError(
            f"--checkpoint_path {directory} is being written by another run ({one_line(holder)}); wait until it has "
            "ended, or choose another folder"
        )
    with contextlib.suppress(OSError):  # a full disk: it only makes the other's refusal say more
        if _words_in(_locks[directory]).startswith((_HOLDER, b"\0")) or not os.fstat(_locks[directory]).st_size:
            os.ftruncate(_locks[directory], 0)
            os.pwrite(_locks[directory], _HOLDER + f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def lock_linked(folder: Path) -> None:
    """Lock a folder that is a link, to whatever it leads, until this process ends: another run may have one like it.

    Raises:
        InputError: another run has.
    """
    if not folder.is_symlink():
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        is_mine = _lock(descriptor, time.monotonic() + LOCK_WAIT_S)
    except OSError:  # a file system without locks
        is_mine = True
    if not is_mine:
        os.close(descriptor)
        raise InputError(
            f"{folder} leads to {folder.resolve()}, where another run writes; wait until it has ended, or give each "
            "run a folder of its own there"
        )
    _locks[folder] = descriptor


def _is_locked(directory: Path) -> bool:
    """Lock the file, which network file systems can do too, and the folder itself, whose lock nobody can delete. For a
    few seconds: a launcher restarts a run while the kernel still clears up the killed rank 0."""
    deadline_s = time.monotonic() + LOCK_WAIT_S
    try:
        if not _lock(_locks[directory], deadline_s):
            return False
    except OSError as error:  # locking is unsupported here; continue without it
        say(f"no lock on {directory} ({error.strerror or error}): start no second run in it", flush=True)
    try:
        return directory not in _handles or _lock(_handles[directory], deadline_s)
    except OSError:
        return True


def _lock(descriptor: int, deadline_s: float) -> bool:
    """Return whether the lock could be had before that moment of the monotonic clock. OSError: there are no locks
    here."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.1)


def _words_in(descriptor: int) -> bytes:
    with contextlib.suppress(OSError):
        return os.pread(descriptor, 200, 0)
    return b""


def release(directory: Path) -> None:
    """Release the locks while this process lives on. The file stays: it means nothing without the lock."""
    for kept in (_locks, _handles):
        for place in [place for place in kept if directory in (place, place.parent)]:
            os.close(kept.pop(place))


def hold(directory: Path) -> None:
    """Keep a handle of a folder, without a lock. A rank that does not see the folder, or may not list it, has none."""
    if directory not in _handles:
        with contextlib.suppress(OSError):
            _handles[directory] = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)


def check_held(directory: Path) -> None:
    """Check, before something is written under this path, that it still leads to the folder that is held, if one is.

    Raises:
        FolderGone: in the words of `why_gone`.
    """
    reason = why_gone(directory)
    if reason is not None:
        raise FolderGone(reason)


@contextlib.contextmanager
def writing_in(directory: Path) -> Iterator[Path]:
    """Check that the path leads to the held folder, and yield a path that leads there whatever happens meanwhile: the
    check of a long file's content takes a while. An OSError names the path that everybody knows.

    Raises:
        FolderGone: as `check_held`.
    """
    check_held(directory)
    place = by_handle(directory)
    try:
        yield place
    except OSError as error:
        if error.filename is not None:
            error.filename = str(error.filename).replace(str(place), str(directory), 1)
        raise


def why_gone(directory: Path) -> str | None:
    """Return one sentence that says what became of the held folder and how to go on; None: its path leads to it."""
    if directory not in _handles or _leads_to_held(directory, directory):
        return None
    name, now = one_line(str(directory)), "there is none now"
    if os.path.lexists(directory):
        now = "another folder has its name now" if directory.is_dir() else "something else has its name now"
    place = place_of(directory)
    if place is None:
        return (
            f"--checkpoint_path {name} was deleted or unmounted while the run wrote into it, and {now}; nothing is "
            "written there: begin again in a folder that stays, or mount it again and go on with --resume"
        )
    there = one_line(str(place))
    return (
        f"--checkpoint_path {name} was renamed to {there} while the run wrote into it, and {now}; all that was written "
        f"is there: go on with --checkpoint_path {there} --resume"
    )


def place_of(directory: Path) -> Path | None:
    """Return where the folder lies that was held as `directory`, whatever its name is now; None where no path leads to
    it. One that nobody holds lies where its path says."""
    if directory not in _handles or _leads_to_held(directory, directory):
        return directory
    with contextlib.suppress(OSError):  # no /proc: macOS
        place = (_HANDLES / str(_handles[directory])).readlink()
        if _leads_to_held(place, directory):
            return place
    return None


def by_handle(directory: Path) -> Path:
    """Return a path that leads to the held folder even after its name has gone to another one; the path itself where
    there is no such."""
    if directory not in _handles:
        return directory
    handle = _HANDLES / str(_handles[directory])
    return handle if handle.exists() else directory


def _leads_to_held(path: Path, directory: Path) -> bool:
    """Return whether a path leads to the folder that is held as `directory`. What cannot be found out is not denied:
    the write that follows will say what is wrong."""
    try:
        return os.path.samestat(path.stat(), os.fstat(_handles[directory]))
    except OSError as error:
        return error.errno not in _GONE


@contextlib.contextmanager
def dead_writers_lock(directory: Path, patience_s: float) -> Iterator[bool]:
    """Yields whether rank 0, which holds the folder's lock, is dead, and as long as that is so the lock is this rank's:
    no new start writes meanwhile. For `patience_s` it is looked at again. False where it cannot be known."""
    deadline_s = time.monotonic() + patience_s
    with contextlib.ExitStack() as opened:
        try:
            descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            opened.callback(os.close, descriptor)
            is_mine = _lock(descriptor, deadline_s)
        except OSError:  # no such file, or a file system without locks
            is_mine = False
        yield is_mine
