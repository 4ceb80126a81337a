#!/usr/bin/env python3
"""Measure what a slower network does to each strategy: step time, exposed communication, throughput.

    python scripts/network_study.py --dry_run    # every command, and how long it will take
    python scripts/network_study.py              # about an hour on two cores; the same command goes on after a stop
    python scripts/network_study.py --quick      # two strategies, two links, two repeats: three minutes, no claims
    python scripts/network_study.py --tables docs/results/network --into docs/results/network/README.md

Each run is one call of src/gpt2.py with one rank on each of 2 or 4 hosts (scripts/lab/network.py; root only), in
interleaved rounds, and once more under the profiler, which is never timed. It writes DIR/network_study.json with every
step of every run, and pictures next to it. Runs that are finished are kept. See docs/network.md.

Exit code: 0, 1 a run failed, 2 what was typed cannot be done, 128 + a signal's number after it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.experiments.network_lab.study import Asked
    from testbed.sweep.plan import Cell
    from testbed.sweep.state import Sweep

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import not_negative, positive
from testbed.errors import InputError, say
from testbed.program import program, recorded_command

REPOSITORY = Path(__file__).resolve().parent.parent

DEFAULTS: dict[str, Any] = {"repeats": 5, "profile_runs": 1, "steps": 9, "warmup_steps": 3, "hosts": "2,4"}
QUICK = {
    "repeats": 2, "profile_runs": 1, "steps": 8, "hosts": "2", "strategies": "allreduce,ddp",
    "links": "unlimited,100mbit", "parts": "strategies",
}  # fmt: skip
MOST_REPEATS = 100
RUN_TIMEOUT_S = 660.0  # the limit of network.py run is 600 s


def parse_arguments(words: list[str]) -> argparse.Namespace:
    from testbed.experiments.network_lab.study import LEVERS, LINKS, PARTS, STRATEGIES_STUDIED

    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--parts", metavar="LIST", help=f"of {', '.join(PARTS)} (default: all); levers are {', '.join(LEVERS)}"
    )
    what.add_argument("--strategies", metavar="LIST", help=f"of {', '.join(STRATEGIES_STUDIED)} (default: all)")
    what.add_argument(
        "--hosts",
        metavar="LIST",
        help="2, 4, ... (default: 2,4, where 4 are those strategies and links that --dry_run shows)",
    )
    what.add_argument("--links", metavar="LIST", help=f"of {', '.join(LINKS)} (default: all)")
    what.add_argument("--every", action="store_true", help="every strategy over every link on every number of hosts")
    what.add_argument("--quick", action="store_true", help="a trial of minutes; fewer than 5 repeats make no claim")
    how = parser.add_argument_group("how")
    how.add_argument("--repeats", type=positive, metavar="N", help="interleaved rounds (default: 5)")
    how.add_argument("--profile_runs", type=not_negative, metavar="N", help="profiled runs of each (default: 1)")
    how.add_argument(
        "--steps", type=positive, metavar="N", help="optimizer steps of a run, 3 of them warm-up (default: 9)"
    )
    how.add_argument(
        "--out_dir",
        type=Path,
        default=Path("checkpoint/network"),
        metavar="DIR",
        help="runs and results (default: %(default)s)",
    )
    how.add_argument("--allow_mismatch", action="store_true", help="keep runs of other commits of the code")
    how.add_argument("--dry_run", action="store_true", help="print every command and the time; run nothing")
    shown = parser.add_argument_group("what was measured")
    shown.add_argument("--tables", type=Path, metavar="DIR", help="print the tables of a study, measure nothing")
    shown.add_argument("--into", type=Path, metavar="FILE.md", help="with --tables: fill them into the page, and draw")
    arguments = parser.parse_args(words)
    if arguments.into is not None and arguments.tables is None:
        parser.error("--into needs --tables DIR, the study whose tables it takes")
    for name in ("parts", "strategies", "hosts", "links", "repeats", "profile_runs", "steps"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, (QUICK if arguments.quick else {}).get(name, DEFAULTS.get(name)))
    return arguments  # fmt: skip


@program
def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    return show(arguments) if arguments.tables is not None else study(arguments)


def show(arguments: argparse.Namespace) -> int:
    """Print the tables of an earlier study; with --into fill them into the page, and draw its pictures."""
    from testbed.analysis.blocks import filled
    from testbed.experiments.network_lab.charts import plot_study
    from testbed.experiments.network_lab.study_file import STUDY_FILE
    from testbed.experiments.network_lab.tables import blocks, tables
    from testbed.io import write_text

    content = STUDY_FILE.read(arguments.tables)
    if arguments.into is None:
        say("\n\n".join(f"**{name}**\n\n{text}" for name, text in tables(content).items()))
        return 0
    page = filled(arguments.into.read_text(encoding="utf-8"), blocks(content))
    folder = arguments.tables if arguments.tables.is_dir() else arguments.tables.parent
    drawn = plot_study(content, folder)
    write_text(arguments.into, page)
    say(f"filled in: {arguments.into}; drawn: {', '.join(map(str, drawn))}")
    return 0


def asked_for(arguments: argparse.Namespace) -> Asked:
    """ValueError names what cannot be."""
    from testbed.experiments.network_lab.links import MOST_HOSTS
    from testbed.experiments.network_lab.study import LINKS, PARTS, STRATEGIES_STUDIED, Asked
    from testbed.sweep.request import parse_names, parse_numbers

    def chosen(flag: str, text: str | None, known: Iterable[str]) -> tuple[str, ...]:
        """Return names in the order in which they are known; all where none are given."""
        names = known if text is None else parse_names(text, known, flag)
        return tuple(name for name in known if name in names)

    for name, least in (("repeats", 1), ("profile_runs", 0), ("steps", DEFAULTS["warmup_steps"] + 1)):
        value = getattr(arguments, name)
        if not least <= value <= MOST_REPEATS:
            raise InputError(f"--{name} {value} is not from {least} to {MOST_REPEATS}")
    hosts = parse_numbers(arguments.hosts, "--hosts")
    if not all(2 <= number <= MOST_HOSTS for number in hosts):
        raise InputError(f"--hosts {arguments.hosts}: a number is not from 2 to {MOST_HOSTS}")
    out_dir = Path(os.path.relpath(arguments.out_dir))  # it is recorded, and a record should not name a home folder
    return Asked(
        parts=chosen("--parts", arguments.parts, PARTS),
        strategies=chosen("--strategies", arguments.strategies, STRATEGIES_STUDIED),
        hosts=hosts,
        links=chosen("--links", arguments.links, LINKS),
        repeats=arguments.repeats,
        profile_runs=arguments.profile_runs,
        steps=arguments.steps,
        warmup_steps=DEFAULTS["warmup_steps"],
        folder=str(out_dir),
        data=str(out_dir / "data"),
        program=os.path.relpath(REPOSITORY / "src" / "gpt2.py"),
        network=os.path.relpath(REPOSITORY / "scripts" / "lab" / "network.py"),
        is_whole=arguments.every,
    )


def study(arguments: argparse.Namespace) -> int:
    """Plan, run round after round, and say what came out."""
    from testbed.experiments.made_up_tokens import write_made_up_tokens
    from testbed.experiments.network_lab.study import VOCABULARY, cells_of
    from testbed.sweep.plan import FAILED
    from testbed.sweep.request import Machine, facts_of_machine
    from testbed.sweep.runner import Runner, only_sweep_in, resumable_runs
    from testbed.sweep.state import Sweep, take_over

    asked = asked_for(arguments)
    cells = cells_of(asked)
    if arguments.dry_run:
        return say_plan(asked, cells)
    if (reason := why_not_here(cells)) is not None:
        raise InputError(f"no lab can be made here: {reason}")
    out_dir = Path(asked.folder)
    with resumable_runs(out_dir) as stop, only_sweep_in(out_dir) as lock:
        write_made_up_tokens(Path(asked.data), VOCABULARY)
        settings = check(cells)
        facts = facts_of_machine()
        command_line = recorded_command(__file__, sys.argv[1:])
        sweep = Sweep("network", command_line, facts["commit"], cells, git_dirty=facts["is_dirty"])
        say(take_over(sweep, out_dir, arguments.allow_mismatch), flush=True)
        sweep.write(out_dir)
        machine = Machine(num_cores=os.cpu_count() or 1)
        Runner(sweep, out_dir, machine, settings, stop, lock, RUN_TIMEOUT_S).run_all(warmup_runs=0)
    report(asked, sweep)
    if stop.exit_code is not None:
        return stop.exit_code
    return 1 if any(cell.status == FAILED for cell in cells) else 0


def why_not_here(cells: list[Cell]) -> str | None:
    """Return why the labs of a plan cannot be made here; None where they can."""
    from testbed.experiments.network_lab.links import why_impossible, why_no_switch

    return why_no_switch() if any("--delay_ms" in cell.command for cell in cells) else why_impossible()


def check(cells: list[Cell]) -> dict:
    """Have gpt2.py's rules checked before anything runs; what a lever changes may differ, all else may not."""
    from testbed.sweep.plan import check_cells

    changed = [cell for cell in cells if "--gradient_compression" in cell.command]
    settings = check_cells([cell for cell in cells if cell not in changed], allow_mismatch=False)
    return {**settings, **(check_cells(changed, allow_mismatch=True) if changed else {})}


