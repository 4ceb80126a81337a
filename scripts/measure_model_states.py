#!/usr/bin/env python
"""Count the bytes of model states on every rank, beside the formulas of testbed.autotune.memory_model.

    python scripts/measure_model_states.py

Trains each strategy on 2 and on 4 CPU ranks for two optimizer steps on random tokens, and counts just before the second
update (before the first there are no moments). The table shows the rank that holds most, the last line is about all.
What is alive and no model state is listed apart. Takes two minutes on two cores. Exit code 1: a count is more than 2 %
off its formula, or a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # `testbed` lies there, installed or not

import numpy as np

from testbed.autotune.memory_model import elements_held
from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.data.token_file import TokenFileWriter
from testbed.errors import say
from testbed.model.shape import ModelShape

if TYPE_CHECKING:
    from testbed.distributed.launch import Launch

TOLERANCE = 0.02
STEPS = 2
SEQUENCE = 16  # activations are not what is counted, and bf16 is slow on a CPU
TIMEOUT_S = 600
NATIVE_BF16 = "--precision bf16 --mixed_precision native"
# stage 3 keeps weights below the threshold whole on every rank; the formula has none of them
DEEPSPEED_CONFIG = {
    "zero_optimization": {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 500_000,
        "reduce_bucket_size": 500_000,
        "allgather_bucket_size": 500_000,
    }
}
NOTES = """Why a formula is not the ZeRO paper's (more in src/testbed/autotune/memory_model.py):
  ZeRO 1, 2  gradients: whole tensors where a rank's part cuts one, so more than 2 P / N; stage 1 keeps no others either
  ZeRO 1-3   fp32 copy for update: the gradients that Adam reads, made for one parameter group at a time
  FSDP       fp32 shards are weights and masters in one: 4 + 4 + 8 in place of 2 + 2 + 12"""
CASES = {
    "ZeRO 1": f"--run_type optimized --zero_stage 1 {NATIVE_BF16}",
    "ZeRO 2": f"--run_type optimized --zero_stage 2 {NATIVE_BF16}",
    "ZeRO 3": f"--run_type optimized --zero_stage 3 {NATIVE_BF16}",
    "FSDP": f"--run_type fsdp {NATIVE_BF16}",
    "ddp": "--run_type ddp --precision fp32",
    "ddp Muon": "--run_type ddp --precision fp32 --optimizer muon",
    "FSDP Muon": "--run_type fsdp --precision fp32 --optimizer muon",
    "pipeline": "--run_type pipeline --precision fp32",
    "tensor": "--run_type tensor --precision fp32",
}


def main() -> int:
    arguments = parse_arguments()
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)  # before the minutes, not after
    shape = ModelShape(
        arguments.num_layers, arguments.num_heads, arguments.embedding_size, arguments.vocab_size, SEQUENCE
    )
    say(f"{elements_held(shape):,} parameters with padding; {shape.describe()}, vocab_size={shape.vocab_size}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        flags = write_inputs(Path(folder), shape)
        for ranks in arguments.ranks:
            say(f"running {', '.join(arguments.strategies)} on {ranks} ranks ...", file=sys.stderr, flush=True)
            counted = launch(Path(folder), ranks, flags, arguments.strategies)
            if counted is None:
                return 1
            results += counted
    rows = [row for result in results for of_rank in result["per_rank"] for row in of_rank["rows"]]
    largest = max((abs(difference(row)) for row in rows), default=0.0)
    say("\n".join([*table(results), "", NOTES]))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    is_near = largest <= TOLERANCE
    say(f"largest difference on any rank: {largest:.2%}, {'within' if is_near else 'MORE THAN'} {TOLERANCE:.0%}")
    return 0 if is_near else 1


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=_numbers, default=[2, 4], metavar="N,N",
                        help="numbers of ranks to run on (default: 2,4)")  # fmt: skip
    parser.add_argument("--strategies", type=_names, default=list(CASES), metavar="NAME,NAME",
                        help=f"of {', '.join(CASES)} (default: all)")  # fmt: skip
    for name, default in (("num_layers", 4), ("num_heads", 4), ("embedding_size", 384), ("vocab_size", 8000)):
        parser.add_argument(
            f"--{name}", type=positive, default=default, metavar="N", help="of the model (default: %(default)s)"
        )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write every rank's counts there")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(CASES)}")
    return names


def write_inputs(folder: Path, shape: ModelShape) -> list[str]:
    """Random tokens and a DeepSpeed configuration. Returns the flags that all runs share."""
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size - 1, 4000)
    for name in ("train", "val"):
        with TokenFileWriter(folder / f"{name}.bin", shape.vocab_size, "random", shape.vocab_size - 1) as writer:
            writer.append_document(tokens)
    (folder / "deepspeed.json").write_text(json.dumps(DEEPSPEED_CONFIG))
    dimensions = {
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "embedding_size": shape.embedding_size,
        "max_position_embeddings": shape.max_position_embeddings,
    }
    flags = [word for name, value in dimensions.items() for word in (f"--{name}", str(value))]
    flags += ["--train_data_path", str(folder / "train.bin"), "--val_data_path", str(folder / "val.bin")]
    return [*flags, "--seq_length", str(SEQUENCE), "--max_train_steps", str(STEPS), "--device", "cpu"]


def launch(folder: Path, ranks: int, flags: list[str], names: list[str]) -> list[dict] | None:
    """Train some strategies on so many ranks. Returns the counts of each; None if a rank failed, after showing what it
    said."""
    runs = {name: [*flags, *CASES[name].split()] for name in names}
    for run_flags in runs.values():
        # two micro batches on each data rank, enough of them for a pipeline
        run_flags += ["--micro_batch_size_per_gpu", "1", "--global_batch_size", str(2 * ranks)]
        if "optimized" in run_flags:
            run_flags += ["--deepspeed_config", str(folder / "deepspeed.json")]
    (folder / "runs.json").write_text(json.dumps(runs))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, str(Path(__file__).resolve()), "--worker", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        say(f"{done.stdout}{done.stderr}\nthe run on {ranks} ranks failed", file=sys.stderr)
        return None
    return json.loads((folder / "counts.json").read_text())


def difference(row: dict[str, Any]) -> float:
    """Relative to the formula."""
    return row["measured_bytes"] / row["formula_bytes"] - 1


def table(results: list[dict]) -> list[str]:
    """The rank with the most model states of each run, a line per kind, and what else is alive on it."""
    lines = [
        f"{'strategy':<10}{'ranks':>5} {'rank':>5}  "
        f"{'kind':<21}{'measured bytes':>15}{'formula bytes':>15}{'off by':>9}{'ZeRO paper':>13}"
    ]
    for result in results:
        totals = [sum(row["measured_bytes"] for row in of["rows"]) for of in result["per_rank"]]
        rank = totals.index(max(totals))
        of_rank = result["per_rank"][rank]
        lines.append("")
        for row in of_rank["rows"]:
            numbers = f"{row['measured_bytes']:>15,}{row['formula_bytes']:>15,}{difference(row):>+9.2%}"
            numbers += "" if row["paper_bytes"] is None else f"{row['paper_bytes']:>13,}"
            lines.append(f"{result['strategy']:<10}{result['ranks']:>5} {rank:>5}  {row['kind']:<21}{numbers}")
        apart = f"{sum(of_rank['transient'].values()):>15,}"
        named = ", ".join(f"{what} {size:,}" for what, size in of_rank["transient"].items())
        lines.append(f"{'':<23}{'transient and other':<21}{apart}  {named}".rstrip())
    return lines


def worker(folder: Path) -> None:
    """One rank: train every run of runs.json, and let rank 0 write everyone's counts."""
    import torch

    from testbed.distributed import process_group
    from testbed.distributed.launch import read_launch
    from testbed.distributed.signals import StopSignals

    StopSignals(grace_s=10, on_stuck=lambda stop: None).interrupt()
    torch.set_num_threads(1)
    launch = read_launch()
    process_group.start_process_group(torch.device("cpu"), launch, is_needed=True)
    results = []
    for name, flags in json.loads((folder / "runs.json").read_text()).items():
        per_rank = process_group.gather_objects(train_and_count(flags, launch))
        results.append({"strategy": name, "ranks": launch.world_size, "per_rank": per_rank})
    if launch.rank == 0:
        (folder / "counts.json").write_text(json.dumps(results))
    process_group.wait_for_everyone()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own way out


