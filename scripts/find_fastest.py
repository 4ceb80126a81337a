#!/usr/bin/env python3
"""Find the fastest way to train on this machine by a race, and write it to a file that --run_type auto takes.

    python scripts/find_fastest.py --ranks 1,2 --budget 15m --dry_run     # the field, and the time of its first round
    python scripts/find_fastest.py --ranks 1,2 --budget 15m
    python scripts/find_fastest.py --ranks 2 --run_types ddp,optimized --over zero_stage,bucket -- --model gpt2
    torchrun --nproc-per-node 2 src/gpt2.py --run_type auto               # takes checkpoint/fastest/choice.json

Every configuration runs once in each round. It leaves when it is shown to be slower than another one. The winner is
then measured again, in turn with the runner-up. What follows `--` goes to every src/gpt2.py as it stands; without it
the work is that of scripts/run_scaling_benchmarks.py. docs/find_fastest.md says what the figures mean.

The same command resumes where it stopped, and with a larger --budget. Files: DIR/choice.json, DIR/sweep.json,
DIR/<configuration>/run_<k>/ with training_metrics.json, and DIR/fresh/ with the second measurement.

Exit code: 0 there is a verdict, 1 there is none, 2 what was typed cannot be run, 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_types import duration, percentage
from testbed.config.run_types import run_types_with
from testbed.config.sweep_flags import add_flags, check_out_dir, parse_before_dashes, parser_of, relative
from testbed.errors import Failure, InputError, counted, say
from testbed.program import program, recorded_command

CHOICE, FRESH = "choice.json", "fresh"
MADE_UP_TOKENS = 2_000_000  # enough for a step of any batch that is usual
OF_A_SHORT_RUN = (
    "max_train_steps",
    "max_tokens",
    "epochs",
    "save_at_end",
    "warmup_steps",
    "max_val_steps",
    "sample_tokens",
    "seed",
    "overwrite",
)

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings
    from testbed.distributed.processes import Stop
    from testbed.sweep.field import Field, Prediction
    from testbed.sweep.plan import Cell
    from testbed.sweep.race import Race
    from testbed.sweep.race_runs import Fresh, Starts
    from testbed.sweep.request import Request


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Return the program's own flags as `own`, and what follows `--` as `passed_on`."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--ranks", metavar="LIST", help="numbers of ranks (default: 1, and as many as there are devices or cores)")
    add("--budget", type=duration, default=900.0, metavar="TIME", help="time for all runs: 90s, 15m, 2h (default: 15m)")
    text = (
        "run types, with flags as in scripts/run_scaling_benchmarks.py; mesh without sizes is the plan's three best "
        "products of axes (default: all of equal work)"
    )
    add("--run_types", default=",".join(run_types_with(equals_baseline=True)), metavar="LIST", help=text)
    text = (
        "what else may vary, one flag at a time: micro_batch, compile, zero_stage, bucket, recompute, schedule "
        "(default: nothing)"
    )
    add("--over", metavar="LIST", help=text)
    text = "difference that does not matter (default: 2%%)"
    add("--equivalent", type=percentage, default=0.02, metavar="PERCENT", help=text)
    text = "what scripts/plan.py --calibrate measured (default: checkpoint/calibration.json, if there)"
    add("--calibration", type=Path, metavar="FILE.json", help=text)
    add_flags(parser, "batch_size", "steps", "seq_length", "dataset_mode", "deepspeed_config", "seed")
    add_flags(parser, "out_dir", default=Path("checkpoint/fastest"))
    add_flags(parser, "warmup_runs", "run_timeout_s", "certificate")
    add("--allow_mismatch", action="store_true", help="go on with runs that another commit made")
    add_flags(parser, "dry_run", "yes")
    arguments = parse_before_dashes(parser, words)
    arguments.out_dir = relative(arguments.out_dir)
    check_out_dir(arguments, "the race")
    return arguments


@program
def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    from testbed.analysis.certificate import CERTIFICATE_FILE, certificate_here, save_certificate, this_machine
    from testbed.planner.measured_rates import constants_here
    from testbed.planner.step_time import published_constants
    from testbed.sweep.field import OVER, field_of, predictions_of, prune
    from testbed.sweep.race import Race
    from testbed.sweep.race_runs import check_budget
    from testbed.sweep.request import facts_of_machine, parse_names
    from testbed.sweep.runner import check_cores, resumable_runs

    over = parse_names(arguments.over, OVER, "--over") if arguments.over is not None else ()
    facts = facts_of_machine()
    request = request_from(arguments, facts)
    certificate = certificate_here(arguments.certificate, this_machine(request.machine.kind))
    try:
        constants = constants_here(arguments.calibration)
    except InputError as error:
        if arguments.calibration is not None:
            raise
        constants = published_constants()
        say(f"predicted without a calibration: {error}")
    with token_files_of(request, arguments.dry_run) as checked:
        field = field_of(checked, over, constants)
    for cell in field.cells:
        cell.command = [dict(zip(checked.shared, request.shared, strict=True)).get(word, word) for word in cell.command]
    try:
        predictions = predictions_of(field.cells, field.settings, constants)
    except InputError as error:
        if arguments.calibration is not None:
            raise
        predictions = {}
        say(f"nothing is predicted: {error}")
    field = prune(field, predictions)
    show_field(field, request, predictions, arguments)
    check_budget(arguments.budget, arguments.out_dir, field.cells[0], field.settings, request.machine)
    if arguments.dry_run:
        return 0
    check_cores(field.cells, request.machine, arguments.yes)
    race = Race([cell.name for cell in field.cells], arguments.equivalent)
    with resumable_runs(arguments.out_dir) as stop:
        fresh = make_runs(arguments, request, field, race, facts, stop)
        if certificate is not None:  # it travels with the results
            save_certificate(arguments.out_dir / CERTIFICATE_FILE, certificate[1])
    if stop.exit_code is not None:
        return stop.exit_code
    conclude(arguments, request, field, race, fresh, predictions, facts["commit"])
    return 0


def request_from(arguments: argparse.Namespace, facts: dict) -> Request:
    """Return the request for the race's runs. InputError for what cannot be run here."""
    from testbed.sweep.request import machine_for, parse_numbers, request_for

    machine = machine_for(facts["devices"], arguments.passed_on)
    ranks = parse_numbers(arguments.ranks, "--ranks") if arguments.ranks else tuple(sorted({1, machine.most_ranks}))
    return request_for(arguments, machine, ranks=ranks)


