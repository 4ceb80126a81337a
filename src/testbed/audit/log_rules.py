"""The audit's rules for the training logs of other programs: each line against the others, the header and the device.

What a line prints twice in other units must agree. Only a contradiction that no rounding explains is a finding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, takewhile

from testbed.audit.finding import Finding, Rule
from testbed.audit.log_lines import Disagreement, LogLine, disagreement
from testbed.audit.reported import ANY, Reported
from testbed.audit.tables.peaks import peak_of

SAME_PEAK = 0.02  # data sheets and programs round a board's peak
MOST_SHOWN = 3
CLOCK_TOLERANCE = 0.02
OUTSIDE_THE_STEPS = 0.10  # of the wall clock, beyond which a note says so
FEWEST_INTERVALS = 3
WHOLE_SECONDS = 1.0  # of a date


def figures_of_a_line_agree(item: Reported) -> Iterator[Finding]:
    """Check what each line prints against the other lines, and against the header where it gives the number."""
    for relation in item.relations:
        if found := disagreement(relation, item.lines):
            yield item.fails(Rule.FOLLOWS, *said(found))


def said(found: Disagreement) -> tuple[str, str]:
    """Return the message about lines that disagree, and the number in its place."""
    shown, relation = found.lines[:MOST_SHOWN], found.relation
    steps = ", ".join(f"{line.step:,}" for line in shown)
    more = f" and {len(found.lines) - len(shown)} more" if len(found.lines) > len(shown) else ""
    values = ", ".join(
        f"{name} {found.lines[0].figures[name].value:,.10g}" for name, power in relation.powers.items() if power
    )
    one = math.prod(found.lines[0].figures[name].value ** power for name, power in relation.powers.items())
    if found.is_of_every_line:
        against = f"{relation.source} says {found.constant:,.6g}"
    elif relation.expected:
        against = f"it is {found.constant:,.6g} by {relation.source} and in the other lines"
    else:
        others = found.num_checked - len(found.lines)
        against = f"it is {found.constant:,.6g} in the other line{'s' * (others > 1)}"
    where = f"the line of step {steps}" if len(found.lines) == 1 else f"the lines of steps {steps}{more}"
    return (
        f"{where}: {relation.words} is {one:,.6g} ({values}), {against}: these figures do not follow from one another",
        f"{relation.words} = {found.constant:,.6g}",
    )


def header_multiplies(item: Reported) -> Iterator[Finding]:
    for product in item.products:
        expected = math.prod(number for _, number in product.factors)
        name, number = product.result
        if expected != number:
            factors = " x ".join(f"{words} {value:,}" for words, value in product.factors)
            yield item.fails(
                Rule.EQUAL_WORK,
                f"{name} {number:,} does not follow from {factors} = {expected:,}",
                f"{expected:,}, or one of the factors is another",
            )


def mfu_is_of_its_device(item: Reported) -> Iterator[Finding]:
    """Compare the peak that an MFU is divided by with the device's, and both figures with what a device can do."""
    peak = peak_of(item.device_name) if item.device_name else None
    of_device = None
    if item.mfu is not None and item.peak_flops and peak:
        of_device = f"{item.mfu * item.peak_flops / peak:.2%} of the device's peak"
    if item.mfu is not None and item.peak_flops and (other := item.details.get("peak_is_of")):
        yield item.notes(
            Rule.FOLLOWS,
            f"the MFU of {item.mfu:.2%} is of {other}, {item.peak_flops / 1e12:,.1f} TFLOP/s: the log itself says that "
            f"it knows no peak of {item.device_name or 'the device'}",
            of_device,
        )
    elif item.mfu is not None and item.peak_flops and peak and abs(item.peak_flops / peak - 1) > SAME_PEAK:
        yield item.fails(
            Rule.FOLLOWS,
            f"an MFU of {item.mfu:.2%} is of {item.peak_flops / 1e12:,.1f} TFLOP/s, the device is {item.device_name}: "
            f"{peak / 1e12:,.1f} TFLOP/s (data sheet, dense bfloat16)",
            of_device,
        )
    elif item.mfu is not None and item.peak_flops and not item.device_name:
        yield item.notes(
            Rule.TRACEABLE,
            f"the MFU of {item.mfu:.2%} is of a peak of {item.peak_flops / 1e12:,.1f} TFLOP/s, and the log does not "
            "name the device: on another one it is another share",
        )
    if item.mfu is not None and item.mfu > 1:
        yield item.fails(
            Rule.FOLLOWS,
            f"an MFU of {item.mfu:.0%} is more than the device can do: its peak, the FLOPs per token or the rate is "
            "not what the formula means",
        )
    if item.tflops is not None and peak and item.tflops * 1e12 > peak:
        yield item.fails(
            Rule.FOLLOWS,
            f"{item.tflops:,.1f} TFLOP/s per device is more than the {peak / 1e12:,.1f} of {item.device_name} (data "
            "sheet, dense bfloat16)",
        )


