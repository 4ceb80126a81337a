#!/usr/bin/env python3
"""Measure what collecting evidence costs: runs with every toggle that works here, in turns with their plain twins.

    python scripts/profiling/measure_evidence.py --out docs/results/evidence/evidence_overhead.json

Each round trains the same work on two CPU ranks twice, without and with, in an order that changes from round to round.
The ratio of the throughputs has an interval (src/testbed/analysis/statistics.py). Nothing else may run on the machine.
Seven rounds take about four minutes on two cores. Exit code 1: a run failed, was not marked, or --out cannot be
written; 2: what was typed is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # `testbed` lies there, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.errors import say

REPOSITORY = Path(__file__).resolve().parent.parent.parent

RANKS, VOCABULARY, NUM_TOKENS = 2, 8192, 60_000
TIMEOUT_S = 120
WORK = {"--run_type": "ddp", "--model": "nano", "--seq_length": "128", "--global_batch_size": "8", "--epochs": "100"}
WORK |= {"--precision": "fp32", "--device": "cpu", "--max_val_steps": "0", "--sample_tokens": "0", "--seed": "1"}
# NCCL's variables mean nothing to gloo: here they only show that they do no harm
TOGGLES = ("NCCL_LOGS", "TORCHRUN_LOGS", "DIST_DEBUG", "NSYS")
START = """
. scripts/slurm/evidence.sh
evidence_prepare "$RUN" || exit
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" --no-python \\
    "${EVIDENCE_TORCHRUN_FLAGS[@]}" "${EVIDENCE_RANK_PREFIX[@]}" \\
    "$PYTHON" src/gpt2.py "$@" --checkpoint_path "$RUN" "${EVIDENCE_GPT2_FLAGS[@]}"
"""


class RunFailed(Exception):
    """A run did not end well, or was not what it was to be."""


def main() -> int:
    arguments = parse_arguments()
    from testbed.experiments.evidence_overhead import check_overhead, overhead_table
    from testbed.io import write_text

    if arguments.out is not None:
        try:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)  # before the minutes, not after
        except OSError as error:
            say(f"measure_evidence.py: --out {arguments.out} cannot be written: {error.strerror}", file=sys.stderr)
            return 1
    toggles = [name for name in TOGGLES if name not in not_measured()]
    with tempfile.TemporaryDirectory() as folder:
        try:
            content = measure(Path(folder), toggles, arguments.rounds, arguments.steps)
        except RunFailed as error:
            say(f"measure_evidence.py: {error}", file=sys.stderr)
            return 1
    check_overhead(content)
    say(overhead_table(content))
    if arguments.out is not None:
        try:
            write_text(arguments.out, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            say(f"measure_evidence.py: --out {arguments.out} cannot be written: {error.strerror}", file=sys.stderr)
            return 1
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write every run there, as JSON")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N",
                        help="runs of each kind; 5 are needed for an interval (default: %(default)s)")  # fmt: skip
    parser.add_argument("--steps", type=positive, default=40, metavar="STEPS",
                        help="optimizer steps of a run, at least 10 (default: %(default)s)")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.steps < 10:
        parser.error(f"--steps {arguments.steps} must be at least 10")
    return arguments


def not_measured() -> dict[str, str]:
    """The toggles that cannot be switched on here, and why."""
    found = {}
    if shutil.which(os.environ.get("NSYS_BIN", "nsys")) is None:
        found["NSYS"] = "Nsight Systems is not installed"
    return found


def measure(folder: Path, toggles: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """All runs, as the JSON file has them."""
    from testbed.experiments.evidence_overhead import EVIDENCE, PLAIN, SCHEMA_VERSION
    from testbed.io import now_utc

    data = write_tokens(folder)
    runs, example = [], None
    for number in range(1, rounds + 1):
        order = (PLAIN, EVIDENCE) if number % 2 else (EVIDENCE, PLAIN)  # neither is always the first
        for arm in order:
            metrics, row = train(folder / f"{arm}_{number}", toggles if arm == EVIDENCE else [], data, steps)
            runs.append({"round": number, "arm": arm, **row})
            example = example or metrics
            say(f"round {number} of {rounds}, {arm}: {row['tokens_per_s']:,.0f} tokens/s", file=sys.stderr, flush=True)
    hardware, config = example["hardware"], example["training_config"]
    return {
        "schema_version": SCHEMA_VERSION,
        "timestamp_utc": now_utc(),
        "command_line": shlex.join(["python", os.path.relpath(__file__), *sys.argv[1:]]),
        "git_commit": example["git_commit"],
        "git_dirty": example["git_dirty"],
        "machine": {
            "cpu_name": hardware["cpu_name"],
            "cpu_cores_visible": hardware["cpu_cores_visible"],
            "torch_version": example["env"]["torch_version"],
            "backend": hardware["backend"],
        },
        "work": {
            "run_type": config["run_type"],
            "ranks": hardware["world_size"],
            "steps": steps,
            "warmup_steps": example["timing"]["warmup_steps"],
            "global_batch_size": config["global_batch_size"],
            "seq_length": config["seq_len"],
            "model_size": config["model_size"],
        },
        "toggles": toggles,
        "not_measured": not_measured(),
        "runs": runs,
    }


def write_tokens(folder: Path) -> list[str]:
    """Random tokens, which cost what others cost. Returns the flags that name them."""
    import numpy as np

    from testbed.data.token_file import TokenFileWriter

    flags = []
    for name, seed in (("train", 1), ("val", 2)):
        with TokenFileWriter(folder / f"{name}.bin", VOCABULARY, f"bpe:{VOCABULARY}", VOCABULARY - 1) as writer:
            writer.append_document(np.random.default_rng(seed).integers(0, VOCABULARY - 1, NUM_TOKENS))
        flags += [f"--{name}_data_path", str(folder / f"{name}.bin")]
    return flags


def train(run: Path, toggles: list[str], data: list[str], steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One run through the launcher's own lines. Returns its metrics, and what of them is kept.

    Raises:
        RunFailed: it did not complete, or it is not marked as what it was.
    """
    from testbed.metrics.file import read_metrics

    flags = [word for pair in WORK.items() for word in pair]
    flags += [*data, "--max_train_steps", str(steps), "--timing_warmup_steps", "5"]
    environment = {name: value for name, value in os.environ.items() if name not in TOGGLES}
    environment |= {"RUN": str(run), "PYTHON": sys.executable, "RANKS": str(RANKS), "OMP_NUM_THREADS": "1"}
    environment |= dict.fromkeys(toggles, "1")
    command = ["bash", "-c", START, "measure_evidence", *flags]
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{run.name} took more than {TIMEOUT_S} s: something else runs on this machine") from None
    if done.returncode:
        raise RunFailed(f"{run.name} ended with exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    metrics = read_metrics(run / "training_metrics.json")
    if metrics["instrumented"] != bool(toggles):
        raise RunFailed(f"{run.name} is marked as instrumented {metrics['instrumented']} by {metrics['instruments']}")
    files = [path for path in (run / "evidence").rglob("*") if path.is_file()]
    return metrics, {
        "tokens_per_s": metrics["timing"]["tokens_per_sec_global"],
        "step_time_median_s": metrics["timing"]["step_time_p50_sec"],
        "final_train_loss": metrics["steps"][-1]["loss"],
        "instruments": metrics["instruments"],
        "evidence_bytes": sum(path.stat().st_size for path in files),
    }


if __name__ == "__main__":
    sys.exit(main())
