"""Check that the files of a sweep, or of any runs, are whole and consistent. Each run gets a status and reasons.

What is stated twice is compared: throughput with the rows, a step's time with its ranks, the number of steps with the
settings, the number of ranks with the plan, the launcher's record and RUN_COMPLETE.txt.
"""

from __future__ import annotations

import math
import re
import shlex
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed import typed_json
from testbed.analysis.runs.load import METRICS_FILE, files_of_runs
from testbed.errors import InputError
from testbed.io import not_a_folder, read_json, read_text
from testbed.metrics.file import metrics_version, read_metrics
from testbed.run_folder import COMPLETE, FAILED, LAUNCHER, PREEMPTED
from testbed.sweep.plan import Cell, work_arguments
from testbed.sweep.state import SWEEP_FILE, read_sweep

LOG = "train.log"
OK, NOT_APPLICABLE = "ok", "not_applicable"
_EXACT = 1e-9  # floats that were computed from the same rows, summed in another order
_PRINTED = 0.0051  # RUN_COMPLETE.txt has two decimals

Fault = tuple[str, str]  # status, reason


@dataclass(frozen=True)
class RunCheck:
    """One line of the table. `expected` is the number of ranks that the plan, or else the launcher, asked for."""

    run_dir: Path
    status: str
    world_size: int | None
    expected: int | None
    reasons: tuple[str, ...]

    @property
    def is_failure(self) -> bool:
        return self.status not in (OK, NOT_APPLICABLE)


