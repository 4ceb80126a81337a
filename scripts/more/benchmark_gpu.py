#!/usr/bin/env python3
"""Measure a GPU machine, without a network, in numbered parts of at most nine minutes.

    bash scripts/more/benchmark_gpu.sh --check              # what is missing here, and how to fetch it
    bash scripts/more/benchmark_gpu.sh --dry_run            # the plan, or what --part and --only choose, with estimates
    bash scripts/more/benchmark_gpu.sh --part 1             # then --part 2, and so on
    bash scripts/more/benchmark_gpu.sh                      # all parts, one after the other
    DEVICE=cpu bash scripts/more/benchmark_gpu.sh DIR         # a tiny variant: everything that a CPU can do runs

What is done is not run again: the same call goes on where the last one ended. On another machine of the same kind it
does so once results.tar.gz is unpacked in DIR.

DIR holds summary.json (speeds, agreement of losses and gradient norms, what was left out and why), steps.json (what
became of each step), runs/, logs/, the comparisons with other trainers, and two archives: results.tar.gz has all of it
but data, weights and checkpoints, traces.tar.gz the profiler's traces.

Exit code: 0 all that was asked for is done and agrees; 1 something failed, does not agree or no longer fitted; 2 what
was typed cannot be run; 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.errors import InputError, say
from testbed.experiments.gpu_benchmark import packages
from testbed.experiments.gpu_benchmark.parts import DEADLINE_S, estimate_s, parts
from testbed.experiments.gpu_benchmark.steps import Machine, Step, plan
from testbed.io import SOURCE, not_a_file, read_text
from testbed.program import program, recorded_command

ALL = "all"


def part(text: str) -> int | str:
    """Return the number of a part, or "all"."""
    return ALL if text == ALL else positive(text)


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="In the environment DEVICE, WHEELS, NANOGPT_DIR, ONLY, PEER_ROUNDS and DEADLINE_S stand for the flags "
        "of these names, and PYTHON for the interpreter.",
    )  # fmt: skip
    variables = os.environ
    place = Path("checkpoint/benchmark_gpu")
    parser.add_argument("out", type=Path, nargs="?", default=place, metavar="DIR", help="(default: %(default)s)")
    what = parser.add_argument_group("what is done")
    what.add_argument(
        "--part",
        type=part,
        default=ALL,
        metavar="N|all",
        help="run this part, within --deadline_s (default: %(default)s, without a deadline)",
    )
    what.add_argument(
        "--only", default=variables.get("ONLY"), metavar="REGEX", help="run only the steps whose names match"
    )
    what.add_argument("--dry_run", action="store_true", help="print what would run and run nothing")
    what.add_argument(
        "--check",
        action="store_true",
        help="list the packages that are missing and the commands that fetch their wheels, run nothing",
    )
    what.add_argument("--summarise", action="store_true", help="write summary.json again and run nothing")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--device", choices=["cuda", "cpu"], default=variables.get("DEVICE", "cuda"), help="(default: %(default)s)"
    )
    how.add_argument(
        "--wheels",
        type=Path,
        default=variables.get("WHEELS") or None,
        metavar="DIR",
        help="install these wheels into DIR/site first (default: none; --check looks at .wheels)",
    )
    how.add_argument(
        "--nanogpt_dir",
        default=variables.get("NANOGPT_DIR") or None,
        metavar="DIR",
        help="a copy of nanoGPT, to be measured too",
    )
    how.add_argument(
        "--peer_rounds",
        type=positive,
        default=variables.get("PEER_ROUNDS", 5),
        metavar="N",
        help="rounds of each comparison with another trainer; fewer than 5 make no claim (default: %(default)s)",
    )
    how.add_argument(
        "--deadline_s",
        type=positive,
        default=variables.get("DEADLINE_S"),
        metavar="SECONDS",
        help=f"no step begins that its estimate would carry past this, and none runs on beyond it "
        f"(default: {DEADLINE_S} with --part N)",
    )
    there = parser.add_argument_group("with --check: another machine than this one")
    there.add_argument("--packages", type=Path, metavar="FILE", help="what is installed there: the output of pip list")
    there.add_argument("--python_version", metavar="3.N", help="of its Python (default: this one's)")
    gpus = parser.add_argument_group("with --dry_run: another machine than this one")
    gpus.add_argument("--gpus", type=positive, default=1, metavar="N", help="(default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.device not in ("cuda", "cpu"):  # a default is not checked by the parser
        parser.error(f"DEVICE={arguments.device} is not cuda or cpu")
    if arguments.python_version is not None and not re.fullmatch(r"3\.\d+", arguments.python_version):
        parser.error(f"--python_version {arguments.python_version} is not a version such as 3.12")
    return arguments


@program
def main() -> int:
    arguments = parse_arguments()
    if arguments.check:
        return check(arguments)
    if arguments.summarise:
        if fault := not_a_file(arguments.out / "steps.json"):  # before wheels are installed there
            raise InputError(f"{arguments.out / 'steps.json'} {fault}; name the folder of a benchmark")
        have_packages(arguments, [each for each in packages.PACKAGES if each.module not in packages.TRAINING])
        return sum_up(arguments.out)
    if arguments.dry_run:
        found = {"name": arguments.device, "gpus": arguments.gpus, "torch_version": "any"}
        return say_plan(machine_of(found, arguments), arguments)
    return run_steps(arguments)


def have_packages(arguments: argparse.Namespace, needed: Sequence[packages.Package]) -> None:
    """Install --wheels. Raise InputError where one of these packages is missing without which nothing works."""
    if arguments.wheels is not None:
        from testbed.experiments.gpu_benchmark.install import install

        arguments.out.mkdir(parents=True, exist_ok=True)
        install(packages.wheels_in(arguments.wheels), arguments.out)
    packages.check_needed([package for package in needed if not packages.is_here(package)])


def check(arguments: argparse.Namespace) -> int:
    """List what is missing. 1 where something is, and no wheel of it is in the folder."""
    has: Callable[[packages.Package], bool] = packages.is_here
    if arguments.packages is not None:
        if fault := not_a_file(arguments.packages):
            raise InputError(f"--packages {arguments.packages} {fault}; give a file with the output of pip list")
        has = packages.is_listed_in(read_text(arguments.packages, errors="replace"))
    lines, is_all = packages.report(has, arguments.wheels or Path(".wheels"), arguments.python_version)
    for line in lines:
        say(line)
    return 0 if is_all else 1


def machine_of(found: dict[str, Any], arguments: argparse.Namespace) -> Machine:
    here = frozenset(package.module for package in packages.OPTIONAL if packages.is_here(package))
    return Machine(arguments.device, packages=here, nanogpt_dir=arguments.nanogpt_dir, **found)


def name_of(out: Path) -> str:
    """Return the folder as the commands name it, which run in the repository."""
    return os.path.relpath(out, SOURCE.parent)


def say_plan(machine: Machine, arguments: argparse.Namespace) -> int:
    """Print the steps that --part and --only choose."""
    out = name_of(arguments.out)
    steps = plan(machine, out, arguments.peer_rounds)
    wanted = wanted_steps(steps, arguments)
    say_missing(machine, steps, out)
    total = 0
    for number, of_part in enumerate(parts(steps), start=1):
        chosen = [step for step in of_part if step.name in wanted]
        if not chosen:
            continue
        seconds = estimate_s(chosen, steps)
        total += seconds
        say(f"part {number}: {seconds} s estimated on a bare machine")
        warm: set[str] = set()
        for step in chosen:
            say(f"  {step.name:26s} {step.estimate_s(warm):4d} s  {step.shows}")
            say(f"  {'':33s}  {' '.join(step.command)}")
            warm |= set(step.cold)
    left_out = [step for step in steps if step.left_out is not None]
    if len(wanted) + len(left_out) == len(steps):
        for step in left_out:
            say(f"left out: {step.name}: {step.left_out}")
        say(f"all parts: {total / 60:.0f} minutes on bare machines, estimated")
    return 0


def say_missing(machine: Machine, steps: Sequence[Step], out: str) -> None:
    """Say which packages this machine lacks, or a copy of nanoGPT, and which steps of the plan that leaves out."""
    missing = packages.missing()
    if needed := [package.name for package in missing if not package.used_for]:
        say(f"missing: {', '.join(needed)}; nothing runs without that")
    lacking = [package.name for package in missing if package.used_for]
    lacking += [] if machine.nanogpt_dir else ["NANOGPT_DIR"]
    whole = frozenset(package.module for package in packages.OPTIONAL)
    complete = plan(dataclasses.replace(machine, packages=whole, nanogpt_dir="nanoGPT"), out)
    could_run = {step.name for step in complete if step.left_out is None}
    without = [step.name for step in steps if step.left_out is not None and step.name in could_run]
    if lacking:
        say(f"missing: {', '.join(lacking)}; left out without that: {', '.join(without) or 'no step'}")
    if missing:
        say("bash scripts/more/benchmark_gpu.sh --check prints the commands that fetch the packages")


def run_steps(arguments: argparse.Namespace) -> int:
    """Run what is wanted and not done, and sum up."""
    started_s = time.monotonic()
    out = arguments.out
    check_folder(out)
    have_packages(arguments, packages.PACKAGES)
    from testbed.distributed.processes import Stop
    from testbed.experiments.gpu_benchmark import record, summary
    from testbed.experiments.gpu_benchmark.running import Runner, environment_of_steps, look_at
    from testbed.sweep.runner import only_sweep_in

    environment = environment_of_steps(out.absolute(), arguments.device)
    machine = machine_of(look_at(environment, arguments.device), arguments)
    steps = plan(machine, name_of(out), arguments.peer_rounds)
    wanted = wanted_steps(steps, arguments)
    content = record.beginning(recorded_command(__file__, sys.argv[1:]), machine, steps)
    deadline_s = arguments.deadline_s or (None if arguments.part == ALL else DEADLINE_S)
    with Stop() as stop, only_sweep_in(out):
        file = out / record.STEPS_FILE.name
        if file.exists():
            for line in record.take_over(content, record.STEPS_FILE.read(file)):
                say(line)
        rows = {row["name"]: row for row in content["steps"]}
        chosen = record.to_run(steps, rows, wanted, out)
        say(f"{machine}: {len(chosen)} steps to run, {sum(row['status'] == record.DONE for row in rows.values())} done")
        ends_s = None if deadline_s is None else started_s + deadline_s
        Runner(out, content, stop, environment, ends_s).run_all(chosen)
    code = sum_up(out)
    for archive in summary.pack(out):
        say(f"{archive}: {archive.stat().st_size / packages.MIB:.1f} MiB")
    return stop.exit_code or code


def check_folder(out: Path) -> None:
    """Raise InputError where the folder holds something else than a benchmark: files in it will be replaced."""
    is_ours = not out.exists()
    if out.is_dir():
        own = {"site", ".sweep.lock"}  # what a call that was refused leaves
        is_ours = (out / "steps.json").exists() or {path.name for path in out.iterdir()} <= own
    if not is_ours:
        raise InputError(f"{out} holds no steps.json of a benchmark, but something else; name another folder")


def wanted_steps(steps: list[Step], arguments: argparse.Namespace) -> set[str]:
    """Return the names of the steps of --part that match --only."""
    in_parts = parts(steps)
    if arguments.part != ALL and arguments.part > len(in_parts):
        raise InputError(f"--part {arguments.part}: the plan has {len(in_parts)} parts; --dry_run prints them")
    chosen = in_parts if arguments.part == ALL else [in_parts[arguments.part - 1]]
    try:
        pattern = re.compile(arguments.only or "")
    except re.error as error:
        raise InputError(f"--only {arguments.only} is no regular expression ({error})") from None
    names = {step.name for of_part in chosen for step in of_part if pattern.search(step.name)}
    if not names:
        raise InputError(f"--only {arguments.only} matches no step of --part {arguments.part}; --dry_run lists them")
    return names


def sum_up(out: Path) -> int:
    """Write and print the summary. 1 where something did not pass."""
    from testbed.experiments.gpu_benchmark.summary import print_summary, summarise

    found = summarise(out)
    print_summary(found)
    say(f"{len(found['failed'])} did not pass; {out / 'summary.json'}")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
