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
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_types import positive
from testbed.config.sweep_flags import add_flags, check_out_dir, parse_before_dashes, parser_of, relative
from testbed.errors import InputError, say
from testbed.program import program, recorded_command

LEAST_PAIRS, MOST_PAIRS = 5, 1000

if TYPE_CHECKING:
    from testbed.sweep.request import Request


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Return the program's own flags as `own`, and what follows `--` as `passed_on`."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--pairs", type=positive, default=20, metavar="N", help="pairs of each configuration (default: %(default)s)")
    text = (
        "what is run, with flags as in scripts/run_scaling_benchmarks.py (default: baseline, and ddp where there are "
        "several devices or cores)"
    )
    add("--run_types", metavar="LIST", help=text)
    add("--ranks", type=positive, metavar="N", help="ranks of what runs on several (default: all devices or cores)")
    add_flags(parser, "batch_size", "steps", "seed", "out_dir", default=Path("checkpoint/certificate"))
    add_flags(parser, "warmup_runs", "run_timeout_s", "dry_run", "yes")
    arguments = parse_before_dashes(parser, words)
    arguments.out_dir = relative(arguments.out_dir)
    if not LEAST_PAIRS <= arguments.pairs <= MOST_PAIRS:
        raise InputError(f"--pairs {arguments.pairs} is not from {LEAST_PAIRS} to {MOST_PAIRS}; fewer say too little")
    check_out_dir(arguments, "the runs")
    return arguments


@program
def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    from testbed.sweep.plan import FAILED, cells_of_pairs, check_cells, compile_alike
    from testbed.sweep.request import facts_of_machine
    from testbed.sweep.runner import make_runs, plan_lines
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
    if (code := make_runs(sweep, arguments, request.machine, settings)) is not None:
        return code
    say("\n".join(shortfalls(cells)))
    conclude(arguments.out_dir, command)
    return 1 if any(cell.status == FAILED for cell in cells) else 0


def request_from(arguments: argparse.Namespace, facts: dict) -> tuple[Request, int]:
    """Return the request for the runs, and the ranks of what runs on several. InputError for what cannot be run."""
    from testbed.sweep.request import machine_for, request_for

    machine = machine_for(facts["devices"], arguments.passed_on)
    ranks = arguments.ranks or machine.most_ranks
    run_types = arguments.run_types or ("baseline,ddp" if ranks > 1 else "baseline")
    return request_for(arguments, machine, run_types=run_types, ranks=(ranks,)), ranks


def conclude(out_dir: Path, command: str) -> None:
    """Write the certificate and print it. Failure: there are too few whole pairs."""
    from testbed.analysis.certificate import CERTIFICATE_FILE, certificate_of, read_certificate, save_certificate
    from testbed.analysis.document import terminal
    from testbed.analysis.document.model import Document, Section
    from testbed.analysis.report.certified import blocks

    path = out_dir / CERTIFICATE_FILE
    save_certificate(path, certificate_of(out_dir, command))
    shown = Document(sections=[Section(blocks=blocks(read_certificate(path), path.name))])
    say(f"\n{terminal.text(shown, terminal.WIDTH)}")
    say(f"\ncertificate: {path}")
    say(f"report:      python generate_charts.py --runs {shlex.quote(str(out_dir))} --report report.html")


if __name__ == "__main__":
    sys.exit(main())