@contextlib.contextmanager
def token_files_of(request: Request, may_be_missing: bool) -> Iterator[Request]:
    """Yield the request; where nothing is to run and its token files are missing, with others of made-up tokens."""
    from testbed.data.shards import is_at_hand
    from testbed.experiments.made_up_tokens import write_made_up_tokens
    from testbed.model.shape import MODEL_SIZES

    flags = ("--train_data_path", "--val_data_path")
    places = [request.shared.index(flag) + 1 for flag in flags if flag in request.shared]
    missing = [request.shared[place] for place in places if not is_at_hand(Path(request.shared[place]))]
    if not (may_be_missing and missing):
        yield request
        return
    say(f"note: {missing[0]} is not here; the configurations are checked with made-up tokens of GPT-2's vocabulary")
    with tempfile.TemporaryDirectory() as folder:
        write_made_up_tokens(Path(folder), MODEL_SIZES["gpt2"].vocab_size, MADE_UP_TOKENS)
        shared = list(request.shared)
        for place in places:
            shared[place] = str(Path(folder, "train.bin" if shared[place - 1] == flags[0] else "val.bin"))
        yield replace(request, shared=tuple(shared))


def show_field(
    field: Field, request: Request, predictions: Mapping[str, Prediction], arguments: argparse.Namespace
) -> None:
    """Print what races, what does not and why, and the time of one round."""
    from testbed.sweep.runner import in_words, seconds_left

    for cell in field.cells:
        said = predictions.get(cell.name)
        step = "" if said is None else f"; predicted {said.seconds:.3g} s a step [{said.low:.3g}, {said.high:.3g}]"
        say(f"races: {in_plain_words(cell)}{step}")
        if arguments.dry_run:
            say(f"  {shlex.join(cell.command)}")
    for name, reason in field.left_out.items():
        say(f"does not race: {name}: {reason}")
    if field.note is not None:
        say(f"note: {field.note}")
    round_s = seconds_left(field.cells, field.settings, request.machine)
    say(
        f"{len(field.cells)} configurations; a first round of about {in_words(round_s)} (a guess from FLOPs), "
        f"a budget of {in_words(arguments.budget)}"
    )


