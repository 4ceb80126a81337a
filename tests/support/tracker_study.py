"""Measure what a tracker costs whose server takes connections and never answers: runs without and with it in turn.

cd tests
PYTHONPATH=../src:. python -m support.tracker_study --track wandb --pairs 5 --into FILE.jsonl
PYTHONPATH=../src:. python -m support.tracker_study --pairs 0 --into FILE.jsonl    # the table alone
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import psutil

from support.diagnosis_study import FLAGS, commit, read
from support.programs import PROGRAM, data_flags, write_token_files
from testbed.analysis.statistics import compare, median_interval
from testbed.metrics.file import read_metrics

SERVERS = {"wandb": "WANDB_BASE_URL", "mlflow": "MLFLOW_TRACKING_URI"}  # the variable with the address
RUN_S, START_UP_S = 60.0, 7.0  # of a run; the part of it that trains no step, about
QUANTITIES = {"step_s": "median step", "cpu_s": "CPU, with all that it starts", "wall_s": "start of the process to end"}


def run(folder: Path, track: str | None, steps: int, address: str) -> dict:
    """Train nano on one thread. Returns the seconds of QUANTITIES."""
    environment = {**os.environ, "HOME": str(folder), "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}
    words = [sys.executable, PROGRAM, *FLAGS, *data_flags((folder / "train.bin", folder / "val.bin"))]
    words += ["--run_type", "baseline", "--max_train_steps", steps, "--checkpoint_path", folder / "run", "--overwrite"]
    if track:
        environment[SERVERS[track]], words = address, [*words, "--track", track]
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(list(map(str, words)), env=environment, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - start_s
    for process in psutil.wait_procs(psutil.Process().children(), timeout=10)[1]:  # what the run left behind
        process.kill()
        process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    step_s = read_metrics(folder / "run" / "training_metrics.json")["timing"]["step_time_p50_sec"]
    return {"track": track, "steps": steps, "step_s": step_s, "cpu_s": cpu_s, "wall_s": wall_s}


def measure(pairs: int, track: str, into: Path, one_run: Callable[[str | None, int], dict]) -> None:
    """Append the rows of pairs, of a pair both or none. Pairs of this commit in the file say how many steps a run has.

    Args:
        one_run: of a tracker and a number of steps.
    """
    now, steps = commit(), 0
    if (found := newest(read(into), track)) and found[0]["commit"] == now:
        steps = found[0]["steps"]
    for pair in range(pairs):
        steps = steps or round((RUN_S - START_UP_S) / one_run(None, 60)["step_s"])
        arms = (track, None) if pair % 2 else (None, track)
        rows = [{"of": track, **one_run(arm, steps), "commit": now} for arm in arms]
        with into.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))


def newest(rows: list[dict], track: str) -> list[dict]:
    """Return the rows that may be compared: of the last one's commit and number of steps."""
    rows = [row for row in rows if row["of"] == track]
    return [row for row in rows if all(row[key] == rows[-1][key] for key in ("commit", "steps"))]


def table(rows: list[dict], track: str) -> str:
    """Return medians without it, ratios of medians, with to without, and medians of the pairs' differences."""
    if not (rows := newest(rows, track)):
        return f"No runs with {track} are recorded: --pairs 5 makes some."
    told = f"{len(rows) // 2} pairs of {rows[0]['steps']} steps at commit {rows[0]['commit']}"
    lines = [told, "", f"| {track} | without | with / without (95 % interval) | longer by |", "|---|--:|--:|--:|"]
    for name, words in QUANTITIES.items():
        on, off = ([row[name] for row in rows if row["track"] == arm] for arm in (track, None))
        found = compare([1 / value for value in off], [1 / value for value in on])
        more = median_interval([one - other for one, other in zip(on, off, strict=True)], is_signed=True)
        bounds = "" if found.low is None else f" ({found.low:.4f} to {found.high:.4f})"
        bounds_s = "" if more[1] is None else f" ({more[1]:+.3f} to {more[2]:+.3f})"
        lines.append(f"| {words} | {median(off):.3f} s | {found.ratio:.4f}{bounds} | {more[0]:+.3f}{bounds_s} s |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--track", choices=SERVERS, default="wandb")
    parser.add_argument("--pairs", type=int, default=5, help="a pair takes two minutes (default: %(default)s)")
    parser.add_argument("--into", type=Path, required=True)
    asked = parser.parse_args()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a run leaves behind becomes our child
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        folder, address = Path(name), "http://{}:{}".format(*server.getsockname())
        write_token_files(folder, train_tokens=200_000)
        measure(asked.pairs, asked.track, asked.into, lambda track, steps: run(folder, track, steps, address))
    print(table(read(asked.into), asked.track))


if __name__ == "__main__":
    main()
