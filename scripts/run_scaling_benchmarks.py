#!/usr/bin/env python3
"""Train strategies x ranks x batch sizes, each several times in interleaved order, and compare them.

    python scripts/run_scaling_benchmarks.py --dry_run             # what would run, the time, what the repeats can show
    python scripts/run_scaling_benchmarks.py --run_types baseline,allreduce,ddp,fsdp,optimized --ranks 1,2
    python scripts/run_scaling_benchmarks.py --protocol time_to_loss --target_val_loss 6.2 --run_types baseline,ddp
    python scripts/run_scaling_benchmarks.py --run_types ddp,ddp:bucket_cap_mb=5 --ranks 2 -- --learning_rate 1e-3

What follows `--` goes to every src/gpt2.py as it stands. Where no CUDA device is found, a run is nano on one core per
rank: sequences of 128 tokens, fp32, 30 optimizer steps. With CUDA devices it is GPT-2 124M on one device per rank:
sequences of 1024 tokens, bf16 where that is faster, 100 steps.

Runs that are finished are kept: the same command continues a sweep, one with more repeats, run types, ranks or batch
sizes extends it. Files: DIR/sweep.json (the plan and the state of each run), DIR/<cell>/run_<k>/ with
training_metrics.json and train.log, and DIR/scaling_report.json. docs/reproduce.md has a command for every table of the
projects that this one replaces.

Exit code: 0 every run is there, 1 a run failed, 2 what was typed cannot be run, 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_types import not_negative, positive
from testbed.config.sweep_flags import add_flags, check_out_dir, parse_before_dashes, parser_of, relative
from testbed.errors import InputError, say
from testbed.program import program, recorded_command

MOST_RUNS = 10_000  # of one configuration

if TYPE_CHECKING:
    from testbed.sweep.plan import Cell
    from testbed.sweep.request import Request
    from testbed.sweep.state import Sweep


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Return the sweep's own flags as `own`, and what follows `--` as `passed_on`."""
    parser = parser_of(__doc__)
    group = parser.add_argument_group("what is compared (lists are separated by commas)")
    add = group.add_argument
    add(
        "--run_types",
        default="baseline,allreduce,ddp,fsdp,optimized",
        metavar="LIST",
        help="run types of gpt2.py, with flags of their own as run_type:flag=value+flag=value, for example "
        "optimized:zero_stage=3+offload=optimizer (default: %(default)s)",
    )
    add("--ranks", metavar="LIST", help="numbers of ranks; on the CPU one core each (default: those of 1,2,4 that fit)")
    add("--gpus", metavar="LIST", help="the same as --ranks, and refused without enough CUDA devices")
    add(
        "--batch_sizes",
        metavar="LIST",
        help="sequences per optimizer step of all ranks, with --protocol weak of each rank (default: 32; weak: 16)",
    )
    add(
        "--repeats",
        "--repeat",
        type=positive,
        default=5,
        metavar="N",
        help="runs of each; fewer than 5 make no claim (default: %(default)s)",
    )
    add(
        "--protocol",
        choices=["strong", "weak", "time_to_loss"],
        default="strong",
        help="strong: the same global batch on more ranks. weak: the same batch per rank. time_to_loss: as strong, "
        "timed until --target_val_loss, each repeat with another seed (default: %(default)s)",
    )
    add("--target_val_loss", type=float, metavar="NATS", help="with --protocol time_to_loss: validation loss to reach")

    group = parser.add_argument_group("work of each run")
    text = "optimizer steps (default on CPU / CUDA: 30 / 100; time_to_loss: 120 / 1000)"
    add_flags(group, "steps", help=text)
    text = "passes over the data; with --steps, whichever ends first (default: 100 with --steps)"
    group.add_argument("--epochs", type=positive, metavar="N", help=text)
    add_flags(group, "seq_length", "dataset_mode", "deepspeed_config")
    add_flags(group, "seed", help="of all runs; with time_to_loss of the first repeat (default: %(default)s)")
    text = "allow unequal work, and runs of another commit in one sweep"
    group.add_argument("--allow_mismatch", action="store_true", help=text)

    group = parser.add_argument_group("how it runs")
    add_flags(group, "out_dir", help="folder of the sweep (default: checkpoint/scaling/<protocol>)")
    add_flags(group, "warmup_runs")
    group.add_argument(
        "--profile_runs",
        type=not_negative,
        default=0,
        metavar="N",
        help="also N runs of each with --profile, for communication, compute and idle time but never throughput "
        "(default: %(default)s)",
    )
    text = "print what would run, an estimate of the time, and which differences the repeats can show; write nothing"
    add_flags(group, "run_timeout_s", "certificate", "yes", "dry_run", help=text)
    arguments = parse_before_dashes(parser, words)
    arguments.out_dir = relative(arguments.out_dir or Path("checkpoint") / "scaling" / arguments.protocol)
    return arguments


@program
def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    from testbed.analysis.certificate import CERTIFICATE_FILE, certificate_here, save_certificate, this_machine
    from testbed.sweep.plan import FAILED, check_cells, compile_alike, plan
    from testbed.sweep.request import facts_of_machine
    from testbed.sweep.runner import make_runs, plan_lines
    from testbed.sweep.state import Sweep

    check_typed(arguments)
    facts = facts_of_machine()
    request = request_from(arguments, facts)
    certificate = certificate_here(arguments.certificate, this_machine(request.machine.kind))
    cells = plan(request)
    if (note := compile_alike(cells, request.machine)) is not None:
        say(f"note: {note}")
    settings = check_cells(cells, arguments.allow_mismatch, request.protocol)
    command_line = recorded_command(__file__, arguments.own, arguments.passed_on)
    sweep = Sweep(request.protocol, command_line, facts["commit"], cells, request.target_val_loss)
    sweep.git_dirty = facts["is_dirty"]
    if arguments.dry_run:
        say("\n".join(plan_lines(sweep, arguments.out_dir, settings, request.machine, arguments.allow_mismatch)))
        print_power(request, sweep, settings, certificate, arguments.out_dir)
        return 0
    code = make_runs(sweep, arguments, request.machine, settings)
    if certificate is not None:  # it travels with the results
        save_certificate(arguments.out_dir / CERTIFICATE_FILE, certificate[1])
    if code is not None:
        return code
    report(cells, arguments.out_dir)
    return 1 if any(cell.status == FAILED for cell in cells) else 0


