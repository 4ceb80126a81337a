"""Scaling reports as tables: one row per arm, the layouts of the earlier studies, and sentences on fits and warnings.

Every function takes what `scaling_report` returns and nothing else, so a table can be made again from the file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from testbed.analysis.document import markdown
from testbed.analysis.document.model import Block, Cell, Document, Section, Table, Text
from testbed.analysis.document.words import BRACKETS, UNKNOWN, Number, times
from testbed.analysis.statistics import FASTER, SLOWER, compare

CellOf = Callable[[dict], Cell]
NOT_MEASURED = "not measured (run with --profile)"
CUTS = ("model_parallel", "pipeline")  # of one layer cut: one micro batch at a time, and overlapped
PLACE = ("strategy", "batch", "GPUs/ranks")
LAYOUTS = {
    "": (*PLACE, "tokens/s", "wall time (s)", "speed-up", "efficiency", "n", "verdict"),
    "time_to_loss": (
        *(*PLACE, "tokens/s", "wall time (s)", "time to loss (s)", "tokens to it"),
        *("speed-up", "efficiency", "n", "verdict"),
    ),
    "002": (*PLACE, "training time (s)", "tokens/s", "speed-up", "n"),
    "003": (
        *(*PLACE, "tokens/s", "median step (ms)", "communication (ms/step), exposed part"),
        *("utilization", "peak memory (MiB, largest rank)", "efficiency", "n"),
    ),
    "004": (
        *(*PLACE, "tokens/s", "training time (s)", "wall time (s)", "p95 step (ms)"),
        *("final validation loss", "n"),
    ),
}


def scaling_table(report: dict, layout: str | None = None, variants: Sequence[str] | None = None) -> str:
    """Return `document_of` as Markdown."""
    return markdown.text(document_of(report, layout, variants))


def document_of(report: dict, layout: str | None = None, variants: Sequence[str] | None = None) -> Document:
    """Return the plain table, or a table in the `layout` of an earlier study, 001 to 004.

    Args:
        variants: the two that layout 004 compares; None: those there are.

    Raises:
        ValueError: layout 004, and not exactly two variants; one sentence that names those there are.
    """
    if layout == "004":
        blocks = [_against(report, *_two_variants(report, variants))]
    elif layout:
        blocks = {"001": _table_001, "002": _table_002, "003": _table_003}[layout](report)
    else:
        blocks = [_table(report, report["arms"], "time_to_loss" if _target(report) else "")]
    fits = [] if layout else [("- ", *line) for line in fit_lines(report)]
    return Document(
        lead=_about(report),
        sections=[Section(blocks=blocks)],
        notes=[group for group in (fits, _footnotes(report)) if group],
    )


def fit_lines(report: dict) -> list[tuple[str | Number, ...]]:
    """Return a sentence for each law that was fitted to a strategy."""
    lines = []
    for strategy in report["strategies"]:
        for fit in strategy["fits"].values():
            if fit["serial_fraction"] is not None:
                name = f"{fit['law'].capitalize()}, {strategy['strategy_name']}, batch {_plain(strategy['batch_size'])}"
                share = Number(fit["serial_fraction"], ".3f", fit["low"], fit["high"], interval=BRACKETS)
                ranks = ", ".join(map(str, fit["rank_counts"]))
                source = f" from {fit['num_points']} runs at {ranks} ranks{''.join(f'; {n}' for n in fit['notes'])}."
                lines.append((f"{name}: serial share ", share, *_limit(fit), source))
    return lines


def _limit(fit: dict) -> tuple[str | Number, ...]:
    """Return Amdahl's 1 / s with the interval of s turned round; nothing where that reaches 0 and bounds nothing."""
    if (fit["limit_of_speedup"] or 0) <= 1 or not fit["low"] or fit["low"] <= 0:
        return ()
    return ", speed-up at most ", Number(fit["limit_of_speedup"], ".1f", 1 / fit["high"], 1 / fit["low"], "x", BRACKETS)


