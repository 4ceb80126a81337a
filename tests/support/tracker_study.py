"""Measure what a tracker costs whose server takes connections and never answers.

    cd tests
    PYTHONPATH=../src:. python -m support.tracker_study --track wandb --runs 6 --steps 1400 --into FILE.jsonl
    PYTHONPATH=../src:. python -m support.tracker_study --table --into FILE.jsonl

Within one run the tracker gets the rows of some steps and of others none (alternation.py). A run is a line of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from support.alternation import compared, in_words
from support.diagnosis_study import FLAGS, commit, read
from support.programs import PROGRAM, data_flags, write_token_files

SERVERS = {"wandb": "WANDB_BASE_URL", "mlflow": "MLFLOW_TRACKING_URI"}  # the variable with the address
GATED = """
import json, runpy, sys
from support.alternation import is_given, now
from testbed.metrics.trackers import _Channel
put, moments, (into, seed, *sys.argv) = _Channel.put, [], sys.argv[1:]
def gate(channel, row):
    moments.append(now())
    if is_given(len(moments) - 1, int(seed)):
        put(channel, row)
    if row[0] % 50 == 0:  # the channel may close before the last step
        open(into, "w").write(json.dumps(moments))
_Channel.put = gate
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(folder: Path, track: str, steps: int, address: str, seed: int) -> dict[str, Any]:
    """Train nano on one thread. Returns when each step handed over its row, and CPU seconds of what it started."""
    environment = {**os.environ, "HOME": str(folder), "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
    environment |= {SERVERS[track]: address}
    words = [sys.executable, "-c", GATED, folder / "moments.json", seed, PROGRAM, *FLAGS, "--run_type", "baseline"]
    words += [*data_flags(write_token_files(folder, train_tokens=200_000)), "--checkpoint_path", folder / "run"]
    words += ["--track", track, "--max_train_steps", steps]
    cpu_s: dict[int, float] = {}
    with subprocess.Popen(list(map(str, words)), env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    cpu_s[child.pid] = sum(child.cpu_times()[:2])
            time.sleep(0.2)
    assert process.returncode == 0
    for left in filter(psutil.pid_exists, cpu_s):  # the run does not wait for a library that hangs
        psutil.Process(left).kill()
    moments = json.loads((folder / "moments.json").read_text())
    found = {"track": track, "seconds": moments[-1][0] - moments[0][0], "library_cpu_s": sum(cpu_s.values())}
    return {**found, "commit": commit(), "longer": compared(moments, seed)}


def sentences(runs: list[dict[str, Any]]) -> list[str]:
    """Return what a file says of each tracker in it."""
    told = []
    for track in dict.fromkeys(run["track"] for run in runs):
        of_it = [run for run in runs if run["track"] == track]
        seconds, cpu_s = (sum(run[name] for run in of_it) for name in ("seconds", "library_cpu_s"))
        longer = in_words([run["longer"] for run in of_it])
        told.append(
            f"Steps whose rows go to {track} take longer by {longer}. "
            f"Its own processes used {cpu_s:.1f} s of CPU in {seconds:.0f} s of training."
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--track", choices=SERVERS, default="wandb")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument(
        "--steps",
        type=int,
        default=1400,
        help="20 take a second, and W&B gives a server up after 90 s (default: %(default)s)",
    )
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    num_done = sum(run["track"] == asked.track for run in read(asked.into))
    for seed in range(num_done, num_done if asked.table else asked.runs):
        with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
            found = run(Path(name), asked.track, asked.steps, "http://{}:{}".format(*server.getsockname()), seed)
        with asked.into.open("a") as file:
            file.write(json.dumps(found) + "\n")
    print("\n".join(sentences(read(asked.into))))


if __name__ == "__main__":
    main()
