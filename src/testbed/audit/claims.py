"""Audit training measurements, our own and others': which comparison the files allow, and which they contradict.

The claim is the comparison: every arm against the first, or against the one that is named as the baseline. A run whose
number of ranks no file records becomes the baseline only by being named. Arms are the runs of one configuration
(arms.py). A sweep's plan says the protocol; without one, arms of different global batch are compared only where no arm
has a single rank at that batch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from testbed.analysis.runs.arms import group_into_arms
from testbed.audit.answer import Answer, answer
from testbed.audit.checked import Checked, checked_in, columns_in_words
from testbed.audit.comparison_rules import CLAIM_RULES
from testbed.audit.conditions import BATCHES, DIFFERS, batch_is_in_proportion, conditions, strategy_of
from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.foreign_rules import findings_of_run
from testbed.audit.readers import read_reported
from testbed.audit.reported import ROW, STRATEGY, TABLE, Claim, Reported, Side
from testbed.audit.tables.columns import LEARNT, RESULTS, Grid
from testbed.audit.tables.rows import claim_of, row_named, side_of
from testbed.audit.tables.rules import findings_of_table, reference_of
from testbed.audit.tables.sentences import quotes_on
from testbed.audit.tables.told import MOST_NAMED
from testbed.config.run_types import REFERENCE
from testbed.errors import InputError
from testbed.sweep.state import sweeps_above

__all__ = ["FAILS", "NOTE", "Finding", "audit", "audit_runs"]

ENOUGH_REPEATS = 5
SAME_FIGURE = 0.01  # a table gives other digits, and another average of the steps
OF_FIGURES = (Rule.FOLLOWS, Rule.STEP_CLOCK, Rule.MORE_DEVICES)  # of two rows; in what they differ, conditions say


def audit(
    paths: Sequence[Path], baseline: Path | None = None, columns: Mapping[str, str] | None = None
) -> list[Finding]:
    """Return the findings on the runs in files and folders, those that make a claim fall first.

    `columns` gives the quantity of a table's columns by their heading.

    InputError, one sentence that names the file, when one does not exist or cannot be read.
    """
    return audit_and_count(paths, baseline, columns)[0]


def audit_and_count(
    paths: Sequence[Path], baseline: Path | None = None, columns: Mapping[str, str] | None = None
) -> tuple[list[Finding], int, int, Checked]:
    """Return the findings, how many runs and files with tables there are, the baseline not counted, and the checks."""
    nothing_read: list[Path] = []
    items = read_reported(paths, columns, nothing_read)
    folder = Path(paths[0]).absolute()
    # In a folder of several runs the first is first by its name: look for a baseline.
    is_chosen = not folder.is_dir() or sum(item.path.absolute().is_relative_to(folder) for item in items) <= 1
    baselines = read_reported([baseline]) if baseline else []
    num_tables = sum(item.form == TABLE for item in items)
    findings = audit_runs(items, baselines, prefer_baseline=not is_chosen)
    checked = checked_in([*items, *baselines], list(map(Path, paths)), nothing_read)
    return findings, len(items) - num_tables, num_tables, checked


def answered(
    paths: Sequence[Path],
    claimed: float | None = None,
    named: tuple[str | None, str | None] = (None, None),
    columns: Mapping[str, str] | None = None,
) -> Answer | None:
    """Return the answer to the claim that two things compare; None: the paths hold more than two.

    They are two files or folders of runs, or two rows of tables that `named` names.

    Raises:
        InputError: a file cannot be read, or a name is of no row; one sentence that says which.
    """
    if named != (None, None):
        return _answered_by_rows([item for item in read_reported(paths, columns) if item.form == TABLE], claimed, named)
    if len(paths) != 2 or columns:
        return None
    if paths[0].absolute() == paths[1].absolute():
        raise InputError(f"{paths[0]} is given twice: a claim compares two things")
    sides = [_sides([item for item in read_reported([path]) if item.form != TABLE], False) for path in paths]
    if [len(side) for side in sides] != [1, 1]:
        return None
    protocols = {item.protocol for side in sides for item in side[0].runs}
    return answer(Claim(sides[0][0], sides[1][0], protocols.pop() if len(protocols) == 1 else None), claimed)


def _answered_by_rows(items: Sequence[Reported], claimed: float | None, named: tuple[str | None, str | None]) -> Answer:
    if None in named:
        raise InputError("--a and --b name two rows of a table: give both")
    base, other = (row_named(items, str(name), flag) for name, flag in zip(named, ("--a", "--b"), strict=True))
    if (base.name, base.first.details["row"]) == (other.name, other.first.details["row"]):
        raise InputError(f"--a and --b are both the row {base.name}: name two")
    found = [finding for item in items for finding in _findings_of_item(item)]
    figures = [each for each in found if each.rule in OF_FIGURES and {base.name, other.name} & {*each.runs}]
    quotes: list[str] = []
    read: list[str] = []
    for item in items:
        sides = [side for side in (base, other) if side.first.path == item.path]
        lines = {side.first.details["line"] for side in sides}
        quotes += quotes_on(item.details["quotes"], lines) if lines else []
        read += [columns_in_words(grid) for grid in item.details["grids"] if lines & {*grid.lines}]
    return replace(answer(claim_of(base, other), claimed, figures), read=tuple(read), quotes=tuple(quotes))


def audit_runs(
    items: Sequence[Reported], baselines: Sequence[Reported] = (), prefer_baseline: bool = False
) -> list[Finding]:
    """Audit runs that were read. `baselines` stand for the first arm, `prefer_baseline` looks for one."""
    given = {item.path.absolute() for item in baselines}
    items = [*baselines, *(item for item in items if item.path.absolute() not in given)]
    findings = [finding for item in items for finding in _findings_of_item(item)]
    finished = []
    for item in items:
        if item.run and item.run.status != "complete":
            findings.append(item.notes(Rule.TRACEABLE, f"left out of every comparison: the run is {item.run.status}"))
        elif item.is_claim and item.form != TABLE:
            finished.append(item)
    for protocol, sides in _tables(finished, bool(baselines), prefer_baseline):
        compared = _without_marked_instrumented(sides, is_planned=protocol is not None)
        if protocol is None:  # a plan has its profiled runs beside the others on purpose
            for side in (side for side in sides if side not in compared):
                said = f"left out of every comparison: {side.first.instruments[0]}"
                findings.append(side.notes(Rule.INSTRUMENTED, said))
        findings += _findings_of_table(compared, protocol)
    findings += [finding for claim, rows in _claims_of_logs(items) for finding in _findings_of_logs(claim, rows)]
    unique = list(dict.fromkeys(findings))
    return sorted(unique, key=lambda finding: finding.severity != FAILS)


def _findings_of_logs(claim: Claim, rows: Claim) -> Iterator[Finding]:
    """Yield what two logs differ in and the rows of their table do not show, and the other findings on two runs."""
    shown = {each.name for each in conditions(rows) if each.state == DIFFERS}
    if shown & {*BATCHES} or batch_is_in_proportion(*claim.firsts):  # of a device or of all
        shown |= {*BATCHES}
    spoiling = [each for each in conditions(claim) if each.spoils and each.name not in shown]
    if spoiling:
        is_other_work = any(each.is_work or each.name in ("ranks", "devices") for each in spoiling)
        said = "; ".join(f"{each.against}: {each.effect}" for each in spoiling)
        yield Finding(Rule.EQUAL_WORK, claim.names, f"a table compares these: {said}", FAILS if is_other_work else NOTE)
    yield from _of_one_and_of_all(claim, rows)
    found = (finding for rule in CLAIM_RULES for finding in rule(claim))
    yield from (each for each in found if each.rule != Rule.EQUAL_WORK)


def _of_one_and_of_all(claim: Claim, rows: Claim) -> Iterator[Finding]:
    """Yield that one row gives the rate of one device of its log, and the other that of all devices."""
    shares = [_share_of(row, log) for row, log in zip(rows.firsts, claim.firsts, strict=True)]
    are_many = all(log.world_size and log.world_size > 1 for log in claim.firsts)  # one device is all of one
    if are_many and None not in shares and (shares[0] == 1) != (shares[1] == 1):
        words = [f"{row.rate:,.5g} is of {'all devices' if share == 1 else 'one device'} of {log.name}"
                 for row, share, log in zip(rows.firsts, shares, claim.firsts, strict=True)]  # fmt: skip
        yield Finding(Rule.FOLLOWS, rows.names, f"a table compares these: {' and '.join(words)}", FAILS)


def _claims_of_logs(items: Sequence[Reported]) -> Iterator[tuple[Claim, Claim]]:
    """Yield, of each table that compares rows, the logs that its rows name against the reference's, and the rows.

    A row names a log whose file stands in it, or whose name has no word that the row has not.
    """
    logs = [item for item in items if item.form not in (TABLE, ROW) and item.run is None]
    grids = (grid for item in items for grid in item.details.get("grids", ()) if len(grid.lines) <= MOST_NAMED)
    for grid in grids if logs else ():
        found, reference = _logs_by_row(grid, logs), reference_of(grid)
        if len(found) < 2 or reference not in found:
            continue
        sides = {row: side_of(grid, row) for row in found}

        def logged(row: int, sides: Mapping[int, Side] = sides, found: Mapping[int, Reported] = found) -> Side:
            called = {STRATEGY: name} if (name := strategy_of(sides[row])) else {}
            return Side(found[row].name, (replace(found[row], settings=found[row].settings | called),))

        for row in (row for row in found if row != reference):
            rows = claim_of(sides[reference], sides[row])
            yield Claim(logged(reference), logged(row), rows.protocol), rows


def _logs_by_row(grid: Grid, logs: Sequence[Reported]) -> dict[int, Reported]:
    """Return the log that each row names, or else the one whose figure it has; none where two rows have one."""

    def words_of(text: str) -> set[str]:
        return {*re.findall(r"[a-z]+|\d+", text.lower())}

    no_figures = [column for column in grid.columns if column.quantity not in (*RESULTS, *LEARNT)]
    cells = [[column.texts[row] for column in no_figures] for row in range(len(grid.lines))]
    by_file = [[log for log in logs if any(text.endswith(log.path.name) for text in row)] for row in cells]
    by_words = [[log for log in logs if words_of(log.path.stem) <= words_of(" ".join(row))] for row in cells]
    found: dict[int, Reported] = {}
    for named in (by_file, by_words, _logs_by_figures(grid, logs)):
        alone = {row: each[0] for row, each in enumerate(named) if len(each) == 1 and row not in found}
        count = Counter(id(log) for log in (*found.values(), *alone.values()))
        found |= {row: log for row, log in alone.items() if count[id(log)] == 1}
    return found


def _logs_by_figures(grid: Grid, logs: Sequence[Reported]) -> list[list[Reported]]:
    """Return, for each row, the logs that give its rate, or the time of its step, and contradict no setting of it."""
    settings = ("world_size", "global_batch_size", "micro_batch_size", "sequence_length")

    def is_of(row: Reported, log: Reported) -> bool:
        both = [(getattr(row, name), getattr(log, name)) for name in settings]
        if any(a and b and a != b for a, b in both):
            return False
        if row.is_of_iteration and log.is_of_iteration and row.time_s and log.time_s:
            return abs(row.time_s / log.time_s - 1) < SAME_FIGURE or _share_of(row, log) is not None
        return _share_of(row, log) is not None

    rows = (side_of(grid, row).first for row in range(len(grid.lines)))
    return [[log for log in logs if is_of(row, log)] for row in rows]


def _share_of(row: Reported, log: Reported) -> float | None:
    """Return which share of the rate of all devices in a log a row gives: all of it, or one device's; None: neither."""
    ranks, rate = log.world_size or 1, log.rate
    if not rate or not row.rate or not row.has_own_rate or row.rate_unit != log.rate_unit:
        return None
    of_all = rate * ranks if log.rate_is_per_rank else rate
    return next((share for share in (1.0, 1 / ranks) if abs(row.rate / (of_all * share) - 1) < SAME_FIGURE), None)