def _of(name: str, form: str | Callable[[float], str], factor: float = 1, unit: str = "") -> Callable[[dict], Number]:
    """Return the cell of a median or a ratio, "6,134 [6,101, 6,170]"; without an interval the middle alone."""

    def cell(arm: dict) -> Number:
        found = arm[name] or {}
        middle, low, high = found.get("ratio", found.get("median")), found.get("low"), found.get("high")
        scaled = [None if value is None else value * factor for value in (middle, low, high)]
        return Number(scaled[0], form, scaled[1], scaled[2], unit, BRACKETS)

    return cell


def _speed_up(arm: dict) -> Cell:
    """Return "1.61x [1.58, 1.64]", or why there is none."""
    if not arm["speedup"]:
        return f"{UNKNOWN} ({arm['reason']})"
    return _of("speedup", times, unit="x")(arm), " (UNEQUAL WORK)" * bool(arm["mismatches"])


def _verdict(arm: dict) -> str:
    """Return the verdict with what a reader must not overlook: unequal work, faster than linear, unequal losses."""
    if not arm["speedup"]:
        return UNKNOWN
    marks = ["unequal work"] if arm["mismatches"] else []
    marks += ["faster than linear"] if arm["efficiency"]["ratio"] > 1 and arm["ranks"] > 1 else []
    marks += ["losses differ"] if arm["loss_note"] else []
    return "; ".join([arm["verdict"] or "reference", *marks])


def _until_loss(quantity: str, form: str) -> CellOf:
    def cell(arm: dict) -> Cell:
        found = arm["time_to_loss"]
        never = f" ({found['num_never_reached']} of {found['n']} never)" if found["num_never_reached"] else ""
        return "at most " * bool(found["num_upper_bounds"]), _of(quantity, form)(found), never

    return cell


def _attributed(form: str) -> CellOf:
    """Return the cell of attributed milliseconds, by the name that each has in `form`."""

    def cell(arm: dict) -> str:
        found = arm["attribution"]
        if not found:
            return NOT_MEASURED
        return form.format(**{name: value * 1e3 for name, value in found.items() if name.endswith("_s") and value})

    return cell


def _utilization(arm: dict) -> str:
    found = arm["utilization"] or {}
    shown = [f"{name} {found[f'{name.lower()}_percent_mean']:.0f} %" for name in ("GPU", "CPU")
             if found.get(f"{name.lower()}_percent_mean") is not None]  # fmt: skip
    return ", ".join(shown) or "not measured"


CELLS: dict[str, CellOf] = {
    "strategy": lambda arm: arm["strategy_name"],
    "batch": lambda arm: _plain(arm["batch_size"]),
    "GPUs/ranks": lambda arm: str(arm["ranks"]),
    "n": lambda arm: str(arm["n"]),
    "speed-up": _speed_up,
    "efficiency": _of("efficiency", ".2f"),
    "verdict": _verdict,
    "tokens/s": _of("tokens_per_s", ",.0f"),
    "wall time (s)": _of("wall_time_s", ",.1f"),
    "training time (s)": _of("training_time_s", ",.2f"),
    "median step (ms)": _of("step_time_s", ",.1f", 1e3),
    "p95 step (ms)": _of("step_time_p95_s", ",.1f", 1e3),
    "peak memory (MiB, largest rank)": _of("peak_memory_bytes", ",.0f", 2**-20),
    "final validation loss": _of("final_val_loss", ".4f"),
    "time to loss (s)": _until_loss("train_time_s", ",.1f"),
    "tokens to it": _until_loss("tokens", ",.0f"),
    "compute (ms/step)": _attributed("{compute_s:,.1f}"),
    "communication (ms/step), exposed part": _attributed(
        "{communication_s:,.1f}, {exposed_communication_s:,.1f} exposed"
    ),
    "utilization": _utilization,
}


def _header(report: dict, name: str) -> str:
    """Return the name of a column, with what the report holds fixed."""
    if name == "batch":
        return f"batch ({report['arms'][0]['batch_size_is']})"
    return name.replace("to loss", f"to loss {_target(report):g}") if name == "time to loss (s)" else name


def _table(report: dict, arms: Sequence[dict], layout: str) -> Table:
    """Return one row per strategy, batch size and number of ranks."""
    names = LAYOUTS[layout]
    return Table([_header(report, name) for name in names], [[CELLS[name](arm) for name in names] for arm in arms])


