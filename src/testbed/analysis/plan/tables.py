"""A plan as text: the answer in a sentence, a row for each strategy and mesh, memory and step in parts, commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from testbed.analysis.document.model import Cell, Table, table_of
from testbed.analysis.document.terminal import table_lines
from testbed.analysis.document.words import UNKNOWN, Number, digits, rate
from testbed.memory_model.job import Job
from testbed.planner.command import command_of
from testbed.planner.plan import Budget, PlannedRun, duration, headline, name_of, settings_of, three
from testbed.planner.question import Question
from testbed.planner.step_time import BUBBLE, PARTS

MIB, GIB = 2**20, 2**30
NOT_TRAINED = "src/gpt2.py trains GPT-2 alone: these are its strategies on another model, and no command starts them."
RECOMPUTED = {"none": "-", "full": "blocks", "selective_op": "selective"}


def plan_text(
    found: Sequence[PlannedRun],
    budget: Budget,
    refused: Mapping[str, object],
    work: Sequence[str] | None,
    top: int | None = None,
    vocabulary: str | None = None,
    hints: Sequence[str] = (),
) -> str:
    """Return all that a terminal shows of a plan.

    Args:
        found: one of each strategy and mesh, the best first.
        refused: run type -> why none of it is possible.
        work: flags of the model as they were typed, for the commands; None where src/gpt2.py does not train it.
        top: how many of them have rows; the sentence is about all.
        vocabulary: of the model, in words.
        hints: what else to ask for.
    """
    best, runs = found[0], found[:top]
    more = [f"the first {len(runs)} of {len(found)}; --top 0 shows all"] if len(runs) < len(found) else []
    ends = f" {vocabulary[:1].upper()}{vocabulary[1:]}." if vocabulary else ""
    groups = [
        [f"Best: {headline(found, budget)}{ends}", *(f"{hint}." for hint in hints), f"({best.time.label})"],
        [*table_lines(overview(runs, budget)), *more],
        ["Memory per device at its peak, GiB", *table_lines(memory_table(runs))],
        ["Step, ms", *table_lines(time_table(runs))],
        [NOT_TRAINED] if work is None else ["Commands", *_commands(runs, work)],
        _assumptions(best, budget),
        [f"not possible: {run_type}: {reason}" for run_type, reason in refused.items()],
    ]
    return "\n\n".join("\n".join(lines) for lines in groups if lines)


def overview(runs: Sequence[PlannedRun], budget: Budget) -> Table:
    """Return one row per run."""
    columns: dict[str, Callable[[PlannedRun], Cell]] = {
        "": _numbers(runs),
        "strategy": lambda run: name_of(run.job),
        "micro batch": lambda run: f"{run.job.micro_batch:g} x {run.job.accumulation:g}",
        "recompute": lambda run: RECOMPUTED.get(run.job.recompute, run.job.recompute),
        "memory GiB": lambda run: f"{run.needs_bytes / GIB:.1f}",
        "spare": lambda run: f"{run.spare_bytes / GIB:+.1f}" + ("" if run.fits else " NO") + " tight" * run.is_tight,
        "compiled": lambda run: "yes" if run.job.compiled else "no",
        "step s": lambda run: three(run.time.seconds),
        "90 %": lambda run: f"{three(run.time.low)} to {three(run.time.high)}",
        "ratio to 1": lambda run: "{:.3g} ({:.3g} to {:.3g})".format(*run.ratio_to(runs[0])),
        "tokens/s": lambda run: rate(run.tokens_per_s),
        "MFU": _mfu,
        "whole run": lambda run: _whole_run(run, budget),
        "cost": lambda run: _cost(run, budget),
        "goodput": lambda run: UNKNOWN if budget.mtbf_hours is None else f"{budget.goodput(run):.1%}",
        "costs most": lambda run: run.limited_by,
    }
    return table_of(runs, columns, text=("", "strategy", "recompute", "compiled", "costs most"))


def _cost(run: PlannedRun, budget: Budget) -> Cell:
    cost = budget.cost(run)
    return UNKNOWN if cost is None else three(cost)


def _mfu(run: PlannedRun) -> Cell:
    return Number(run.mfu, ".0%" if run.mfu >= 0.1 else ".2%")


def _whole_run(run: PlannedRun, budget: Budget) -> Cell:
    days = budget.days(run)
    return UNKNOWN if days is None else duration(days)


def memory_table(runs: Sequence[PlannedRun]) -> Table:
    """Return the kinds of memory at the peak."""
    kinds = _in_order(run.memory_by_kind for run in runs)
    columns: dict[str, Callable[[PlannedRun], Cell]] = {"": _numbers(runs), "strategy": lambda run: name_of(run.job)}
    columns |= {kind: _gib(kind) for kind in kinds}
    columns |= {
        "in all": lambda run: f"{run.needs_bytes / GIB:.2f}",
        "between steps": lambda run: f"{run.memory.steady / GIB:.2f}",
        "peak at": lambda run: run.memory.peak_moment,
        "of a node's host": lambda run: f"{run.host_bytes / GIB:.0f}" if run.host_bytes else UNKNOWN,
    }
    return table_of(runs, columns, text=("", "strategy", "peak at"))


def time_table(runs: Sequence[PlannedRun]) -> Table:
    """Return what the step is made of; a part that no run has is left out."""
    names = dict.fromkeys([*PARTS, BUBBLE, *_in_order(run.time.parts for run in runs)])
    parts = [part for part in names if any(run.time.parts.get(part) for run in runs)]
    columns: dict[str, Callable[[PlannedRun], Cell]] = {"": _numbers(runs), "strategy": lambda run: name_of(run.job)}
    columns |= {part: _ms(part) for part in parts}
    columns["in all"] = lambda run: digits(run.time.seconds * 1e3)
    return table_of(runs, columns, text=("", "strategy"))


def choices_table(choices: Sequence[Question]) -> Table:
    """Return a row for each kind and number of devices: its best run, or why there is none."""
    first: dict[str, PlannedRun] = {}  # of each kind of device
    for choice in choices:
        if (best := choice.fitting()) is not None:
            first.setdefault(choice.machine.device.name, best)

    def of(cell: Callable[[PlannedRun, Budget], Cell]) -> Callable[[Question], Cell]:
        return lambda choice: "" if (best := choice.fitting()) is None else cell(best, choice.budget)

    def strategy(choice: Question) -> str:
        best = choice.best()
        return best if isinstance(best, str) else name_of(best.job)

    def efficiency(run: PlannedRun, budget: Budget) -> str:
        least = first[run.machine.device.name]
        return f"{run.tokens_per_s / run.machine.devices / (least.tokens_per_s / least.machine.devices):.0%}"

    columns: dict[str, Callable[[Question], Cell]] = {
        "device": lambda choice: choice.machine.device.name if len(kinds) > 1 else UNKNOWN,
        "devices": lambda choice: f"{choice.machine.devices:,}",
        "strategy": strategy,
        "settings": of(lambda run, _: settings_of(run.job)),
        "step s": of(lambda run, _: three(run.time.seconds)),
        "90 %": of(lambda run, _: f"{three(run.time.low)} to {three(run.time.high)}"),
        "tokens/s": of(lambda run, _: rate(run.tokens_per_s)),
        "per device": of(efficiency),
        "MFU": of(lambda run, _: _mfu(run)),
        "whole run": of(_whole_run),
        "cost": of(_cost),
        "goodput": of(lambda run, budget: UNKNOWN if budget.mtbf_hours is None else f"{budget.goodput(run):.1%}"),
        "costs most": of(lambda run, _: run.limited_by),
    }
    kinds = {choice.machine.device.name for choice in choices}
    return table_of(choices, columns, text=("device", "strategy", "settings", "costs most"))


def check_text(
    checked: Sequence[tuple[Job, Sequence[dict[str, Any]], list[str]]], refused: Mapping[str, object]
) -> str:
    """Return a table of built strategies, and what would fail.

    Args:
        checked: job, facts of its ranks (`BuiltRank`), faults.
        refused: run type -> why none of it is possible.
    """

    def weights(row: tuple[Job, Sequence[dict[str, Any]], list[str]]) -> str:
        sizes = sorted({round(rank["parameter_bytes"] / MIB, 1) for rank in row[1] if rank["fault"] is None})
        return UNKNOWN if not sizes else f"{sizes[0]:,}" + (f" to {sizes[-1]:,}" if len(sizes) > 1 else "")

    columns: dict[str, Callable[[Any], Cell]] = {
        "strategy": lambda row: name_of(row[0]),
        "ranks built": lambda row: str(len(row[1])),
        "data ranks": lambda row: str(row[1][0]["data_world_size"]),
        "groups of": lambda row: ", ".join(map(str, sorted({size for rank in row[1] for size in rank["group_sizes"]}))),
        "weights MiB": weights,
        "s": lambda row: f"{sum(rank['seconds'] for rank in row[1]):.1f}",
        "": lambda row: "would fail" if row[2] else "would start",
    }
    lines = table_lines(table_of(checked, columns, text=("strategy", "groups of", "")))
    lines += [f"{name_of(job)}: {fault}" for job, _, faults in checked for fault in faults]
    return "\n".join([*lines, *(f"not possible: {run_type}: {reason}" for run_type, reason in refused.items())])


def _commands(runs: Sequence[PlannedRun], work: Sequence[str]) -> list[str]:
    return [f"{number}  {shell_words(command_of(run.job, run.machine, work))}" for number, run in _numbered(runs)]


def shell_words(command: Sequence[str]) -> str:
    """Return a command for a shell, in which `$NAME` stays the shell's."""
    return " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in command)