def _findings_of_item(item: Reported) -> Iterator[Finding]:
    """Yield what a run, or the tables of a file, contradict by themselves."""
    if item.form != TABLE:
        yield from findings_of_run(item)
    for grid in item.details.get("grids", ()):
        yield from findings_of_table(grid)


def _findings_of_table(sides: Sequence[Side], protocol: str | None) -> list[Finding]:
    """Compare every arm with the first, then look at each arm by itself, then at what they have in common."""
    claims = [Claim(sides[0], side, protocol) for side in sides[1:]]
    found = [finding for claim in claims for rule in CLAIM_RULES for finding in rule(claim)]
    found += [finding for side in sides for finding in _findings_of_arm(side, is_compared=len(sides) > 1)]
    if len(sides) > 1 and (few := [side for side in sides if len(side.runs) < ENOUGH_REPEATS]):
        counts = ", ".join(sorted({str(len(side.runs)) for side in few}))
        message = (
            f"{len(few)} of {len(sides)} arms have n = {counts}, fewer than {ENOUGH_REPEATS} repeats: a difference "
            "between them does not compare the configurations"
        )
        found.append(Finding(Rule.ONE_RUN, tuple(side.name for side in few), message, NOTE))
    runs = [(side.name, item.run) for side in sides for item in side.runs if item.run]
    if dirty := dict.fromkeys(name for name, run in runs if run.record.get("git_dirty")):
        message = "ran with changed files: the commit does not name the code"
        found.append(Finding(Rule.TRACEABLE, tuple(dirty), message, NOTE))
    return found