def _pivot(report: dict, strategy: str, names: Sequence[str], title: str = "") -> Table:
    """Return ranks as rows; for each batch size the columns `names`."""
    arms = [arm for arm in report["arms"] if arm["strategy"] == strategy]
    batches = _in_order(arm["batch_size"] for arm in arms)
    header = ["GPUs/ranks", *(f"batch {_plain(batch)}: {name}" for batch in batches for name in names)]
    rows = [
        [str(ranks), *(_cell(name, _arm(report, strategy, batch, ranks)) for batch in batches for name in names)]
        for ranks in sorted({1, *(arm["ranks"] for arm in arms)})
    ]
    return Table(header, rows, title)


def _table_001(report: dict) -> list[Block]:
    """Return time and speed-up of each batch over the ranks, then compute and communication."""
    blocks: list[Block] = []
    for strategy in _strategies(report):
        blocks += [
            _pivot(report, strategy, ("training time (s)", "speed-up"), _shown_name(report, strategy)),
            _pivot(report, strategy, ("compute (ms/step)", "communication (ms/step), exposed part")),
        ]
    return blocks


def _table_002(report: dict) -> list[Block]:
    """Return data parallel over the ranks: time and tokens/s; then model_parallel against pipeline at equal ranks."""
    of_data = [name for name in _strategies(report) if not name.startswith(CUTS)]
    arms = [arm for arm in report["arms"] if arm["strategy"] in of_data or arm["ranks"] == 1]
    cuts = [next((each for each in _strategies(report) if each.partition(":")[0] == cut), None) for cut in CUTS]
    first, second = cuts
    if first is None or second is None:
        missing = " and ".join(name for name, found in zip(CUTS, cuts, strict=True) if found is None)
        outcome: Block = f"model_parallel against pipeline: not measured, the sweep has no {missing}."
    else:
        outcome = _against(report, first, second)
    return [_table(report, arms, "002"), outcome]


def _table_003(report: dict) -> list[Block]:
    """Return the speed-ups, ranks by strategy; then one row per arm with what it costs and brings."""
    strategies = _strategies(report)
    blocks: list[Block] = []
    for batch in _in_order(arm["batch_size"] for arm in report["arms"]):
        ranks = sorted({arm["ranks"] for arm in report["arms"] if arm["batch_size"] == batch})
        rows: list[list[Cell]] = []
        for count in ranks:
            rows.append([str(count)])
            for strategy in strategies:
                arm = _arm(report, strategy, batch, count)
                stand_in = f" ({arm['strategy_name']})" if arm is not None and arm["strategy"] != strategy else ""
                cell = _cell("speed-up", arm)
                rows[-1].append((*(cell if isinstance(cell, tuple) else (cell,)), stand_in))
        blocks.append(f"Speed-up, {report['arms'][0]['batch_size_is']} batch {_plain(batch)}")
        blocks.append(Table(["GPUs/ranks", *(_shown_name(report, name) for name in strategies)], rows))
    return [*blocks, _table(report, report["arms"], "003")]


def _two_variants(report: dict, variants: Sequence[str] | None) -> Sequence[str]:
    """Return the two variants that layout 004 compares; they may be given by either name."""
    there = _strategies(report)
    known = _in_order(arm["strategy"] for arm in report["arms"])
    if variants is None:
        # A sweep's baseline is what speed-ups refer to; where it makes the second of two, it is one of the two.
        variants = there if len(there) > 1 else known
    variant_of = {arm["strategy_name"]: arm["strategy"] for arm in report["arms"]}
    variants = [each if each in known else variant_of.get(each, each) for each in variants]
    if len(variants) != 2 or not set(variants) <= set(known):
        raise ValueError(f"--table 004 compares two variants; give --variants A B, two of: {', '.join(known)}")
    return variants


