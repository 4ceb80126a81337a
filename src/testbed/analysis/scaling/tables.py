"""Scaling reports as markdown: the plain table, and tables in the layout of the earlier studies.

Every function takes what `scaling_report` returns and nothing else, so a table can be made again from the file alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NOT_MEASURED = "not measured (run with --profile)"
UNKNOWN = "n/a"
CUTS = ("model_parallel", "pipeline")  # of one layer cut: one micro batch at a time, and overlapped


def scaling_table(report: dict) -> str:
    """One row per strategy, batch size and number of ranks."""
    header = ["strategy", _batch_header(report), "GPUs/ranks", "tokens/s (all ranks)", "wall time (s)", "speed-up",
              "efficiency", "n", "verdict"]  # fmt: skip
    by_target = report["protocol"]["name"] == "time_to_loss"
    if by_target:
        header[5:5] = [f"time to loss {report['protocol']['target_val_loss']:g} (s)", "tokens to it"]
    rows = []
    for arm in report["arms"]:
        row = [arm["strategy_name"], _plain(arm["batch_size"]), str(arm["ranks"]), _range(arm["tokens_per_s"], ",.0f"),
               _range(arm["wall_time_s"], ",.1f"), speed_up(arm), _range(arm["efficiency"], ".2f", "ratio"),
               str(arm["n"]), verdict(arm)]  # fmt: skip
        if by_target:
            row[5:5] = [_until_loss(arm, "train_time_s", ",.1f"), _until_loss(arm, "tokens", ",.0f")]
        rows.append(row)
    fits = [line for strategy in report["strategies"] if (line := _fit_line(strategy))]
    return "\n".join([_about(report), "", markdown_table(header, rows), *_footnotes(report, fits)])


def table_001(report: dict) -> str:
    """GPUs x batch size: time and speed-up side by side for each batch, then compute and communication."""
    parts = [_about(report)]
    for strategy in _strategies(report):
        arms = [arm for arm in report["arms"] if arm["strategy"] == strategy]
        batches = _in_order(arm["batch_size"] for arm in arms)
        ranks = sorted({1, *(arm["ranks"] for arm in arms)})
        times, shares = [], []
        for count in ranks:
            found = [_arm(report, strategy, batch, count) for batch in batches]
            times.append([str(count)])
            shares.append([str(count)])
            for arm in found:
                times[-1] += [_range(arm and arm["training_time_s"], ",.2f"), speed_up(arm)]
                shares[-1] += _compute_and_communication(arm)
        labels = [f"batch {_plain(batch)}" for batch in batches]
        parts += ["", f"**{_shown_name(report, strategy)}**", "", markdown_table(
            ["GPUs/ranks", *(f"{label}: {what}" for label in labels for what in ("time (s)", "speed-up"))], times
        ), "", markdown_table(
            ["GPUs/ranks", *(f"{label}: {what}" for label in labels
                             for what in ("compute (ms/step)", "communication (ms/step), exposed part"))], shares
        )]  # fmt: skip
    return "\n".join([*parts, *_footnotes(report)])


def table_002(report: dict) -> str:
    """Data parallel over the ranks: time and tokens/s; then model_parallel against pipeline at equal ranks."""
    of_data = [name for name in _strategies(report) if not name.startswith(CUTS)]
    header = ["strategy", _batch_header(report), "GPUs/ranks", "training time (s)", "tokens/s", "speed-up", "n"]
    rows = [
        [arm["strategy_name"], _plain(arm["batch_size"]), str(arm["ranks"]), _range(arm["training_time_s"], ",.2f"),
         _range(arm["tokens_per_s"], ",.0f"), speed_up(arm), str(arm["n"])]
        for arm in report["arms"] if arm["strategy"] in of_data or arm["ranks"] == 1
    ]  # fmt: skip
    parts = [_about(report), "", markdown_table(header, rows), ""]
    cuts = [_first_named(report, name) for name in CUTS]
    if None in cuts:
        missing = " and ".join(name for name, found in zip(CUTS, cuts, strict=True) if found is None)
        parts.append(f"model_parallel against pipeline: not measured, the sweep has no {missing}.")
    else:
        parts.append(_against(report, *cuts))
    return "\n".join([*parts, *_footnotes(report)])


def table_003(report: dict) -> str:
    """Strategies as rows: what each costs and brings; before that the speed-ups, GPUs x strategy."""
    strategies = _strategies(report)
    header = ["strategy", _batch_header(report), "GPUs/ranks", "throughput (tokens/s)", "median step (ms)",
              "communication (ms/step), exposed part", "utilization", "peak memory (MiB, largest rank)",
              "scalability (efficiency)", "n"]  # fmt: skip
    parts, rows = [_about(report)], []
    for batch in _in_order(arm["batch_size"] for arm in report["arms"]):
        ranks = sorted({arm["ranks"] for arm in report["arms"] if arm["batch_size"] == batch})
        speed_ups = [
            [str(count), *(_speed_up_of(report, name, batch, count) for name in strategies)] for count in ranks
        ]
        title = f"Speed-up, {report['arms'][0]['batch_size_is']} batch {_plain(batch)}"
        parts += [
            "",
            title,
            "",
            markdown_table(["GPUs/ranks", *(_shown_name(report, name) for name in strategies)], speed_ups),
        ]
    for arm in report["arms"]:
        rows.append([
            arm["strategy_name"], _plain(arm["batch_size"]), str(arm["ranks"]), _range(arm["tokens_per_s"], ",.0f"),
            _scaled(arm["step_time_s"]["median"], 1e3, ",.1f"), _compute_and_communication(arm)[1],
            _utilization(arm), _scaled(arm["peak_memory_bytes"]["median"], 2**-20, ",.0f"),
            _range(arm["efficiency"], ".2f", "ratio"), str(arm["n"]),
        ])  # fmt: skip
    return "\n".join([*parts, "", markdown_table(header, rows), *_footnotes(report)])


def table_004(report: dict, variants: Sequence[str] | None = None) -> str:
    """Two variants against each other, with ratio and verdict.

    Raises:
        ValueError: not exactly two variants; one sentence that names those there are.
    """
    there = _strategies(report)
    if variants is None:
        # A sweep's baseline is what speed-ups refer to; where it makes the second of two, it is one of the two.
        variants = there if len(there) > 1 else _in_order(arm["strategy"] for arm in report["arms"])
    known = _in_order(arm["strategy"] for arm in report["arms"])
    variant_of = {arm["strategy_name"]: arm["strategy"] for arm in report["arms"]}  # by either name
    variants = [each if each in known else variant_of.get(each, each) for each in variants]
    if len(variants) != 2 or not set(variants) <= set(known):
        raise ValueError(f"--table 004 compares two variants; give --variants A B, two of: {', '.join(known)}")
    return "\n".join([_about(report), "", _against(report, *variants), *_footnotes(report)])


TABLES = {"001": table_001, "002": table_002, "003": table_003, "004": table_004}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; a bar inside a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def speed_up(arm: dict | None) -> str:
    """ "1.61x [1.58, 1.64]", or why there is none."""
    if arm is None:
        return "not run"
    if not arm["speedup"]:
        return f"{UNKNOWN} ({arm['reason']})"
    label = " (UNEQUAL WORK)" if arm["mismatches"] else ""
    return _range(arm["speedup"], ".2f", "ratio", unit="x") + label


def verdict(arm: dict) -> str:
    """The verdict with what a reader must not overlook: unequal work, faster than linear, unequal losses."""
    if not arm["speedup"]:
        return UNKNOWN
    marks = ["unequal work"] if arm["mismatches"] else []
    marks += ["faster than linear"] if arm["efficiency"]["ratio"] > 1 and arm["ranks"] > 1 else []
    marks += ["losses differ"] if arm["loss_note"] else []
    return "; ".join([arm["verdict"] or "reference", *marks])


def _speed_up_of(report: dict, strategy: str, batch: Any, ranks: int) -> str:
    arm = _arm(report, strategy, batch, ranks)
    is_another = arm is not None and arm["strategy"] != strategy
    return speed_up(arm) + (f" ({arm['strategy_name']})" if is_another else "")


def _against(report: dict, first: str, second: str) -> str:
    """Variant rows for each batch and number of ranks that both have, then the ratio of medians."""
    from testbed.analysis.statistics import compare

    header = ["run", _batch_header(report), "GPUs/ranks", "tokens/s (all ranks)", "training time (s)", "wall time (s)",
              "p95 step (ms)", "final validation loss", "n", "ratio to A", "verdict"]  # fmt: skip
    rows = []
    for arm in (arm for arm in report["arms"] if arm["strategy"] == first):
        other = _arm(report, second, arm["batch_size"], arm["ranks"])
        if other is None or other["strategy"] != second:
            continue
        refused = _unequal(report, arm, other)
        if refused:
            outcome = [UNKNOWN, refused]
        else:
            ratio = compare(other["tokens_per_s"]["values"], arm["tokens_per_s"]["values"])
            outcome = [_range(vars(ratio), ".3f", "ratio", unit="x"), f"B is {ratio.verdict}"
                       if ratio.verdict in ("faster", "slower") else ratio.verdict]  # fmt: skip
            outcome[1] += "; UNEQUAL WORK" if arm["mismatches"] or other["mismatches"] else ""
        for letter, each, end in (("A", arm, ["1", ""]), ("B", other, outcome)):
            rows.append([
                f"{letter}: {each['strategy_name']}", _plain(each["batch_size"]), str(each["ranks"]),
                _range(each["tokens_per_s"], ",.0f"), _range(each["training_time_s"], ",.2f"),
                _range(each["wall_time_s"], ",.2f"), _scaled(each["step_time_p95_s"]["median"], 1e3, ",.1f"),
                _range(each["final_val_loss"], ".4f"), str(each["n"]), *end,
            ])  # fmt: skip
    if not rows:
        names = (_shown_name(report, each) for each in (first, second))
        return f"{' against '.join(names)}: no number of ranks at which both were run."
    return markdown_table(header, rows)


def _unequal(report: dict, *arms: dict) -> str | None:
    if report["status"] == "invalid_comparison" and any(arm["mismatches"] for arm in arms):
        return "unequal work, see below"
    return None


def _about(report: dict) -> str:
    protocol = report["protocol"]
    references = _in_order(arm["reference"] for arm in report["arms"] if arm["reference"] and arm["ranks"] > 1)
    against = f" Speed-up against {'; '.join(references)}." if references else ""
    return (
        f"{protocol['name'].replace('_', ' ').capitalize()} scaling. Medians of n runs with 95 % intervals.{against}"
        if protocol["name"] != "time_to_loss"
        else f"Time to validation loss {protocol['target_val_loss']:g}. Medians of n runs with 95 % intervals.{against}"
    )


def _fit_line(strategy: dict) -> str | None:
    """The law fitted to a strategy in one sentence; None where nothing was fitted."""
    fit = next((fit for fit in strategy["fits"].values() if fit["serial_fraction"] is not None), None)
    if fit is None:
        return None
    name = f"{fit['law'].capitalize()}, {strategy['strategy_name']}, batch {_plain(strategy['batch_size'])}"
    interval = f" [{fit['low']:.3f}, {fit['high']:.3f}]" if fit["low"] is not None else ""
    ranks = ", ".join(map(str, fit["rank_counts"]))
    notes = "".join(f"; {note}" for note in fit["notes"])
    share = f"serial share {fit['serial_fraction']:.3f}{interval}"
    return f"{name}: {share} from {fit['num_points']} runs at {ranks} ranks{notes}."


def _footnotes(report: dict, fits: Sequence[str] = ()) -> list[str]:
    notes = [*(f"- {line}" for line in fits), *([""] if fits else [])]
    notes += [f"Warning: {text}." for text in report["warnings"]]
    if report["mismatches"]:
        notes.append(f"Status {report['status']}. Work that is not equal:")
        notes += [
            f"- {item['name']}: {item['field']} is {_shown(item['mismatch'])}, "
            f"the reference's {_shown(item['baseline'])}"
            for item in report["mismatches"]
        ]
    return ["", *notes] if notes else []


def _shown(value: Any) -> str:
    return "not recorded" if value is None else str(value)


def _compute_and_communication(arm: dict | None) -> list[str]:
    if arm is None or not arm["attribution"]:
        return [NOT_MEASURED if arm else "not run"] * 2
    found = arm["attribution"]
    milliseconds = {name: found[f"{name}_s"] * 1e3 for name in ("compute", "communication", "exposed_communication")}
    communication = f"{milliseconds['communication']:,.1f}, {milliseconds['exposed_communication']:,.1f} exposed"
    return [f"{milliseconds['compute']:,.1f}", communication]


def _utilization(arm: dict) -> str:
    found = arm["utilization"] or {}
    shown = [f"{name} {found[f'{name.lower()}_percent_mean']:.0f} %" for name in ("GPU", "CPU")
             if found.get(f"{name.lower()}_percent_mean") is not None]  # fmt: skip
    return ", ".join(shown) or "not measured"


def _until_loss(arm: dict, quantity: str, spelled: str) -> str:
    found = arm["time_to_loss"]
    never = f" ({found['num_never_reached']} of {found['n']} never)" if found["num_never_reached"] else ""
    at_most = "at most " if found["num_upper_bounds"] else ""
    return at_most + _range(found[quantity], spelled) + never


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


def _scaled(value: float | None, factor: float, form: str) -> str:
    return UNKNOWN if value is None else format(value * factor, form)


def _range(found: dict | None, form: str, middle: str = "median", unit: str = "") -> str:
    """ "6,134 [6,101, 6,170]"; without an interval the middle alone."""
    if not found or found[middle] is None:
        return UNKNOWN
    text = format(found[middle], form) + unit
    if found["low"] is None:
        return text
    return f"{text} [{format(found['low'], form)}, {format(found['high'], form)}]"