def _findings_of_arm(side: Side, is_compared: bool) -> Iterator[Finding]:
    """Yield what one arm brings into a comparison: instruments, and repeats that did not do the same work."""
    for item in side.runs:
        if item.instruments:
            message = f"instrumented: {'; '.join(item.instruments)}. Its times are not those of the plain program"
            yield item.finds(Rule.INSTRUMENTED, FAILS if is_compared else NOTE, message)
    commits = sorted({str(item.run.git_commit)[:10] for item in side.runs if item.run and item.run.git_commit})
    if len(commits) > 1:
        yield side.fails(Rule.TRACEABLE, f"repeats of one arm ran commits {' / '.join(commits)}")
    steps = sorted({item.optimizer_steps for item in side.runs if item.optimizer_steps is not None})
    if len(steps) > 1:
        counts = " / ".join(f"{count:,}" for count in steps)
        yield side.fails(Rule.EQUAL_WORK, f"repeats of one arm did {counts} optimizer steps")


def _without_marked_instrumented(sides: list[Side], is_planned: bool) -> list[Side]:
    """Leave out our own runs that say so themselves; without a plan, only where the rest still is a comparison."""
    plain = [side for side in sides if not (side.first.is_our_own and side.first.instruments)]
    return plain if is_planned or (len(plain) > 1 and plain[0] is sides[0]) else sides


