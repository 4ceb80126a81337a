#!/usr/bin/env python3
"""Find the first place where two ways of training part: step, phase, module or parameter, rank, size, likely cause.

    python scripts/first_divergence.py --a "--run_type ddp" --ranks_a 2 --b "--run_type baseline"
    python scripts/first_divergence.py --a transformers --b "--run_type baseline" -- --precision bf16
    python scripts/first_divergence.py --a "--run_type fsdp" --ranks_a 2 --save fsdp.npz
    python scripts/first_divergence.py --a fsdp.npz --b "--run_type baseline"

A side is flags of src/gpt2.py, `transformers` (its GPT-2 in a plain loop), or a file of --save. What follows `--`
goes to both. Without --train_data_path there they train a tiny model on made-up tokens. Both train a few steps with the
same weights and batches, and side B once more with another split into micro batches, which shows what rounding does.
docs/first_divergence.md says what is compared.

Exit code: 0 no divergence in two whole runs, 1 a divergence or a run that failed, 2 what was typed cannot be compared;
130 or 143 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_types import positive
from testbed.config.sweep_flags import parse_before_dashes, parser_of
from testbed.distributed.processes import Interrupted, Stop
from testbed.errors import InputError, as_lines, say
from testbed.experiments.divergence.answer import answer_of, lines_of
from testbed.experiments.divergence.run_sides import Request, Start, check, record
from testbed.experiments.divergence.sides import Side, save
from testbed.io import holding_together, not_a_file, write_json
from testbed.program import program


def parse_arguments():
    parser = parser_of(__doc__)
    parser.add_argument("--a", required=True, metavar="SIDE", help="what is looked at")
    parser.add_argument(
        "--b", default="--run_type baseline", metavar="SIDE", help="what is right (default: %(default)s)"
    )
    parser.add_argument("--ranks_a", type=positive, default=1, metavar="N", help="processes of side A (default: 1)")
    parser.add_argument("--ranks_b", type=positive, default=1, metavar="N", help="processes of side B (default: 1)")
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="steps to record (default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the fingerprints of side A")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answer there too")
    parser.add_argument("--out_dir", type=Path, metavar="DIR", help="keep the runs there (default: a folder that goes)")
    return parse_before_dashes(parser, sys.argv[1:])


def words_of(flag: str, text: str) -> list[str]:
    """Split a side into words as a shell does; the path of a file stays whole. Raises InputError on an open quote."""
    if not_a_file(Path(text)) is None:
        return [text]
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{flag} {text} cannot be cut into words ({error}); close the quotation") from None


def check_files(arguments) -> None:
    """Raise InputError where a file that is asked for cannot be written."""
    for flag in ("save", "json"):
        path = getattr(arguments, flag)
        is_other = path is not None and path.exists() and not path.is_file()
        if path is not None and (is_other or not os.access(path.parent, os.W_OK)):
            raise InputError(f"--{flag} {path} cannot be written; name a file in a folder that can be written into")
        sides = [side for side in (arguments.a, arguments.b) if not_a_file(Path(side)) is None]
        if path is not None and path.exists() and any(path.samefile(side) for side in sides):
            raise InputError(f"--{flag} {path} is one of the sides; name another file")
    if (
        arguments.save is not None
        and arguments.json is not None
        and arguments.save.resolve() == arguments.json.resolve()
    ):
        raise InputError(f"--save and --json are both {arguments.save}; name two files")


@program
def main() -> int:
    arguments, started_s = parse_arguments(), time.perf_counter()
    check_files(arguments)
    with tempfile.TemporaryDirectory(prefix="divergence-") as made:
        folder = arguments.out_dir or Path(made)
        sides = words_of("--a", arguments.a), words_of("--b", arguments.b)
        ranks = arguments.ranks_a, arguments.ranks_b
        request = Request(sides, ranks, arguments.passed_on, arguments.steps, folder)
        recorded: list[Side | None] = []
        asked_for = check(request)
        is_file = any(isinstance(side, Side) for side in asked_for)
        for side in asked_for:
            if isinstance(side, Start):
                with Stop() as stop:
                    try:
                        made_side, said = record(request, side, stop)
                    except Interrupted:
                        return int(stop.exit_code or 0)
                say(said, flush=True)
            recorded.append(made_side if isinstance(side, Start) else side)
            if len(recorded) == 1 and arguments.save is not None and recorded[0] is not None:
                save(recorded[0], arguments.save)
    a, b, noisy = [*recorded, None][:3]
    assert a is not None and b is not None
    with holding_together("the file of --save") if is_file else contextlib.nullcontext():
        answer = answer_of(a, b, noisy)
    say(as_lines(lines_of(answer)))
    say(f"{time.perf_counter() - started_s:.0f} s")
    if arguments.json is not None:
        write_json(arguments.json, answer, "--json")
    return 1 if answer["divergence"] or answer["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
