"""Scaling reports as tables: one row per arm, the layouts of the earlier studies, and sentences on fits and warnings.

Every function takes what `scaling_report` returns and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from testbed.analysis.document import markdown
from testbed.analysis.document.model import Block, Cell, Document, Section, Table, Text
from testbed.analysis.document.words import BRACKETS, UNKNOWN, Number, counted, times
from testbed.analysis.runs.comparability import INSTRUMENTS
from testbed.analysis.statistics import FASTER, SLOWER, compare
from testbed.errors import InputError

CellOf = Callable[[dict], Cell]
NOT_MEASURED = "not measured (run with --profile)"
PLACE = ("strategy", "batch", "GPUs/ranks")
SPEED_UP = ("speed-up", "efficiency", "n", "verdict")
COMMUNICATION = "communication (ms/step), exposed part"
# The columns of each table; 001 to 004 have those of the earlier studies' tables.
LAYOUTS = {
    "": (*PLACE, "tokens/s (all ranks)", "wall time (s)", *SPEED_UP),
    "time_to_loss": (*PLACE, "tokens/s (all ranks)", "wall time (s)", "time to loss (s)", "tokens to it", *SPEED_UP),
    "001": (*PLACE, "training time (s)", "speed-up", "compute (ms/step)", COMMUNICATION, "n"),
    "002": (*PLACE, "training time (s)", "tokens/s (all ranks)", "speed-up", "n"),
    "003": (
        *(*PLACE, "tokens/s (all ranks)", "median step (ms)", COMMUNICATION, "utilization"),
        *("peak memory (MiB, largest rank)", "speed-up", "efficiency", "n"),
    ),
    "004": (
        *("batch", "GPUs/ranks", "tokens/s (all ranks)", "training time (s)", "wall time (s)", "p95 step (ms)"),
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
        InputError: layout 004, and not exactly two variants; one sentence that names those there are.
    """
    if layout == "004":
        blocks = [_against(report, *_two_variants(report, variants))]
    else:
        names = LAYOUTS[layout or ("time_to_loss" if _target(report) else "")]
        rows = [[CELLS[name](arm) for name in names] for arm in report["arms"]]
        blocks = [Table([_header(report, name) for name in names], rows)]
    fits = [] if layout else [("- ", *line) for line in fit_lines(report)]
    return Document(
        lead=_about(report),
        sections=[Section(blocks=blocks)],
        notes=[group for group in (fits, _footnotes(report)) if group],
    )


def fit_lines(report: dict) -> list[tuple[str | Number, ...]]:
    """Return a sentence for each law that was fitted to a strategy; what is noted of every fit is said once, last."""
    fits = [
        (strategy, fit)
        for strategy in report["strategies"]
        for fit in strategy["fits"].values()
        if fit["serial_fraction"] is not None
    ]
    shared = [note for note in fits[0][1]["notes"] if all(note in fit["notes"] for _, fit in fits)] if fits else []
    lines: list[tuple[str | Number, ...]] = []
    for strategy, fit in fits:
        name = f"{fit['law'].capitalize()}, {strategy['strategy_name']}, batch {_plain(strategy['batch_size'])}"
        share = Number(fit["serial_fraction"], ".3f", fit["low"], fit["high"], interval=BRACKETS)
        ranks = ", ".join(map(str, fit["rank_counts"]))
        own = "".join(f"; {note}" for note in fit["notes"] if note not in shared)
        source = f" from {counted(fit['num_points'], 'run')} at {ranks} ranks"
        lines.append((f"{name}: serial share ", share, source, *_limit(fit), f"{own}."))
    return lines + [(f"{note[0].upper()}{note[1:]}.",) for note in shared]


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
    return _of("speedup", times, unit="x")(arm), f" ({', '.join(_labels(arm)).upper()})" * bool(arm["mismatches"])


def _labels(arm: dict) -> list[str]:
    """Return what a ratio of unequal arms must carry."""
    fields = {item["field"] for item in arm["mismatches"]}
    return ["unequal work"] * bool(fields - {INSTRUMENTS}) + ["instrumented"] * (INSTRUMENTS in fields)


def _verdict(arm: dict) -> str:
    """Return the verdict with what a reader must not overlook: unequal work, faster than linear, unequal losses."""
    if not arm["speedup"]:
        return UNKNOWN
    marks = _labels(arm)
    marks += ["faster than linear"] if arm["efficiency"]["ratio"] > 1 and arm["ranks"] > 1 else []
    marks += ["losses differ"] if arm["loss_note"] else []
    return "; ".join([arm["verdict"] or "reference", *marks])