def in_plain_words(cell: Cell) -> str:
    return f"{cell.variant} on {cell.ranks} rank{'s' * (cell.ranks > 1)}"


def make_runs(
    arguments: argparse.Namespace, request: Request, field: Field, race: Race, facts: dict, stop: Stop
) -> Fresh | None:
    """Hold the race and measure its winner again; None where there was no time for that, or a signal came."""
    from testbed.sweep.race import STOPPED, RunStopped
    from testbed.sweep.race_runs import LEAST_PAIRS, Budget, Starts, measure_afresh, moved, opened
    from testbed.sweep.runner import Runner, only_sweep_in
    from testbed.sweep.state import Sweep

    budget = Budget(arguments.budget)
    command = recorded_command(__file__, arguments.own, arguments.passed_on)

    def starts_in(out_dir: Path, first: dict[str, Cell], planned: list[Cell], lock: int) -> Starts:
        sweep = Sweep(request.protocol, command, facts["commit"], planned, git_dirty=facts["is_dirty"])
        summary = opened(sweep, first, out_dir, arguments.allow_mismatch)
        say(summary, flush=True)
        sweep.write(out_dir)
        budget.sweeps.append(sweep)
        runner = Runner(sweep, out_dir, request.machine, field.settings, stop, lock, arguments.run_timeout_s)
        return Starts(runner, first, budget)

    with only_sweep_in(arguments.out_dir) as lock:
        starts = starts_in(arguments.out_dir, {cell.name: cell for cell in field.cells}, list(field.cells), lock)
        for number in range(1, arguments.warmup_runs + 1 - len(starts.runner.sweep.warmup_runs)):
            if stop.signal_number is None:
                starts.runner.warm_up(field.cells[0], number)
        starts.reserve = lambda name, number: (  # each is to run once, whatever is left for the second measurement
            0.0
            if number == 1
            else LEAST_PAIRS * sum(starts.expected_s(starts.first[each]) for each in race.first_two())
        )
        race.hold(starts)
        if race.end == STOPPED:
            return None
        pair = race.first_two()
        if len(pair) < 2:
            return None
        fresh_dir = fresh_folder(arguments.out_dir, pair)
        fresh_dir.mkdir(parents=True, exist_ok=True)
        cells = [cell for cell in field.cells if cell.name in pair]
        try:
            again = starts_in(fresh_dir, moved(cells, str(fresh_dir)), [], lock)
            return measure_afresh(again, pair[0], pair[1], arguments.equivalent)
        except RunStopped:
            return None


