#!/usr/bin/env python3
"""Check that this node can run ranks of src/gpt2.py: packages, devices, the data files, the run's folder.

launch.sh starts it once on every node of a job, before any rank: what is missing is said once, in a sentence that names
the node and the way out, instead of by every rank after minutes. The program's flags follow after "--".
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser


def faults(flags: list[str], ranks: int, gpus: int) -> Iterator[str]:
    """Yield what keeps this node from running `ranks` ranks with these flags, one sentence each."""
    if sys.version_info < (3, 11):  # noqa: UP036  # a node may have any Python
        yield f"{sys.executable} is Python {sys.version.split()[0]}; 3.11 or newer is needed, name one with PYTHON"
        return
    try:
        from testbed.config.flags import parse_command_line
        from testbed.config.run_types import STRATEGIES
        from testbed.data.shards import is_at_hand

        values = parse_command_line(flags).values
    except ModuleNotFoundError as error:
        yield f"{sys.executable} has no package {error.name}: pip install -r requirements.txt, or set PYTHON to another"
        return
    except ValueError as error:
        yield str(error)
        return
    yield from _missing_packages(values["run_type"], STRATEGIES[values["run_type"]].engine)
    for name in ("train_data_path", "val_data_path"):
        path = Path(values[name])
        if not is_at_hand(path) or (path.is_file() and not os.access(path, os.R_OK)):
            yield (
                f"--{name} {path.absolute()} is not a readable file here; make it (download_data.py, "
                "preprocess_small.py), or put it on a file system that the nodes share"
            )
    yield from _unwritable(Path(values["checkpoint_path"]))
    if gpus and values["device"] != "cpu":
        yield from _missing_devices(gpus if STRATEGIES[values["run_type"]].devices == "all" else ranks)


def _missing_packages(run_type: str, engine: str) -> Iterator[str]:
    try:
        import torch  # noqa: F401  # found is not enough: its libraries must load
    except Exception as error:
        yield f"{sys.executable} cannot import torch ({error}): pip install -r requirements.txt, or set PYTHON"
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        yield (
            f"{sys.executable} has no deepspeed, which RUN_TYPE={run_type} is: pip install deepspeed, or RUN_TYPE=fsdp"
        )


def _unwritable(folder: Path) -> Iterator[str]:
    shared = "give one on a file system that all nodes share, such as your scratch folder"
    if not folder.is_dir():
        yield f"RUN_DIR={folder} was made by the first node and is not to be seen here; {shared}"
        return
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield f"RUN_DIR={folder} cannot be written here ({error.strerror}); {shared}"


def _missing_devices(needed: int) -> Iterator[str]:
    if "torch" not in sys.modules:
        return  # said already
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        yield (
            f"{needed} GPUs were asked for and PyTorch {torch.__version__} finds {found}: load the driver's module in "
            'site.env, install a PyTorch built for it, or train on the CPU with GPT2_EXTRA_ARGS="--device cpu"'
        )


def main() -> int:
    parser = FlagParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="that this node shall run")
    parser.add_argument("--gpus", type=int, required=True, help="that Slurm gave on each node")
    parser.add_argument("flags", nargs="*", help="of src/gpt2.py, after --")
    asked = parser.parse_args()
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    found = list(faults(asked.flags, asked.ranks, asked.gpus))
    for fault in found:
        print(f"{node}: {fault}", file=sys.stderr, flush=True)
    return 2 if found else 0


if __name__ == "__main__":
    sys.exit(main())
