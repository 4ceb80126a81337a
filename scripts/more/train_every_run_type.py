#!/usr/bin/env python3
"""Train the same small run under every run type and draw the losses on one another.

    python scripts/more/train_every_run_type.py                        # 2 ranks, nano, 50 steps each
    python scripts/more/train_every_run_type.py --draw_only --out DIR  # picture and table of runs that are there

It needs train_small.bin and val_small.bin (download_data.py, preprocess_small.py). A run that is complete is kept; a
run type that is refused is named with the reason. Exit code 1 when a run failed, or another than dp (which needs two
CUDA devices) was refused.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.analysis.charts.agreement import agreement_table, write_agreement_figure
from testbed.analysis.runs.load import load_runs
from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.config.run_types import REFERENCE, STRATEGIES
from testbed.distributed.processes import Stop, run
from testbed.errors import Failure, say
from testbed.metrics.file import read_metrics
from testbed.program import program
from testbed.run_folder import METRICS

REPOSITORY = Path(__file__).resolve().parents[2]
# folder -> what is added to the run type of that name, or to the one named first
FURTHER = {
    "optimized_zero3": ["--run_type", "optimized", "--zero_stage", "3"],
    "pipeline_zero_bubble": ["--run_type", "pipeline", "--pipeline_schedule", "zero_bubble"],
}
WORK = (
    "--model nano --seq_length 128 --learning_rate 1e-3 --precision fp32 --compile off "
    "--micro_batch_size_per_gpu 4 --max_val_steps 4 --sample_tokens 0"
).split()


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=positive, default=2, help="ranks of the distributed run types (default: %(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=50, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("checkpoint/run_types"), metavar="DIR",
                        help="one folder per run (default: %(default)s)")  # fmt: skip
    parser.add_argument("--figure", type=Path, default=Path("docs/charts/strategies_agree.png"), metavar="FILE.png",
                        help="the picture (default: %(default)s)")  # fmt: skip
    parser.add_argument("--draw_only", action="store_true", help="train nothing; draw the runs under --out")
    return parser.parse_args()


@program
def main() -> int:
    arguments = parse_arguments()
    runs = {run_type: ["--run_type", run_type] for run_type in STRATEGIES} | FURTHER
    order = list(STRATEGIES)
    runs = dict(sorted(runs.items(), key=lambda run: (order.index(run[1][1]), run[0])))
    failed = []
    for number, (name, flags) in enumerate(runs.items(), start=1):
        if arguments.draw_only or is_complete(arguments.out / name):
            continue
        say(f"[{number}/{len(runs)}] {name} ...", end=" ", flush=True)
        with Stop() as stop:
            outcome = train(name, flags, arguments, stop)
        say(outcome, flush=True)
        if stop.exit_code is not None:
            return stop.exit_code
        is_excused = STRATEGIES[flags[1]].devices == "all" and outcome.startswith(
            "refused"
        )  # it needs two CUDA devices
        failed += [] if outcome.startswith("complete") or is_excused else [name]
    done = [arguments.out / name for name in runs if is_complete(arguments.out / name)]
    if arguments.out / REFERENCE not in done:
        raise Failure(f"there is no complete baseline under {arguments.out}, so nothing to compare with")
    try:
        loaded = load_runs(done)
        table = agreement_table(loaded)
    except ValueError as error:  # runs of an earlier call with other --steps, say
        raise Failure(f"{error}; give another --out, or remove the older runs") from None
    write_agreement_figure(loaded, arguments.figure)
    say(f"\n{table}\n\npicture: {arguments.figure}")
    return 1 if failed else 0


def is_complete(folder: Path) -> bool:
    metrics = folder / METRICS
    return metrics.exists() and read_metrics(metrics)["status"] == "complete"


def train(name: str, flags: list[str], arguments: argparse.Namespace, stop: Stop) -> str:
    """One run in processes of its own, everything it says in a log. Returns what became of it, in words."""
    folder = arguments.out / name
    log = arguments.out / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    ranks = arguments.ranks if STRATEGIES[flags[1]].is_distributed else 1
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    program = os.path.relpath(REPOSITORY / "src" / "gpt2.py")  # it is recorded, and a record should not name a home
    command = [sys.executable, *launcher, program, *flags, *WORK]
    command += ["--max_train_steps", str(arguments.steps), "--warmup_steps", str(arguments.steps // 5)]
    command += ["--checkpoint_path", str(folder), "--overwrite"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # one core is one device on a CPU: a rank gets one thread
    ended = run(command, log, stop, env=environment)
    if ended.was_stopped:
        return "interrupted"
    if ended.exit_code == 0:
        return f"complete in {ended.seconds:.0f} s"
    said = [line for line in log.read_text().splitlines() if "gpt2.py: error:" in line]
    if said:
        return f"refused: {said[0].partition('error: ')[2]}"
    return f"failed with exit code {ended.exit_code}, see {log}"


if __name__ == "__main__":
    sys.exit(main())
