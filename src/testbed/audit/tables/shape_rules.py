"""Compare rates with what a model of the row's size needs: 6 FLOPs for each parameter and token.

Every doubt widens the bounds: the size that a name rounds, embeddings that do not multiply, recomputation, attention,
the peak that an MFU refers to, and whether a rate is of one device or of all. Models that do not use all their
parameters for each token, and rows that do not train all of them, are left alone. A model whose name does not say that
it uses all of them is one of the table's, most of which agree with the formula.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from testbed.audit.finding import FAILS, Finding, Rule
from testbed.audit.reported import Reported
from testbed.audit.tables.columns import Column
from testbed.audit.tables.counts import most_in
from testbed.audit.tables.fits import Grid
from testbed.audit.tables.peaks import PER_DEVICE, devices_named, highest_peak, lowest_peak
from testbed.planner.devices import Device

FLOPS_PER_PARAMETER = 6.0  # of a token, forward and backward: 2 for each multiply-add, arXiv:2001.08361
WITH_RECOMPUTATION = 8.0
SPARSITY = 2.0  # of a peak that is quoted with structured sparsity
OF_A_NAME = (0.7, 1.45)  # "7B" stands for 6.2 to 8.5 billion
EMBEDDINGS = ((1e9, 0.6), (2e10, 0.85), (math.inf, 0.95))  # up to a size, the least share that multiplies
CHANNELS_PER_SIZE = 0.06  # parameters / channels^3, at least: 0.12 with 100 channels for each layer
UNKNOWN_LENGTH = 3.0  # times what attention may come to, where no length is given
SMALLEST_MODEL = 1e7
# Rows and tables whose tokens do not cost 6 FLOPs for each parameter.
OTHER_WORK = re.compile(
    r"(?i)moe\b|mixtral|expert|active|activated|spars|lora\b|adapter|peft|frozen|freez|prefix|\bt5|bart\b|\bul2|whisper"
    r"|seq2seq|translat|infer|generat|decoding|prefill|serving|serve|vllm|sglang|llama\.cpp|rollout|ppo\b|grpo|dpo\b"
    r"|rlhf|distill|specul|prun|early.exit|\bmod\b|layer.?drop|mamba|rwkv|ssm\b|vision|vlm?\b|vit\b|diffusion|\bdit\b"
    r"|image|audio|speech|retriev|forward|theoretic|projected|estimate|expected|ideal|\d+x\d+(\.\d+)?b\b"
    r"|-a\d+(\.\d+)?b\b|evaluat|ttft"
    # models of experts whose names do not say it
    r"|deepseek|\bds[- ]?v[23]|kimi|gpt-?oss|nemotron|grok|dbrx|jamba|arctic|glm-?4\.[5-9]|minimax|hunyuan|ernie"
    r"|llama-?\s?4|scout|maverick|moonlight|qwen3-?\s?next|\b(ling|ring)-|\bstep-?[23]\b|switch|snowflake"
)
DENSE = re.compile(
    r"(?i)\bgpt-?[23]?\b|\bllama[- ]?[123]?(\.\d)?\b|codellama|\bbert|\bopt\b|pythia|bloom|falcon|\bmpt\b|gemma|\bolmo"
    r"|qwen[- ]?(1\.5|2(\.5)?)\b|baichuan|neox"
)  # models that use all parameters for each token
EXPERTS = re.compile(r"(?i)\bep\b|\betp\b|expert|top-?k|active")
TRAINS = re.compile(
    r"(?i)train|mfu|fsdp|\bddp\b|zero-?[123]\b|deepspeed|optimi[sz]er|fine-?tun|gradient|backward|megatron"
)
SIZE = re.compile(
    r"(?i)(?<![\w.])(?:[a-z][\w.]*[-_ ])?(\d+(?:\.\d+)?)\s?-?([bm])(?![a-z0-9])(?!\s*(?:tok|sampl|step|row|/))"
)
NAMED_SIZE = re.compile(
    r"(?i)\b(?:llama|gpt|qwen|mistral|opt|pythia|falcon|gemma|phi|mpt|bloom|olmo|baichuan|internlm|yi|deepseek|neox)"
    r"[\w.]*[-_ ](?:\d(?:\.\d+)?[-_ ])?(\d+(?:\.\d+)?)\s?([bm])(?![a-z0-9])"
    r"|(?<![\w.])(\d+(?:\.\d+)?)\s?-?([bm])[- ](?:param\w*|model|transformer|gpt|llama|dense|decoder)"
)
OF_MODELS = re.compile(r"(?i)model|size|config|param|arch|network|^name$|^run$|^$")
LENGTH = re.compile(r"(?i)\b(\d{1,4})\s?k\b|\b(\d{4,7})\b")

Interval = tuple[float, float]


@dataclass(frozen=True)
class Claim:
    """What a row says that implies how many FLOPs a token takes."""

    column: Column
    words: str
    per_token: Interval  # a limit has 0 as its lower end


def rates_follow_from_the_size(item: Reported) -> Iterator[Finding]:
    """Compare FLOP/s / rate, MFU x peak / rate and peak / rate with the FLOPs that a token needs."""
    for grid in item.details["grids"]:
        if any(EXPERTS.search(column.heading) for column in grid.columns):
            continue
        found: dict[int, Finding | None] = {}
        for row in range(len(grid.lines)):
            words = words_of(grid, row)
            size, rate = size_of(grid, row), rate_of(grid, row)
            if size and rate and TRAINS.search(words) and not OTHER_WORK.search(words):
                found[row] = _contradiction(item, grid, row, words, size, rate)
        apart = {row: finding for row, finding in found.items() if finding}
        agree = len(found) - len(apart) >= max(2, 2 * len(apart))
        yield from (one for row, one in apart.items() if agree or DENSE.search(words_of(grid, row)))


def _contradiction(
    item: Reported, grid: Grid, row: int, words: str, size: Interval, rate: tuple[Column, Interval]
) -> Finding | None:
    needed = _needed(grid, row, size, words)
    for claim in _claims(grid, row, rate[1], words):
        if claim.per_token[1] < needed[0] or claim.per_token[0] > needed[1]:
            return _finding(item, grid, row, claim, rate[0], size, needed)
    return None


def words_of(grid: Grid, row: int) -> str:
    cells = (f"{column.heading} {column.texts[row]}" for column in grid.columns)
    return "\n".join([grid.above, *cells])


def size_of(grid: Grid, row: int) -> Interval | None:
    """Return between which numbers the parameters lie, of a column, the row's labels, or the text above the table."""
    if params := next((figure for column in grid.of("params") if (figure := column.figures[row])), None):
        return (params.low, params.high) if params.value >= SMALLEST_MODEL else None
    labels = [
        column
        for at, column in enumerate(grid.columns)
        if column.is_setting and column.quantity is None and (at == 0 or OF_MODELS.search(column.heading))
    ]
    own = {_number(*match.groups()) for column in labels for match in SIZE.finditer(column.texts[row])}
    if not own and not any("model" in column.heading.lower() for column in labels):
        own = {_number(*(group for group in match.groups() if group)) for match in NAMED_SIZE.finditer(grid.above)}
    size = own.pop() if len(own) == 1 else 0.0
    return (size * OF_A_NAME[0], size * OF_A_NAME[1]) if size >= SMALLEST_MODEL else None


