#!/usr/bin/env python3
"""Train the same GPT-2 with src/gpt2.py and with other trainers, interleaved on this machine, and compare them.

    git clone https://github.com/karpathy/nanoGPT
    python scripts/more/compare_peers.py --peers transformers,nanogpt=nanoGPT -- --model gpt2 --max_train_steps 60
    python scripts/more/compare_peers.py --repeats 1 -- --model nano --max_train_steps 10    # does everything work?

What follows `--` goes to every run (docs/flags.md); scripts/more/train_peer.py --help lists the trainers. Each round
runs every trainer once, in an order that changes. At the end scripts/compare_runs.py compares ours with each of them:
throughput by the wall clock, step times, memory, and the losses, with intervals from 5 rounds on. A run that is
complete is not made again unless its command changed: the same call resumes where it stopped.

Files: DIR/TRAINER/run_N/ as src/gpt2.py writes them, DIR/logs/. compare_runs.py --json writes a comparison to a file.

Exit code: 0 every trainer was measured; 1 one could not be; 2 what was typed cannot be run; 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.check import check_run
from testbed.config.flag_types import positive
from testbed.config.flags import parse_command_line
from testbed.config.sweep_flags import add_flags, check_out_dir, parse_before_dashes, parser_of, relative
from testbed.distributed.launch import Launch, usable_cores
from testbed.errors import InputError, say
from testbed.program import program

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = "ours"
# before what was typed: what all trainers do alike
SHARED = "--run_type baseline --save_at_end off --sample_tokens 0 --max_val_steps 4".split()


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    text = "other trainers, separated by commas (default: %(default)s)"
    parser.add_argument("--peers", default="transformers,transformers-loop", metavar="LIST", help=text)
    text = "rounds; fewer than 5 make no claim (default: %(default)s)"
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help=text)
    text = "CPU threads of every run (default: the usable cores)"
    parser.add_argument("--threads", type=positive, default=usable_cores(), metavar="N", help=text)
    add_flags(parser, "out_dir", default=Path("checkpoint/peers"))
    add_flags(parser, "run_timeout_s", default=7200, help="end a run that takes longer (default: %(default)s)")
    add_flags(parser, "dry_run", help="print what would run and run nothing")
    return parse_before_dashes(parser, sys.argv[1:])


@program
def main() -> int:
    arguments = parse_arguments()
    check_out_dir(arguments, "the runs")
    peers = [name for name in arguments.peers.split(",") if name]
    if not peers or len(set(peers)) < len(peers):
        raise InputError(f"--peers {arguments.peers} must name at least one trainer, and each once")
    for flag in ("checkpoint_path", "run_type", "resume"):
        if flag in parse_command_line(arguments.passed_on).typed:
            raise InputError(f"--{flag} is set by this program itself; leave it out")
    check_run(parse_command_line([*SHARED, *arguments.passed_on]), Launch(0, 0, 1, 1))
    if arguments.dry_run:
        for name in (OURS, *peers):
            say(shlex.join(words_of(name, arguments, 1)))
        return 0
    return run_rounds([OURS, *peers], arguments)


def folder_of(name: str, arguments: argparse.Namespace) -> Path:
    return relative(arguments.out_dir) / name.partition("=")[0]


def words_of(name: str, arguments: argparse.Namespace, number: int) -> list[str]:
    program = ["src/gpt2.py"] if name == OURS else ["scripts/more/train_peer.py", name]
    out = os.path.relpath(folder_of(name, arguments), REPOSITORY)  # a record should not name a home folder
    return ["python", *program, *SHARED, *arguments.passed_on, "--checkpoint_path", f"{out}/run_{number}"]


def run_rounds(names: list[str], arguments: argparse.Namespace) -> int:
    """Make every run that is not there, compare, and return the exit code. A trainer that fails is not run again."""
    from testbed.experiments.kept_runs import is_done, make
    from testbed.sweep.plan import order_of_round
    from testbed.sweep.runner import only_sweep_in, resumable_runs

    failed: dict[str, str] = {}
    variables = {"OMP_NUM_THREADS": str(arguments.threads)}  # every trainer gets the same cores
    with only_sweep_in(arguments.out_dir), resumable_runs(arguments.out_dir) as stop:
        for number in range(1, arguments.repeats + 1):
            for name in (names[place] for place in order_of_round(len(names), number)):
                words, folder = words_of(name, arguments, number), folder_of(name, arguments)
                log = arguments.out_dir / "logs" / f"{folder.name}_{number}.log"
                run = folder / f"run_{number}"
                if name in failed or stop.signal_number is not None or is_done(words, run, log):
                    continue
                reason = make(words, run, log, stop, arguments.run_timeout_s, variables)
                if stop.signal_number is None:
                    say(f"round {number} of {arguments.repeats}: {name}: {reason or 'complete'}", flush=True)
                    failed |= {name: reason} if reason else {}
    if stop.exit_code is not None:
        return stop.exit_code
    measured = [name for name in names[1:] if name not in failed] if OURS not in failed else []
    codes = [compare(folder_of(OURS, arguments), folder_of(name, arguments)) for name in measured]
    for name, reason in failed.items():
        say(f"compare_peers.py: could not measure {name}: {reason}", file=sys.stderr)
    return 1 if failed or any(codes) else 0


def compare(ours: Path, theirs: Path) -> int:
    """Let compare_runs.py compare, also a trainer whose mathematics differs, which it then says."""
    say(f"\n=== A: src/gpt2.py, B: {theirs.name}\n", flush=True)
    program = str(REPOSITORY / "scripts" / "compare_runs.py")
    command = [sys.executable, program, str(ours), "--against", str(theirs), "--allow-mismatch"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