def _until_loss(quantity: str, form: str) -> CellOf:
    def cell(arm: dict) -> Cell:
        found = arm["time_to_loss"]
        never = f" ({found['num_never_reached']} of {found['n']} never)" if found["num_never_reached"] else ""
        return "at most " * bool(found["num_upper_bounds"]), _of(quantity, form)(found), never

    return cell


def _attributed(form: str, *names: str) -> CellOf:
    """Return the cell of attributed milliseconds of a step, written into `form` in the order of `names`."""

    def cell(arm: dict) -> str:
        seconds = [(arm["attribution"] or {}).get(f"{name}_s") for name in names]
        known = [value for value in seconds if value is not None]
        return form.format(*(value * 1e3 for value in known)) if len(known) == len(names) else NOT_MEASURED

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
    "tokens/s (all ranks)": _of("tokens_per_s", ",.0f"),
    "wall time (s)": _of("wall_time_s", ",.1f"),
    "training time (s)": _of("training_time_s", ",.2f"),
    "median step (ms)": _of("step_time_s", ",.1f", 1e3),
    "p95 step (ms)": _of("step_time_p95_s", ",.1f", 1e3),
    "peak memory (MiB, largest rank)": _of("peak_memory_bytes", ",.0f", 2**-20),
    "final validation loss": _of("final_val_loss", ".4f"),
    "time to loss (s)": _until_loss("train_time_s", ",.1f"),
    "tokens to it": _until_loss("tokens", ",.0f"),
    "compute (ms/step)": _attributed("{:,.1f}", "compute"),
    COMMUNICATION: _attributed("{:,.1f}, {:,.1f} exposed", "communication", "exposed_communication"),
    "utilization": _utilization,
}


def _header(report: dict, name: str) -> str:
    """Return the name of a column, with what the report holds fixed."""
    if name == "batch":
        return f"batch ({report['arms'][0]['batch_size_is']})"
    return name.replace("to loss", f"to loss {_target(report):g}") if name == "time to loss (s)" else name


def _two_variants(report: dict, variants: Sequence[str] | None) -> Sequence[str]:
    """Return the two variants that layout 004 compares; they may be given by either name."""
    known = _in_order(arm["strategy"] for arm in report["arms"])
    if variants is None:
        # A sweep's baseline is what speed-ups refer to; where it makes the second of two, it is one of the two.
        spread = _in_order(arm["strategy"] for arm in report["arms"] if arm["ranks"] > 1)
        variants = spread if len(spread) > 1 else known
    variant_of = {arm["strategy_name"]: arm["strategy"] for arm in report["arms"]}
    variants = [each if each in known else variant_of.get(each, each) for each in variants]
    if len(variants) != 2 or not set(variants) <= set(known):
        raise InputError(f"--table 004 compares two variants; give --variants A B, two of: {', '.join(known)}")
    return variants


def _against(report: dict, first: str, second: str) -> Block:
    """Return the rows of both for each batch and number of ranks that both have, with the ratio of medians."""
    arms = {(arm["strategy"], arm["batch_size"], arm["ranks"]): arm for arm in report["arms"]}
    pairs = [(arm, arms.get((second, *place))) for (strategy, *place), arm in arms.items() if strategy == first]
    rows: list[list[Cell]] = []
    for arm, other in pairs:
        if other is not None:
            for letter, each, end in (("A", arm, ["1", ""]), ("B", other, _outcome(report, arm, other))):
                cells = [CELLS[name](each) for name in LAYOUTS["004"]]
                rows.append([f"{letter}: {each['strategy_name']}", *cells, *end])
    if not rows:
        names = {arm["strategy"]: arm["strategy_name"] for arm in report["arms"]}
        return f"{names[first]} against {names[second]}: no number of ranks at which both were run."
    return Table(["run", *(_header(report, name) for name in LAYOUTS["004"]), "ratio to A", "verdict"], rows)


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
    known = [item for item in report["mismatches"] if None not in (item["mismatch"], item["baseline"])]
    unknown = _in_order(item["field"] for item in report["mismatches"] if item not in known)
    if report["mismatches"]:
        notes.append(f"Status {report['status']}." + " Work that is not equal:" * bool(known))
    for item in known:
        notes.append(f"- {item['name']}: {item['field']} is {item['mismatch']}, the reference's {item['baseline']}")
    if unknown:
        notes.append(f"- Not shown to be equal, not recorded in every file: {', '.join(unknown)}")
    return notes


def _target(report: dict) -> float | None:
    """Return the loss that time is measured to; None under the other protocols."""
    protocol = report["protocol"]
    return protocol["target_val_loss"] if protocol["name"] == "time_to_loss" else None


def _in_order(values: Any) -> list:
    return list(dict.fromkeys(values))


def _plain(value: Any) -> str:
    return UNKNOWN if value is None else f"{value:g}" if isinstance(value, float) else str(value)
