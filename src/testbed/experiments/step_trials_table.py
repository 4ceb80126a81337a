"""The table of what was tried on the plain step, from the file that scripts/measure_trials.py writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.analysis.statistics import FASTER, NO_DIFFERENCE, NOT_ENOUGH, SLOWER, median_interval


@dataclass(frozen=True)
class TrialResult:
    """A step with the alternative over a step as it is: 1.1 = takes 10 % longer. Bounds are None below five repeats."""

    ratio: float
    low: float | None
    high: float | None
    num_repeats: int

    @property
    def verdict(self) -> str:
        """Of the alternative."""
        if self.low is None:
            return NOT_ENOUGH
        return SLOWER if self.low > 1 else FASTER if self.high < 1 else NO_DIFFERENCE


def trial_result(repeats: list[list[list[float]]]) -> TrialResult:
    """Of one trial: for each repeat (a process) the pairs of seconds [as it is, with the alternative].

    One number per repeat, the median ratio of neighbours; median and 95 % interval over repeats, of the logarithms.
    """
    logs = [float(np.median([math.log(other / usual) for usual, other in pairs])) for pairs in repeats]
    median, low, high = median_interval(logs)
    bounds = (None, None) if low is None else (math.exp(low), math.exp(high))
    return TrialResult(math.exp(median), *bounds, len(repeats))


def two_numbers_table(content: Mapping[str, Any]) -> str:
    """What the hardware would allow a step to take, and what it takes: medians over all processes, in Markdown.

    Only runs in the precision of the step as it is count; a trial may need another. The bound counts what must be
    computed, half of the attention scores; the MFU in the last line counts all of them, as MFUs do (PaLM, appendix B).
    Empty where no run was in that precision.
    """
    usual = content["precision"]
    runs = [run for trial in content["trials"].values() for run in trial["repeats"] if run["precision"] == usual]
    if not runs:
        return ""
    step_s = float(np.median([pair[0] for run in runs for pair in run["pairs"]]))
    flops_per_s = float(np.median([run["matrix_flops_per_s"] for run in runs]))
    bytes_per_s = float(np.median([run["copy_bytes_per_s"] for run in runs]))
    rows = [
        (f"{content['causal_flops_per_step'] / 1e9:,.0f} GFLOP at {flops_per_s / 1e9:,.0f} GFLOP/s, the rate of a "
         f"large {usual} matrix product here", content["causal_flops_per_step"] / flops_per_s),
        (f"{content['least_bytes_per_step'] / 1e9:.2f} GB at {bytes_per_s / 1e9:.1f} GB/s, the rate of a large copy",
         content["least_bytes_per_step"] / bytes_per_s),
        (f"measured, median of {len(runs)} processes", step_s),
    ]  # fmt: skip
    mfu = content["palm_flops_per_step"] / step_s / flops_per_s
    lines = [f"| a step in {usual} | seconds | of the measured step |", "|---|---|---|"]
    lines += [f"| {what} | {seconds:.3f} | {seconds / step_s:.0%} |" for what, seconds in rows]
    return "\n".join([*lines, "", f"MFU by the measured matrix rate (6N + 12LCT per token): {mfu:.1%}."])


def trials_table(content: Mapping[str, Any]) -> str:
    """In Markdown, in the order of the file. A trial that could not be made says why.

    "kept" is what was decided for the plain step, whatever was measured here.
    """
    lines = [
        "| tried | predicted | a step takes (95 % interval) | the alternative is | kept |",
        "|---|---|---|---|---|",
    ]
    for name, trial in content["trials"].items():
        lead = f"| {name}: {trial['what']} | {trial['predicted']} |"
        if trial["not_measured"]:
            lines.append(f"{lead} not measured: {trial['not_measured']} | | {trial['kept']} |")
            continue
        result = trial_result([run["pairs"] for run in trial["repeats"]])
        interval = "" if result.low is None else f" ({result.low:.3f} to {result.high:.3f})"
        lines.append(f"{lead} {result.ratio:.3f} times as long{interval} | {result.verdict} | {trial['kept']} |")
    return "\n".join(lines)
