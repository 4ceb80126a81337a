"""Install wheels into the benchmark's own folder. The standard library alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from testbed.errors import InputError
from testbed.io import write_text


def install(wheels: Sequence[Path], folder: Path) -> None:
    """Install wheels into the benchmark's own `site`, without a network, and import from there from now on.

    What the last call installed from the same wheels stays.

    Raises:
        InputError: pip refuses one, as for another version of Python.
    """
    site, mark = folder / "site", folder / "site" / "installed.txt"
    installed = "".join(f"{wheel.name} {wheel.stat().st_size}\n" for wheel in wheels)
    if not mark.exists() or mark.read_text(encoding="utf-8") != installed:
        options = "-q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --upgrade".split()
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), *map(str, wheels)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip() or "pip failed").splitlines()[-1]
            raise InputError(f"--wheels {wheels[0].parent}: {sys.executable} cannot install them ({said})")
        write_text(mark, installed)
    sys.path.append(str(site))