def _assumptions(run: PlannedRun, budget: Budget) -> list[str]:
    """Return what the numbers rest on that is neither in a table nor in a flag."""
    machine = run.machine
    lines = [f"device: {machine.device.name}, {machine.device.source}" if machine.device.source else ""]
    near_bytes_per_s = machine.near_bytes_per_s(min(machine.devices, machine.joined))
    links = [("within a node", near_bytes_per_s, machine.within_node.name)]
    if machine.devices > machine.joined:
        links.append(("between nodes", machine.between_nodes.bytes_per_s, machine.between_nodes.name))
    for where, bytes_per_s, name in links if machine.devices > 1 else ():
        lines.append(f"link {where}: {bytes_per_s * 8 / 1e9:,.4g} Gbit/s per device and direction ({name})")
    saved = f"a checkpoint: {three(run.checkpoint_bytes / 1e9)} GB of weights and moments"
    seconds = f", {three(budget.saving_s(run))} s"
    lines.append(saved + seconds + (" at 1 GB/s of each node, an assumption" if budget.save_s is None else ""))
    failures = budget.failures(run)
    if failures is not None:
        between, interval = three(failures.between_s / 3600), three(failures.interval_s / 60)
        lines.append(
            f"goodput: Daly 2006; a failure of the machine every {between} h, a checkpoint of "
            f"{three(failures.save_s)} s every {interval} min, {failures.restart_s:g} s to restart"
        )
    return [line for line in lines if line]


def _numbered(runs: Sequence[PlannedRun]) -> list[tuple[int, PlannedRun]]:
    return list(enumerate(runs, start=1))


def _numbers(runs: Sequence[PlannedRun]) -> Callable[[PlannedRun], Cell]:
    number_of = {id(run): str(number) for number, run in _numbered(runs)}
    return lambda run: number_of[id(run)]


def _gib(kind: str) -> Callable[[PlannedRun], Cell]:
    return lambda run: f"{run.memory_by_kind.get(kind, 0.0) / GIB:.2f}"


def _ms(part: str) -> Callable[[PlannedRun], Cell]:
    return lambda run: digits(run.time.parts.get(part, 0.0) * 1e3) if run.time.parts.get(part) else "-"


def _in_order(tables: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))
