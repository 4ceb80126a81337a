"""The audit's rules for one run whatever its format: logs, rank files, exports and reports against themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import takewhile
from statistics import fmean

from testbed.audit import logs
from testbed.audit.finding import Finding, Rule
from testbed.audit.reported import ANY, Reported
from testbed.audit.run_rules import METRICS_RULES, is_exact
from testbed.model.flops import PEAK_FLOPS_PER_S

SAME_PEAK = 0.02  # data sheets and programs round a board's peak
APART = 0.15  # medians of rates and of times are of other lines
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


def communication_is_what_collectives_take(item: Reported) -> Iterator[Finding]:
    least, most = min(item.communication_s, default=0.0), max(item.communication_s, default=0.0)
    if least < 0:
        said = f"a communication time of {least:.3f} s is negative: a difference of run times does not measure it"
        yield item.fails(Rule.COMMUNICATION, said)
    if item.world_size == 1 and most > 0:
        said = f"one rank alone reports {most:,.2f} s of communication: this is another part of the loop"
        yield item.fails(Rule.COMMUNICATION, said, "0 s on one rank; on more the file does not tell")


def replicas_have_one_loss(item: Reported) -> Iterator[Finding]:
    """Check that ranks which validate over all of the data report one loss: equal weights give equal losses."""
    losses = item.rank_val_losses
    if len(losses) > 1 and max(losses) - min(losses) > 1e-4 * abs(max(losses)):
        said = f"ranks that validate on the same data report {', '.join(f'{loss:.4f}' for loss in losses)}"
        yield item.fails(Rule.EQUAL_MATH, f"{said}: their weights differ, so this is not one model")


def ranks_read_different_batches(item: Reported) -> Iterator[Finding]:
    losses = item.rank_train_losses
    if len(losses) > 1 and len(set(losses)) == 1 and is_exact(losses[0]):
        said = f"{len(losses)} ranks report the same training loss {losses[0]!r}"
        yield item.notes(Rule.EQUAL_WORK, f"{said}: unless it is their mean, all trained on the same sequences")


def profiler_rows_nest(item: Reported) -> Iterator[Finding]:
    rows_s, kernels_s = item.details.get("collective_rows_s"), item.details.get("collective_kernels_s")
    if not rows_s or not kernels_s:
        return
    if rows_s > kernels_s * (1 + RANK_SPREAD):
        yield item.notes(
            Rule.NESTED,
            f"rows named after collectives add up to {rows_s:,.2f} s: each collective counts in every range around it",
            f"{kernels_s:,.2f} s in NCCL kernels, summed over the devices of the table",
        )


def iteration_time_agrees_with_progress(item: Reported) -> Iterator[Finding]:
    """Compare a log's two clocks. A timer that starts again at each line, divided by all steps so far, is too short."""
    steps, clock_s = item.details.get("logged_steps", []), item.details.get("progress_s", {})
    if not item.time_s or len(steps) < 2:
        return
    first, last = steps[-2], steps[-1]
    if first not in clock_s or last not in clock_s:
        return
    seconds, count = clock_s[last] - clock_s[first], last - first
    if item.time_s * count >= 0.7 * seconds:
        return
    scaled_s = item.time_s * last / count
    fits = scaled_s * count <= seconds * 1.1 + 1
    yield item.fails(
        Rule.STEP_CLOCK,
        f"{item.time_s:.3f} s per iteration x {count} iterations is {item.time_s * count:.1f} s, the progress bar of "
        f"the same log shows {seconds} s from step {first} to {last}"
        + f": an interval's time divided by all {last} steps?"
        * fits,
        f"{scaled_s:.3f} s per iteration ({item.time_s:.3f} x {last} / {count})"
        if fits
        else f"at most {seconds / count:.2f} s per iteration",
    )


def scaling_report_compares_like_with_like(item: Reported) -> Iterator[Finding]:
    if fields := sorted({str(row.get("field")) for row in item.details["mismatches"] if row.get("field")}):
        yield item.fails(Rule.EQUAL_WORK, f"the report itself lists what its runs differ in: {', '.join(fields)}")
    for ranks, values in item.details["runs"].items():
        paths, spread = values.get("metrics_paths"), values.get("stdev_tokens_per_sec_global")
        if isinstance(paths, list) and len(paths) == 1 and spread == 0:
            yield item.notes(Rule.ONE_RUN, f"a standard deviation of 0.0 at {ranks} ranks is of one run", "unknown")
        speed_up = values.get("speedup_vs_1gpu")
        if ranks.isdigit() and isinstance(speed_up, int | float) and speed_up > 1.01 * int(ranks[:9]):
            yield item.fails(Rule.STEP_CLOCK, f"{speed_up:.2f}x on {ranks} ranks is more than linear")


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


