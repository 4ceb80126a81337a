#!/usr/bin/env python3
"""Compare what the planner predicts from a calibration with what src/gpt2.py then takes, on CPU cores.

    python scripts/plan.py --calibrate                  # at most 10 minutes -> checkpoint/calibration.json
    python scripts/planner_study.py --dry_run           # every command, and how long it will take
    python scripts/planner_study.py                     # about 20 minutes; the same command goes on after a stop
    python scripts/planner_study.py --quick             # a trial: one small model, three run types
    python scripts/planner_study.py --memory            # the resident memory of every run type on 1, 2 and 4 ranks
    python scripts/planner_study.py --tables docs/results/planner --into docs/results/planner/README.md

The runs train sizes that no calibration trains, with every run type of a CPU, on one rank and two, the latter also
over --links between two hosts of the network lab (root only). Writes DIR/planner_study.json and a picture, or
DIR/planner_memory.json. See docs/planner.md.

Exit code: 0, 1 a run failed, 2 what was typed cannot be done, 128 + a signal's number after it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed.experiments.calibration.study import Asked
    from testbed.sweep.plan import Cell

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.errors import InputError, say
from testbed.planner.calibration import CALIBRATION
from testbed.program import program, recorded_command

REPOSITORY = Path(__file__).resolve().parent.parent
WARMUP_STEPS, MOST_REPEATS = 3, 100
QUICK_KINDS = "baseline,ddp,pipeline 1f1b"
RUN_TIMEOUT_S = 660.0  # the limit of network.py run is 600 s


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what to measure")
    text = "made by scripts/plan.py --calibrate (default: %(default)s)"
    what.add_argument("--calibration", type=Path, default=CALIBRATION, metavar="FILE.json", help=text)
    text = "run types, such as ddp,optimized 1,pipeline gpipe (default: all)"
    what.add_argument("--kinds", metavar="LIST", help=text)
    text = "between two ranks: unlimited, or a rate of the network lab (default: unlimited,100mbit)"
    what.add_argument("--links", metavar="LIST", help=text)
    what.add_argument("--quick", action="store_true", help="a trial of a minute, which proves nothing")
    text = "memory in place of time, with one size; neither --calibration nor root is needed"
    what.add_argument("--memory", action="store_true", help=text)
    how = parser.add_argument_group("how")
    text = "interleaved rounds (default: %(default)s)"
    how.add_argument("--repeats", type=positive, default=1, metavar="N", help=text)
    text = f"optimizer steps of a run, {WARMUP_STEPS} of them warm-up (default: %(default)s)"
    how.add_argument("--steps", type=positive, default=13, metavar="N", help=text)
    text = "runs and results (default: checkpoint/planner, with --memory checkpoint/planner_memory)"
    how.add_argument("--out_dir", type=Path, metavar="DIR", help=text)
    how.add_argument("--allow_mismatch", action="store_true", help="keep runs of other commits of the code")
    how.add_argument("--dry_run", action="store_true", help="print every command and the time; run nothing")
    shown = parser.add_argument_group("what was measured")
    shown.add_argument("--tables", type=Path, metavar="DIR", help="print the tables of a study, measure nothing")
    shown.add_argument("--into", type=Path, metavar="FILE.md", help="with --tables: fill them into the page, and draw")
    arguments = parser.parse_args(words)
    if arguments.into is not None and arguments.tables is None:
        parser.error("--into needs --tables DIR, the study whose tables it takes")
    return arguments


@program
def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    return show(arguments) if arguments.tables is not None else study(arguments)


def show(arguments: argparse.Namespace) -> int:
    """Print the tables of an earlier study; with --into fill them into the page, and draw its picture."""
    from testbed.analysis.blocks import filled
    from testbed.experiments.calibration.study_file import STUDY_FILE
    from testbed.experiments.calibration.study_tables import PAGE, blocks, draw
    from testbed.io import write_text

    content = STUDY_FILE.read(arguments.tables)
    if arguments.into is None:
        say("\n\n".join(blocks(content).values()))
        return 0
    page = filled(arguments.into.read_text(encoding="utf-8") if arguments.into.exists() else PAGE, blocks(content))
    drawn = draw(content, arguments.tables if arguments.tables.is_dir() else arguments.tables.parent)
    write_text(arguments.into, page)
    say(f"filled in: {arguments.into}; drawn: {drawn}")
    return 0


def asked_for(arguments: argparse.Namespace) -> Asked:
    """Return the request. InputError names what cannot be."""
    from testbed.experiments.calibration import memory_study
    from testbed.experiments.calibration.study import QUICK_WORKS, UNLIMITED, WORKS, Asked, rates_of
    from testbed.experiments.calibration.work import FLAGS_OF_KIND
    from testbed.sweep.request import parse_names

    if arguments.steps <= WARMUP_STEPS + 1:
        raise InputError(f"--steps {arguments.steps} leaves less than two steps after the {WARMUP_STEPS} of warm-up")
    if arguments.repeats > MOST_REPEATS:
        raise InputError(f"--repeats {arguments.repeats} is more than {MOST_REPEATS}")
    words = arguments.links or (UNLIMITED if arguments.quick else f"{UNLIMITED},100mbit")
    links = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    rates_of(links)
    kinds = arguments.kinds or (QUICK_KINDS if arguments.quick else ",".join(FLAGS_OF_KIND))
    out_dir = arguments.out_dir or Path("checkpoint", "planner_memory" if arguments.memory else "planner")
    out_dir = Path(os.path.relpath(out_dir))  # it is recorded, and a record should not name a home folder
    asked = Asked(
        works=QUICK_WORKS if arguments.quick else WORKS,
        kinds=parse_names(kinds, FLAGS_OF_KIND, "--kinds"),
        links=links,
        repeats=arguments.repeats,
        steps=arguments.steps,
        warmup_steps=WARMUP_STEPS,
        folder=str(out_dir),
        program=os.path.relpath(REPOSITORY / "src" / "gpt2.py"),
        network=os.path.relpath(REPOSITORY / "scripts" / "lab" / "network.py"),
    )
    return memory_study.of_memory(asked) if arguments.memory else asked


def study(arguments: argparse.Namespace) -> int:
    """Plan, run round after round, and say what came out."""
    from testbed.experiments.calibration.calibrate import VOCABULARY
    from testbed.experiments.calibration.study import cells_of, settings_by_name
    from testbed.experiments.made_up_tokens import write_made_up_tokens
    from testbed.planner.calibration import check_machine, read_calibration
    from testbed.planner.here import facts_here
    from testbed.sweep.plan import FAILED
    from testbed.sweep.request import Machine, facts_of_machine
    from testbed.sweep.runner import Runner, only_sweep_in, resumable_runs
    from testbed.sweep.state import Sweep, take_over

    asked = asked_for(arguments)
    cells = cells_of(asked)
    if arguments.dry_run:
        return say_plan(cells)
    calibration = None if arguments.memory else read_calibration(arguments.calibration)
    if calibration is not None:
        check_machine(calibration, facts_here(), arguments.calibration)
    out_dir = Path(asked.folder)
    with resumable_runs(out_dir) as stop, only_sweep_in(out_dir) as lock:
        write_made_up_tokens(out_dir / "data", VOCABULARY)
        if any("--rate" in cell.command for cell in cells) and (reason := why_no_lab()) is not None:
            raise InputError(f"--links {arguments.links or '100mbit'}: no lab can be made here: {reason}")
        settings = settings_by_name(cells)
        facts = facts_of_machine()
        command_line = recorded_command(__file__, sys.argv[1:])
        sweep = Sweep("planner", command_line, facts["commit"], cells, git_dirty=facts["is_dirty"])
        say(take_over(sweep, out_dir, arguments.allow_mismatch), flush=True)
        sweep.write(out_dir)
        machine = Machine(num_cores=os.cpu_count() or 1)
        Runner(sweep, out_dir, machine, settings, stop, lock, RUN_TIMEOUT_S).run_all(warmup_runs=0)
    if calibration is None:
        report_memory(out_dir, command_line, settings)
    else:
        report(asked, command_line, calibration)
    if stop.exit_code is not None:
        return stop.exit_code
    return 1 if any(cell.status == FAILED for cell in cells) else 0


def why_no_lab() -> str | None:
    from testbed.experiments.network_lab.links import why_impossible

    return why_impossible()


def say_plan(cells: list[Cell]) -> int:
    """Print every command, and the time."""
    from testbed.experiments.calibration.study import SECONDS_PER_RUN
    from testbed.sweep.runner import in_words

    for cell in cells:
        say(shlex.join(cell.command))
    say(f"\n# {len(cells)} runs: about {in_words(SECONDS_PER_RUN * len(cells))} on two cores, a guess")
    return 0


def report(asked: Asked, command_line: str, calibration) -> None:
    """Write planner_study.json and the picture of what there is by now, and print the tables."""
    from testbed.experiments.calibration.study import arms_of
    from testbed.experiments.calibration.study_file import STUDY_FILE, content_of
    from testbed.experiments.calibration.study_tables import blocks, draw

    out_dir = Path(asked.folder)
    head = {"command_line": command_line, "steps": asked.steps, "warmup_steps": asked.warmup_steps}
    rows = json.loads((out_dir / "sweep.json").read_text(encoding="utf-8"))["cells"]
    STUDY_FILE.write(out_dir / STUDY_FILE.name, content_of(head, arms_of(asked), rows, out_dir, calibration))
    content = STUDY_FILE.read(out_dir)
    drawn = draw(content, out_dir)
    say("\n\n".join(["", *blocks(content).values(), ""]))
    say(f"files: {out_dir / STUDY_FILE.name}, {drawn}")


def report_memory(out_dir: Path, command_line: str, settings: dict) -> None:
    """Write planner_memory.json of what there is by now, and print its table."""
    from testbed.experiments.calibration.memory_study import MEMORY_FILE, content_of, memory_table

    rows = json.loads((out_dir / "sweep.json").read_text(encoding="utf-8"))["cells"]
    MEMORY_FILE.write(out_dir / MEMORY_FILE.name, content_of(command_line, rows, settings, out_dir))
    say(f"\n{memory_table(MEMORY_FILE.read(out_dir))}\n\nfile: {out_dir / MEMORY_FILE.name}")


if __name__ == "__main__":
    sys.exit(main())
