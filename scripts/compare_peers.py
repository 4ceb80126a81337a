#!/usr/bin/env python3
"""Train the same GPT-2 with src/gpt2.py and with other trainers, interleaved on this machine, and compare the speeds.

    git clone https://github.com/karpathy/nanoGPT
    python scripts/compare_peers.py --nanogpt_dir nanoGPT --dry_run     # what would be run, and what cannot be
    python scripts/compare_peers.py --nanogpt_dir nanoGPT               # 5 rounds; on two CPU cores two hours
    python scripts/compare_peers.py --quick --peers ours,transformers   # a minute; too few runs for a claim
    python scripts/compare_peers.py --table checkpoint/peers/peers.json # the table of an earlier comparison

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
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # `testbed` lies there, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.errors import say
from testbed.experiments.peers import PEERS

if TYPE_CHECKING:
    from testbed.experiments.peers.plan import Plan
    from testbed.experiments.peers.running import Runner

PROGRAM = Path(__file__).resolve()
GPT2 = PROGRAM.parent.parent / "src" / "gpt2.py"
DEFAULT_PEERS = {
    "cpu": "ours,transformers,transformers-eager,transformers-loop,nanogpt",
    "cuda": "ours,transformers,transformers-compiled,transformers-loop,nanogpt",
}
# what is not given: by the device, or --quick
DEFAULTS = {
    "cpu": {"batch_size": 4, "seq_length": 512, "steps": 20, "warmup_steps": 3, "repeats": 5},
    "cuda": {"batch_size": 32, "seq_length": 1024, "steps": 60, "warmup_steps": 10, "repeats": 5},
    "quick": {"batch_size": 4, "seq_length": 64, "steps": 6, "warmup_steps": 2, "repeats": 2,
              "num_layers": 2, "num_heads": 2, "embedding_size": 64, "precision": ("fp32",)},
}  # fmt: skip
VALIDATION_BATCHES = 4  # of --batch_size sequences
DIMENSIONS = ("num_layers", "num_heads", "embedding_size")
GPT2_VOCABULARY = 50257  # of the published sizes; a token file with fewer tokens must not make the head smaller


def parse_arguments(words: list[str]) -> argparse.Namespace:
    peers = "\n".join(f"  {name:<{2 + max(map(len, PEERS))}}{peer.summary}" for name, peer in PEERS.items())
    parser = FlagParser(
        description=__doc__.replace("PEERS", peers),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is compared (lists are separated by commas)")
    what.add_argument(
        "--peers",
        metavar="LIST",
        help=f"trainers, `ours` among them (default: {DEFAULT_PEERS['cpu']}, on CUDA transformers-compiled in place of "
        "transformers-eager, and nanogpt-bf16 where bf16 is fast or asked for)",
    )
    what.add_argument("--nanogpt_dir", type=Path, metavar="DIR", help="folder of a clone of nanoGPT")
    what.add_argument(
        "--precision",
        metavar="LIST",
        help="own = each as it runs of itself, fp32 and bf16 = all alike (default: own,fp32, and bf16 where "
        "a trial product is faster in it)",
    )
    work = parser.add_argument_group("the work of every run")
    work.add_argument("--model", default="gpt2", metavar="SIZE", help="a size of src/gpt2.py (default: %(default)s)")
    for name in DIMENSIONS:
        work.add_argument(f"--{name}", metavar="N", help="as src/gpt2.py takes it (default: the size's)")
    work.add_argument(
        "--vocab_size",
        type=positive,
        metavar="TOKENS",
        help=f"of every trainer's model; may exceed the data's (default: {GPT2_VOCABULARY} with a published size, else "
        "and with --quick the data's). Ours and nanoGPT pad it to a multiple of 128, 50304; transformers does not",
    )
    work.add_argument(
        "--batch_size",
        type=positive,
        metavar="SEQUENCES",
        help="sequences per optimizer step (default: 4, on CUDA 32)",
    )
    work.add_argument(
        "--micro_batch_size",
        type=positive,
        metavar="SEQUENCES",
        help="sequences of one forward pass (default: --batch_size)",
    )
    work.add_argument("--seq_length", type=positive, metavar="TOKENS", help="(default: 512, on CUDA 1024)")
    work.add_argument("--steps", type=positive, metavar="STEPS", help="optimizer steps (default: 20, on CUDA 60)")
    work.add_argument(
        "--warmup_steps",
        type=positive,
        metavar="STEPS",
        help="first steps that are kept but not counted: compiling, first touches of memory (default: 3, on CUDA 10, "
        "at most half of --steps)",
    )
    work.add_argument(
        "--learning_rate", metavar="LR", help="constant (default: the peak that src/gpt2.py takes for --model)"
    )
    work.add_argument("--seed", default="42", metavar="N", help="(default: %(default)s)")
    work.add_argument("--train_data_path", default="train_small.bin", metavar="FILE.bin", help="(default: %(default)s)")
    work.add_argument("--val_data_path", default="val_small.bin", metavar="FILE.bin", help="(default: %(default)s)")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--repeats", type=positive, metavar="N", help="rounds; fewer than 5 make no claim (default: 5, with --quick 2)"
    )
    how.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto = CUDA where PyTorch finds it (default: %(default)s)",
    )
    how.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads of every run (default: the usable cores)"
    )
    how.add_argument(
        "--out_dir", type=Path, default=Path("checkpoint/peers"), metavar="DIR", help="(default: %(default)s)"
    )
    how.add_argument("--overwrite", action="store_true", help="replace the comparison that --out_dir holds")
    how.add_argument(
        "--run_timeout_s",
        type=float,
        default=7200,
        metavar="SECONDS",
        help="end a run that takes longer (default: %(default)s)",
    )
    how.add_argument(
        "--quick",
        action="store_true",
        help="whether everything works: a tiny model, fp32, 6 steps, 2 rounds; other flags still hold",
    )
    how.add_argument("--dry_run", action="store_true", help="say what would be run and what cannot be, and run nothing")
    how.add_argument(
        "--table", type=Path, metavar="FILE.json", help="print an earlier comparison's table and run nothing"
    )
    how.add_argument("--picture", type=Path, metavar="FILE.png", help="with --table: draw it again, too")
    how.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    place = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:place])
    arguments.only_ours = words[place + 1 :]
    return arguments  # fmt: skip


def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    if arguments.worker is not None:
        from testbed.experiments.peers.worker import run_work

        run_work(arguments.worker)
        return 0
    try:
        return show(arguments) if arguments.table is not None else compare(arguments)
    except (ValueError, OSError) as error:
        say(f"compare_peers.py: error: {error}", file=sys.stderr)
        return 2


def show(arguments: argparse.Namespace) -> int:
    """The table of an earlier comparison."""
    from testbed.experiments.peers.results_file import peers_table, read_peers

    content = read_peers(arguments.table)
    if arguments.picture is not None:
        from testbed.experiments.peers.chart import plot_peers

        plot_peers(content, arguments.picture)
    say(peers_table(content))
    return 1 if content["not_measured"] else 0


def compare(arguments: argparse.Namespace) -> int:
    """Plan, run round after round, and say what came out."""
    from testbed.distributed.launch import usable_cores
    from testbed.experiments.peers import nanogpt
    from testbed.experiments.peers.first_record import PEERS_FILE, beginning
    from testbed.experiments.peers.plan import make_plan, why_missing
    from testbed.experiments.peers.running import Interrupted, RunFailed, Runner
    from testbed.sweep.runner import Stop, only_sweep_in

    peers, sets = chosen(arguments)
    if arguments.nanogpt_dir is not None:
        nanogpt.check_directory(arguments.nanogpt_dir)
    gpt2_run(arguments, "cpu")  # what is typed wrong is said before anything is started
    file = arguments.out_dir / PEERS_FILE
    if file.exists() and not (arguments.overwrite or arguments.dry_run):
        raise ValueError(f"--out_dir {arguments.out_dir} holds a comparison; give --overwrite, or another folder")
    with (
        Stop() as stop,
        only_sweep_in(arguments.out_dir),
        tempfile.TemporaryDirectory(prefix=".scratch-", dir=arguments.out_dir, ignore_cleanup_errors=True) as scratch,
    ):
        logs = arguments.out_dir / "logs"
        logs.mkdir(exist_ok=True)
        runner = Runner(
            PROGRAM, GPT2, Path(scratch), logs, arguments.threads or usable_cores(), arguments.device, stop,
            arguments.run_timeout_s, warmup_steps=1, only_ours=arguments.only_ours, nanogpt_dir=arguments.nanogpt_dir,
        )  # fmt: skip
        try:
            facts = runner.facts()
        except RunFailed as error:
            raise ValueError(f"PyTorch cannot be used here: {error}") from None
        except Interrupted:
            return stop.exit_code
        device_type = facts["hardware"]["device_type"]
        if arguments.device == "cuda" and device_type != "cuda":
            raise ValueError("--device cuda, but PyTorch finds no CUDA device here; use --device cpu or auto")
        runner.device = device_type
        runner.gpt2_arguments, runner.checked = gpt2_run(arguments, device_type)
        runner.warmup_steps = default(arguments, device_type, "warmup_steps")
        if runner.warmup_steps >= runner.settings.last_step:
            raise ValueError(
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
        words = sys.argv[1:]
        if arguments.nanogpt_dir is not None:  # a record should not name a home folder
            shorter = os.path.relpath(arguments.nanogpt_dir)
            words = [word.replace(str(arguments.nanogpt_dir), shorter) for word in words]
        command_line = shlex.join(["scripts/compare_peers.py", *words])
        content = beginning(command_line, facts, plan, runner, peers, repeats)
        return run_rounds(content, plan.rounds(repeats), runner, file)


def chosen(arguments: argparse.Namespace) -> tuple[list[str] | None, tuple[str, ...] | None]:
    """Peers and sets of precisions that were asked for; None where nothing was said. ValueError for an unknown name."""
    from testbed.experiments.peers.plan import OURS, SETS

    peers = _names(arguments.peers, PEERS, "--peers")
    if peers is not None and (OURS not in peers or len(peers) < 2):
        raise ValueError(f"--peers {arguments.peers} compares nothing; name ours and another of {', '.join(PEERS)}")
    sets = _names(arguments.precision, SETS, "--precision")
    if sets is None and arguments.quick:
        sets = DEFAULTS["quick"]["precision"]
    return peers, None if sets is None else tuple(sets)


def _names(text: str | None, known: Any, flag: str) -> list[str] | None:
    if text is None:
        return None
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{flag} {text}: {unknown[0]!r} is not one of {', '.join(known)}")
    return names


def default(arguments: argparse.Namespace, device_type: str, name: str) -> Any:
    """What was given, else what --quick or the device suggests."""
    given = getattr(arguments, name)
    if given is not None:
        return given
    suggested = (DEFAULTS["quick"] if arguments.quick else {}).get(name, DEFAULTS[device_type].get(name))
    if name == "warmup_steps":  # a short run still measures half of its steps
        return min(suggested, default(arguments, device_type, "steps") // 2)
    return suggested


def gpt2_run(arguments: argparse.Namespace, device_type: str) -> tuple[list[str], Any]:
    """The flags of src/gpt2.py for the work of every run, and the run that they make.

    The learning rate is constant, because every trainer can do that alike. ValueError: what src/gpt2.py would refuse.
    """
    from testbed.config.check import check_run
    from testbed.config.flags import parse_command_line
    from testbed.distributed.launch import Launch
    from testbed.experiments.peers.plan import check_only_ours
    from testbed.model.shape import LEARNING_RATES

    steps, batch = default(arguments, device_type, "steps"), default(arguments, device_type, "batch_size")
    learning_rate = arguments.learning_rate or LEARNING_RATES.get(arguments.model)  # an unknown size is refused below
    values = {
        "model": arguments.model,
        **{name: default(arguments, device_type, name) for name in DIMENSIONS},
        "vocab_size": vocabulary(arguments),
        "seq_length": default(arguments, device_type, "seq_length"),
        "global_batch_size": batch,
        "micro_batch_size_per_gpu": arguments.micro_batch_size or batch,
        "max_train_steps": steps,
        "epochs": steps,  # a short corpus must not end the run
        "timing_warmup_steps": default(arguments, device_type, "warmup_steps"),
        "learning_rate": learning_rate,
        "min_learning_rate": learning_rate,
        "warmup_steps": 0,
        "optimizer": "adamw",
        "seed": arguments.seed,
        "train_data_path": arguments.train_data_path,
        "val_data_path": arguments.val_data_path,
        "max_val_steps": VALIDATION_BATCHES,
        "sample_tokens": 0,
        "device": device_type,
    }
    words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    launch = Launch(0, 0, 1, 1)
    checked = check_run(parse_command_line(words), launch)
    tokens = checked.train_file.vocab_size
    if checked.settings.model.vocab_size < tokens:
        raise ValueError(
            f"--vocab_size {checked.settings.model.vocab_size} is less than the {tokens} tokens that "
            f"{arguments.train_data_path} is written with; give --vocab_size {tokens} or more, or other data"
        )
    check_only_ours(arguments.only_ours)
    if arguments.only_ours:
        check_run(parse_command_line([*words, *arguments.only_ours]), launch)
    return words, checked


def vocabulary(arguments: argparse.Namespace) -> int | None:
    """Tokens of the model; None: as many as the data's."""
    is_published = arguments.model.startswith("gpt2") and not arguments.quick
    return arguments.vocab_size or (GPT2_VOCABULARY if is_published else None)


def say_plan(plan: Plan, runner: Runner, repeats: int) -> int:
    """What would be run. 1 where a trainer that was asked for cannot be."""
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


def run_rounds(content: dict[str, Any], runs: list[tuple[int, Any]], runner: Runner, file: Path) -> int:
    """Make every run, keep the file up to date, print the table, draw the picture. Returns the exit code.

    A trainer that fails once is not run again; without ours there is nothing to compare with, so that ends it.
    """
    from testbed.experiments.peers.chart import plot_peers
    from testbed.experiments.peers.plan import CEILING, OURS
    from testbed.experiments.peers.results_file import peers_table, write_peers
    from testbed.experiments.peers.running import Interrupted, RunFailed

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
        write_peers(file, content)
        left_s = (time.perf_counter() - started_s) / done * (len(runs) - done)
        say(f"[{done}/{len(runs)}] round {number}: {arm}: {_outcome(row, content)}; {left_s:.0f} s left", flush=True)
    if runner.stop.signal_number is None:
        content["status"] = "complete"
    write_peers(file, content)
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