def say_plan(asked: Asked, cells: list[Cell]) -> int:
    """Print every command, the number of runs, and what keeps them from being made here."""
    from testbed.experiments.network_lab.study import SECONDS_PER_RUN, arms_of
    from testbed.sweep.runner import in_words

    for cell in cells:
        say(shlex.join(cell.command))
    timed = sum(not cell.profiled for cell in cells)
    say(
        f"\n# {len(arms_of(asked))} arms: {timed} timed runs and {len(cells) - timed} profiled ones, in interleaved "
        f"rounds: about {in_words(SECONDS_PER_RUN * len(cells))} on two cores, a guess"
    )
    if (reason := why_not_here(cells)) is not None:
        say(f"# not here: {reason}")
    return 0


def report(asked: Asked, sweep: Sweep) -> None:
    """Write network_study.json and the pictures of what there is by now, and print the tables."""
    from testbed.experiments.network_lab.charts import plot_study
    from testbed.experiments.network_lab.study import LINKS, arms_of, links_as_records
    from testbed.experiments.network_lab.study_file import STUDY_FILE, study_of
    from testbed.experiments.network_lab.tables import tables

    out_dir, arms = Path(asked.folder), arms_of(asked)
    used = [name for name in LINKS if any(arm.link == name for arm in arms)]
    head = {
        "command_line": sweep.command_line,
        "repeats": asked.repeats,
        "arms": [arm.as_record() for arm in arms],
        "links": links_as_records(used),
    }
    rows = json.loads((out_dir / "sweep.json").read_text(encoding="utf-8"))["cells"]
    try:
        STUDY_FILE.write(out_dir / STUDY_FILE.name, study_of(head, rows, out_dir))
    except ValueError as error:
        say(f"no results yet: {error}")
        return
    content = STUDY_FILE.read(out_dir)
    drawn = plot_study(content, out_dir)
    say("\n\n".join(["", *tables(content).values(), ""]))
    say(f"files: {', '.join(map(str, [out_dir / STUDY_FILE.name, *drawn]))}")


if __name__ == "__main__":
    sys.exit(main())