def check_typed(arguments: argparse.Namespace) -> None:
    """Check the flags that depend on each other. Raises InputError."""
    check_out_dir(arguments, "the sweep")
    for name in ("repeats", "warmup_runs", "profile_runs"):
        if (value := getattr(arguments, name)) > MOST_RUNS:
            raise InputError(f"--{name} {value} is above {MOST_RUNS}: every run is a row of the plan")
    if (arguments.protocol == "time_to_loss") != (arguments.target_val_loss is not None):
        raise InputError(
            "--protocol time_to_loss needs --target_val_loss, the validation loss that runs are timed to reach"
            if arguments.protocol == "time_to_loss"
            else f"--target_val_loss is for --protocol time_to_loss, not for {arguments.protocol}"
        )
    if arguments.target_val_loss is not None and not 0 < arguments.target_val_loss < float("inf"):
        raise InputError(f"--target_val_loss {arguments.target_val_loss:g} is not a loss above 0")
    if arguments.gpus and arguments.ranks:
        raise InputError("--gpus is --ranks with a demand for CUDA devices; give one of them")


def request_from(arguments: argparse.Namespace, facts: dict) -> Request:
    """Return the request for the sweep's runs. InputError for what cannot be run here."""
    from testbed.sweep.request import DEFAULT_BATCH_SIZE, machine_for, parse_numbers, request_for

    machine = machine_for(facts["devices"], arguments.passed_on)
    devices = machine.cuda_devices
    if arguments.gpus or arguments.ranks:
        ranks = parse_numbers(arguments.gpus or arguments.ranks, "--gpus" if arguments.gpus else "--ranks")
    else:
        ranks = tuple(number for number in (1, 2, 4) if number <= machine.most_ranks)
    if arguments.gpus and max(ranks) > len(devices):
        raise InputError(
            f"--gpus {arguments.gpus} needs {max(ranks)} CUDA devices, but PyTorch sees {len(devices)} here; use "
            "--ranks for CPU cores"
        )
    default_batch = str(DEFAULT_BATCH_SIZE[arguments.protocol])
    return request_for(
        arguments,
        machine,
        protocol=arguments.protocol,
        ranks=ranks,
        batch_sizes=parse_numbers(arguments.batch_sizes or default_batch, "--batch_sizes"),
        repeats=arguments.repeats,
        target_val_loss=arguments.target_val_loss,
        profile_runs=arguments.profile_runs,
    )


def print_power(
    request: Request, sweep: Sweep, settings: dict, certificate: tuple[Path, dict] | None, out_dir: Path
) -> None:
    """Print which differences the repeats can show, and how many a difference takes."""
    from testbed.analysis.certificate import known_noise, power_lines
    from testbed.sweep.plan import COMPLETE, FAILED, NOT_APPLICABLE, PENDING
    from testbed.sweep.runner import seconds_left
    from testbed.sweep.state import metrics_of

    arms: dict[str, list[float]] = {}
    for cell in sweep.cells:
        metrics = metrics_of(cell, out_dir) if cell.status == COMPLETE and not cell.profiled else None
        if metrics is not None and (rate := metrics["summary"]["mean_tokens_per_sec_global"]):
            arms.setdefault(cell.name, []).append(rate)
    finished = [cell for cell in sweep.cells if cell.status == COMPLETE]
    once = [
        dataclasses.replace(cell, status=PENDING)
        for cell in sweep.cells
        if cell.repeat == 1 and not cell.profiled and cell.status not in (FAILED, NOT_APPLICABLE)
    ]
    seconds = seconds_left([*finished, *once], settings, request.machine)
    for line in power_lines(known_noise(arms, certificate), request.repeats, seconds):
        say(f"# {line}")


def report(cells: list[Cell], out_dir: Path) -> None:
    """Write the report, and print its table, what did not run, and where the files are."""
    from testbed.analysis.scaling.report import write_scaling_report
    from testbed.analysis.scaling.tables import scaling_table
    from testbed.sweep.plan import COMPLETE
    from testbed.sweep.state import SWEEP_FILE, comparisons, shortfalls

    if any(cell.status == COMPLETE and not cell.profiled for cell in cells):
        try:
            path, found = write_scaling_report(out_dir)
            say(f"\n{scaling_table(found)}\nscaling report: {path}, its status is {found['status']}")
            if not any(arm["speedup"] for arm in found["arms"]) and (commands := comparisons(cells, out_dir)):
                say("\n".join(["no speed-up can be given; verdicts between configurations on equal ranks:", *commands]))
        except ValueError as error:  # every run was instrumented, say
            say(f"scaling report: not written: {error}")
    say("\n".join(shortfalls(cells)))
    say(f"plan and state: {out_dir / SWEEP_FILE}")
    say(f"runs:           {out_dir}/<cell>/run_<k>/training_metrics.json")
    say(f"this table:     python scripts/more/generate_scaling_table.py --dir {shlex.quote(str(out_dir))}")


if __name__ == "__main__":
    sys.exit(main())
