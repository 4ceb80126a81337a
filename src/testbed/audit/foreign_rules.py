"""The audit's rules for one run whatever its format: logs, rank files, exports and reports against themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import takewhile
from statistics import fmean

from testbed.audit.finding import Finding, Rule
from testbed.audit.reported import ANY, BATCH, TABLE, Reported
from testbed.audit.run_rules import METRICS_RULES, is_exact
from testbed.audit.text import is_read_in_parts
from testbed.model.flops import PEAK_FLOPS_PER_S

LOOKED_FOR = {
    "number of ranks": "world_size",
    "global batch size": "global_batch_size",
    "sequence length": "sequence_length",
    "time of a step": "time_s",
    "throughput": "rate",
    "training loss": "train_loss",
    "validation loss": "val_loss",
}
RANK_SPREAD = 0.10  # ranks of one synchronous epoch end together: more says that their clocks do not


def ranks_of_one_epoch_end_together(item: Reported) -> Iterator[Finding]:
    if len(item.rank_times_s) < 2:
        return
    slowest, fastest = max(item.rank_times_s), min(item.rank_times_s)
    if fastest <= 0 or slowest / fastest - 1 <= RANK_SPREAD:
        return
    times = ", ".join(f"{time:,.2f}" for time in item.rank_times_s)
    yield item.fails(
        Rule.STEP_CLOCK,
        f"ranks of the same synchronous epoch report {times} s: the shorter times leave something out",
        f"{slowest:,.2f} s, the slowest rank, instead of the mean {fmean(item.rank_times_s):,.2f} s",
    )


def ranks_read_different_batches(item: Reported) -> Iterator[Finding]:
    losses = item.rank_train_losses
    if len(losses) > 1 and len(set(losses)) == 1 and is_exact(losses[0]):
        said = f"{len(losses)} ranks report the same training loss {losses[0]!r}"
        yield item.notes(Rule.EQUAL_WORK, f"{said}: unless it is their mean, all trained on the same sequences")


def batch_is_the_product_of_its_factors(item: Reported) -> Iterator[Finding]:
    """Check global batch = micro batch x accumulation x data ranks, as a metrics file or a log's header says them."""
    micro, accumulation, ranks = item.micro_batch_size or 0, item.accumulation or 0, item.data_ranks or 0
    product, batch = micro * accumulation * ranks, item.global_batch_size
    if product and batch and product != batch:
        yield item.fails(
            Rule.EQUAL_WORK,
            f"global batch {batch:,} does not follow from micro batch {micro:,} x accumulation {accumulation:,} x data "
            f"ranks {ranks:,} = {product:,}",
            f"{product:,}, or one of the factors is another",
        )


def no_device_does_more_than_it_can(item: Reported) -> Iterator[Finding]:
    """Find an MFU over 100 % and FLOP/s over the device's peak; note an MFU of an assumed device."""
    peak = PEAK_FLOPS_PER_S.get((item.device_name or "", "bf16"))
    if item.mfu is not None and item.peak_flops and not item.device_name:
        said = f"the MFU of {item.mfu:.2%} is of {item.peak_flops / 1e12:,.1f} TFLOP/s, and the log does not name"
        yield item.notes(Rule.TRACEABLE, f"{said} the device: on another one it differs")
    if item.mfu is not None and item.mfu > 1:
        yield item.fails(Rule.FOLLOWS, f"an MFU of {item.mfu:.0%} is more than the device can do")
    if item.tflops is not None and peak and item.tflops * 1e12 > peak:
        said = f"{item.tflops:,.1f} TFLOP/s per device is more than the {peak / 1e12:,.1f} of {item.device_name}"
        yield item.fails(Rule.FOLLOWS, f"{said} (data sheet, dense bfloat16)")


def losses_are_numbers(item: Reported) -> Iterator[Finding]:
    at_end = list(takewhile(lambda point: math.isnan(point[1]), reversed(item.losses)))
    if at_end:
        yield item.fails(
            Rule.LOSSES,
            f"the training loss is not a number in the last {len(at_end):,} of {len(item.losses):,} lines, from step "
            f"{at_end[-1][0]:,} on: the run trains nothing there",
        )


def rates_of_ranks_are_not_the_global_rate(item: Reported) -> Iterator[Finding]:
    if len(item.rank_rates) > 1:
        yield item.notes(
            Rule.THROUGHPUT,
            f"tokens_per_sec is of one rank ({', '.join(f'{rate:,.1f}' for rate in item.rank_rates)})",
            f"{sum(item.rank_rates):,.1f} tokens/s, the sum over {len(item.rank_rates)} ranks",
        )


def large_files_are_read_in_part(item: Reported) -> Iterator[Finding]:
    is_text = item.run is None and item.path.suffix != ".json"  # JSON is read whole
    if is_text and is_read_in_parts(item.path):
        size = item.path.stat().st_size
        yield item.notes(Rule.TRACEABLE, f"{size / 1e6:,.0f} MB: its beginning, its end and parts between were read")


def what_is_not_said(item: Reported) -> Iterator[Finding]:
    """Name what the file of another program does not say, of what decides a comparison."""
    if item.run is None and item.form != TABLE and item.path.suffix.lower() != ".md":  # of a page, a part of a log
        names = [words for words, name in LOOKED_FOR.items() if getattr(item, name) is None]
        names = [name for name in names if name != "global batch size" or BATCH not in item.settings]
        said = f"could not be read from this {item.form}: {'; '.join(names)}"
        yield from [item.cannot_tell(Rule.TRACEABLE, said, *names)] if names else []


# rule -> the forms of files that it reads, and takes no other
FOREIGN_RULES: dict[Callable[[Reported], Iterator[Finding]], tuple[str, ...]] = {
    rates_of_ranks_are_not_the_global_rate: ("rank JSON",),
    ranks_of_one_epoch_end_together: ANY,
    ranks_read_different_batches: ("wandb log",),
    batch_is_the_product_of_its_factors: ANY,
    no_device_does_more_than_it_can: ANY,
    losses_are_numbers: ANY,
    large_files_are_read_in_part: ANY,
    what_is_not_said: ANY,
}


def findings_of_run(item: Reported) -> Iterator[Finding]:
    """Yield what the rules for one run find, those that read its form."""
    for rule, forms in (METRICS_RULES | FOREIGN_RULES).items():
        if not forms or item.form in forms:
            yield from rule(item)
