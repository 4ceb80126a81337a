#!/usr/bin/env python3
"""Run every path of a new GPU machine, small runs first, and say which runs agree.

    python scripts/more/benchmark_gpu.py --dry_run         # the commands, and what is left out and why
    python scripts/more/benchmark_gpu.py                   # about an hour on one H100
    python scripts/more/benchmark_gpu.py --only 'fp32|fsdp'
    python scripts/more/benchmark_gpu.py --device cpu      # tiny: what a CPU can do, about ten minutes on two cores

Precisions, the compiler, attention kernels, every strategy on the devices there, saving and resuming, generation, and
the profiler. Losses and gradient norms of every step are compared with another run's. A run that is complete is not
made again unless its command changed: the same call resumes where it stopped. Give each machine its own --out_dir.

Files: DIR/table.txt, DIR/runs/NAME/ as src/gpt2.py writes them, DIR/logs/NAME.log.

Exit code: 0 all that was asked for ran and agrees; 1 a run failed or does not agree; 2 what was typed cannot be run;
130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_types import positive
from testbed.config.sweep_flags import add_flags, check_out_dir, parser_of
from testbed.errors import InputError, say
from testbed.experiments.gpu_paths import Row, compare, rows, why_left_out, with_what_they_need
from testbed.io import write_text
from testbed.program import program
from testbed.run_folder import METRICS

REPOSITORY = Path(__file__).resolve().parents[2]
VOCABULARY, NUM_TOKENS = 8192, 2_000_000
HEADINGS = ("run", "ranks", "tokens/s", "MFU", "memory (GiB)", "compared with", "", "difference")


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_flags(parser, "out_dir", default=Path("checkpoint/benchmark_gpu"))
    text = "make the runs whose names match, and those that they are compared with (default: all)"
    parser.add_argument("--only", metavar="REGEX", default="", help=text)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(default: %(default)s)")
    text = "CUDA devices to use (default: those that PyTorch finds; with --dry_run on a machine without any: 1)"
    parser.add_argument("--gpus", type=positive, metavar="N", help=text)
    add_flags(parser, "run_timeout_s", default=3600, help="end a run that takes longer (default: %(default)s)")
    add_flags(parser, "dry_run", help="print what would run and run nothing")
    return parser.parse_args()


@program
def main() -> int:
    arguments = parse_arguments()
    check_out_dir(arguments, "the runs")
    gpus = number_of_gpus(arguments)
    plan = rows(gpus)
    packages = [name for name in ("deepspeed", "torchao") if importlib.util.find_spec(name)]
    left_out = {row.name: reason for row in plan if (reason := why_left_out(row, gpus, packages))}
    plan = [row for row in plan if row.name not in left_out]
    chosen = with_what_they_need(chosen_rows(plan, arguments.only), plan)
    if arguments.dry_run:
        for row in chosen:
            against = f": as {row.reference}, within {row.within}" if row.reference not in (None, *left_out) else ""
            say(f"{row.name}{against}\n  {shlex.join(words_of(row, arguments))}")
    else:
        code, lines = run_all(chosen, arguments)
    for name, reason in left_out.items():
        if re.search(arguments.only, name):
            say(f"left out: {name}: {reason}")
    if arguments.dry_run:
        return 0
    say("\n".join(["", *lines]))
    return code


def number_of_gpus(arguments: argparse.Namespace) -> int:
    """Return how many CUDA devices are used; 0: the CPU. InputError where there are not so many."""
    from testbed.sweep.request import facts_of_machine

    if arguments.device == "cpu":
        return 0
    there = facts_of_machine()["devices"]
    if arguments.dry_run:
        return arguments.gpus or there or 1
    if not there:
        raise InputError("--device cuda, but PyTorch finds no CUDA device here; --device cpu tries what a CPU can do")
    if (arguments.gpus or 0) > there:
        raise InputError(f"--gpus {arguments.gpus}, but PyTorch finds {there}; give at most that, or leave it out")
    return arguments.gpus or there


def chosen_rows(plan: Sequence[Row], only: str) -> list[Row]:
    try:
        found = [row for row in plan if re.search(only, row.name)]
    except re.error as error:
        raise InputError(f"--only {only} is not a regular expression ({error})") from None
    if not found:
        raise InputError(f"--only {only} matches no run that this machine can do; --dry_run lists them")
    return found


def words_of(row: Row, arguments: argparse.Namespace) -> list[str]:
    # relative: records should not name a home folder
    out = os.path.relpath(arguments.out_dir, REPOSITORY)
    return row.words(f"{out}/runs", arguments.device, f"{out}/data")


def run_all(chosen: Sequence[Row], arguments: argparse.Namespace) -> tuple[int, list[str]]:
    """Make the runs that are not complete. Return the exit code and the lines of the table."""
    from testbed.experiments.kept_runs import is_done, make
    from testbed.experiments.made_up_tokens import write_made_up_tokens
    from testbed.sweep.runner import only_sweep_in, resumable_runs

    out = arguments.out_dir
    failed: dict[str, str] = {}
    done: list[Row] = []
    with only_sweep_in(out), resumable_runs(out) as stop:
        write_made_up_tokens(out / "data", VOCABULARY, NUM_TOKENS)
        for number, row in enumerate(chosen, start=1):
            made_by = words_of(row, arguments), out / "runs" / row.name, out / "logs" / f"{row.name}.log"
            if is_done(*made_by):
                done.append(row)
            if row in done or stop.signal_number is not None:
                continue
            if row.reads in failed:
                reason: str | None = f"{row.reads}, which it reads, failed"
            else:
                variables = {"OMP_NUM_THREADS": "1"} if row.ranks > 1 else {}
                reason = make(*made_by, stop, arguments.run_timeout_s, variables)
            if stop.signal_number is None:
                say(f"[{number}/{len(chosen)}] {row.name}: {reason or 'complete'}", flush=True)
                failed |= {row.name: reason} if reason else {}
                done += [] if reason else [row]
        lines, disagree = table(done, out)
        lines += [f"failed: {name}: {reason}" for name, reason in failed.items()]
        write_text(out / "table.txt", "\n".join(lines) + "\n")
    return stop.exit_code or (1 if failed or disagree else 0), lines


def table(done: Sequence[Row], out: Path) -> tuple[list[str], bool]:
    """Return a line for each run, and whether one does not agree with its reference."""
    from testbed.analysis.document.model import Table
    from testbed.analysis.document.terminal import table_lines
    from testbed.analysis.runs.load import Run, load_run

    runs: Mapping[str, Run] = {row.name: load_run(out / "runs" / row.name / METRICS) for row in done}
    lines, disagree = [], False
    for row in done:
        run, reference = runs[row.name], runs.get(row.reference or "")
        speed = "" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}"
        share = "" if run.mfu is None else f"{run.mfu:.1%}"
        memory = f"{max(run.memory_bytes_per_rank) / 2**30:.2f}" if run.memory_bytes_per_rank else ""
        compared = ("", "", "")
        if reference is not None:
            holds, apart = compare(run, reference, row.within)
            compared = (reference.path.parent.name, "agrees" if holds else "DOES NOT AGREE", f"{apart} ({row.within})")
            disagree |= not holds
        lines.append((row.name, str(row.ranks), speed, share, memory, *compared))
    return table_lines(Table(HEADINGS, lines, text_columns=(0, 5, 6, 7))), disagree


if __name__ == "__main__":
    sys.exit(main())
