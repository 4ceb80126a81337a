"""Scaling reports as documents: the plain table, and tables in the layout of the earlier studies.

Every function takes what `scaling_report` returns and nothing else, so a table can be made again from the file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from testbed.analysis.document import markdown
from testbed.analysis.document.model import Block, Cell, Document, Section, Table, Text
from testbed.analysis.document.words import BRACKETS, UNKNOWN, Number

NOT_MEASURED = "not measured (run with --profile)"
CUTS = ("model_parallel", "pipeline")  # of one layer cut: one micro batch at a time, and overlapped


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
        blocks = [_two_variants(report, variants)]
    else:
        blocks = (LAYOUTS[layout] if layout else _every_arm)(report)
    fits = [line for strategy in report["strategies"] if not layout and (line := _fit_line(strategy))]
    notes = [group for group in (fits, _footnotes(report)) if group]
    return Document(lead=_about(report), sections=[Section(blocks=blocks)], notes=notes)


def _every_arm(report: dict) -> list[Block]:
    """One row per strategy, batch size and number of ranks."""
    header = ["strategy", _batch_header(report), "GPUs/ranks", "tokens/s (all ranks)", "wall time (s)", "speed-up",
              "efficiency", "n", "verdict"]  # fmt: skip
    by_target = report["protocol"]["name"] == "time_to_loss"
    if by_target:
        header[5:5] = [f"time to loss {report['protocol']['target_val_loss']:g} (s)", "tokens to it"]
    rows = []
    for arm in report["arms"]:
        row = [*_place(arm), _number(arm["tokens_per_s"], ",.0f"), _number(arm["wall_time_s"], ",.1f"), _speed_up(arm),
               _number(arm["efficiency"], ".2f"), str(arm["n"]), _verdict(arm)]  # fmt: skip
        if by_target:
            row[5:5] = [_until_loss(arm, "train_time_s", ",.1f"), _until_loss(arm, "tokens", ",.0f")]
        rows.append(row)
    return [Table(header, rows)]


def _table_001(report: dict) -> list[Block]:
    """GPUs x batch size: time and speed-up side by side for each batch, then compute and communication."""
    blocks: list[Block] = []
    for strategy in _strategies(report):
        arms = [arm for arm in report["arms"] if arm["strategy"] == strategy]
        batches = _in_order(arm["batch_size"] for arm in arms)
        ranks = sorted({1, *(arm["ranks"] for arm in arms)})
        at = {count: [_arm(report, strategy, batch, count) for batch in batches] for count in ranks}
        times = [
            [str(count), *(cell for arm in found for cell in (_training_time(arm), _speed_up(arm)))]
            for count, found in at.items()
        ]
        shares = [
            [str(count), *(cell for arm in found for cell in _compute_and_communication(arm))]
            for count, found in at.items()
        ]

        def header(*quantities: str, batches: Sequence = batches) -> list[str]:
            return ["GPUs/ranks", *(f"batch {_plain(batch)}: {what}" for batch in batches for what in quantities)]

        blocks += [
            Table(header("time (s)", "speed-up"), times, _shown_name(report, strategy)),
            Table(header("compute (ms/step)", "communication (ms/step), exposed part"), shares),
        ]
    return blocks


def _table_002(report: dict) -> list[Block]:
    """Data parallel over the ranks: time and tokens/s; then model_parallel against pipeline at equal ranks."""
    of_data = [name for name in _strategies(report) if not name.startswith(CUTS)]
    header = ["strategy", _batch_header(report), "GPUs/ranks", "training time (s)", "tokens/s", "speed-up", "n"]
    rows = [
        [*_place(arm), _training_time(arm), _number(arm["tokens_per_s"], ",.0f"), _speed_up(arm), str(arm["n"])]
        for arm in report["arms"]
        if arm["strategy"] in of_data or arm["ranks"] == 1
    ]
    first, second = (_first_named(report, name) for name in CUTS)
    if first is None or second is None:
        missing = " and ".join(name for name, found in zip(CUTS, (first, second), strict=True) if found is None)
        return [Table(header, rows), f"model_parallel against pipeline: not measured, the sweep has no {missing}."]
    return [Table(header, rows), _against(report, first, second)]


def _table_003(report: dict) -> list[Block]:
    """Strategies as rows: what each costs and brings; before that the speed-ups, GPUs x strategy."""
    strategies = _strategies(report)
    blocks: list[Block] = []
    for batch in _in_order(arm["batch_size"] for arm in report["arms"]):
        ranks = sorted({arm["ranks"] for arm in report["arms"] if arm["batch_size"] == batch})
        speed_ups = [
            [str(count), *(_speed_up_of(report, name, batch, count) for name in strategies)] for count in ranks
        ]
        header = ["GPUs/ranks", *(_shown_name(report, name) for name in strategies)]
        blocks.append(f"Speed-up, {report['arms'][0]['batch_size_is']} batch {_plain(batch)}")
        blocks.append(Table(header, speed_ups))
    header = ["strategy", _batch_header(report), "GPUs/ranks", "throughput (tokens/s)", "median step (ms)",
              "communication (ms/step), exposed part", "utilization", "peak memory (MiB, largest rank)",
              "scalability (efficiency)", "n"]  # fmt: skip
    rows = [
        [
            *_place(arm), _number(arm["tokens_per_s"], ",.0f"), _scaled(arm["step_time_s"], 1e3, ",.1f"),
            _compute_and_communication(arm)[1], _utilization(arm), _scaled(arm["peak_memory_bytes"], 2**-20, ",.0f"),
            _number(arm["efficiency"], ".2f"), str(arm["n"]),
        ]
        for arm in report["arms"]
    ]  # fmt: skip
    return [*blocks, Table(header, rows)]


def _two_variants(report: dict, variants: Sequence[str] | None) -> Block:
    """Layout 004: two variants against each other, with ratio and verdict."""
    there = _strategies(report)
    known = _in_order(arm["strategy"] for arm in report["arms"])
    if variants is None:
        # A sweep's baseline is what speed-ups refer to; where it makes the second of two, it is one of the two.
        variants = there if len(there) > 1 else known
    variant_of = {arm["strategy_name"]: arm["strategy"] for arm in report["arms"]}  # by either name
    variants = [each if each in known else variant_of.get(each, each) for each in variants]
    if len(variants) != 2 or not set(variants) <= set(known):
        raise ValueError(f"--table 004 compares two variants; give --variants A B, two of: {', '.join(known)}")
    return _against(report, *variants)


LAYOUTS: dict[str, Callable[[dict], list[Block]]] = {"001": _table_001, "002": _table_002, "003": _table_003}


def _place(arm: dict) -> list[Cell]:
    return [arm["strategy_name"], _plain(arm["batch_size"]), str(arm["ranks"])]


def _speed_up(arm: dict | None, note: str = "") -> Cell:
    """ "1.61x [1.58, 1.64]", or why there is none."""
    if arm is None:
        return "not run"
    if not arm["speedup"]:
        return f"{UNKNOWN} ({arm['reason']}){note}"
    return _number(arm["speedup"], ".2f", unit="x"), " (UNEQUAL WORK)" * bool(arm["mismatches"]), note


def _verdict(arm: dict) -> str:
    """The verdict with what a reader must not overlook: unequal work, faster than linear, unequal losses."""
    if not arm["speedup"]:
        return UNKNOWN
    marks = ["unequal work"] if arm["mismatches"] else []
    marks += ["faster than linear"] if arm["efficiency"]["ratio"] > 1 and arm["ranks"] > 1 else []
    marks += ["losses differ"] if arm["loss_note"] else []
    return "; ".join([arm["verdict"] or "reference", *marks])


def _speed_up_of(report: dict, strategy: str, batch: Any, ranks: int) -> Cell:
    arm = _arm(report, strategy, batch, ranks)
    note = f" ({arm['strategy_name']})" if arm is not None and arm["strategy"] != strategy else ""
    return _speed_up(arm, note)


def _against(report: dict, first: str, second: str) -> Block:
    """Variant rows for each batch and number of ranks that both have, then the ratio of medians."""
    from testbed.analysis.statistics import compare

    header = ["run", _batch_header(report), "GPUs/ranks", "tokens/s (all ranks)", "training time (s)", "wall time (s)",
              "p95 step (ms)", "final validation loss", "n", "ratio to A", "verdict"]  # fmt: skip
    rows: list[list[Cell]] = []
    for arm in (arm for arm in report["arms"] if arm["strategy"] == first):
        other = _arm(report, second, arm["batch_size"], arm["ranks"])
        if other is None or other["strategy"] != second:
            continue
        is_unequal = bool(arm["mismatches"] or other["mismatches"])
        if is_unequal and report["status"] == "invalid_comparison":
            outcome: list[Cell] = [UNKNOWN, "unequal work, see below"]
        else:
            ratio = compare(other["tokens_per_s"]["values"], arm["tokens_per_s"]["values"])
            said = f"B is {ratio.verdict}" if ratio.verdict in ("faster", "slower") else ratio.verdict
            outcome = [_number(vars(ratio), ".3f", unit="x"), said + "; UNEQUAL WORK" * is_unequal]
        for letter, each, end in (("A", arm, ["1", ""]), ("B", other, outcome)):
            name, *place = _place(each)
            rows.append([
                f"{letter}: {name}", *place, _number(each["tokens_per_s"], ",.0f"), _training_time(each),
                _number(each["wall_time_s"], ",.2f"), _scaled(each["step_time_p95_s"], 1e3, ",.1f"),
                _number(each["final_val_loss"], ".4f"), str(each["n"]), *end,
            ])  # fmt: skip
    if not rows:
        names = (_shown_name(report, each) for each in (first, second))
        return f"{' against '.join(names)}: no number of ranks at which both were run."
    return Table(header, rows)


def _about(report: dict) -> str:
    protocol = report["protocol"]
    references = _in_order(arm["reference"] for arm in report["arms"] if arm["reference"] and arm["ranks"] > 1)
    against = f" Speed-up against {'; '.join(references)}." if references else ""
    title = f"{protocol['name'].replace('_', ' ').capitalize()} scaling"
    if protocol["name"] == "time_to_loss":
        title = f"Time to validation loss {protocol['target_val_loss']:g}"
    return f"{title}. Medians of n runs with 95 % intervals.{against}"


def _fit_line(strategy: dict) -> Text | None:
    """The law fitted to a strategy in one sentence; None where nothing was fitted."""
    fit = next((fit for fit in strategy["fits"].values() if fit["serial_fraction"] is not None), None)
    if fit is None:
        return None
    name = f"{fit['law'].capitalize()}, {strategy['strategy_name']}, batch {_plain(strategy['batch_size'])}"
    ranks = ", ".join(map(str, fit["rank_counts"]))
    notes = "".join(f"; {note}" for note in fit["notes"])
    share = Number(fit["serial_fraction"], ".3f", fit["low"], fit["high"], interval=BRACKETS)
    return f"- {name}: serial share ", share, f" from {fit['num_points']} runs at {ranks} ranks{notes}."


def _footnotes(report: dict) -> list[Text]:
    notes: list[Text] = [f"Warning: {text}." for text in report["warnings"]]
    if report["mismatches"]:
        notes.append(f"Status {report['status']}. Work that is not equal:")
        notes += [
            f"- {item['name']}: {item['field']} is {_shown(item['mismatch'])}, "
            f"the reference's {_shown(item['baseline'])}"
            for item in report["mismatches"]
        ]
    return notes


def _shown(value: Any) -> str:
    return "not recorded" if value is None else str(value)


def _compute_and_communication(arm: dict | None) -> list[str]:
    if arm is None or not arm["attribution"]:
        return [NOT_MEASURED if arm else "not run"] * 2
    found = arm["attribution"]
    compute, communication, exposed = (
        f"{found[f'{name}_s'] * 1e3:,.1f}" for name in ("compute", "communication", "exposed_communication")
    )
    return [compute, f"{communication}, {exposed} exposed"]


def _utilization(arm: dict) -> str:
    found = arm["utilization"] or {}
    shown = [f"{name} {found[f'{name.lower()}_percent_mean']:.0f} %" for name in ("GPU", "CPU")
             if found.get(f"{name.lower()}_percent_mean") is not None]  # fmt: skip
    return ", ".join(shown) or "not measured"


def _until_loss(arm: dict, quantity: str, form: str) -> Cell:
    found = arm["time_to_loss"]
    never = f" ({found['num_never_reached']} of {found['n']} never)" if found["num_never_reached"] else ""
    return "at most " * bool(found["num_upper_bounds"]), _number(found[quantity], form), never


def _strategies(report: dict) -> list[str]:
    """Strategies that run on more than one rank, in order; all of them where none does."""
    spread = _in_order(arm["strategy"] for arm in report["arms"] if arm["ranks"] > 1)
    return spread or _in_order(arm["strategy"] for arm in report["arms"])


def _first_named(report: dict, name: str) -> str | None:
    return next((each for each in _strategies(report) if each.partition(":")[0] == name), None)


def _arm(report: dict, strategy: str, batch: Any, ranks: int) -> dict | None:
    """The arm; at one rank, where the strategy was not run there, what its speed-ups refer to."""
    alike = [arm for arm in report["arms"] if (arm["batch_size"], arm["ranks"]) == (batch, ranks)]
    for arm in alike:
        if arm["strategy"] == strategy:
            return arm
    if ranks == 1:
        of_strategy = (arm for arm in report["arms"] if (arm["strategy"], arm["batch_size"]) == (strategy, batch))
        reference = next((arm["reference_strategy"] for arm in of_strategy), None)
        return next((arm for arm in alike if arm["strategy"] == reference), None)
    return None


def _shown_name(report: dict, strategy: str) -> str:
    return next(each["strategy_name"] for each in report["strategies"] if each["strategy"] == strategy)


def _in_order(values: Any) -> list:
    return list(dict.fromkeys(values))


def _batch_header(report: dict) -> str:
    return f"batch ({report['arms'][0]['batch_size_is']})"


def _plain(value: Any) -> str:
    return UNKNOWN if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _training_time(arm: dict | None) -> Number:
    return _number(arm and arm["training_time_s"], ",.2f")


def _number(found: dict | None, form: str, unit: str = "") -> Number:
    """ "6,134 [6,101, 6,170]" of a median or a ratio; without an interval the middle alone."""
    if not found:
        return Number(None, form)
    middle = found["ratio"] if "ratio" in found else found["median"]
    return Number(middle, form, found["low"], found["high"], unit, BRACKETS)


def _scaled(found: dict, factor: float, form: str) -> Number:
    return Number(None if found["median"] is None else found["median"] * factor, form)
