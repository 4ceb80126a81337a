#!/usr/bin/env python3
"""Train the same GPT-2 with src/gpt2.py and with other trainers, interleaved on this machine, and compare the speeds.

    git clone https://github.com/karpathy/nanoGPT
    python scripts/more/compare_peers.py --nanogpt_dir nanoGPT --dry_run     # what would be run, and what cannot be
    python scripts/more/compare_peers.py --nanogpt_dir nanoGPT               # 5 rounds; on two CPU cores two hours
    python scripts/more/compare_peers.py --quick --peers ours,transformers   # a minute; too few runs for a claim
    python scripts/more/compare_peers.py --table checkpoint/peers/peers.json # the table of an earlier comparison

Each round runs every trainer once, in an order that changes, and measures the matrix product's rate. A run is a process
of its own with the same cores; its number is its tokens/s by the wall clock over all steps after warm-up. Ratios are of
medians over the rounds with a 95 % interval. What follows `--` goes to src/gpt2.py alone, and may change how it
computes but not what (docs/performance.md).
Trainers:
PEERS
Files: DIR/peers.json with every step of every run (rewritten after each run), DIR/peers.png, DIR/logs/.

Exit code: 0 every trainer that was asked for was measured; 1 one could not be, and the last lines say which and why;
2 what was typed cannot be run; 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.errors import InputError, say
from testbed.experiments.peers import PEERS
from testbed.experiments.peers.work import DEFAULTS, default, gpt2_run
from testbed.program import program, recorded_command

if TYPE_CHECKING:
    from testbed.experiments.peers.plan import Plan
    from testbed.experiments.peers.running import PeerRunner

PROGRAM = Path(__file__).resolve()
GPT2 = PROGRAM.parents[2] / "src" / "gpt2.py"
DEFAULT_PEERS = {
    "cpu": "ours,transformers,transformers-eager,transformers-loop,nanogpt",
    "cuda": "ours,transformers,transformers-compiled,transformers-loop,nanogpt",
}


def parse_arguments(words: list[str]) -> argparse.Namespace:
    peers = "\n".join(f"  {name:<{2 + max(map(len, PEERS))}}{peer.summary}" for name, peer in PEERS.items())
    parser = FlagParser(
        description=__doc__.replace("PEERS", peers),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_what(parser.add_argument_group("what is compared (lists are separated by commas)"))
    add_work(parser.add_argument_group("the work of every run"))
    add_how(parser.add_argument_group("how"))
    place = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:place])
    arguments.own, arguments.only_ours = words[:place], words[place + 1 :]
    return arguments


def add_what(what: argparse._ArgumentGroup) -> None:
    text = f"trainers, `ours` among them (default: {DEFAULT_PEERS['cpu']}, on CUDA transformers-compiled in place of "
    text += "transformers-eager, and nanogpt-bf16 where bf16 is fast or asked for)"
    what.add_argument("--peers", metavar="LIST", help=text)
    what.add_argument("--nanogpt_dir", type=Path, metavar="DIR", help="folder of a clone of nanoGPT")
    text = (
        "own = each as it runs of itself, fp32 and bf16 = all alike (default: own,fp32, and bf16 where a trial product "
    )
    what.add_argument("--precision", metavar="LIST", help=text + "is faster in it)")


def add_work(work: argparse._ArgumentGroup) -> None:
    work.add_argument("--model", default="gpt2", metavar="SIZE", help="a size of src/gpt2.py (default: %(default)s)")
    counts = {
        "--batch_size": ("SEQUENCES", "sequences per optimizer step (default: 4, on CUDA 32)"),
        "--micro_batch_size": ("SEQUENCES", "sequences of one forward pass (default: --batch_size)"),
        "--seq_length": ("TOKENS", "(default: 512, on CUDA 1024)"),
        "--steps": ("STEPS", "optimizer steps (default: 20, on CUDA 60)"),
        "--warmup_steps": (
            "STEPS",
            "first steps that are kept but not counted: compiling, first touches of memory (default: 3, on CUDA 10, "
            "at most half of --steps)",
        ),
    }
    for flag, (metavar, text) in counts.items():
        work.add_argument(flag, type=positive, metavar=metavar, help=text)
    for name in ("train", "val"):
        flag, default = f"--{name}_data_path", f"{name}_small.bin"
        work.add_argument(flag, default=default, metavar="FILE.bin", help="(default: %(default)s)")


def add_how(how: argparse._ArgumentGroup) -> None:
    text = "rounds; fewer than 5 make no claim (default: 5, with --quick 2)"
    how.add_argument("--repeats", type=positive, metavar="N", help=text)
    text = "auto = CUDA where PyTorch finds it (default: %(default)s)"
    how.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help=text)
    text = "CPU threads of every run (default: the usable cores)"
    how.add_argument("--threads", type=positive, metavar="N", help=text)
    out_dir = Path("checkpoint/peers")
    how.add_argument("--out_dir", type=Path, default=out_dir, metavar="DIR", help="(default: %(default)s)")
    how.add_argument("--overwrite", action="store_true", help="replace the comparison that --out_dir holds")
    text = "end a run that takes longer (default: %(default)s)"
    how.add_argument("--run_timeout_s", type=float, default=7200, metavar="SECONDS", help=text)
    text = "check that everything works: a tiny model, fp32, 6 steps, 2 rounds; other flags still hold"
    how.add_argument("--quick", action="store_true", help=text)
    how.add_argument("--dry_run", action="store_true", help="say what would be run and what cannot be, and run nothing")
    text = "print an earlier comparison's table and run nothing"
    how.add_argument("--table", type=Path, metavar="FILE.json", help=text)
    how.add_argument("--picture", type=Path, metavar="FILE.png", help="with --table: draw it again, too")
    how.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


@program
def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    if arguments.worker is not None:
        from testbed.experiments.peers.worker import run_work

        run_work(arguments.worker)
        return 0
    return show(arguments) if arguments.table is not None else compare(arguments)


def show(arguments: argparse.Namespace) -> int:
    """Print the table of an earlier comparison."""
    from testbed.experiments.peers.results_file import PEERS_FILE
    from testbed.experiments.peers.table import peers_table

    content = PEERS_FILE.read(arguments.table)
    if arguments.picture is not None:
        from testbed.experiments.peers.chart import plot_peers

        plot_peers(content, arguments.picture)
    say(peers_table(content))
    return 1 if content["not_measured"] else 0


def compare(arguments: argparse.Namespace) -> int:
    """Plan, run round after round, and say what came out."""
    from testbed.distributed.launch import usable_cores
    from testbed.distributed.processes import Interrupted, Stop
    from testbed.experiments.peers import nanogpt
    from testbed.experiments.peers.plan import make_plan, why_missing
    from testbed.experiments.peers.results_file import PEERS_FILE, beginning
    from testbed.experiments.peers.running import PeerRunner, RunFailed
    from testbed.sweep.runner import only_sweep_in

    peers, sets = chosen(arguments)
    if arguments.nanogpt_dir is not None:
        nanogpt.check_directory(arguments.nanogpt_dir)
    gpt2_run(arguments, "cpu")  # what is typed wrong is said before anything is started
    file = arguments.out_dir / PEERS_FILE.name
    if file.exists() and not (arguments.overwrite or arguments.dry_run):
        raise InputError(f"--out_dir {arguments.out_dir} holds a comparison; give --overwrite, or another folder")
    with (
        Stop() as stop,
        only_sweep_in(arguments.out_dir),
        tempfile.TemporaryDirectory(prefix=".scratch-", dir=arguments.out_dir, ignore_cleanup_errors=True) as scratch,
    ):
        logs = arguments.out_dir / "logs"
        logs.mkdir(exist_ok=True)
        runner = PeerRunner(
            PROGRAM, GPT2, Path(scratch), logs, arguments.threads or usable_cores(), arguments.device, stop,
            arguments.run_timeout_s, warmup_steps=1, only_ours=arguments.only_ours, nanogpt_dir=arguments.nanogpt_dir,
        )  # fmt: skip
        try:
            facts = runner.facts()
        except RunFailed as error:
            raise InputError(f"PyTorch cannot be used here: {error}") from None
        except Interrupted:
            assert stop.exit_code is not None  # a signal was noted
            return stop.exit_code
        device_type = facts["hardware"]["device_type"]
        if arguments.device == "cuda" and device_type != "cuda":
            raise InputError("--device cuda, but PyTorch finds no CUDA device here; use --device cpu or auto")
        runner.device = device_type
        runner.gpt2_arguments, runner.checked = gpt2_run(arguments, device_type)
        runner.warmup_steps = default(arguments, device_type, "warmup_steps")
        if runner.warmup_steps >= runner.settings.last_step:
            raise InputError(
                f"--warmup_steps {runner.warmup_steps} leaves no step to measure of --steps {runner.settings.last_step}"
            )
        if peers is None:
            has_bf16 = "bf16" in sets if sets is not None else facts["is_bf16_fast"]
            peers = [*DEFAULT_PEERS[device_type].split(","), *(["nanogpt-bf16"] if has_bf16 else [])]
        missing = why_missing(peers, arguments.nanogpt_dir, runner.checked.train_file, runner.checked.val_file)
        plan = make_plan(peers, sets, device_type, facts["is_bf16_fast"], missing)
        repeats = default(arguments, device_type, "repeats")
        if arguments.dry_run:
            return say_plan(plan, runner, repeats)
        command_line = recorded_command(__file__, arguments.own, arguments.only_ours)
        content = beginning(command_line, facts, plan, runner, peers, repeats)
        return run_rounds(content, plan.rounds(repeats), runner, file)


def chosen(arguments: argparse.Namespace) -> tuple[list[str] | None, tuple[str, ...] | None]:
    """Return peers and sets of precisions that were asked for; None where none were. InputError for an unknown name."""
    from testbed.experiments.peers.plan import OURS, SETS
    from testbed.sweep.request import parse_names

    peers = None if arguments.peers is None else list(parse_names(arguments.peers, PEERS, "--peers"))
    if peers is not None and (OURS not in peers or len(peers) < 2):
        raise InputError(f"--peers {arguments.peers} compares nothing; name ours and another of {', '.join(PEERS)}")
    if arguments.precision is not None:
        return peers, parse_names(arguments.precision, SETS, "--precision")
    return peers, DEFAULTS["quick"]["precision"] if arguments.quick else None


def say_plan(plan: Plan, runner: PeerRunner, repeats: int) -> int:
    """Print what would be run. 1 where a trainer that was asked for cannot be."""
    for name, arms in plan.sets.items():
        say(f"{name}: {', '.join(map(str, arms))}")
    say(f"{len(plan.rounds(repeats))} runs: {repeats} rounds of {', '.join(map(str, plan.arms))}")
    for arm in plan.arms:
        if arm.peer in PEERS:
            say(f"  {arm}: {shlex.join(runner.command(arm))}")
    for name, reason in plan.skipped.items():
        say(f"left out: {name}: {reason}")
    return say_unmeasured(plan.not_measured)


def say_unmeasured(not_measured: dict[str, str]) -> int:
    for name, reason in not_measured.items():
        say(f"compare_peers.py: could not measure {name}: {reason}", file=sys.stderr)
    return 1 if not_measured else 0


def run_rounds(content: dict[str, Any], runs: list[tuple[int, Any]], runner: PeerRunner, file: Path) -> int:
    """Make every run, keep the file up to date, print the table, draw the picture. Returns the exit code.

    A trainer that fails once is not run again; without ours there is nothing to compare with, so that ends it.
    """
    from testbed.distributed.processes import Interrupted
    from testbed.experiments.peers.chart import plot_peers
    from testbed.experiments.peers.plan import CEILING, OURS
    from testbed.experiments.peers.results_file import PEERS_FILE
    from testbed.experiments.peers.running import RunFailed
    from testbed.experiments.peers.table import peers_table

    started_s, failed = time.perf_counter(), set()
    content["status"] = "interrupted"  # until the last run is made
    for done, (number, arm) in enumerate(runs, start=1):
        if arm in failed:
            continue
        try:
            row = runner.run(arm, number)
        except Interrupted:
            break
        except RunFailed as error:
            failed.add(arm)
            content["not_measured"][str(arm)] = f"round {number}: {error}"
            say(f"[{done}/{len(runs)}] round {number}: {arm} failed: {error}", flush=True)
            if arm.peer == OURS:
                break
            continue
        content["ceilings" if arm.peer == CEILING else "runs"].append(row)
        PEERS_FILE.write(file, content)
        left_s = (time.perf_counter() - started_s) / done * (len(runs) - done)
        say(f"[{done}/{len(runs)}] round {number}: {arm}: {_outcome(row, content)}; {left_s:.0f} s left", flush=True)
    if runner.stop.signal_number is None:
        content["status"] = "complete"
    PEERS_FILE.write(file, content)
    if content["runs"]:
        plot_peers(content, file.with_suffix(".png"))
        say(f"\n{peers_table(content)}\n\nfiles: {file}, {file.with_suffix('.png')}")
    return runner.stop.exit_code or say_unmeasured(content["not_measured"])


def _outcome(row: dict[str, Any], content: dict[str, Any]) -> str:
    if "flops_per_s" in row:
        return f"{row['flops_per_s'] / 1e9:,.0f} GFLOP/s"
    work = content["work"]
    steps = len(row["step_times_s"]) - work["warmup_steps"]
    speed = steps * work["batch_size"] * work["seq_length"] / row["measured_loop_s"]
    return f"{speed:,.0f} tokens/s, last loss {row['losses'][-1]:.4f}, {row['seconds']:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