def verify(directory: Path, metrics_only: bool = False) -> list[RunCheck]:
    """Check every run at any depth below `directory`, and every cell of every sweep.json there.

    Args:
        metrics_only: look at training_metrics.json alone; the marks, the log and the launcher's record may be absent
            (published results).

    Raises:
        InputError: `directory` is none, or holds no run and no sweep; a sweep.json that cannot be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"--dir {directory} {not_a_folder(directory)}; give the folder of a sweep or of runs")
    sweeps = [path.parent for path in sorted(directory.rglob(SWEEP_FILE))]
    planned: dict[Path, tuple[Cell, str]] = {}
    for root in sweeps:
        if sweep := read_sweep(root):
            planned |= {root / cell.folder: (cell, sweep.protocol) for cell in sweep.cells}
    marks = (METRICS_FILE, COMPLETE, FAILED, PREEMPTED, LAUNCHER, *(() if metrics_only else (LOG,)))
    folders = {path.parent for name in marks for path in files_of_runs(directory, name)} | set(planned)
    if not folders:
        raise InputError(f"--dir {directory} holds no run at any depth (no {METRICS_FILE}, no {SWEEP_FILE})")
    seen: dict[tuple, Path] = {}
    checks = []
    for folder in sorted(folders):
        cell, protocol = planned.get(folder, (None, None))
        checks.append(_check(folder, cell, protocol, metrics_only, seen))
    return checks


def as_tsv(checks: Sequence[RunCheck]) -> str:
    """Return the table: run_dir, status, world_size, expected, reason; "-" where there is nothing to say."""
    lines = ["run_dir\tstatus\tworld_size\texpected\treason"]
    for each in checks:
        cells = (each.run_dir, each.status, each.world_size, each.expected, "; ".join(each.reasons) or None)
        # a reason can quote a file, and a file can hold anything
        lines.append("\t".join("-" if cell is None else " ".join(str(cell).split()) for cell in cells))
    return "\n".join(lines)


def _check(
    folder: Path, cell: Cell | None, protocol: str | None, metrics_only: bool, seen: dict[tuple, Path]
) -> RunCheck:
    """Check one run. `seen` has the folder of every run so far by what no second run has; this one is added."""
    planned = None if cell is None else cell.ranks
    if cell is not None and cell.status != "complete":
        status = {"not applicable": NOT_APPLICABLE, "failed": "failed"}.get(cell.status, "missing_run")
        said = f": {cell.reason}" if cell.reason else ""
        return RunCheck(folder, status, None, planned, (f"the sweep says {cell.status}{said}",))
    if not (folder / METRICS_FILE).exists():
        reason = f"no {METRICS_FILE}" + ("" if cell is None else ", and the sweep says complete")
        return RunCheck(folder, "missing_metrics", None, planned, (reason,))
    try:
        metrics = read_metrics(folder / METRICS_FILE)
    except ValueError as error:
        return RunCheck(folder, "invalid_schema", None, planned, (str(error),))
    faults: list[Fault] = []
    launcher = _read_launcher(folder, faults, metrics_only)
    launched = launcher.get("world_size")
    if not metrics_only:
        faults += _mark_faults(folder, metrics, needs_log=cell is not None)
        if launched is not None and launched != metrics.get("hardware", {}).get("world_size"):
            faults.append(("world_size_mismatch", f"{LAUNCHER} says {launched} ranks"))
    faults += _content_faults(metrics)
    if cell is not None:
        faults += _plan_faults(metrics, cell, protocol)
    times = array("d", (row["step_time_s"] for row in metrics.get("steps", ()))).tobytes()
    if times and (first := seen.setdefault((metrics["run_id"], times), folder)) != folder:
        faults.append(("duplicate_run", f"the same run_id and step times as {first}"))
    world_size = metrics.get("hardware", {}).get("world_size")
    status = faults[0][0] if faults else OK
    return RunCheck(folder, status, world_size, planned or launched, tuple(reason for _, reason in faults))


def _read_launcher(folder: Path, faults: list[Fault], metrics_only: bool) -> dict:
    path = folder / LAUNCHER
    if not path.exists():
        faults += [] if metrics_only else [("missing_launcher_metadata", f"no {LAUNCHER}")]
        return {}
    try:
        return typed_json.check(read_json(path), dict)
    except ValueError:
        faults.append(("invalid_launcher_metadata", f"{LAUNCHER} cannot be read"))
        return {}


def _mark_faults(folder: Path, metrics: dict, needs_log: bool) -> Iterator[Fault]:
    """Compare the marks of how a run ended with each other and the metrics; look for the log of a sweep's run."""
    complete, log = folder / COMPLETE, folder / LOG
    there = [mark for mark in (FAILED, PREEMPTED, COMPLETE) if (folder / mark).exists()]
    if len(there) > 1:
        yield "contradicting_marks", f"{there[0]} is there beside {' and '.join(there[1:])}"
    elif there == [FAILED] or there == [PREEMPTED]:
        yield "failed" if there == [FAILED] else "incomplete", f"{there[0]} is there"
    if not complete.exists():
        yield "missing_mark", f"no {COMPLETE}"
    else:
        try:
            line = read_text(complete, errors="replace")
        except OSError as error:
            yield "invalid_mark", f"{COMPLETE} cannot be read ({error.strerror})"
            return
        stated = dict(re.findall(r"(world_size|tokens_per_sec)=(\S+)", line))
        throughput = metrics.get("summary", {}).get("mean_tokens_per_sec_global")
        if stated.get("world_size") != str(metrics.get("hardware", {}).get("world_size")):
            yield "world_size_mismatch", f"{COMPLETE} says world_size={stated.get('world_size')}"
        if not _is_printed(stated.get("tokens_per_sec"), throughput):
            reason = f"{COMPLETE} says tokens_per_sec={stated.get('tokens_per_sec')}, the metrics {throughput}"
            yield "inconsistent_throughput", reason
    if needs_log and not (log.exists() and log.stat().st_size):
        yield "missing_log", f"no {LOG}, or it is empty"


def _is_printed(text: str | None, value: float | None) -> bool:
    if text is None or value is None:
        return text in (None, "n/a") and value is None
    try:
        return abs(float(text) - value) <= _PRINTED
    except ValueError:
        return False


def _content_faults(metrics: dict) -> Iterator[Fault]:
    """Compare training_metrics.json with itself. Versions before 2.2 hold too little to contradict much."""
    if metrics_version(metrics) != "2.2":
        return
    if metrics["status"] != "complete":
        why = f": {metrics['failure']['reason']}" if metrics["failure"] else ""
        yield "failed" if metrics["status"] == "failed" else "incomplete", f"status is {metrics['status']}{why}"
    elif metrics["completion"] is None:
        yield "missing_mark", "status is complete, but completion is null"
    if not metrics["settings"].get("eval_only"):
        yield from _step_faults(metrics)
        yield from _throughput_faults(metrics)


