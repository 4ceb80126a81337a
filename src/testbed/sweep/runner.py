"""Run the cells of a sweep one after another, each in processes of its own."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import os
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from testbed.config.settings import RunSettings
from testbed.distributed.processes import Stop, run
from testbed.errors import Failure, InputError, counted, say
from testbed.io import now_utc
from testbed.model.flops import flops_per_token_palm
from testbed.run_folder import FAILED as FAILED_MARK
from testbed.run_folder import PREEMPTED as PREEMPTED_MARK
from testbed.run_folder import TOKENIZER, WEIGHTS
from testbed.sweep.plan import COMPLETE, FAILED, NOT_APPLICABLE, PENDING, RUNNING, Cell, oversubscription
from testbed.sweep.request import Machine
from testbed.sweep.state import Sweep, is_run_of, metrics_of, take_over

LOG = "train.log"
LOCK = ".sweep.lock"

# A guess of a run's time before any run has finished: model FLOP/s of a core in fp32 and of a GPU in bf16, and the
# seconds in which a program starts and ends. Measured seconds replace it. It can miss by a
# factor of two: docs/results/sweep and docs/results/certificate have the rates of one model on two virtual machines.
GUESSED_FLOPS_PER_S = {"cpu": 40e9, "cuda": 100e12}
GUESSED_START_S = {"cpu": 12.0, "cuda": 40.0}


@contextlib.contextmanager
def only_sweep_in(out_dir: Path) -> Iterator[int]:
    """Make the folder and hold its lock until the last run, which inherits it, has ended.

    Raises:
        InputError: the folder cannot be written, or is in use by another sweep or a run that one left behind.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(os.open(out_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+")
    except OSError as error:
        raise InputError(f"--out_dir {out_dir} cannot be written ({error.strerror}); give another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"--out_dir {out_dir} is in use by another sweep, or by a run that a killed sweep left; wait for it, "
                "or give another --out_dir"
            ) from None
        yield lock.fileno()


@contextlib.contextmanager
def resumable_runs(out_dir: Path) -> Iterator[Stop]:
    """Watch for Ctrl-C and SIGTERM while runs are made. The same command resumes after those that have finished.

    Raises:
        Failure: a file of the runs cannot be written.
    """
    try:
        with Stop() as stop:  # before it and after it, Ctrl-C ends the program as it ends any
            yield stop
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Failure(
            f"{error.filename or out_dir} cannot be written ({error.strerror or error}); free space or give another "
            "--out_dir, and call again: finished runs are kept"
        ) from None
    if stop.exit_code is not None:
        say("interrupted: finished runs are kept, the same command resumes from here", file=sys.stderr)


@dataclasses.dataclass
class Runner:
    """Runs the cells. `settings`: of those that can run, by `configuration`."""

    sweep: Sweep
    out_dir: Path
    machine: Machine
    settings: dict[str, RunSettings]
    stop: Stop
    lock: int
    timeout_s: float | None = None

    def run_all(self, warmup_runs: int) -> None:
        """Make every pending run, after warm-up; return early on a signal.

        Raises:
            OSError: sweep.json or a log cannot be written.
        """
        waiting = [cell for cell in self.sweep.cells if cell.status == PENDING]
        for number in range(1, warmup_runs + 1) if waiting else ():
            if self.stop.signal_number is None:
                self.warm_up(waiting[0], number)
        has_terminal = sys.stderr.isatty()
        with tqdm(
            total=len(waiting),
            unit="run",
            disable=not has_terminal,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} runs [{elapsed}, {postfix}]",
        ) as bar:
            for number, cell in enumerate(waiting, start=1):
                if self.stop.signal_number is not None:
                    break
                bar.set_description(cell.folder, refresh=False)
                bar.set_postfix_str(self._time_left())
                self.make(cell, bar)
                bar.update()
                _say(f"[{number}/{len(waiting)}] {cell.folder}: {self.outcome(cell)}; {self._time_left()}")

    def make(self, cell: Cell, bar: tqdm | None = None) -> None:
        """Make the run of a cell, which then has its status, and write sweep.json before and after.

        Raises:
            OSError: sweep.json or a log cannot be written.
        """
        cell.status, cell.reason, cell.seconds, cell.started_utc = RUNNING, None, None, now_utc()
        self.sweep.write(self.out_dir)
        try:
            cell.status, cell.reason, cell.seconds = self._launch(cell, self.out_dir / cell.folder / LOG, bar)
        except OSError as error:
            cell.status, cell.reason = FAILED, f"could not be started or logged ({error.strerror or error})"
            raise
        finally:
            self.sweep.write(self.out_dir)

    def warm_up(self, cell: Cell, number: int) -> None:
        """Make a run like the first one and delete it, to fill caches."""
        _say(f"warm-up run {number}, not measured: {cell.variant} on {counted(cell.ranks, 'rank')} ...")
        started_utc = now_utc()
        # deleted, so that no search for runs finds it
        with tempfile.TemporaryDirectory(prefix=".warmup-", dir=self.out_dir, ignore_cleanup_errors=True) as made:
            folder = Path(made).name
            place = cell.command.index("--checkpoint_path") + 1
            own = str(Path(cell.command[place]).parent.parent / folder)
            command = [*cell.command[:place], own, *cell.command[place + 1 :]]
            like = dataclasses.replace(cell, folder=folder, command=command)
            status, reason, seconds = self._launch(like, self.out_dir / f"warmup_{number}.log", None)
            metrics = metrics_of(like, self.out_dir)
        if status == PENDING:
            return
        self.sweep.warmup_runs.append(
            {
                "name": cell.name,
                "command": like.command,
                "started_utc": started_utc,
                "status": status,
                "reason": reason,
                "seconds": seconds,
                "tokens_per_s": None if metrics is None else metrics["summary"]["mean_tokens_per_sec_global"],
            }
        )
        self.sweep.write(self.out_dir)

    def _launch(self, cell: Cell, log: Path, bar: tqdm | None) -> tuple[str, str | None, float]:
        """Make one run. Return its status, the reason of a failure, and its seconds."""
        folder = self.out_dir / cell.folder
        folder.mkdir(parents=True, exist_ok=True)
        for mark in (FAILED_MARK, PREEMPTED_MARK):  # of an earlier try; a run that is refused would leave it there
            (folder / mark).unlink(missing_ok=True)
        command = [sys.executable if word == "python" else word for word in cell.command]
        refresh = (lambda: None) if bar is None else bar.refresh
        ended = run(command, log, self.stop, self.timeout_s, cell.command, refresh, pass_fds=[self.lock])
        if ended.was_stopped:
            return PENDING, "interrupted", ended.seconds
        if ended.was_late:
            return FAILED, f"it ran longer than --run_timeout_s {self.timeout_s:g} and was ended", ended.seconds
        metrics, code = metrics_of(cell, self.out_dir), ended.exit_code
        if code == 0 and metrics is not None and is_run_of(metrics, cell):
            for name in (*WEIGHTS, TOKENIZER):
                (folder / name).unlink(missing_ok=True)
            return COMPLETE, None, ended.seconds
        return FAILED, reason_of_failure(folder, log, code), ended.seconds

    def outcome(self, cell: Cell) -> str:
        """Return how a run ended, in words."""
        if cell.status != COMPLETE:
            return str(cell.reason) if cell.status == PENDING else f"{cell.status}: {cell.reason}"
        metrics = metrics_of(cell, self.out_dir)
        assert metrics is not None, "a run that is complete left its file"
        speed = metrics["summary"]["mean_tokens_per_sec_global"]
        return f"{cell.seconds:.0f} s, " + ("no step measured" if speed is None else f"{speed:,.0f} tokens/s")

    def _time_left(self) -> str:
        left_s = seconds_left(self.sweep.cells, self.settings, self.machine)
        return f"about {in_words(left_s)} left" if left_s else "nothing left"


def make_runs(
    sweep: Sweep, arguments: argparse.Namespace, machine: Machine, settings: dict[str, RunSettings]
) -> int | None:
    """Make the runs of a sweep that are not finished.

    Args:
        arguments: out_dir, warmup_runs, run_timeout_s and yes; allow_mismatch where the program has it.

    Returns:
        The program's exit code where it did not come to the last run, else None.

    Raises:
        InputError: the folder holds another sweep, or the cells have more threads than cores.
        Failure: a file of the runs cannot be written.
    """
    out_dir = arguments.out_dir
    check_cores(sweep.cells, machine, arguments.yes)
    with resumable_runs(out_dir) as stop, only_sweep_in(out_dir) as lock:
        say(take_over(sweep, out_dir, getattr(arguments, "allow_mismatch", False)), flush=True)
        sweep.write(out_dir)
        runner = Runner(sweep, out_dir, machine, settings, stop, lock, arguments.run_timeout_s)
        runner.run_all(arguments.warmup_runs)
    return stop.exit_code


def check_cores(cells: Sequence[Cell], machine: Machine, is_agreed: bool) -> None:
    """Raise InputError where a cell has more threads than there are cores and nobody agreed."""
    fact = oversubscription([cell for cell in cells if cell.status == PENDING], machine)
    if fact is not None and not is_agreed:
        raise InputError(
            f"{fact}: ranks would wait for each other's core, and the numbers say nothing about the strategy; give "
            "fewer --ranks or --threads_per_rank, or --yes to run and mark them"
        )


def seconds_left(cells: Sequence[Cell], settings: dict[str, RunSettings], machine: Machine) -> float:
    """Return the expected seconds of all pending runs: a cell's median, else a scaled guess."""
    finished: dict[str, list[float]] = {}
    for cell in cells:
        if cell.status == COMPLETE and cell.seconds is not None:
            finished.setdefault(cell.configuration, []).append(cell.seconds)
    guesses = {
        cell.configuration: guessed_seconds(cell, settings[cell.configuration], machine)
        for cell in cells
        if cell.configuration in settings
    }
    off = [seconds / guesses[key] for key, times in finished.items() if key in guesses for seconds in times]
    correction = statistics.median(off) if off else 1.0
    expected = {key: guess * correction for key, guess in guesses.items()}
    expected |= {key: statistics.median(times) for key, times in finished.items()}
    return sum(expected[cell.configuration] for cell in cells if cell.status in (PENDING, RUNNING))


def guess_in_words(machine: Machine) -> str:
    """Return what the time is made from before any run has finished."""
    rate = GUESSED_FLOPS_PER_S[machine.kind]
    speed = f"{rate / 1e9:.0f} GFLOP/s a core" if machine.kind == "cpu" else f"{rate / 1e12:.0f} TFLOP/s a GPU"
    return f"a guess that supposes {speed}; the first run corrects it"


def guessed_seconds(cell: Cell, settings: RunSettings, machine: Machine) -> float:
    """Return a guess of a run's wall seconds: model FLOPs over a typical rate."""
    validations = 1 + (settings.last_step // settings.training.eval_every if settings.training.eval_every else 0)
    sequences: float = settings.last_step * settings.batch.global_batch_size
    sequences += (
        validations * (settings.training.max_val_steps or 0) * settings.batch.global_batch_size / 3
    )  # forward only
    flops = sequences * settings.data.seq_length * flops_per_token_palm(settings.shape, settings.data.seq_length)
    devices = min(cell.ranks, machine.num_cores) if machine.kind == "cpu" else cell.ranks
    return GUESSED_START_S[machine.kind] + flops / (GUESSED_FLOPS_PER_S[machine.kind] * devices)


def in_words(seconds: float) -> str:
    """Return `40 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plan_lines(
    sweep: Sweep, out_dir: Path, settings: dict[str, RunSettings], machine: Machine, allow_mismatch: bool = False
) -> list[str]:
    """Return the lines of a dry run, whose commands can be typed, and mark the finished runs of the sweep.

    Raises:
        InputError: the folder holds another sweep, or runs of other code.
    """
    lines = [f"# {line}" for line in take_over(sweep, out_dir, allow_mismatch).splitlines()]
    cells = sweep.cells
    possible = [cell for cell in cells if cell.status not in (FAILED, NOT_APPLICABLE)]
    for name in dict.fromkeys(cell.configuration for cell in possible):
        runs = [cell for cell in possible if cell.configuration == name]
        lines.append(f"# {name}: {_counted(runs)}")
        waits = next((cell for cell in runs if cell.status == PENDING), None)
        lines.append(shlex.join(waits.command) if waits else f"# {shlex.join(runs[0].command)}")
    refused = {cell.configuration: cell for cell in reversed(cells) if cell.status == FAILED}
    for cell in refused.values():
        lines += [f"# gpt2.py would refuse: {cell.reason}", f"# {shlex.join(cell.command)}"]
    lines += [f"# not applicable: {each.name}: {each.reason}" for each in cells if each.status == NOT_APPLICABLE]
    waiting = [cell for cell in cells if cell.status == PENDING]
    if (fact := oversubscription(waiting, machine)) is not None:
        lines.append(f"# oversubscribed: {fact}; refused without --yes")
    is_measured = any(cell.status == COMPLETE for cell in cells)
    basis = "from the finished runs" if is_measured else guess_in_words(machine)
    left = in_words(seconds_left(cells, settings, machine))
    return [*lines, "", f"# {counted(len(waiting), 'run')} to make, and warm-up: about {left} ({basis})"]


def _counted(runs: Sequence[Cell]) -> str:
    """Return `5 runs, 2 of them finished`."""
    finished = sum(cell.status == COMPLETE for cell in runs)
    return f"{len(runs)} run{'s' * (len(runs) > 1)}" + (f", {finished} of them finished" if finished else "")


def reason_of_failure(folder: Path, log: Path, code: int) -> str:
    """Return why a run failed: from RUN_FAILED.txt, its refusal, or the last error in its log."""
    with contextlib.suppress(OSError):
        mark = (folder / FAILED_MARK).read_text(encoding="utf-8", errors="replace")
        found = re.search(r"reason=(.*?)(?: timestamp_utc=\S*)?$", mark.strip(), re.DOTALL)
        if found:
            return found[1]
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[1:]]
    refusals = [line.partition("gpt2.py: error: ")[2] for line in lines if "gpt2.py: error: " in line]
    if refusals:
        return refusals[0]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]:? ?)?[\w.]*(Error|Exception)\b", line)]
    said = errors[-1] if errors else next((line for line in reversed(lines) if line), "it said nothing")
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{how}: {said}"


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