def _tables(items: list[Reported], has_baseline: bool, prefer_baseline: bool) -> list[tuple[str | None, list[Side]]]:
    """Return (protocol, arms with the baseline first) for each set of arms to compare, one per table of a sweep."""
    by_cell: dict[tuple, list[Reported]] = {}
    cells = {} if has_baseline else _cells(items)
    for item in items:
        by_cell.setdefault(cells.get(item.path.absolute().parent, (item.protocol, None)), []).append(item)
    found: list[tuple[str | None, list[Side]]] = []
    for (protocol, _), members in by_cell.items():
        sides = _sides(members, baseline_first=not has_baseline and (prefer_baseline or protocol is not None))
        batches = {side.first.global_batch_size for side in sides}
        alone = {side.first.global_batch_size for side in sides if side.first.world_size == 1}
        is_open = protocol is None and not has_baseline and None not in batches
        if is_open and 1 < len(batches) < len(sides) and batches == alone:
            # Every batch has its own one-rank run: a table per batch, as scaling studies print them.
            known = sorted(batch for batch in batches if batch is not None)
            groups = [[side for side in sides if side.first.global_batch_size == batch] for batch in known]
            found += [(None, sorted(group, key=lambda side: side.first.world_size != 1)) for group in groups]
        else:
            found.append((protocol, sides))
    return found


def _sides(items: list[Reported], baseline_first: bool) -> list[Side]:
    """Return arms in the order in which they first appear, or with the baseline on the fewest ranks first."""
    of_run = {id(item.run): item for item in items if item.run}
    sides = []
    for arm in group_into_arms([item.run for item in items if item.run and item.form != "v1"]):
        runs = tuple(of_run[id(run)] for run in arm.runs)
        sides.append(Side(arm.label if len(runs) > 1 else runs[0].name, runs))
    sides += [Side(item.name, (item,)) for item in items if item.run is None or item.form == "v1"]
    names = [side.name for side in sides]
    for at, side in enumerate(sides):
        if names.count(side.name) > 1:
            sides[at] = replace(side, name=f"{side.name} ({side.first.path.parent})")
    order = {id(item): number for number, item in enumerate(items)}
    sides.sort(key=lambda side: min(order[id(item)] for item in side.runs))
    if baseline_first and sides:
        first = min(sides, key=_rank_as_baseline)
        sides = [first, *(side for side in sides if side is not first)]
    return sides


def _rank_as_baseline(side: Side) -> tuple[bool, float, bool]:
    is_reference = side.first.run is not None and side.first.run.run_type == REFERENCE
    return bool(side.first.instruments), side.first.world_size or math.inf, not is_reference


def _cells(items: Sequence[Reported]) -> dict[Path, tuple]:
    """Return (protocol, batch of the cell) for each folder of a run in the sweeps above these runs."""
    sweeps = sweeps_above(item.path for item in items if item.run)
    return {
        folder / cell.folder: (sweep.protocol, (str(folder), cell.batch_size))
        for folder, sweep in sweeps.items()
        for cell in sweep.cells
    }