def train_and_count(flags: list[str], launch: Launch) -> dict[str, Any]:
    """Train by the program's own parts. Returns this rank's counts in the last step beside the formulas."""
    import torch

    from testbed.config.check import check_run
    from testbed.config.flags import parse_command_line
    from testbed.experiments.model_states import beside_formulas, count_before_updates, live_tensors
    from testbed.model.gpt2 import GPT2
    from testbed.optim.lr_schedule import learning_rate_at
    from testbed.strategies import build_strategy
    from testbed.train.batches import TrainingBatches

    cpu = torch.device("cpu")
    checked = check_run(parse_command_line(flags), launch)
    settings = checked.settings
    # held until this run has ended, so that no address is used again: DeepSpeed does not let go of everything
    left_by_earlier_runs = live_tensors()
    torch.manual_seed(settings.training.seed)
    model = GPT2(settings.shape)
    strategy = build_strategy(settings, model, cpu)
    del model  # a strategy may hold a part of it only
    count = count_before_updates(strategy, not_counted=left_by_earlier_runs)
    batches = TrainingBatches(checked.train_file, settings, strategy.data_rank, cpu)
    for step in range(settings.last_step):
        count.clear()
        strategy.train_step(batches.of_step(step), learning_rate_at(step, settings))
    strategy.close()
    return beside_formulas(count, settings, launch.rank)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]))
    sys.exit(main())
