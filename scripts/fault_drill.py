#!/usr/bin/env python3
"""Inject faults into runs at random moments, resume them, and check whether anything was lost.

    python scripts/fault_drill.py --dry_run               # every fault, and the time it may take
    python scripts/fault_drill.py --faults 200 --seed 1   # hours; with --jobs 2 about an hour on two cores
    python scripts/fault_drill.py --seed 1 --only 17      # one of them again

A drill is a run of a few steps on two ranks that is killed, stopped, signalled, denied its disk or damaged in its
files, and started again with the same command until it says that it is complete. It has survived when its weights and
losses are those of the reference run bit for bit, its metrics hold every step once, no process, no lock and no
half-written file is left, and every start ended in time. Faults and their moments follow from --seed alone.

Drills that are done are kept: the same command goes on. Files: DIR/fault_drill.json, DIR/lost/ with the folders of runs
that lost something, DIR/logs/. docs/fault_drill.md explains each fault.

Exit code: 0 all survived, 1 one was lost or none could be made, 2 what was typed cannot be run, 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import not_negative, positive
from testbed.errors import InputError, say
from testbed.program import program, recorded_command

REPOSITORY = Path(__file__).resolve().parent.parent
PROGRAM = REPOSITORY / "src" / "gpt2.py"

if TYPE_CHECKING:
    from testbed.experiments.fault_drill.drills import Drills
    from testbed.experiments.fault_drill.faults import Fault
    from testbed.sweep.request import Variant

RUN_TYPES = "ddp,fsdp,optimized,pipeline,tensor:dropout=0,fsdp:async_mode=async"
BEGAN_S = time.perf_counter()
DRILLS_PER_REFERENCE = 2.5  # seconds of a drill over those of the reference run, before any drill was made


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    what = parser.add_argument_group("faults")
    what.add_argument("--faults", type=positive, default=200, metavar="N", help="how many (default: %(default)s)")
    text = "decides each fault and its moment (default: %(default)s)"
    what.add_argument("--seed", type=not_negative, default=1, metavar="N", help=text)
    text = "make only the faults with these numbers, again if they were made before"
    what.add_argument("--only", metavar="LIST", help=text)
    work = parser.add_argument_group("the run")
    text = (
        "run types of gpt2.py, each with flags of its own where wanted: optimized:zero_stage=3 (default: %(default)s)"
    )
    work.add_argument("--run_types", default=RUN_TYPES, metavar="LIST", help=text)
    text = "tiny = 2 layers of 32 channels, for a quick look (default: %(default)s)"
    work.add_argument("--model", choices=["nano", "tiny"], default="nano", help=text)
    numbers = {
        "--steps": (12, "N", "optimizer steps"),
        "--save_every": (3, "STEPS", "a checkpoint every STEPS"),
        "--collective_timeout": (15, "SECONDS", "of every run: how long a rank waits for another"),
        "--grace_seconds": (10, "SECONDS", "of every run: how long it may take to end after a signal"),
    }
    for flag, (default, metavar, text) in numbers.items():
        work.add_argument(flag, type=positive, default=default, metavar=metavar, help=f"{text} (default: %(default)s)")
    how = parser.add_argument_group("how")
    text = "drills at a time; two cores each (default: %(default)s)"
    how.add_argument("--jobs", type=positive, default=1, metavar="N", help=text)
    out_dir = Path("checkpoint/fault_drill")
    how.add_argument("--out_dir", type=Path, default=out_dir, metavar="DIR", help="(default: %(default)s)")
    how.add_argument("--overwrite", action="store_true", help="forget the drill that --out_dir holds")
    how.add_argument("--dry_run", action="store_true", help="print the faults, and run nothing")
    how.add_argument("--program", type=Path, default=PROGRAM, help=argparse.SUPPRESS)
    return parser.parse_args(words)


@program
def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    check_numbers(arguments)
    return drill(arguments)


BOUNDS = {"faults": 100_000, "steps": 10_000, "jobs": 64, "collective_timeout": 86_400, "grace_seconds": 86_400}


def check_numbers(arguments: argparse.Namespace) -> None:
    for name, bound in BOUNDS.items():
        if getattr(arguments, name) > bound:
            raise InputError(f"--{name} {getattr(arguments, name)} is above {bound:,}, more than any machine does")
    if 2 * arguments.save_every > arguments.steps:
        raise InputError(
            f"--save_every {arguments.save_every} saves less than twice in --steps {arguments.steps}; a drill needs an "
            "earlier checkpoint and a later one"
        )


def drill(arguments: argparse.Namespace) -> int:
    """Plan, make the reference runs, inject the faults, and say what came out."""
    from testbed.distributed.processes import Interrupted, Stop
    from testbed.experiments.fault_drill.damage import disk_full_backend
    from testbed.experiments.fault_drill.drill_file import DRILL_FILE, beginning, table, take_over
    from testbed.experiments.fault_drill.drills import Drills
    from testbed.experiments.fault_drill.faults import plan
    from testbed.experiments.fault_drill.work import Work
    from testbed.sweep.request import parse_numbers, parse_variants
    from testbed.sweep.runner import in_words, only_sweep_in

    variants = parse_variants(arguments.run_types)
    work = Work(
        arguments.program, arguments.out_dir.resolve() / "data", arguments.model, arguments.steps, arguments.save_every,
        arguments.collective_timeout, arguments.grace_seconds,
    )  # fmt: skip
    numbers = parse_numbers(arguments.only, "--only") if arguments.only else range(1, arguments.faults + 1)
    faults = [plan(arguments.seed, number, variants, work.steps, work.save_every) for number in numbers]
    if arguments.dry_run:
        return say_plan(faults, variants)
    with Stop() as stop, only_sweep_in(arguments.out_dir):
        work.write_data()
        work.check(variants)
        file = arguments.out_dir / DRILL_FILE.name
        content = beginning(
            recorded_command(__file__, sys.argv[1:]), arguments.seed, arguments.faults,
            [variant.text for variant in variants], work, arguments.jobs, disk_full_backend(),
        )  # fmt: skip
        if not arguments.overwrite:
            take_over(content, file)
        made = set() if arguments.only else {row["number"] for row in content["faults"]}
        faults = [fault for fault in faults if fault.number not in made]
        by_text = {variant.text: variant for variant in variants}
        drills = Drills(work, by_text, arguments.out_dir, content["disk_method"], stop, arguments.jobs)
        try:
            make_references(drills, faults, content)
            inject(drills, faults, content, file)
        except Interrupted:
            pass
        if stop.exit_code is not None:
            say("interrupted: drills that are done are kept, the same command goes on from here", file=sys.stderr)
            return stop.exit_code
        shutil.rmtree(arguments.out_dir / "runs", ignore_errors=True)
        content = DRILL_FILE.read(file)
        in_all = f"{len(content['faults'])} faults, {in_words(content['wall_s'])} in all"
        say(f"\n{table(content['summary'])}\n\n{in_all}; disk full by {content['disk_method']}; file: {file}")
        return 1 if any(row["survived"] is False for row in content["faults"]) else 0


def say_plan(faults: list[Fault], variants: tuple[Variant, ...]) -> int:
    from testbed.sweep.runner import in_words

    for fault in faults:
        say(f"{fault.number:>4}  {fault}")
    guess = in_words(12 * len(faults) + 15 * len(variants))
    say(f"\n# {len(faults)} faults and {len(variants)} reference runs: about {guess} on two cores")
    return 0


def make_references(drills: Drills, faults: list[Fault], content: dict[str, Any]) -> None:
    """Make the reference run of every run type that has a fault, and note what it says of the code."""
    from testbed.experiments.fault_drill.drill_file import add_code
    from testbed.experiments.fault_drill.drills import DrillFailed

    for text in dict.fromkeys(fault.run_type for fault in faults):
        say(f"reference run of {text} ...", flush=True)
        metrics = drills.make_reference(text)
        reference, earlier = drills.references[text], content["references"].get(text)
        say(f"  {reference.seconds:.1f} s, weights {reference.weights_sha256[:12]}", flush=True)
        if earlier is not None and earlier["weights_sha256"] != reference.weights_sha256:
            raise DrillFailed(
                f"the reference run of {text} ends with other weights than when this drill began "
                f"({earlier['weights_sha256'][:12]}): the code has changed; give --overwrite, or another --out_dir"
            )
        content["references"][text] = dataclasses.asdict(reference)
        add_code(content, metrics)


def inject(drills: Drills, faults: list[Fault], content: dict[str, Any], file: Path) -> None:
    """Make drill after drill; the file is up to date after each."""
    from tqdm import tqdm

    from testbed.experiments.fault_drill.drill_file import DRILL_FILE
    from testbed.sweep.runner import in_words

    references = [drills.references[fault.run_type].seconds for fault in faults]
    expected_s = DRILLS_PER_REFERENCE * sum(references) / max(1, len(references))
    seconds, started_s, lost, earlier_s = [], time.perf_counter(), 0, content["wall_s"]
    with tqdm(total=len(faults), unit="fault", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:
        for done, row in enumerate(drills.run_all(faults), start=1):
            content["faults"] = [each for each in content["faults"] if each["number"] != row["number"]] + [row]
            missing = set(range(1, content["num_faults"] + 1)) - {each["number"] for each in content["faults"]}
            content["status"] = "interrupted" if missing else "complete"
            content["wall_s"] = earlier_s + time.perf_counter() - BEGAN_S
            DRILL_FILE.write(file, content)
            seconds.append(row["seconds"])
            lost += row["survived"] is False
            mean_s = (expected_s + sum(seconds)) / (1 + done)  # the guess weighs as much as one drill
            left = in_words(mean_s * (len(faults) - done) / drills.jobs)
            outcome = {True: "survived", False: "LOST", None: "came too late"}[row["survived"]]
            problems = f": {'; '.join(row['problems'])}" if row["survived"] is False else ""
            line = f"{row['number']:>4} {row['kind']} {row['run_type']} {row['target']}, {len(row['starts'])} starts, "
            bar.write(f"[{done}/{len(faults)}] {line}{row['seconds']:.0f} s: {outcome}{problems}; about {left} left")
            bar.set_postfix_str(f"{lost} lost", refresh=False)
            bar.update()
            sys.stdout.flush()
    say(f"{len(seconds)} drills in {in_words(time.perf_counter() - started_s)}, {lost} lost", flush=True)


if __name__ == "__main__":
    sys.exit(main())
