#!/usr/bin/env python3
"""Several hosts on one machine, as network namespaces, with a rate on every link. Root only.

    python scripts/lab/network.py run --hosts 2 --rate 100mbit -- torchrun src/gpt2.py --run_type ddp --model nano
    python scripts/lab/network.py run --hosts 2 -- python src/gpt2.py --run_type fsdp --model nano
    python scripts/lab/network.py run --hosts 2 -- deepspeed src/gpt2.py --run_type optimized --model nano
    python scripts/lab/network.py up --hosts 2 --rate 1gbit   # until Ctrl-C, and at most for an hour

`run` brings the hosts up, starts the command on each of them, and takes everything down again. torchrun and deepspeed
get the flags for several nodes filled in; a program without a launcher the variables of one rank per host. `up` shows
how to enter each host. Hosts are called host1, host2, ...; the first one is the master. See docs/network.md.

Exit code of `run`: 0 when the command ended with 0 on every host, 1 when not, 2 for what was typed.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive, positive_number
from testbed.errors import InputError, say
from testbed.program import program


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True, metavar="up|run")
    shared = FlagParser(add_help=False)
    shared.add_argument("--hosts", type=positive, default=2, metavar="N", help="hosts, 1 to 32 (default: %(default)s)")
    text = "of every link in both directions: 100mbit, 1gbit, ... (default: %(default)s)"
    shared.add_argument("--rate", default="unlimited", metavar="RATE", help=text)
    up = commands.add_parser("up", parents=[shared], help="make hosts, and wait")
    text = "make hosts, run a command on each, take them down"
    run = commands.add_parser("run", parents=[shared], help=text, usage="%(prog)s [options] -- COMMAND")
    text = "then everything is taken down, whatever runs (default: %(default)g)"
    for each, seconds in ((up, 3600.0), (run, 1800.0)):
        each.add_argument("--seconds", type=positive_number, default=seconds, metavar="SECONDS", help=text)
    run.add_argument("--log_dir", type=Path, metavar="DIR", help="keep what each host said (default: only show it)")
    text = "how long the other hosts run on after the first has ended (default: %(default)g)"
    run.add_argument("--patience_s", type=float, default=30.0, metavar="SECONDS", help=text)
    place = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:place])
    arguments.command = words[place + 1 :]
    if (arguments.what == "run") != bool(arguments.command):
        parser.error("give the command after --" if arguments.what == "run" else "only `run` takes a command")
    return arguments


@program
def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    return {"up": up, "run": run}[arguments.what](arguments)


def link_of(arguments: argparse.Namespace):
    from testbed.experiments.network_lab import Link, parse_rate

    try:
        return Link(parse_rate(arguments.rate))
    except ValueError as error:
        raise InputError(f"--rate: {error}") from None


def up(arguments: argparse.Namespace) -> int:
    """Make hosts and wait, until the time is over or a signal comes."""
    from testbed.distributed.processes import POLL_S, Stop
    from testbed.experiments.network_lab import address_of, lab

    deadline_s = time.monotonic() + arguments.seconds
    with Stop() as stop, lab(arguments.hosts, link_of(arguments)) as made:
        say(f"{made}, for {arguments.seconds:g} s")
        for number, host in enumerate(made.hosts, start=1):
            say(f"  {host.name} {address_of(number)}: {shlex.join(host.inside)} COMMAND", flush=True)
        while stop.signal_number is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
    return stop.exit_code or 0


def run(arguments: argparse.Namespace) -> int:
    from testbed.distributed.processes import Stop
    from testbed.experiments.network_lab import lab, run_on_hosts

    def show(host: int, line: str) -> None:
        with contextlib.suppress(OSError):  # the reader has gone: the run continues
            say(f"[host{host}] {line}", flush=True)

    link = link_of(arguments)
    with Stop() as stop, tempfile.TemporaryDirectory(prefix="lab-") as scratch:
        folder = Path(scratch) if arguments.log_dir is None else arguments.log_dir
        with lab(arguments.hosts, link) as made:
            say(f"network.py: {made}", file=sys.stderr, flush=True)
            ends = run_on_hosts(
                made, arguments.command, folder, arguments.seconds, lambda: stop.signal_number is not None, show,
                arguments.patience_s,
            )  # fmt: skip
        for end in ends:
            if end.exit_code != 0:
                why = ", ended by the lab" if end.ended_by_us else ""
                say(f"network.py: host{end.host} ended with {end.exit_code}{why}", file=sys.stderr)
        return stop.exit_code or int(any(end.exit_code != 0 for end in ends))


if __name__ == "__main__":
    sys.exit(main())
