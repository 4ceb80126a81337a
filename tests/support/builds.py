"""Keep what PyTorch has built of DeepSpeed's C++, a minute and more, from one run of the suite to the next."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "TORCH_EXTENSIONS_DIR"


@contextlib.contextmanager
def own_builds(folder: Path) -> Iterator[None]:
    """Let extensions be built in a folder of this run, which a killed run cannot leave locked for others.

    It begins with those of the folder that scripts/maintain/environment.sh names, and gives that one what it lacks.
    """
    kept = Path(os.environ.get(VARIABLE) or Path(sys.prefix) / "torch_extensions")
    copy_builds(kept, folder)
    os.environ[VARIABLE] = str(folder)
    yield
    with contextlib.suppress(OSError):  # it need not be ours to write into
        copy_builds(folder, kept)


def copy_builds(source: Path, target: Path) -> None:
    """Copy each extension that was built to its end, unless the target's is as new; at once, as others may copy it
    too."""
    for built in {library.parent for library in source.glob("*/*.so")}:
        if (built / "lock").exists() or _built_at(target / built.name) >= _built_at(built):
            continue
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target) as folder:
            copy = shutil.copytree(built, Path(folder) / built.name)  # with the times, by which ninja knows it
            with contextlib.suppress(OSError):
                if (target / built.name).exists():  # of an earlier version
                    (target / built.name).rename(Path(folder) / "earlier")
                copy.rename(target / built.name)


def _built_at(folder: Path) -> float:
    return max((library.stat().st_mtime for library in folder.glob("*.so")), default=0.0)