def rate_of(grid: Grid, row: int) -> tuple[Column, Interval] | None:
    """Return tokens/s of one device, from the least that the row's words allow to the most."""
    length = next((figure for column in grid.of("length") if (figure := column.figures[row])), None)
    for name in ("device_token_rate", "token_rate", *(("device_sample_rate", "sample_rate") if length else ())):
        for column in grid.of(name):
            figure = column.figures[row]
            if figure:
                low, high = (1.0, 1.0) if name.endswith("token_rate") or not length else (length.low, length.high)
                count = 1 if name.startswith("device") else devices_of(grid, row)
                return column, (figure.low * low / count if count else 0.0, figure.high * high)
    return None


def devices_of(grid: Grid, row: int) -> int | None:
    """Return as many devices as the row allows, else the text above its table; None: neither names a number."""
    counts = [figure.value for name in ("devices", "dp", "nodes", "devices_per_node") for column in grid.of(name)
              if (figure := column.figures[row])]  # fmt: skip
    nodes = max((figure.value for column in grid.of("nodes") if (figure := column.figures[row])), default=0)
    if counts:
        return int(max(*counts, 0, nodes * 16))
    labels = " ; ".join(f"{column.heading} {column.texts[row]}" for column in grid.columns)
    return most_in(labels) or most_in(grid.above)


