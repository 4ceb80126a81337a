"""Write the planner's score as docs/planner.md shows it. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from testbed.planner.hold_out import FOR_WIDTH
from testbed.planner.score import LEAST_ROWS, TITLES

HEAD = ("rows", "median", "90th percentile", "constant MFU: median", "90th percentile", "covered")
FIELDS = ("rows", "median", "p90", "control_median", "control_p90", "covered")


def page_of(result: dict[str, Any]) -> str:
    """Return the tables and the sentences that follow from them, as Markdown."""
    schemes = result["schemes"]
    lines = list(_table("each row is predicted", ((TITLES[name], entry["all"]) for name, entry in schemes.items())))
    weak = ((TITLES[name], schemes[name]["weak_or_flagged"]) for name in FOR_WIDTH)
    lines += ["", "Weak and flagged rows, which are counted in no other line:", ""]
    lines += _table("each row is predicted", weak)
    for name in FOR_WIDTH:
        blocks = {block: errors for block, errors in schemes[name]["blocks"].items() if errors["rows"] >= LEAST_ROWS}
        lines += ["", f"Blocks of {LEAST_ROWS} rows or more, {TITLES[name]}:", ""]
        lines += _table("block", blocks.items())
    return "\n".join([*lines, "", *_sentences(result)])


def _table(first: str, entries: Any) -> Iterator[str]:
    yield f"| {first} | {' | '.join(HEAD)} |"
    yield f"|---|{'---:|' * len(HEAD)}"
    for name, errors in entries:
        cells = [errors[field] for field in FIELDS]
        yield f"| {name.replace('|', ', ')} | {' | '.join('' if cell is None else f'{cell:g}' for cell in cells)} |"


def _sentences(result: dict[str, Any]) -> list[str]:
    of_sub_blocks, memory = result["schemes"]["sub_block"], result["memory"]
    wins = {
        name: [
            f"{block.replace('|', ', ')} ({errors['control_median']:g} against {errors['median']:g} %)"
            for block, errors in result["schemes"][name]["blocks"].items()
            if errors["control_median"] < errors["median"]
        ]
        for name in FOR_WIDTH
    }
    return [
        f"Median of the block medians in (b): {of_sub_blocks['median_of_block_medians']:g} %, constant MFU "
        f"{of_sub_blocks['control_median_of_block_medians']:g} %.",
        "",
        *[
            f"Constant MFU wins {TITLES[name]} in {len(found)} of {len(result['schemes'][name]['blocks'])} blocks, by "
            f"their medians: {'; '.join(found)}.\n"
            for name, found in wins.items()
            if found
        ],
        f'Memory: {len(memory["false_fits"])} false "fits"; of {memory["rows"]} rows, which all ran, '
        f"{len(memory['said_not_to_fit'])} are said not to fit.",
    ]
