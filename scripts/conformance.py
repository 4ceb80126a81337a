#!/usr/bin/env python3
"""Say which releases of DeepSpeed and PyTorch train the same model as a single process.

    python scripts/conformance.py --here                                       # what is installed: about four minutes
    python scripts/conformance.py --deepspeed 0.18.9 0.19.8 --torch 2.13.0 --dry_run
    python scripts/conformance.py --deepspeed 0.18.9 0.19.8 --torch 2.13.0 --yes

Every pair of releases gets a virtual environment, from the package index that pip is configured for. In it a tiny model
trains for six steps on two ranks of this machine's CPU, with DeepSpeed alone, as its guide says: ZeRO 0 to 3, one and
two micro batches, clipping active and inactive, in fp32 and bf16. Losses and gradient norms of every step and the final
weights are compared with those of a single process without DeepSpeed, in the same environment.
docs/results/conformance says what was found.

A combination that is in DIR/conformance.jsonl is not run again: the same call resumes where it stopped. Remove a line
to run it again. Other files: logs, and DIR/environments/, which may be removed.

Exit code: 0 all that was asked for agrees; 1 something differs or does not run; 2 what was typed cannot be run; 130 or
143 interrupted.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.sweep_flags import add_flags, check_out_dir, parser_of
from testbed.errors import Failure, InputError, counted, say
from testbed.experiments.conformance import Trial, environments, results
from testbed.experiments.conformance.trials import trials
from testbed.program import program, recorded_command

if TYPE_CHECKING:
    from testbed.distributed.processes import Stop

Plan = dict[tuple[str, str], list[Trial]]  # PyTorch and DeepSpeed -> what is to be run
TRIAL_S = 5.0  # two busy cores


def release(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a release of three numbers, such as 0.19.8")
    return text


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    of_releases: dict[str, Any] = {"nargs": "+", "type": release, "default": [], "metavar": "RELEASE"}
    parser.add_argument("--deepspeed", **of_releases, help="releases of DeepSpeed")
    parser.add_argument("--torch", **of_releases, help="releases of PyTorch; all pairs are tried")
    here_help = "try the releases that are installed here, and make no environment"
    parser.add_argument("--here", action="store_true", help=here_help)
    only_help = "combinations whose names match, as --dry_run prints them (default: all)"
    parser.add_argument("--only", metavar="REGEX", default="", help=only_help)
    add_flags(parser, "out_dir", default=Path("checkpoint/conformance"))
    add_flags(parser, "dry_run", help="print what would run, with disk and time; write nothing")
    add_flags(parser, "yes", help="make the environments that are missing")
    return parser.parse_args()


@program
def main() -> int:
    arguments = parse_arguments()
    check_out_dir(arguments, "environments and results")
    file = arguments.out_dir / results.FILE
    plan = planned(arguments)
    there = {results.key(line) for line in results.combinations(results.read(file))}
    left = {pair: [one for one in wanted if (*pair, one.name) not in there] for pair, wanted in plan.items()}
    left = {pair: wanted for pair, wanted in left.items() if wanted}
    new = [] if arguments.here else environments.missing(arguments.out_dir, list(left))
    show_cost(arguments.out_dir, plan, left, new)
    if arguments.dry_run:
        for wanted in left.values():
            say("\n".join(one.name for one in wanted))
            break
        return 0
    if new and not arguments.yes:
        raise InputError("it would download and install what stands above; give --yes to do it")
    code = run_all(arguments, left, file) if left else 0
    asked_for = {(*pair, one.name) for pair, wanted in plan.items() for one in wanted}
    lines = [line for line in results.read(file) if "command" in line or results.key(line) in asked_for]
    if results.combinations(lines):
        say("\n" + results.tables(lines))
    return code or int(not all(line["agrees"] for line in results.combinations(lines)))


def planned(arguments: argparse.Namespace) -> Plan:
    """Return what is asked for. InputError where flags contradict each other."""
    pairs = [(torch, deepspeed) for torch in arguments.torch for deepspeed in arguments.deepspeed]
    if arguments.here == bool(pairs) or bool(arguments.deepspeed) != bool(arguments.torch):
        raise InputError("give --deepspeed and --torch with releases, or --here alone for those that are installed")
    try:
        wanted = [one for one in trials() if re.search(arguments.only, one.name)]
    except re.error as error:
        raise InputError(f"--only {arguments.only} is not a regular expression ({error})") from None
    if not wanted:
        raise InputError(f"--only {arguments.only} matches no combination; --dry_run without it lists them")
    if arguments.here:
        try:
            pairs = [(metadata.version("torch").partition("+")[0], metadata.version("deepspeed"))]
        except metadata.PackageNotFoundError as error:
            raise InputError(f"--here, but the package {error.name} is not installed; pip install it") from None
    return dict.fromkeys(pairs, wanted)


def show_cost(out: Path, plan: Plan, left: Plan, new: Sequence[Path]) -> None:
    """Print what is to be done, with disk and time. InputError where the disk is too small."""
    total, missing = (sum(map(len, each.values())) for each in (plan, left))
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free, needed = shutil.disk_usage(place).free / 1e9, environments.gigabytes(new)
    minutes = (len(new) * environments.INSTALL_S + missing * TRIAL_S) / 60
    say(
        f"{counted(total, 'combination')} of {counted(len(plan), 'pair')} of releases, {total - missing:,} of them are "
        f"there; {counted(len(new), 'environment')} to make: up to {needed:.1f} GB of disk ({free:.0f} GB are free; "
        f"PyTorch's build for CPUs takes a fifth) and as much to download; about {minutes:.0f} minutes"
    )
    if needed > free:
        raise InputError(
            f"--out_dir {out} lies on a disk with {free:.0f} GB free, and the environments may take {needed:.0f}; give "
            f"another folder, or fewer releases of --torch at a time and remove {out}/environments in between"
        )


def run_all(arguments: argparse.Namespace, left: Plan, file: Path) -> int:
    """Run what is left, and add its lines. Return the exit code: 1 where pip cannot install."""
    from testbed.metrics.environment import commit
    from testbed.sweep.runner import only_sweep_in, resumable_runs

    failed = False
    with only_sweep_in(arguments.out_dir), resumable_runs(arguments.out_dir) as stop:
        results.add(file, results.made_by(recorded_command(__file__, sys.argv[1:]), *commit()))
        for (torch, deepspeed), wanted in left.items():
            where = f"DeepSpeed {deepspeed}, PyTorch {torch}"
            try:
                for number, line in enumerate(lines_of(arguments, torch, deepspeed, wanted, stop), start=1):
                    results.add(file, line)
                    verdict = line.get("error") or line.get("note") or ("agrees" if line["agrees"] else "DIFFERS")
                    say(f"[{number}/{len(wanted)}] {where}: {results.key(line)[-1]}: {verdict}", flush=True)
            except Failure as error:
                failed = True
                say(f"{where}: {error}", flush=True)
    return stop.exit_code or int(failed)


def lines_of(
    arguments: argparse.Namespace, torch: str, deepspeed: str, wanted: Sequence[Trial], stop: Stop
) -> Iterator[results.Line]:
    """Yield the line of each combination of a pair, in its environment, until a signal comes. Raises Failure."""
    from testbed.distributed.processes import end_processes

    python = Path(sys.executable) if arguments.here else environments.make(arguments.out_dir, torch, deepspeed, stop)
    if stop.signal_number is not None:
        return
    log = arguments.out_dir / f"torch-{torch}-deepspeed-{deepspeed}.log"
    command = [str(python.absolute()), "-m", "testbed.experiments.conformance.trials", *(one.name for one in wanted)]
    with log.open("a") as file, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True, env=environments.variables()
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for text in process.stdout:
            if stop.signal_number is not None:
                end_processes(process, stop)
                return
            yield {"deepspeed": deepspeed, "torch": torch, **json.loads(text)}
    if process.returncode:
        raise Failure(f"the process of its runs died; {log} says why")


if __name__ == "__main__":
    sys.exit(main())
