"""Print counts of model states with the formulas of `testbed.memory_model.model_states`, as docs/results has them.

tests/planner/test_model_states.py makes such counts.
"""

from __future__ import annotations

from typing import Any


def difference(row: dict[str, Any]) -> float:
    """Return how far a count is off its formula, relative to the formula."""
    return row["measured_bytes"] / row["formula_bytes"] - 1


def table(results: list[dict]) -> list[str]:
    """Return the lines of a table: the rank with the most model states of each run, a line per kind, and what else is
    alive on it."""
    lines = [
        f"{'strategy':<10}{'ranks':>5} {'rank':>5}  "
        f"{'kind':<21}{'measured bytes':>15}{'formula bytes':>15}{'off by':>9}{'ZeRO paper':>13}"
    ]
    for result in results:
        totals = [sum(row["measured_bytes"] for row in of["rows"]) for of in result["per_rank"]]
        rank = totals.index(max(totals))
        of_rank = result["per_rank"][rank]
        lines.append("")
        for row in of_rank["rows"]:
            numbers = f"{row['measured_bytes']:>15,}{row['formula_bytes']:>15,}{difference(row):>+9.2%}"
            numbers += "" if row["paper_bytes"] is None else f"{row['paper_bytes']:>13,}"
            lines.append(f"{result['strategy']:<10}{result['ranks']:>5} {rank:>5}  {row['kind']:<21}{numbers}")
        apart = f"{sum(of_rank['transient'].values()):>15,}"
        named = ", ".join(f"{what} {size:,}" for what, size in of_rank["transient"].items())
        lines.append(f"{'':<23}{'transient and other':<21}{apart}  {named}".rstrip())
    return lines