def _against(report: dict, first: str, second: str) -> Block:
    """Return the rows of both for each batch and number of ranks that both have, with the ratio of medians."""
    rows: list[list[Cell]] = []
    for arm in (arm for arm in report["arms"] if arm["strategy"] == first):
        other = _arm(report, second, arm["batch_size"], arm["ranks"])
        if other is None or other["strategy"] != second:
            continue
        for letter, each, end in (("A", arm, ["1", ""]), ("B", other, _outcome(report, arm, other))):
            cells = [CELLS[name](each) for name in LAYOUTS["004"]]
            rows.append([f"{letter}: {each['strategy_name']}", *cells[1:], *end])
    if not rows:
        names = (_shown_name(report, each) for each in (first, second))
        return f"{' against '.join(names)}: no number of ranks at which both were run."
    header = ["run", *(_header(report, name) for name in LAYOUTS["004"][1:]), "ratio to A", "verdict"]
    return Table(header, rows)


def _outcome(report: dict, arm: dict, other: dict) -> list[Cell]:
    """Return the ratio of `other` to `arm` and its verdict."""
    is_unequal = bool(arm["mismatches"] or other["mismatches"])
    if is_unequal and report["status"] == "invalid_comparison":
        return [UNKNOWN, "unequal work, see below"]
    ratio = compare(other["tokens_per_s"]["values"], arm["tokens_per_s"]["values"])
    said = f"B is {ratio.verdict}" if ratio.verdict in (FASTER, SLOWER) else ratio.verdict
    return [_of("ratio", ".3f", unit="x")({"ratio": vars(ratio)}), said + "; UNEQUAL WORK" * is_unequal]


def _about(report: dict) -> str:
    references = _in_order(arm["reference"] for arm in report["arms"] if arm["reference"] and arm["ranks"] > 1)
    against = f" Speed-up against {'; '.join(references)}." if references else ""
    title = f"{report['protocol']['name'].replace('_', ' ').capitalize()} scaling"
    if (target := _target(report)) is not None:
        title = f"Time to validation loss {target:g}"
    return f"{title}. Medians of n runs with 95 % intervals.{against}"


def _footnotes(report: dict) -> list[Text]:
    notes: list[Text] = [f"Warning: {text}." for text in report["warnings"]]
    if report["mismatches"]:
        notes.append(f"Status {report['status']}. Work that is not equal:")
        for item in report["mismatches"]:
            own, reference = (
                "not recorded" if item[side] is None else str(item[side]) for side in ("mismatch", "baseline")
            )
            notes.append(f"- {item['name']}: {item['field']} is {own}, the reference's {reference}")
    return notes


def _target(report: dict) -> float | None:
    """Return the loss that time is measured to; None under the other protocols."""
    protocol = report["protocol"]
    return protocol["target_val_loss"] if protocol["name"] == "time_to_loss" else None


def _cell(name: str, arm: dict | None) -> Cell:
    """Return a cell of an arm that need not have been run; a time is then unknown."""
    if arm is None:
        return UNKNOWN if name == "training time (s)" else "not run"
    return CELLS[name](arm)


def _strategies(report: dict) -> list[str]:
    """Return the strategies that run on more than one rank, in order; all of them where none does."""
    spread = _in_order(arm["strategy"] for arm in report["arms"] if arm["ranks"] > 1)
    return spread or _in_order(arm["strategy"] for arm in report["arms"])


def _arm(report: dict, strategy: str, batch: Any, ranks: int) -> dict | None:
    """Return the arm; at one rank, where the strategy was not run there, what its speed-ups refer to."""
    alike = {arm["strategy"]: arm for arm in report["arms"] if (arm["batch_size"], arm["ranks"]) == (batch, ranks)}
    if strategy in alike or ranks != 1:
        return alike.get(strategy)
    of_strategy = (arm for arm in report["arms"] if (arm["strategy"], arm["batch_size"]) == (strategy, batch))
    return alike.get(next((arm["reference_strategy"] for arm in of_strategy), None))


def _shown_name(report: dict, strategy: str) -> str:
    return next(each["strategy_name"] for each in report["strategies"] if each["strategy"] == strategy)


def _in_order(values: Any) -> list:
    return list(dict.fromkeys(values))


def _plain(value: Any) -> str:
    return UNKNOWN if value is None else f"{value:g}" if isinstance(value, float) else str(value)
