#!/usr/bin/env python3
"""Measure how noisy this machine is, by pairs of equal runs, and which differences it can show.

    python scripts/more/certify_machine.py --dry_run          # what would run, and the time it may take
    python scripts/more/certify_machine.py                    # twenty pairs of baseline, and of ddp on all devices
    python scripts/more/certify_machine.py --run_types fsdp --ranks 2 -- --model gpt2

Both runs of a pair have the same command, so whatever is between them is noise. Leave the machine alone meanwhile, or
use it as it is used while you measure. The work is that of scripts/run_scaling_benchmarks.py; what follows `--` goes to
every src/gpt2.py as it stands. The same command resumes where it stopped, and with more --pairs extends it.

Files: DIR/machine_certificate.json, DIR/sweep.json, DIR/<configuration>_a/run_<k>/ and _b/run_<k>/ with
training_metrics.json. A sweep on this machine copies the certificate into its folder, and a report quotes it.

Exit code: 0 the certificate is written, 1 a run failed or there is none, 2 what was typed cannot be run, 130 or 143
interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import not_negative, positive
from testbed.config.sweep_flags import check_folder_and_timeout, parse_before_dashes, relative
from testbed.errors import InputError, say
from testbed.program import program, recorded_command

REPOSITORY = Path(__file__).resolve().parents[2]
LEAST_PAIRS, MOST_PAIRS = 5, 1000

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings
    from testbed.distributed.processes import Stop
    from testbed.sweep.request import Request
    from testbed.sweep.state import Sweep


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Return the program's own flags as `own`, and what follows `--` as `passed_on`."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--pairs", type=positive, default=20, metavar="N", help="pairs of each configuration (default: %(default)s)")
    add("--run_types", metavar="LIST",
        help="what is run, with flags as in scripts/run_scaling_benchmarks.py (default: baseline, and ddp where there "
        "are several devices or cores)")  # fmt: skip
    add("--ranks", type=positive, metavar="N", help="ranks of what runs on several (default: all devices or cores)")
    add("--batch_size", type=positive, default=32, metavar="N",
        help="sequences per optimizer step of all ranks (default: %(default)s)")  # fmt: skip
    add("--steps", type=positive, metavar="N", help="optimizer steps of a run (default on CPU / CUDA: 30 / 100)")
    add("--seed", type=not_negative, default=42, metavar="N", help="of every run (default: %(default)s)")
    add("--out_dir", type=Path, default=Path("checkpoint/certificate"), metavar="DIR", help="(default: %(default)s)")
    add("--warmup_runs", type=not_negative, default=1, metavar="N",
        help="unmeasured runs before the first (default: %(default)s)")  # fmt: skip
    add("--run_timeout_s", type=float, metavar="SECONDS", help="end a longer run; it counts as failed (default: never)")
    add("--dry_run", action="store_true", help="print what would run and an estimate of the time; write nothing")
    add("--yes", action="store_true", help="do not ask before running more ranks than there are cores")
    arguments = parse_before_dashes(parser, words)
    arguments.out_dir = relative(arguments.out_dir)
    if not LEAST_PAIRS <= arguments.pairs <= MOST_PAIRS:
        raise InputError(f"--pairs {arguments.pairs} is not from {LEAST_PAIRS} to {MOST_PAIRS}; fewer say too little")
    check_folder_and_timeout(arguments, "the runs")
    return arguments


@program
def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    from testbed.sweep.listing import plan_lines
    from testbed.sweep.pairs import cells_of_pairs
    from testbed.sweep.plan import FAILED, check_cells, compile_alike
    from testbed.sweep.request import facts_of_machine
    from testbed.sweep.runner import agree_to_oversubscribe, resumable_runs
    from testbed.sweep.state import Sweep, shortfalls

    facts = facts_of_machine()
    request, ranks = request_from(arguments, facts)
    cells = cells_of_pairs(request, ranks, arguments.pairs)
    if (note := compile_alike(cells, request.machine)) is not None:
        say(f"note: {note}")
    settings = check_cells(cells, allow_mismatch=False)
    command = recorded_command(__file__, arguments.own, arguments.passed_on)
    sweep = Sweep(request.protocol, command, facts["commit"], cells, git_dirty=facts["is_dirty"])
    if arguments.dry_run:
        say("\n".join(plan_lines(sweep, arguments.out_dir, settings, request.machine)))
        return 0
    if not agree_to_oversubscribe(cells, request.machine, arguments.yes):
        return 2
    with resumable_runs(arguments.out_dir) as stop:
        make_runs(arguments, request, sweep, settings, stop)
    if stop.exit_code is not None:
        return stop.exit_code
    say("\n".join(shortfalls(cells)))
    conclude(arguments.out_dir, command)
    return 1 if any(cell.status == FAILED for cell in cells) else 0


def request_from(arguments: argparse.Namespace, facts: dict) -> tuple[Request, int]:
    """Return the request for the runs, and the ranks of what runs on several. InputError for what cannot be run."""
    from testbed.sweep.request import Request, machine_for, parse_variants, shared_arguments

    given = dict.fromkeys(("epochs", "seq_length", "dataset_mode", "deepspeed_config")) | {"steps": arguments.steps}
    shared_arguments("strong", "cpu", given, arguments.passed_on)  # says what is wrong after --
    machine = machine_for(facts["devices"], arguments.passed_on)
    ranks = arguments.ranks or len(machine.cuda_devices) or max(1, machine.num_cores // (machine.threads_per_rank or 1))
    run_types = arguments.run_types or ("baseline,ddp" if ranks > 1 else "baseline")
    request = Request(
        protocol="strong",
        variants=parse_variants(run_types),
        ranks=(ranks,),
        batch_sizes=(arguments.batch_size,),
        repeats=1,
        seed=arguments.seed,
        shared=shared_arguments("strong", machine.kind, given, arguments.passed_on),
        machine=machine,
        folder=str(arguments.out_dir),
        program=os.path.relpath(REPOSITORY / "src" / "gpt2.py"),
    )
    return request, ranks


def make_runs(
    arguments: argparse.Namespace, request: Request, sweep: Sweep, settings: dict[str, RunSettings], stop: Stop
) -> None:
    """Make the runs that are not finished, until a signal comes."""
    from testbed.sweep.runner import Runner, only_sweep_in
    from testbed.sweep.state import take_over

    out_dir = arguments.out_dir
    with only_sweep_in(out_dir) as lock:
        say(take_over(sweep, out_dir, allow_mismatch=False), flush=True)
        sweep.write(out_dir)
        Runner(sweep, out_dir, request.machine, settings, stop, lock, arguments.run_timeout_s).run_all(
            arguments.warmup_runs
        )


def conclude(out_dir: Path, command: str) -> None:
    """Write the certificate and print it. Failure: there are too few whole pairs."""
    from testbed.analysis.certificate import CERTIFICATE_FILE, certificate_of
    from testbed.analysis.document import terminal
    from testbed.analysis.document.model import Document, Section
    from testbed.analysis.report.certified import blocks

    path = out_dir / CERTIFICATE_FILE.name
    CERTIFICATE_FILE.write(path, certificate_of(out_dir, command))
    shown = Document(sections=[Section(blocks=blocks(CERTIFICATE_FILE.read(path), path.name))])
    say(f"\n{terminal.text(shown, terminal.WIDTH)}")
    say(f"\ncertificate: {path}")
    say(f"report:      python generate_charts.py --runs {shlex.quote(str(out_dir))} --report report.html")


if __name__ == "__main__":
    sys.exit(main())