def conclude(
    arguments: argparse.Namespace,
    request: Request,
    field: Field,
    race: Race,
    fresh: Fresh | None,
    predictions: Mapping[str, Prediction],
    commit: str,
) -> None:
    """Print table, verdict, reason and command, and write choice.json. Failure if nothing ran."""
    from testbed.analysis.comparison.document import about_losses
    from testbed.analysis.comparison.fastest import (
        NOT_RUN,
        compared,
        predicted_and_measured,
        reason,
        standings,
        standings_table,
        verdict,
    )
    from testbed.io import now_utc, write_json

    pair = race.first_two()
    if not pair:
        raise Failure(f"no configuration ran: {'; '.join(race.out.values()) or 'the budget is too small for one run'}")
    fresh = fresh.fastest_first() if fresh is not None else None
    winner = fresh.winner if fresh is not None else pair[0]
    cells = {cell.name: cell for cell in field.cells}
    names = {name: in_plain_words(cell) for name, cell in cells.items()}
    tokens = {name: field.settings[name].tokens_per_step for name in cells}
    rows = standings(race, winner, tokens, predictions)
    say(f"\n{standings_table(rows, names)}\n")
    noise = race.evidence().noise
    say(f"{counted(len(race.runs), 'run')}, {race.end}" + ("" if noise is None else f"; runs scatter by {noise:.1%}"))
    left = [winner, *(name for name in race.left if name != winner and any(run.name == name for run in race.runs))]
    kind, sentence = verdict(fresh, left, names, [row.name for row in rows if row.state == NOT_RUN])
    say(f"verdict: {sentence}")
    if len(pair) > 1 and (fresh is None or fresh.ratio is None):
        say("not measured again, as the budget has no time for it: the figures are the race's, and flatter the winner")
    why, losses = None, []
    if fresh is not None and fresh.pairs:
        of_pair = (names[fresh.winner], names[fresh.runner_up])
        folder = fresh_folder(arguments.out_dir, pair)
        folders = (folder / fresh.winner, folder / fresh.runner_up)
        comparison = compared(folders, of_pair)
        losses = about_losses(comparison)
        if comparison.worse_side == "a":
            raise Failure(f"{of_pair[0]} is faster but learns worse, so it is not faster: {' '.join(losses)}")
        why = reason(folders, of_pair)
    for line in (f"why: {why}" if why else "", *losses, predicted_and_measured(rows, winner)):
        say(line, end="\n" if line else "")
    commands = start_commands(cells[winner])
    record = choice_record(cells[winner], field.settings[winner], commit)
    record |= {
        "made_by": recorded_command(__file__, arguments.own, arguments.passed_on),
        "created_utc": now_utc(),
        "verdict": {"kind": kind, "sentence": sentence, "equivalent": arguments.equivalent, "ended": race.end},
        "fresh": None if fresh is None else fresh.as_json(),
        "reason": why,
        "losses": losses,
        "arms": [row.as_json() for row in rows],
        "did_not_race": field.left_out,
        "command": commands[0],
    }
    path = arguments.out_dir / CHOICE
    write_json(path, record, str(path))
    say(f"command: {commands[0]}\n     or: {commands[1]}")
    say(f"choice:  {path}\nruns:    {arguments.out_dir}/<configuration>/run_<k>/training_metrics.json")
    say(f"report:  python generate_charts.py --runs {shlex.quote(str(arguments.out_dir))} --report report.html")


def choice_record(cell: Cell, settings: RunSettings, commit: str) -> dict:
    """Return what choice.json says of a configuration, with the flags that its runs were given."""
    from testbed.config.automatic_run_type import SETS, content_of
    from testbed.config.flags import parse_command_line

    asked = parse_command_line(cell.gpt2_arguments)
    flags = {name: asked.values[name] for name in sorted(asked.explicit & SETS) if asked.values[name] is not None}
    return content_of(cell.run_type, flags, cell.ranks, settings, commit)


def start_commands(cell: Cell) -> list[str]:
    """Return the command that trains with a configuration, and the one that takes it from choice.json."""
    from testbed.config.automatic_run_type import DEFAULT_CHOICE, SETS
    from testbed.sweep.state import by_flag

    given = {
        flag: value
        for flag, value in by_flag(cell.gpt2_arguments).items()
        if flag.removeprefix("--") not in OF_A_SHORT_RUN
    }
    is_launched = "torch.distributed.run" in cell.command
    start = ["torchrun", f"--nproc-per-node={cell.ranks}"] if is_launched else ["python"]
    program = next(word for word in cell.command if word.endswith("gpt2.py"))
    choice = Path(cell.command[cell.command.index("--checkpoint_path") + 1]).parents[1] / CHOICE
    typed_choice = {} if str(choice) == DEFAULT_CHOICE else {"--choice": str(choice)}
    by_choice = {flag: value for flag, value in given.items() if flag.removeprefix("--") not in SETS}
    both = (given, by_choice | {"--run_type": "auto"} | typed_choice)
    return [
        shlex.join([*start, program, *(word for item in each.items() for word in item if word != "")]) for each in both
    ]


def fresh_folder(out_dir: Path, pair: Sequence[str]) -> Path:
    return out_dir / FRESH / "-".join(sorted(pair))


if __name__ == "__main__":
    sys.exit(main())