def _step_faults(metrics: dict) -> Iterator[Fault]:
    rows, config, timing = metrics["steps"], metrics["training_config"], metrics["timing"]
    planned = min(limit for limit in (config["total_steps"], config["stop_at_step"]) if limit is not None)
    # a run that began from another's checkpoint has the rows after it
    first = next((start["first_step"] for start in metrics.get("segments", [])[:1] if start["resumed_from"]), 1)
    if [row["step"] for row in rows] != list(range(first, first + len(rows))):
        yield "missing_steps", f"the rows of steps are not {first}, {first + 1}, {first + 2} without a gap"
    if len(rows) != planned - first + 1:
        yield "wrong_number_of_steps", f"{len(rows)} steps, the settings say {planned - first + 1}"
    if sum(epoch["optimizer_steps"] for epoch in metrics["epochs"]) != len(rows):
        yield "wrong_number_of_steps", f"epochs[].optimizer_steps do not add up to the {len(rows)} rows"
    warmup = timing["warmup_steps"]
    if not warmup or not all(row["is_warmup"] for row in rows[:warmup]):
        yield "missing_warmup", f"timing.warmup_steps is {warmup}, the first rows are not all marked as warm-up"
    if any(not _same(row["step_time_s"], max(row["per_rank_step_time_s"])) for row in rows):
        yield "inconsistent_step_time", "a step_time_s is not the slowest rank's"


def _throughput_faults(metrics: dict) -> Iterator[Fault]:
    config = metrics["training_config"]
    measured = [row["step_time_s"] for row in metrics["steps"] if not row["is_warmup"]]
    if not measured:
        yield "no_measured_step", "no step after the warm-up"
        return
    rate = len(measured) * config["global_batch_size"] * config["seq_len"] / math.fsum(measured)
    stated = metrics["summary"]["mean_tokens_per_sec_global"]
    if stated is None or not _same(stated, rate):
        yield "inconsistent_throughput", f"summary.mean_tokens_per_sec_global is {stated}, the rows give {rate:.3f}"
    if metrics["timing"]["num_measured_steps"] != len(measured):
        yield "inconsistent_throughput", f"timing.num_measured_steps is not the {len(measured)} measured rows"


def _plan_faults(metrics: dict, cell: Cell, protocol: str | None) -> Iterator[Fault]:
    """Compare the run with its cell in sweep.json."""
    config, hardware = metrics.get("training_config", {}), metrics.get("hardware", {})
    ranks = hardware.get("num_devices") or hardware.get("world_size")  # dp drives all devices from one process
    if ranks != cell.ranks:
        yield "world_size_mismatch", f"{ranks} devices, the plan has {cell.ranks} ranks"
    batch = cell.batch_size * (cell.ranks if protocol == "weak" else 1)
    for name, value in (("run_type", cell.run_type), ("seed", cell.seed), ("global_batch_size", batch)):
        if config.get(name) != value:
            yield "not_as_planned", f"{name} is {config.get(name)}, the plan has {value}"
    asked, done = _work_arguments(cell.command), _words_of(metrics.get("command_line"))
    if asked is not None and asked != _work_arguments(done):
        yield "not_as_planned", f"it ran {shlex.join(done) or 'an unknown command'}, the plan has {shlex.join(asked)}"
    is_meant_to_be = cell.profiled or "skip_gradient_sync" in cell.variant
    if metrics.get("instrumented") and not is_meant_to_be:
        yield "instrumented", "a run of the plan was slowed down by a profiler or a debug switch"


def _words_of(command_line: str | None) -> list[str]:
    try:
        return shlex.split(command_line or "")
    except ValueError:  # a quote that does not close
        return []


def _work_arguments(command: Sequence[str]) -> list[str] | None:
    """Return the flags of gpt2.py in a command but for those that say where to; None: it does not call gpt2.py."""
    try:
        return [word for word in work_arguments(command) if word != "--overwrite"]
    except InputError:
        return None


def _same(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=_EXACT, abs_tol=_EXACT)
