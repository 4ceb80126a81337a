"""Read the training logs of other programs by one table of patterns: a line for each step, and settings in a header.

To add a program, add its row to PROGRAMS: a line that only it prints, the step and figures of a line, and the settings
that it prints once. Put a real excerpt with its source and licence into tests/support/real_logs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from testbed.audit.curves import Curves, reported_of
from testbed.audit.printed_setup import counts_of, plain_precision, printed_setup, said_in
from testbed.audit.reported import (
    COMPILED,
    DATA,
    LAYOUT,
    MODEL,
    PRECISION,
    RECOMPUTED,
    SIZES,
    STATUS,
    ZERO,
    Reported,
)

NUMBER = r"([-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d{1,3})?)"
COUNT = r"(\d[\d,]*)"
PRODUCT = r"(\d+(?: ?\* ?\d+)*)"
_SAYS_STEP = r"\b(?:step|iter(?:ation)?)[ :=#]*"
# or, at the beginning of a line without them, `it 20` and `[  20/1200]`
STEP = rf"(?:{_SAYS_STEP}|^ *(?:it[ :=#]+|\[ *(?=\d+/\d+\]))(?![^\n]{{0,300}}{_SAYS_STEP}\d))"
LOSS = r"(?<!aux )(?<!val )(?<!eval )(?<!validation )(?:\b|(?<=train_))loss[ :=]+"
VAL_LOSS = r"(?i)\b(?:val|eval|valid|validation)[ _]loss[ :=]+([\d.]+)"
TIME = r"\b(?:dt|(?:step|iter|iteration)[_ ]?time)[ :=]*"
MOST_LINES, LAST_LINES = 50_000, 1000  # of steps, whose figures are read
LOOKED_AT = 20_000  # characters at the end
MARKED_WITHIN = 1_000_000  # characters at either end of a log, where its program shows
# of any program: what it says of its own surroundings
SLOWS_DOWN = {
    r"\bCUDA_LAUNCH_BLOCKING=1\b": "the host waited for each kernel (CUDA_LAUNCH_BLOCKING=1)",
    r"detect[-_]anomaly(?! ?[=:]? ?(?:False|0|off))": "autograd looked for anomalies (detect_anomaly)",
    r"--debug[ =]underflow_overflow": "the Trainer looked for overflows (--debug)",
}
# which says that figures were not measured
NO_RUN = {
    r"(?:COMM_MODE=|--comm[._]mode[ =])[\"']?(?:fake_backend|local_tensor)": "a dry run that does not communicate",
    r"(?i)\b(?:predicted|simulated) (?:(?:step|iteration|iter)[ _]time|throughput)\b": "predicted or simulated",
}
# how programs print the name of a GPU, and nvidia-smi does
DEVICES_NAMED = {
    "device_name": r"(?m)(?:\bget_device_name\(\w*\)|\bdevice_name|\| +\d+ ) *[=:]? +"
    r"((?:NVIDIA|AMD|Tesla) [\w-][\w -]{0,40}?) *(?:$|,| (?:On|Off) )"
}
_OUT_OF_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError")
NEAR = 0.05  # by which a median rate may differ from batch / median time
LONGEST_LINE = 6000  # characters; more is damage, and patterns take long


@dataclass(frozen=True)
class Program:
    """What one program prints. A pattern has its value in the first group."""

    name: str
    mark: str  # what stands in the log of this program alone
    line: str  # the line of one step: its number in the first group, or epoch, step and of; figures in the rest of it
    figures: Mapping[str, str]  # of a line: loss, ms, s, rate, mfu (in percent), tflops, total_ms, batch
    header: Mapping[str, str] = field(default_factory=dict)  # field of Reported, or a name of _settings -> pattern
    val_loss: str | None = None  # of another line
    first_step: int = 1
    rate_is_per_rank: bool = False
    peak_flops: float | None = None  # by which it divides on every device
    start: str | None = None  # of each stage in one file
    protocol: str | None = None
    time_meaning: str = "time of one iteration"
    rate_unit: str = "tokens/s"
    instruments: Mapping[str, str] = field(default_factory=dict)  # pattern -> what it says that slows the run down


LLMC_HEADER = {
    "world_size": rf"num_processes[ =|]+{COUNT}",
    "step_tokens": rf"total[ _]batch[ _]size[ =|]+{COUNT}",
    "micro_batch_size": rf"(?:micro batch size B +\| |batch_size B=){COUNT}",
    "sequence_length": rf"(?:sequence length T +\| |seq_len T=){COUNT}",
    "accumulation": rf"setting grad_accum_steps={COUNT}",
    "num_parameters": rf"num_parameters[: |]+{COUNT}",
    "device_name": r"\| device +\| (.{1,80}?) +\|",
    PRECISION: r"\| precision +\| (\w+) +\|",
    RECOMPUTED: r"\| recompute +\| (\d) +\|",
    DATA: r"\| train data pattern +\| (?:\S*/)?([^\s/|]+) +\|",
    ZERO: r"\| zero_stage +\| (\d) +\|",
}
PROGRAMS = (
    Program(
        "torchtitan",
        mark=r"step:\s*\d+\s+loss:.{0,500}?\b(?:tps|wps):",
        line=r"(?<!validate )\bstep:\s*(\d{1,12})\s+loss:",
        figures={
            "loss": r"loss:\s*(\S+)",
            "rate": rf"\b(?:tps|wps):\s*{NUMBER}",
            "tflops": rf"tflops:\s*{NUMBER}",
            "mfu": rf"mfu:\s*{NUMBER}%",
        },
        header={
            "mesh": r"Building (?:\d-D )?device mesh with (.*)",
            "micro_batch_size": rf"local batch size {COUNT}",
            "global_batch_size": rf"global batch size {COUNT}",
            "accumulation": rf"gradient accumulation steps {COUNT}",
            "sequence_length": rf"sequence length {COUNT}",
            "num_parameters": rf"size: {COUNT} total parameters",
            "device_name": r"\b[A-Z]{3,5} capacity: (.{1,80}?) with",
            MODEL: r"\bModel (\S.{0,60}?) size: [\d,]+ total",
            COMPILED: r"(?i)(compiling) each \w+ with torch\.compile",
            RECOMPUTED: r"(?i)applied (\w+) activation checkpointing",
            DATA: r"Preparing (\w+) dataset",
        },
        instruments={r"Profiling active\. Traces will be saved": "the profiler of PyTorch ran (Profiling active)"},
        val_loss=r"validate step:\s*\d+\s+loss:\s*(\S+)",
        rate_is_per_rank=True,
    ),
    Program(
        "Megatron-LM",
        mark=r"iteration\s+\d+/\s*\d+ \|.{0,2000}?elapsed time per iteration \(m?s\):",
        line=r"\biteration\s+(\d{1,12})/\s*\d{1,12} \|",
        figures={
            "loss": r"\| lm[ -]loss:\s*([^\s|]+)",
            "ms": rf"elapsed time per iteration \(ms\):\s*{NUMBER}",
            "s": rf"elapsed time per iteration \(s\):\s*{NUMBER}",
            "rate": r"(?:tokens per gpu per second \(tgs\)|tokens/sec/GPU|tokens per GPU \(tokens/s/GPU\)):\s*"
            + NUMBER,
            "tflops": rf"(?:throughput per GPU \(TFLOP/s/GPU\)|TFLOPs):\s*{NUMBER}",
            "batch": rf"global batch size:\s*{COUNT}",
        },
        header={
            "world_size": rf"using world size: {COUNT}",
            "micro_batch_size": r"(?m)^(?!.*print\]).*\bmicro_batch_size \.{3,} ?(\d+)\s*$",
            "sequence_length": r"(?m)^(?!.*print\]).*\bseq_length \.{3,} ?(\d+)\s*$",
            "layers": r"(?m)^(?!.*print\]).*\bnum_layers \.{3,} ?(\d+)\s*$",
            "width": r"(?m)^(?!.*print\]).*\bhidden_size \.{3,} ?(\d+)\s*$",
            "tp": r"(?<!encoder-)tensor-model-parallel size: (\d+)",
            "pp": r"(?<!encoder-)pipeline-model-parallel size: (\d+)",
            "sp": r"(?m)\bsequence_parallel \.{3,} ?(True)\s*$",
            "fp8": r"(?m)\bfp8 \.{3,} ?(?!None|False)(\w+)\s*$",
            PRECISION: r"(?m)(?:\bparams_dtype \.{3,} ?|^using )torch\.(\w+)(?: for parameters \.\.\.)?\s*$",
            RECOMPUTED: r"(?m)\brecompute_granularity \.{3,} ?(\w+)\s*$",
            DATA: r"(?m)\bdata_path \.{3,} ?\['(?:[^'\n]*/)?([^'/\n]+)'\]\s*$",
        },
        instruments={
            r"(?m)\bprofile \.{3,} ?True\s*$": "a profiler ran (--profile)",
            r"(?m)\buse_pytorch_profiler \.{3,} ?True\s*$": "the profiler of PyTorch ran (--use-pytorch-profiler)",
        },
        val_loss=r"validation loss at iteration \d+(?: on validation set)? \|.{0,200}?lm loss value: (\S+)",
        rate_is_per_rank=True,
    ),
    Program(
        "nanochat",
        mark=r"step \d+(?:/\d+)? \(\d+\.\d+%\) \| loss: ",
        line=r"\bstep (\d{1,12})(?:/\d{1,12})? \([\d.]+%\) \| loss: ",
        figures={
            "loss": r"\| loss: (\S+)",
            "ms": rf"\| dt: {NUMBER}ms",
            "rate": rf"\| tok/sec: {NUMBER}",
            "mfu": rf"\| (?:bf16_)?mfu: {NUMBER}",
        },
        header={
            "step_tokens": rf"Total batch size {COUNT}",
            "accumulation": rf"gradient accumulation steps: {COUNT}",
            "micro_batch_size": rf"Tokens / micro-batch / rank: {COUNT} x",
            "sequence_length": rf"Tokens / micro-batch / rank: \d+ x {COUNT}",
            "pass_tokens": rf"Tokens / micro-batch: {COUNT}",
            "num_parameters": rf"(?m)^(?:Number of parameters|total\s*): {COUNT}$",
            "device_name": r"GPU: (.{1,80}?) \| Peak FLOPS",
            PRECISION: r"COMPUTE_DTYPE: torch\.(\w+)",
            "fp8": r"FP8 training enabled \((\w+)",
        },
        val_loss=r"Validation bpb: (\S+)",
        first_step=0,
        start=r"(?m)^Autodetected device type: \w+",
    ),
    Program(
        "modded-nanogpt",
        mark=r"\bstep:\d+/\d+ (?:(?:val|train)_loss:\S+ )?(?:\w+:\S+ )?train_time:[\d.]+m?s\b",
        line=r"\bstep:(\d{1,12})/\d+ (?:\w+:\S+ )*train_time:",
        figures={
            "loss": r"train_loss:(\S+)",
            "val_loss": r"val_loss:(\S+)",
            "total_ms": rf"train_time:{NUMBER}ms",
            "total_s": rf"train_time:{NUMBER}s",
        },
        header={  # of the source code that it prints first: a batch in sequences, later in tokens
            "global_batch_size": rf"(?m)^[ \t]+batch_size ?: ?int = {PRODUCT}",
            "step_tokens": rf"(?m)^[ \t]+train_batch_size ?: ?int = {PRODUCT}",
            "micro_batch_size": rf"(?m)^[ \t]+device_batch_size ?: ?int = {PRODUCT}",
            "sequence_length": rf"(?m)^[ \t]+(?:sequence_length|train_(?:max_)?seq_len)(?: ?: ?int)? = {PRODUCT}",
            "world_size": rf"(?m)^[ \t]*assert world_size == {COUNT}",
            DATA: r"(?m)^[ \t]+(?:input_bin|train_files)\b[^=\n]{0,20}= ['\"](?:[^'\"\n]*/)?([^'\"/\n]+)",
        },
        protocol="time_to_loss",
        time_meaning="training time",
    ),
    Program(
        "llm.c",
        mark=r"\bstep\s+\d+/\d+ \| (?:train loss |loss [^|\n]{1,40}\| norm )",
        line=r"\bstep\s+(\d{1,12})/\d{1,12} \| (?:train )?loss ",
        figures={
            "loss": r"loss\s+(\S+)",
            "ms": rf"{NUMBER} ms",
            "rate": rf"{NUMBER} tok/s",
            "mfu": rf"{NUMBER}% \w+ MFU",
        },
        header=LLMC_HEADER,
        val_loss=r"(?m)^(?:.{0,80}\s)?val loss (\S+)$",
    ),
    Program(
        "build-nanogpt",
        mark=r"\bstep\s+\d+ \| loss: \S+ \| lr:? \S+ \| norm: \S+ \| dt: ",
        line=r"\bstep\s+(\d{1,12}) \| loss: ",
        figures={"loss": r"loss: (\S+)", "ms": rf"\| dt: {NUMBER}ms", "rate": rf"\| tok/sec: {NUMBER}"},
        header={"step_tokens": rf"(?i)total desired batch size: {COUNT}"},
        val_loss=r"validation loss: (\S+)",
        first_step=0,
    ),
    Program(
        "nanoGPT",
        mark=r"\biter \d+: loss \S+, time \d+\.\d+ms",
        line=r"\biter (\d{1,12}): loss ",
        figures={"loss": r"loss (\S+),", "ms": rf"time {NUMBER}ms", "mfu": rf"mfu {NUMBER}%"},
        header={
            "step_tokens": rf"tokens per iteration will be: {COUNT}",
            "micro_batch_size": rf"(?m)^[ \t]*(?:Overriding: )?batch_size = {COUNT}",
            "sequence_length": rf"(?m)^[ \t]*(?:Overriding: )?block_size = {COUNT}",
            PRECISION: r"(?m)^[ \t]*(?:Overriding: )?dtype = '?(\w+)",
            "layers": r"(?m)^[ \t]*(?:Overriding: )?n_layer = (\d+)",
            "width": r"(?m)^[ \t]*(?:Overriding: )?n_embd = (\d+)",
            MODEL: r"(?m)^number of parameters: (\S+)",
            COMPILED: r"(?m)^(?:(?=compiling the model)|[ \t]*(?:Overriding: )?compile = )(\w+)",
        },
        val_loss=r"step \d+: train loss \S+, val loss (\S+)",
        first_step=0,
        peak_flops=312e12,  # model.py, `estimate_mfu`: an A100's in bfloat16
    ),
    Program(  # of any program that trains with it; its settings are read by printed_setup.py
        "DeepSpeed",
        mark=r"global_step=\d+, RunningAvgSamplesPerSec=",
        line=r"\bglobal_step=(\d{1,12}), RunningAvgSamplesPerSec=",
        figures={"rate": rf"CurrSamplesPerSec={NUMBER}"},
        rate_unit="samples/s",
    ),
    Program(  # its pipeline engine
        "DeepSpeed",
        mark=r"\bsteps: \d+ loss: \S+ iter time \(s\): ",
        line=r"\bsteps: (\d{1,12}) loss: ",
        figures={
            "loss": r"loss: (\S+)",
            "s": rf"iter time \(s\): {NUMBER}",
            "rate": rf"samples/sec: {NUMBER}",
        },
        rate_unit="samples/s",
    ),
    Program(
        "timm",
        mark=r"\bTrain: \d+\s*\[ *\d+/\d+ (?=[^\n]{0,500}?\bTime:\s+\d)",
        line=r"\bTrain: (?P<epoch>\d{1,6})\s*\[ *(?P<step>\d{1,9})/(?P<of>\d{1,9}) ",
        figures={"loss": r"\bLoss:\s+(\S+)", "s": rf"\bTime:\s+{NUMBER}", "rate": rf"s,\s+{NUMBER}/s"},
        header={"world_size": rf"\bProcess 0, total {COUNT}"},
        rate_unit="images/s",
        first_step=0,
    ),
    Program(  # also PyTorch's example of ImageNet, and the programs that took over torchvision's MetricLogger
        "torchvision",
        mark=r"\bEpoch: \[\d+\]\s*\[ *\d+/\d+\](?=[^\n]{0,500}?\b[Tt]ime:?\s+\d)",
        line=r"\bEpoch: \[(?P<epoch>\d{1,6})\]\s*\[ *(?P<step>\d{1,9})/(?P<of>\d{1,9})\]",
        figures={"loss": r"\b[Ll]oss:?\s+(\S+)", "s": rf"\b[Tt]ime:?\s+{NUMBER}", "rate": rf"\bimg/s:\s+{NUMBER}"},
        rate_unit="images/s",
        first_step=0,
    ),
    Program(  # of no program that is known: a step, its loss, and a rate or a time with its unit
        "training",
        mark=rf"(?im){STEP}\d+\b(?:(?=.{{0,300}}?{LOSS}[\dn])(?=.{{0,500}}?(?:/s(?:ec)?\b|\d ?m?s\b))"
        rf"|.{{0,200}}?{TIME}[\d.]+ ?m?s\b)",
        line=rf"(?im){STEP}(\d{{1,12}})\b(?=.{{0,300}}?(?:\bloss[ :=]+[\dn]|{TIME}\d))",
        figures={
            "loss": rf"(?i){LOSS}([\d.]+(?:e[-+]?\d+)?|nan)\b",
            "val_loss": VAL_LOSS,
            "ms": rf"(?i){TIME}{NUMBER} ?ms\b|[ |,]{NUMBER} ?ms/(?:step|iter)",
            "s": rf"(?i){TIME}{NUMBER} ?s\b|[ |,]{NUMBER} ?s/(?:step|iter)",
            "rate": rf"(?i)\b(?:tok(?:en)?s?(?:/s(?:ec)?|_per_s(?:ec)?)|tps)[ :=]+{NUMBER}"
            r"(?![\w/]|\.\d| ?(?:[kM]|m?s)\b)"
            rf"|\bthroughput[ :=]+{NUMBER} (?:tok(?:en)?|sample|sequence|image)s?/s(?:ec)?(?![\w/])"
            rf"|[ ,|(]{NUMBER} (?:tok(?:en)?|sample|sequence|image)s?/s(?:ec)?(?![\w/:=]| ?[:=])",
        },
        header={
            "world_size": rf"\b(?:world_size|dist_world_size|num_gpus)[ =:]+{COUNT}",
            "global_batch_size": rf"\bglobal[_ ]batch(?:[_ ]size)?[ =:]+{COUNT}\b(?! ?#? ?tok)",
            "sequence_length": rf"\b(?:seq_len|block_size|context_length|sequence_length)[ =:]+{COUNT}",
            PRECISION: r"\b(?:(?:param_)?dtype|precision)[ =:]+'?([\w.]+)",
        },
        val_loss=VAL_LOSS,
        first_step=0,
        rate_unit="throughput",
    ),
)
FORMS = tuple(f"{program.name} log" for program in PROGRAMS)
OF_ANY = FORMS[-2:]  # whose rate may be of one rank or of all: torchvision prints the one, its forks either
KNOWN = "torchtitan, Megatron-LM, nanochat, modded-nanogpt, llm.c, build-nanogpt, nanoGPT, DeepSpeed, torchvision, timm"
SETTINGS = (PRECISION, MODEL, COMPILED, RECOMPUTED, ZERO, DATA)  # names of a header that go into `Reported.settings`
OFF = ("None", "none", "0", "False")
DATA_RANKS = ("dp", "dp_replicate", "dp_shard")  # of torchtitan's mesh; expert ranks are among the others
# name of a figure -> its curve, and its unit
CURVE_OF = {"loss": ("train_loss", 1.0), "ms": ("iteration_s", 1e-3), "s": ("iteration_s", 1.0),
            "mfu": ("mfu_percent", 1.0), "rate": ("token_rate", 1.0), "total_ms": ("total_s", 1e-3)}  # fmt: skip
Line = dict[str, float]  # the figures of one step; a loss may be NaN


def program_of(text: str) -> Program | None:
    """Return the program that printed a log; None: it is not known."""
    ends = text if len(text) <= 2 * MARKED_WITHIN else f"{text[:MARKED_WITHIN]}\n{text[-MARKED_WITHIN:]}"
    return next((program for program in PROGRAMS if re.search(program.mark, ends)), None)


def read_log(path: Path, text: str, program: Program) -> Reported:
    """Return the run that a log tells of; of several stages in one file, the one with the most steps.

    Times and rates are medians over the lines, the first left out: it has the start-up.
    """
    text = _longest_stage(text, program)
    all_lines, others = _lines(text, program)
    lines = _in_order(all_lines)
    curves: Curves = {}
    if not any("train_loss" in line for _, line in lines):  # DeepSpeed prints none, the program that uses it may
        own = _in_order(_lines(others, PROGRAMS[-1])[0])
        losses = [(step, loss) for step, line in own if (loss := line.get("train_loss")) is not None]
        if losses and lines and losses[-1][0] <= lines[-1][0]:  # and counts the same steps
            curves["train_loss"] = losses
    for step, line in lines:
        for name, value in line.items():
            curves.setdefault(name, []).append((step, value))
    printed = printed_setup(others)
    settings, instruments = printed.pop("settings"), printed.pop("instruments")
    header = _settings(others, program)
    settings |= header.pop("settings", {})
    known = printed | said_in(others, DEVICES_NAMED) | header | {"batch_is_printed": program.name == "DeepSpeed"}
    if "batch" in curves:
        known["global_batch_size"] = int(curves["batch"][-1][1])
    if program.rate_is_per_rank and "token_rate" in curves:
        ranks = known.get("world_size")
        curves["token_rate" if ranks else "rank_token_rate"] = [
            (step, rate * (ranks or 1)) for step, rate in curves.pop("token_rate")
        ]
    if program.val_loss and (validated := _last_number(program.val_loss, others)):
        known["val_loss"] = validated
    run = reported_of(
        path,
        f"{program.name} log",
        curves,
        num_skipped=1,
        **known,
        settings=settings,
        peak_flops=program.peak_flops,
        optimizer_steps=lines[-1][0] + (lines[0][0] == program.first_step == 0) if lines else None,
        time_meaning=program.time_meaning,
        protocol=program.protocol,
        instruments=(*instruments, *(words for each, words in program.instruments.items() if re.search(each, others))),
        rate_unit=program.rate_unit,
    )
    return as_it_ran(run, others, text)


def with_unit(run: Reported) -> Reported:
    """Return the run of a log of any program with the unit of its rate, where the time of a step shows it.

    Whether a rate counts tokens or samples, and of one rank or of all, is what its batch and length give.
    """
    if not (run.rate and run.time_s and run.global_batch_size):
        return run
    of_samples = run.rate_unit if run.rate_unit == "images/s" else "samples/s"
    for unit, size in (("tokens/s", run.sequence_length), (of_samples, 1)):
        for ranks in {1, run.world_size or 1}:
            if size and abs(run.rate * run.time_s * ranks / (run.global_batch_size * size) - 1) < NEAR:
                return replace(run, rate_unit=unit, rate_is_per_rank=ranks > 1)
    return run


def as_it_ran(run: Reported, said: str, text: str) -> Reported:
    """Return a run with what its log says of how it ran: what slowed it, and how it ended."""
    settings = dict(run.settings)
    if out := _OUT_OF_MEMORY.search(text[-LOOKED_AT:]):
        settings[STATUS] = f"ended by {out[0]}"
    for words in (words for each, words in NO_RUN.items() if re.search(each, text[:MARKED_WITHIN])):
        settings[STATUS] = words
    slowed = (words for each, words in SLOWS_DOWN.items() if re.search(each, said))
    return replace(run, settings=settings, instruments=(*run.instruments, *slowed))


def _longest_stage(text: str, program: Program) -> str:
    """Return the part of a log with the most steps; of equal ones the last."""
    if program.start is None:
        return text
    parts = re.split(program.start, text)
    return max(reversed(parts), key=lambda part: len(re.findall(program.line, part)))


def _lines(text: str, program: Program) -> tuple[list[tuple[int, Line]], str]:
    """Return step and figures of each line of a step, and the text of the other lines.

    Of two lines in one, nothing says whose a figure is: both are left out. Of more than MOST_LINES lines every n-th is
    read, and the last ones: what is told of them are medians and ends.
    """
    start = re.compile(program.line)
    found: list[tuple[int, int, int]] = []  # of each line: step, where its figures begin and where it ends
    others = []
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        match = start.search(text, at, end) if end - at <= LONGEST_LINE else None
        if not match:
            others.append(text[at : min(end, at + LONGEST_LINE)])
        elif not start.search(text, match.end(), end):
            found.append((_step(match), match.start(), end))
        at = end + 1
    every = 1 + len(found) // MOST_LINES
    kept = [*found[:-LAST_LINES:every], *found[-LAST_LINES:]]
    patterns = {name: re.compile(pattern) for name, pattern in program.figures.items()}
    lines = []
    for step, begin, end in kept:
        figures = {}
        for name, pattern in patterns.items():
            if (value := _figure(name, pattern, text[begin:end])) is not None:
                quantity, unit = CURVE_OF.get(name, (name, 1.0))
                figures[quantity] = value * unit
        lines.append((step, figures))
    return lines, "\n".join(others)


def _step(line: re.Match[str]) -> int:
    """Return the step of a line; of one that counts them within an epoch, over all epochs."""
    named = {name: int(number) for name, number in line.groupdict().items()}
    return named["epoch"] * named["of"] + named["step"] if named else int(line[1])


def _figure(name: str, pattern: re.Pattern[str], line: str) -> float | None:
    """Return a figure of a line; of a loss also NaN."""
    found = pattern.search(line)
    if not found:
        return None
    text = next(group for group in found.groups() if group is not None)
    if name == "loss" and text.lower().lstrip("+-").startswith("nan"):
        return math.nan
    value = _number(text)
    is_none = name == "loss" and value is not None and value < 0  # pipeline stages without the loss print -1
    return None if is_none else value


def _in_order(lines: Iterable[tuple[int, Line]]) -> list[tuple[int, Line]]:
    """Return one line per step, in order: of several, each figure of the first that has it; every rank may print one.

    Where the steps go back, a run was started again from a checkpoint, and its lines take the place of earlier ones.
    """
    kept: list[tuple[int, Line]] = []
    for step, line in lines:
        if kept and kept[-1][0] > step:
            while kept and kept[-1][0] >= step:
                kept.pop()
        if kept and kept[-1][0] == step:
            kept[-1] = (step, line | kept[-1][1])
        else:
            kept.append((step, line))
    return kept


def _settings(text: str, program: Program) -> dict:
    """Return the fields of Reported that a header gives. A setting that has two values in one log is unknown."""
    said = said_in(text, program.header)
    settings = {name: _setting(name, said.pop(name)) for name in SETTINGS if name in said}
    tp, pp, sp, fp8 = (said.pop(name, None) for name in ("tp", "pp", "sp", "fp8"))
    layers, width = said.pop("layers", None), said.pop("width", None)
    if layers and width:
        settings[SIZES] = f"{layers} layers, width {width}"
    if tp and pp:
        settings[LAYOUT] = f"tensor {tp}, pipeline {pp}{', sequence parallel' if sp else ''}"
    if fp8:
        settings[PRECISION] = f"fp8 {fp8}"
    device, mesh = said.pop("device_name", None), said.pop("mesh", None)
    known: dict = counts_of(said)
    step_tokens, pass_tokens = known.pop("step_tokens", None), known.pop("pass_tokens", None)
    length, micro = known.get("sequence_length"), known.get("micro_batch_size")
    if step_tokens and length:
        known["global_batch_size"] = step_tokens // length
    if pass_tokens and length and micro:
        known["world_size"] = pass_tokens // (micro * length) or None
    known["data_ranks"] = known.get("world_size") if program.name in ("llm.c", "nanochat") else None
    if mesh:
        sizes = _mesh(mesh)
        known["world_size"] = math.prod(sizes.values()) or None
        known["data_ranks"] = math.prod(sizes.get(name, 1) for name in DATA_RANKS) or None
    known |= {"device_name": device, "settings": settings or None}
    return {name: value for name, value in known.items() if value is not None}


def _setting(name: str, said: str) -> str:
    """Return a setting as other sources say it."""
    if name in (COMPILED, RECOMPUTED):
        return "off" if said in OFF else "on" if name == COMPILED or said == "1" else said
    return plain_precision(said) if name == PRECISION else said


def _mesh(words: str) -> dict[str, int]:
    """Return the ranks of each dimension of torchtitan's mesh: `dp_shard=8` or, until 2025, `['dp_shard'], [8]`."""
    found = re.findall(r"\b([a-z_]+)=(\d{1,6})\b", words)
    if not found:
        found = list(zip(re.findall(r"'(\w+)'", words), re.findall(r"\b\d{1,6}\b", words), strict=False))
    return {name: int(size) for name, size in found if name in ("pp", "cp", "tp", *DATA_RANKS)}


def _number(text: str) -> float | None:
    """Return the finite number that a text begins with."""
    found = re.match(NUMBER, text.strip())
    value = float(found[1].replace(",", "")) if found else math.nan
    return value if math.isfinite(value) else None


def _last_number(pattern: str, text: str) -> float | None:
    found = re.findall(pattern, text)
    return _number(found[-1]) if found else None