def mfu_is_of_its_device(item: Reported) -> Iterator[Finding]:
    """Compare the peak that an MFU is divided by with the device's, and FLOP/s with what the device can do."""
    peak = PEAK_FLOPS_PER_S.get((item.device_name or "", "bf16"))
    if item.mfu is not None and item.peak_flops:
        said = f"the MFU of {item.mfu:.2%} is of {item.peak_flops / 1e12:,.1f} TFLOP/s"
        of_device = f"{item.mfu * item.peak_flops / peak:.2%} of the device's peak" if peak else None
        device = item.device_name or "the device"
        if item.details.get("assumes_a_peak"):
            said = f"{said}, an A100's: the log says that it knows no peak of {device}"
            yield item.notes(Rule.FOLLOWS, said, of_device)
        elif peak and all(abs(item.peak_flops / each - 1) > SAME_PEAK for each in _peaks_of(item.device_name)):
            sheet = f"{peak / 1e12:,.1f} TFLOP/s (data sheet, dense bfloat16)"
            yield item.fails(Rule.FOLLOWS, f"{said}, the device is {device}: {sheet}", of_device)
        elif not item.device_name:
            yield item.notes(Rule.TRACEABLE, f"{said}, and the log does not name the device: on another one it differs")
    if item.mfu is not None and item.mfu > 1:
        yield item.fails(Rule.FOLLOWS, f"an MFU of {item.mfu:.0%} is more than the device can do")
    if item.tflops is not None and peak and item.tflops * 1e12 > peak:
        said = f"{item.tflops:,.1f} TFLOP/s per device is more than the {peak / 1e12:,.1f} of {item.device_name}"
        yield item.fails(Rule.FOLLOWS, f"{said} (data sheet, dense bfloat16)")


def _peaks_of(device: str | None) -> list[float]:
    """Return the peaks of a device in every precision."""
    return [peak for (name, _), peak in PEAK_FLOPS_PER_S.items() if name == device]


def rate_agrees_with_time(item: Reported) -> Iterator[Finding]:
    """Check rate x time of an iteration against batch x length: the tokens of a step, of all ranks or of one."""
    length, batch, ranks = item.sequence_length, item.global_batch_size, item.world_size or 1
    if not item.rate or not item.time_s or not length or not batch or item.rate_unit != "tokens/s":
        return
    if not item.is_of_iteration or item.batch_is_printed:
        return
    factor = item.rate * item.time_s / (batch * length)
    if min(abs(factor - 1), abs(factor * ranks - 1), abs(factor / ranks - 1)) > APART:
        yield item.fails(
            Rule.FOLLOWS,
            f"{item.rate:,.0f} tokens/s x {item.time_s:.4g} s is {item.rate * item.time_s:,.0f} tokens, a step has "
            f"{batch:,} x {length:,} = {batch * length:,}: {factor:.3g} times that",
        )


def iterations_take_alike(item: Reported) -> Iterator[Finding]:
    """Note the lines of a log that take over twice the median, where its mean is of them."""
    if slow := item.details.get("slow_lines"):
        count, lines, mean_s, median_s = slow
        yield item.notes(
            Rule.STEP_CLOCK,
            f"{count:,} of {lines:,} lines take over twice the median: they pull the mean of the {item.time_meaning} "
            f"up to {mean_s:.4g} s, the median is {median_s:.4g} s",
        )


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


def what_could_not_be_read(item: Reported) -> Iterator[Finding]:
    if item.unread:
        names = [words.partition(" (")[0] for words in item.unread]
        said = f"could not be read from this {item.form}: {'; '.join(item.unread)}"
        yield item.cannot_tell(Rule.TRACEABLE, said, *names)


# rule -> the forms of files that it reads, and takes no other
FOREIGN_RULES: dict[Callable[[Reported], Iterator[Finding]], tuple[str, ...]] = {
    rates_of_ranks_are_not_the_global_rate: ("rank JSON",),
    ranks_of_one_epoch_end_together: ANY,
    communication_is_what_collectives_take: ANY,
    replicas_have_one_loss: ANY,
    ranks_read_different_batches: ("wandb log",),
    profiler_rows_nest: ("profiler table",),
    iteration_time_agrees_with_progress: ("wandb log",),
    batch_is_the_product_of_its_factors: ANY,
    mfu_is_of_its_device: ANY,
    rate_agrees_with_time: logs.FORMS,
    iterations_take_alike: ANY,
    losses_are_numbers: ANY,
    scaling_report_compares_like_with_like: ("scaling report",),
    what_could_not_be_read: ANY,
}


def findings_of_run(item: Reported) -> Iterator[Finding]:
    """Yield what the rules for one run find, those that read its form."""
    for rule, forms in (METRICS_RULES | FOREIGN_RULES).items():
        if not forms or item.form in forms:
            yield from rule(item)