def losses_are_numbers(item: Reported) -> Iterator[Finding]:
    at_end = list(takewhile(lambda line: line.is_nan, reversed(item.lines)))
    if at_end:
        yield item.fails(
            Rule.LOSSES,
            f"the training loss is not a number in the last {len(at_end):,} of {len(item.lines):,} lines, from step "
            f"{at_end[-1].step:,} on: the run trains nothing there, and its times are of no training",
        )


def steps_fit_into_the_clock(item: Reported) -> Iterator[Finding]:
    """Compare iteration times, each of the interval that ends with its line, with the dates of the lines.

    The interval behind the first line is left out: what programs set up there lies between the clock and the date.
    """
    seconds = _intervals(item.lines[1:])
    if len(seconds) < FEWEST_INTERVALS:
        return
    stepped_s, clock_s = (sum(column) for column in zip(*seconds, strict=True))
    said = f"{len(seconds)} iteration times add up to {stepped_s:,.1f} s, by the dates of their lines {clock_s:,.0f} s"
    longer = sum(stepped > clock * (1 + CLOCK_TOLERANCE) + WHOLE_SECONDS for stepped, clock in seconds)
    if stepped_s > clock_s * (1 + CLOCK_TOLERANCE) + WHOLE_SECONDS and 2 * longer > len(seconds):
        yield item.fails(Rule.STEP_CLOCK, f"{said} passed: the times are longer than the run")
    elif stepped_s < clock_s * (1 - OUTSIDE_THE_STEPS) - WHOLE_SECONDS:
        yield item.notes(
            Rule.STEP_CLOCK,
            f"{said} passed: {1 - stepped_s / clock_s:.0%} of the time is outside them (evaluation, saving, restarts)",
        )


def _intervals(lines: Sequence[LogLine]) -> list[tuple[float, float]]:
    """Return the seconds of each interval by its iterations and by the dates, where no line is missing between."""
    gaps = [line.step - before.step for before, line in pairwise(lines)]
    found = []
    for (before, line), gap in zip(pairwise(lines), gaps, strict=True):
        ms = line.value("ms")
        if gap == min(gaps) and ms is not None and before.at_s is not None and line.at_s is not None:
            found.append((ms / 1e3 * gap, line.at_s - before.at_s))
    return found if all(clock >= 0 for _, clock in found) else []  # the clock was set back


# rule -> the forms of files that it reads; a form without lines and products passes all of them
LOG_RULES: dict[Callable[[Reported], Iterator[Finding]], tuple[str, ...]] = {
    figures_of_a_line_agree: ANY,
    header_multiplies: ANY,
    mfu_is_of_its_device: ANY,
    losses_are_numbers: ANY,
    steps_fit_into_the_clock: ("Megatron-LM log", "TensorBoard event files"),
}
