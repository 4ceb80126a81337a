#!/usr/bin/env python3
"""Measure what was tried to make the plain step faster, each alternative against the step as it is.

    python scripts/measure_trials.py --out trials.json
    python scripts/measure_trials.py --table trials.json
    python scripts/measure_trials.py --out trials.json --trials "unfused AdamW" -- --model gpt2 --seq_length 512

What follows `--` are flags of src/gpt2.py; without any: four layers of GPT-2 small with its whole vocabulary (50,304
rows), two micro batches of 2 x 256 tokens, in the fastest precision. The step as it is: the strategy `baseline`, not
compiled. Each repeat is a process of its own, in which both kinds of steps take turns. A trial that this torch or
device cannot make is named with the reason and fails nothing.

Exit code: 0, 1 a trial failed, 2 what was typed cannot be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # `testbed` lies there, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.distributed.launch import Launch

if TYPE_CHECKING:
    import torch

    from testbed.config.settings import CheckedRun, RunSettings
    from testbed.experiments.step_trials import Trial

ALONE = Launch(0, 0, 1, 1)
DEFAULT_WORK = (
    "--model gpt2 --num_layers 4 --vocab_size 50304 --seq_length 256 --global_batch_size 4 "
    "--micro_batch_size_per_gpu 2 --max_val_steps 0"
).split()


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the measured pairs are written, as JSON")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of such a file, measure nothing")
    parser.add_argument("--trials", metavar="LIST", help="names, separated by commas (default: all)")
    parser.add_argument("--repeats", type=positive, default=5, help="processes per trial (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=positive, default=8, help="pairs of steps in each process (default: %(default)s)"
    )
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)  # what a repeat's process is told
    place = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:place])
    arguments.work = words[place + 1 :] or DEFAULT_WORK
    if not (arguments.out or arguments.table or arguments.one):
        parser.error("give --out FILE to measure, or --table FILE to print what was measured")
    return arguments


def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    if arguments.table:
        from testbed.io import holding_together, read_json

        name = f"--table {arguments.table}"
        try:
            content = read_json(arguments.table, name)
            with holding_together(name):
                tables = tables_of(content)
        except ValueError as error:
            return refuse(str(error))
        print(tables)
        return 0
    return measure_one(arguments) if arguments.one else measure_all(arguments)


def check_work(words: list[str]) -> CheckedRun:
    """The run that the flags after `--` describe; ValueError with one sentence where they do not."""
    from testbed.config.check import check_run
    from testbed.config.flags import parse_command_line

    return check_run(parse_command_line(words), ALONE)


def measure_one(arguments: argparse.Namespace) -> int:
    """The process of one repeat: prints what it measured as JSON on its last line."""
    checked = check_work(arguments.work)
    from testbed.autotune.device import choose_device, with_precision_resolved
    from testbed.experiments.step_trials import TRIALS, times_of_pairs
    from testbed.profiling.device_limits import PeakRate, copy_rate

    device = choose_device(checked.settings, ALONE)
    settings, _ = with_precision_resolved(checked.settings, ALONE, device)
    checked = dataclasses.replace(checked, settings=settings)
    pairs = times_of_pairs(checked, device, TRIALS[arguments.one], arguments.pairs)
    peak = PeakRate(device, settings.compute.precision)
    peak.measure(repeats=3)
    rates = {"matrix_flops_per_s": peak.flops_per_s(), "copy_bytes_per_s": copy_rate(device)}
    print(json.dumps({"precision": settings.compute.precision, "pairs": pairs, **rates}))
    return 0


def measure_all(arguments: argparse.Namespace) -> int:
    """Rounds of all trials, so that a slow quarter of an hour meets them all."""
    try:
        checked = check_work(arguments.work)
    except ValueError as error:
        return refuse(str(error))
    from tqdm import tqdm

    from testbed.autotune.device import choose_device, with_precision_resolved
    from testbed.experiments.step_trials import TRIALS
    from testbed.io import write_text

    names = [name.strip() for name in arguments.trials.split(",")] if arguments.trials else list(TRIALS)
    for name in names:
        if name not in TRIALS:
            return refuse(f"--trials {name}: choose of {', '.join(TRIALS)}")
    try:
        device = choose_device(checked.settings, ALONE)
    except ValueError as error:
        return refuse(str(error))
    settings, _ = with_precision_resolved(checked.settings, ALONE, device)
    trials = {name: entry(TRIALS[name], TRIALS[name].why_not(settings, device)) for name in names}
    content = heading(arguments, settings, device) | {"trials": trials}
    work = [*arguments.work, "--precision", settings.compute.precision]  # decided once, not by every process anew
    failed = False
    for name in tqdm(names * arguments.repeats, unit="run"):
        trial = content["trials"][name]
        if trial["not_measured"]:
            continue
        command = [sys.executable, __file__, "--one", name, "--pairs", str(arguments.pairs), "--"]
        done = subprocess.run([*command, *work, *TRIALS[name].needs], capture_output=True, text=True)
        if done.returncode:
            failed, trial["not_measured"] = True, (done.stderr.strip().splitlines() or ["no message"])[-1]
        else:
            trial["repeats"].append(json.loads(done.stdout.splitlines()[-1]))
        write_text(arguments.out, json.dumps(content, indent=1) + "\n")
    write_text(arguments.out, json.dumps(content, indent=1) + "\n")  # also where nothing could be measured
    print(tables_of(content))
    return 1 if failed else 0


def heading(arguments: argparse.Namespace, settings: RunSettings, device: torch.device) -> dict[str, Any]:
    """What the file says beside the trials, of settings whose precision is decided. Paths stay as they were typed."""
    import torch

    from testbed.experiments.step_trials import WARMUP_PAIRS
    from testbed.metrics.environment import commit, hardware, versions
    from testbed.model.flops import flops_per_token_palm, least_bytes_of_step, least_flops_per_token

    sha, is_dirty = commit()
    tokens = settings.tokens_per_step
    return {
        "schema": 3,
        "git_commit": sha,
        "git_dirty": is_dirty,
        "command": ["python", "scripts/measure_trials.py", *sys.argv[1:]],
        "work": arguments.work,
        "tokens_per_step": tokens,
        "warmup_pairs": WARMUP_PAIRS,  # the first pair after them begins with the step as it is
        "precision": settings.compute.precision,
        "causal_flops_per_step": tokens * least_flops_per_token(settings.shape, settings.data.seq_length),
        "palm_flops_per_step": tokens * flops_per_token_palm(settings.shape, settings.data.seq_length),
        "least_bytes_per_step": least_bytes_of_step(
            settings.shape, tokens, settings.batch.grad_accum_steps, settings.compute.precision
        ),
        "versions": versions(),
        "hardware": hardware(device, ALONE, None),
        "threads": torch.get_num_threads(),
    }


def entry(trial: Trial, not_measured: str | None) -> dict[str, Any]:
    said = {"what": trial.what, "predicted": trial.predicted, "kept": trial.kept}
    return {**said, "not_measured": not_measured, "repeats": []}


def tables_of(content: dict[str, Any]) -> str:
    from testbed.experiments.step_trials_table import trials_table, two_numbers_table

    return "\n\n".join(filter(None, [two_numbers_table(content), trials_table(content)]))


def refuse(sentence: str) -> int:
    print(f"measure_trials.py: error: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