def _claims(grid: Grid, row: int, rate: Interval, words: str) -> Iterator[Claim]:
    lowest, highest = rate
    named = devices_named(grid, row)
    for column in grid.of("flops"):
        if figure := column.figures[row]:
            count = 1 if PER_DEVICE.search(column.heading) else devices_of(grid, row) or math.inf
            high = figure.high / lowest if lowest else math.inf
            yield Claim(column, f"{column.heading} {figure.text}", (figure.low / count / highest, high))
    for column in grid.of("mfu"):
        figure = column.figures[row]
        if figure and named:
            low = figure.low * lowest_peak(named, words) / highest
            high = SPARSITY * figure.high * highest_peak(named, words) / lowest if lowest else math.inf
            yield Claim(column, f"{column.heading} {figure.text} of the peak of {_names(named)}", (low, high))
    if named and lowest:
        column, _ = rate_of(grid, row) or (grid.columns[0], rate)
        yield Claim(column, f"the peak of {_names(named)}", (0.0, highest_peak(named, words) / lowest))


def _needed(grid: Grid, row: int, size: Interval, words: str) -> Interval:
    """Return the FLOPs that a token needs at least, and at most with recomputation and full attention."""
    least = next(share for most, share in EMBEDDINGS if size[1] <= most)
    lengths = [figure.value for column in grid.of("length") if (figure := column.figures[row])]
    told = [int(match[1]) * 1024 if match[1] else int(match[2]) for match in LENGTH.finditer(words)]
    lengths += [value for value in told if value >= 4096 and value % 1024 == 0]
    attention = 1 + max(lengths) / (6 * (size[0] / CHANNELS_PER_SIZE / 4) ** (1 / 3)) if lengths else 1.0
    return (
        FLOPS_PER_PARAMETER * size[0] * least,
        WITH_RECOMPUTATION * size[1] * (attention if grid.of("length") else max(attention, UNKNOWN_LENGTH)),
    )


def _finding(
    item: Reported, grid: Grid, row: int, claim: Claim, rate: Column, size: Interval, needed: Interval
) -> Finding:
    implied = claim.per_token[1] if claim.per_token[1] < needed[0] else claim.per_token[0]
    is_low = implied < needed[0]
    bound = needed[0] if is_low else needed[1]
    message = (
        f"{rate.heading} {rate.texts[row]} does not follow from {claim.words}: they leave "
        f"{'at most' if is_low else 'at least'} {_short(implied)}FLOPs for a token, and a model of "
        f"{_short(size[0])} to {_short(size[1])} parameters needs {'at least' if is_low else 'at most'} {_short(bound)}"
    )
    return Finding(Rule.POSSIBLE, (f"{item.name}:{grid.place(row, claim.column)}",), message, FAILS)


def _names(named: list[Device]) -> str:
    return ", ".join(dict.fromkeys(device.name.partition("-")[0] for device in named))


def _number(digits: str, unit: str) -> float:
    return float(digits) * (1e9 if unit.lower() == "b" else 1e6)


def _short(value: float) -> str:
    power = max(0, min(5, int(math.log10(max(value, 1)) // 3)))
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}"
