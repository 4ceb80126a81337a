"""Name what a column of a table holds, by its exact heading or by `--columns`.

A heading that is not in QUANTITIES is not guessed. If it has the unit of a rate or a time ("Prefill tok/s"), two of its
rows can be compared with each other, and no formula counts it. Other columns are not read, and the page says so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from testbed.audit.reported import (
    COMPILED,
    DATA,
    DEVICE,
    INSTRUMENTS,
    MODEL,
    PASS,
    PRECISION,
    RECOMPUTED,
    RESOLUTION,
    STATUS,
    STRATEGY,
    WARM_UP,
)
from testbed.audit.tables.figures import (
    LONGEST,
    SECONDS,
    SUFFIXES,
    Figure,
    are_factors,
    are_shares,
    exactly,
    figure_of,
    is_reference,
    last_place,
    plain,
)
from testbed.audit.tables.grid import Table, name_in
from testbed.audit.tables.told import Named, SaidOfTable, said_of_table
from testbed.audit.words import BATCHES, DEVICES, FORMS, OF_ALL_ROWS, OF_FIGURES_ALONE, SIGNS, multiplied, value_of

# what is counted: of a rate ("images/s") and of a batch ("images/step")
_ITEMS = ("sample", "sequence", "seq", "image", "img", "example", "frame", "utterance", "utt", "volume", "item", "row",
          "doc", "graph", "clip", "pair", "sentence", "env step")  # fmt: skip
_ITEM_RATES = [f"{item}{plural}/s" for item in _ITEMS for plural in ("", "s")]
_TOKEN_RATES = ["tokens/s", "token/s", "tok/s", "toks/s", "words/s", "wps", "tps"]
# quantity -> its kind of figure, and its headings as `_canonical` writes them
_KNOWN: dict[str, tuple[str, str | list[str]]] = {
    "devices": ("count", "gpus, gpu, devices, ranks, world size, gpu count, gpu num, gpu number, ngpus, ngpu, world, "
                "accelerators, chips, tpus, cards, gpus total, total gpus"),  # workers may load data
    "per_node": ("count", "gpus/node, devices/node, gpu num/node, nproc/node"),
    "nodes": ("count", "nodes, nnodes, node count, machines, vms, instances, hosts, servers"),
    "dp": ("count", "dp, dp size, data parallel, data parallel size, data ranks"),
    "tp": ("count", "tp, tp size, tensor parallel, tensor parallel size"),
    "pp": ("count", "pp, pp size, pipeline parallel, pipeline parallel size"),
    "cp": ("count", "cp, cp size, context parallel, context parallel size"),
    "micro_batch": ("count", "micro batch, mic batch, mbs, local batch, batch/gpu, micro batch/gpu, device batch, "
                    "per device train batch, train micro batch/gpu, per gpu batch, per device batch"),
    "accumulation": ("count", "accumulation, accumulation steps, gradient accumulation, gradient accumulation steps, "
                     "grad accum, grad accum steps, ga, gas, accum, grad acc, accum steps"),
    "batch": ("count", ["global batch", "glob batch", "gbs", "effective batch", "total batch", "tokens/update",
                        *(f"{item}s/step" for item in _ITEMS)]),
    "any_batch": ("count", "batch, tokens/step, tok/step, batch tokens"),  # of one device or of all
    "length": ("count", "sequence length, seq len, seq length, seqlen, context length, block size, seq, ctx len, "
               "max seq len, max length, cutoff len, context, ctx, tokens/sequence"),
    "params": ("number", "parameters, params, num params, num parameters, number of parameters, param count"),
    "steps": ("count", "steps, optimizer steps, training steps, iterations, updates, train steps"),
    "tokens": ("number", "tokens, training tokens, total tokens, tokens processed, tokens seen, tokens trained"),
    "step_s": ("time", "step time, time/step, iteration time, iter time, s/step, ms/step, step duration, step ms, "
               "iter ms, step time ms, iter time ms, batch time, time/batch, time/minibatch, fwd+bwd, fwd + bwd, "
               "forward+backward, forward + backward"),
    "time_s": ("time", "time, training time, train time, total time, wall time, wall clock time, epoch time, "
               "time/epoch, run time, runtime, duration, elapsed time, elapsed, wall clock, epoch, train, training, "
               "total, training time/epoch, train time/epoch, training runtime, total training time, "
               "total train time, s/epoch, min/epoch, minutes/epoch, hours/epoch, pre training time"),
    "token_rate": ("number", [*_TOKEN_RATES, "total tokens/s", "global tokens/s", "ktok/s"]),
    "device_token_rate": ("number", [*(f"{rate}/gpu" for rate in _TOKEN_RATES), "tokens/gpu/s", "tgs"]),
    "sample_rate": ("number", [*_ITEM_RATES, "train samples/s"]),
    "device_sample_rate": ("number", [f"{rate}/gpu" for rate in _ITEM_RATES]),
    "step_rate": ("number", "steps/s, updates/s, it/s, iter/s, iters/s, iterations/s"),
    "rate": ("number", "throughput"),
    "other_rate": ("number", []),  # of which the heading alone says what it is
    "other_time": ("time", []),
    "mfu": ("share", "mfu, hfu"),
    "tflops": ("number", "tflops, tflop/s, tflops/gpu, tflop/s/gpu, tflops/s/gpu, tflops/s"),
    "speedup": ("factor", "speedup, speed up, relative speed, rel speed, relative throughput, relative, gain, x, "
                "acceleration, rel. speedup, rel. speed, rel speedup, speed ratio, rel., rel, "
                "ratio, relative performance, relative training speed, speedup factor, rel. throughput"),
    "efficiency": ("share", "efficiency, scaling efficiency, parallel efficiency, eff., eff, "
                   "scaling eff., scaling eff, parallel eff, weak scaling efficiency, strong scaling efficiency, "
                   "weak scaling eff, strong scaling eff, weak scaling eff., strong scaling eff."),
    "val_loss": ("number", "val loss, val. loss, test loss, bpb, val bpb, bits/byte"),
    "perplexity": ("number", "ppl, perplexity, val ppl, val perplexity, test ppl, test perplexity"),
    "train_loss": ("number", "loss, train loss, training loss, final loss, final train loss, ce, cross entropy"),
    # of what was trained: more is better, and less is
    "score": ("share", "accuracy, acc, acc@1, top 1, top1, top 1 acc, top1 acc, top 1 accuracy, top1 accuracy, "
              "val acc, val accuracy, test acc, test accuracy, bleu, map, m ap, box map, box ap, miou, m io u, iou, "
              "psnr, f1, rouge l, mmlu, hellaswag, hella swag, auc, gsm8k, lambada, eval score, win rate"),
    "error": ("share", "wer, cer, fid, error rate, top 1 error, top1 error, val error, rmse, mae, err, err., error, "
              "test error, val wer, test wer"),
}  # fmt: skip
QUANTITIES = {
    name: (kind, tuple(headings.split(", ") if isinstance(headings, str) else headings))
    for name, (kind, headings) in _KNOWN.items()
}
# what else a row says, in words: name -> its headings
WORDS: dict[str, str] = {
    STRATEGY: "strategy, method, parallelism, parallel strategy, run type, approach, framework, technique, run, name, "
              "configuration, config, setup, setting, experiment, variant, mode, optimization, optimizer, attention, "
              "implementation, algorithm, kernel, backend, stack, layout, system, trainer, library, schedule, fabric, "
              "exchange, pipeline, interconnect, engine, loader, data loader, recipe, code, tool, package, solution, "
              "scheme, compression, option, description, version, branch, change, arm, entry",
    MODEL: "model, model size, size, model name, architecture",
    PRECISION: "precision, dtype, data type, datatype, training precision, prec., prec, numerics, amp",
    DEVICE: "gpu type, gpu model, hardware, device type, accelerator type, gpu, device, accelerator, machine",
    COMPILED: "compile, torch.compile, compiled",
    RECOMPUTED: "activation checkpointing, gradient checkpointing, recompute, recomputation, activation recomputation",
    DATA: "dataset, data",
    PASS: "pass, phase, workload, task",
    INSTRUMENTS: "profiler, profiling, instrumentation, torch profiler, debug, nsys, anomaly detection, "
                 "detect anomaly, cuda launch blocking",
    WARM_UP: "warmup, warm up, warmup steps, warm up steps, warmup iters, warmup iterations, warmup excluded, "
             "warmup included, includes warmup, incl. warmup, clock, timing, timer, timed, what is timed, "
             "timed region, time includes, time covers, measured with, scope",
    RESOLUTION: "resolution, image size, img size, input size, image resolution, input resolution, crop, res",
}  # fmt: skip
# quantity -> its unit, in the order in which one of a row is taken
RATES = {"token_rate": "tokens/s", "sample_rate": "samples/s", "rate": "throughput", "device_token_rate": "tokens/s",
         "device_sample_rate": "samples/s", "step_rate": "steps/s"}  # fmt: skip
TIMES = ("step_s", "time_s")
RATIOS = ("speedup", "efficiency")
OTHERS = ("other_rate", "other_time")
RESULTS = (*TIMES, *RATES, "mfu", "tflops", *RATIOS, *OTHERS)
# of a heading that is not known, with its unit; no bytes, and no part of a time that is no work
_IS_RATE = re.compile(r"(?<![kmgt]b)(?<![kmgt]ib)/s\b")
_IS_NO_RESULT = re.compile(
    r"warm|compil|load|save|set-?up|init|std|dev\b|deviation|variance|min\b|max\b|overhead|diff|delta|bandwidth|price"
    r"|cost|usd|[$\u20ac]|memory|restart|recover|disk|timeout|interval|idle|wait|stall|goal|target|budget|expected|projected|estimated"
    r"|theoretical|peak|ideal"
)
_PRECISIONS = re.compile(r"\b(?:fp32|tf32|fp16|bf16|fp8|amp|mixed)\b")
_OF_A_FILE = re.compile(r"(?i)[~\d., ]+ ?[KMG]i?B")  # a size in bytes
_BETWEEN = re.compile(r"(?i)\(\w[\w .-]{0,30} (?:to|->|/) \w[\w .-]{0,30}\)")
# what counts devices beside a speed-up; elsewhere workers load data, as num_workers of a DataLoader always do
COMPUTE = ("workers", "cpus", "cores", "processes", "procs", "nprocs", "threads")
OF_TIME_ALONE = ("epoch", "train", "training", "total")  # headings that are a time only with its unit
WORD_OF = {heading: name for name, headings in WORDS.items() for heading in headings.split(", ")}
_HEADING = {heading: quantity for quantity, (_, headings) in QUANTITIES.items() for heading in headings}
LEARNT = ("val_loss", "train_loss", "perplexity", "score", "error")
_LEARNT = [each for name in LEARNT if name != "train_loss" for each in QUANTITIES[name][1] if len(each) > 2]
_IS_DIFFERENCE = re.compile(r"\bvs\b|\bover\b|relative|delta|\bgain|\bdrop|change|target|goal|^(?:baseline|reference) ")
_TO_A_LOSS = re.compile(
    r"(?i)\b(?:to|until|reach\w*) (?:a |the |the same )?(?:[\d.]+ )?(?:val\w*|eval\w*|target)?[. ]*"
    r"(?:loss|perplexity)\b"
)
_TO_A_TARGET = re.compile(r"(?i)(?:time|hours|minutes) to (?:target|solution|accuracy|quality|convergence)\b")
# of a heading in small letters, in this order -> as QUANTITIES writes it
_SPELLINGS = {
    r"[*`#_\N{UPWARDS ARROW}\N{DOWNWARDS ARROW}\s-]+": " ",
    r"^ | $": "",
    r"^(?:time|wall clock|days|hours|minutes) to "
    r"(?:train|target|solution|accuracy|quality|convergence|[\d.]+ ?%|[\d.]+[mbt] tokens)(?![a-z])": "time",
    r"(?<=\w)(?: ?@ ?\w[\w. ]{0,30}| (?:vs\.?|over|relative to|compared to|compared with|against) .{1,40})(?=$| "
    r"?[(\[])": "",
    r"^(?:valid|validation|eval|evaluation|dev)\.? (?=loss|ppl|perplexity|acc|error|bpb)": "val ",
    r"[ (](?:pct|percent)\)?$": " (%)",
    r"^(?:global|aggregate|total|system|cluster) (?=throughput)": "",
    r"^(?:(?:no\.|num|number|total number|total|n)(?: of)?|of) (?=gpu|device|rank|worker|acc|node)": "",
    r"^[km] ?(?=tok)": "",
    r" ?(?:/| per ) ?": "/",
    r"/(?:sec|second|secs)\b": "/s",
    r"/(?:iter(?:ation)?|it|update|optimizer step)\b": "/step",
    r"\b(?:seconds|sec)/": "s/",
    r"(?<=tok|ens|les|ges) s$": "/s",  # decode_tok_s
    r"\b(?:batch size|batchsize|bsz|bs)\b": "batch",
    r"/(?:device|accelerator|rank|card|chip)\b": "/gpu",
}
_OF_ONE_DEVICE = re.compile(
    r"(?i)\b(?:TFLOP\S*|throughputs?|rates?|tokens/s\w*|samples/s\w*|images/s\w*|numbers|figures"
    r"|values)\b[^.;|]{0,20} (?:is|are|given|reported)"
    r"(?: \w+){0,2} (?:per|of one|of a single|for one) (?:GPU|device|card|rank)\b"
)
_OF_A_UNIT = re.compile(r"(?:rate|(?:training |train )?(?:throughput|speed|time)),? (\S.*)")
_OF_THE_CLOCK = re.compile(r"(?i)incl|excl|alone|only|whole|end-to-end|wall|w/o|without|with|cold|first")
_OF_REFERENCE = re.compile(r"(?i)\b(?:base(?:line)?|reference|ref|vanilla|original|naive|upstream|default|standard)\b")
_OF_AN_ESTIMATE = re.compile(r"^(?:expected|projected|predicted|estimated|theoretical|simulated|est\.?) ")
_OF_SOME_RUN = re.compile(r"^(?:avg\.?|average|mean|median|measured|achieved|overall|final|best|max\.?) ")
# what a row worked on, in figures that are not read
_OF_WORK = re.compile(
    r"(?i)^(?:training |train |num )?(?:samples|images|examples|sequences|documents|epochs|data ?set size)\b(?!/)"
    r"|^target\b|\btop[- ]?[15]\b|\bres\b|\bacc(?:uracy)?\b|\bbatch\b|\bbs\b|\b(?:width|depth)\b"
)
_OF_ONE_CELL = re.compile(r"(?i)(?:/|\bper )\s?(?:gpu|device|rank|card)\b")
_ANY_FIGURE = re.compile(r"[-+~<>]?[\d.,]+ ?(?:[%\w/°]{0,12})|-*|n/?a", re.I)


@dataclass(frozen=True)
class Column:
    heading: str
    quantity: str | None  # a key of QUANTITIES
    figures: tuple[Figure | None, ...]  # one for each row
    texts: tuple[str, ...]
    word: str | None = None  # a key of WORDS, of a column without figures
    is_of_words: bool = False  # no column of the table: read from the words of its rows


@dataclass(frozen=True)
class Grid:
    """The columns of one table, with the line of each row."""

    path: Path
    lines: tuple[int, ...]
    columns: tuple[Column, ...]
    is_to_a_loss: bool  # the text says that the times are to one loss
    said: SaidOfTable
    warning: str  # a sentence of the page, or the name of the file, that its figures were not measured
    is_of_one: bool  # the text says that rates are of one device
    scaling: str  # "weak" or "strong", where the text or a heading says one of them

    def place(self, row: int) -> str:
        """Return the file and the line of a row, as findings name it."""
        return f"{self.path}:{self.lines[row]}"

    def column(self, quantity: str) -> Column | None:
        return next((column for column in self.columns if column.quantity == quantity), None)

    def figure(self, quantity: str, row: int) -> Figure | None:
        column = self.column(quantity)
        return column.figures[row] if column else None

    @cached_property
    def devices(self) -> tuple[int | None, ...]:
        """The devices of each row: its own count, or else the product of its parallel sizes."""
        sizes = [column.figures for column in map(self.column, ("dp", "tp", "pp", "cp")) if column]
        of_sizes = list(zip(*sizes, strict=True)) if self.column("dp") else [(None,)] * len(self.lines)
        counts = (self.figure("devices", row) for row in range(len(self.lines)))
        return tuple(
            round(count.value) if count else None if None in each else round(math.prod(size.value for size in each))
            for count, each in zip(counts, of_sizes, strict=True)
        )

    @cached_property
    def not_understood(self) -> tuple[Column, ...]:
        """The columns of words under headings that are not understood, but for the first."""
        columns = (each for each in self.columns[1:] if each.heading and not (each.quantity or each.word))
        return tuple(each for each in columns
                     if _OF_WORK.search(each.heading) or not all(map(_ANY_FIGURE.fullmatch, each.texts)))  # fmt: skip


def grid_of(path: Path, table: Table, named: Mapping[str, str]) -> Grid:
    """Return the columns of a table, by their headings or as `named` names them."""
    headings = list(map(_in_one_line, table.header))
    chosen = {heading: quantity for quantity, heading in named.items() if heading in headings}
    known = {quantity_of(heading) for heading in headings}
    taken: set[str] = {*named}
    loads_data = "num_" in " ".join(headings) or any("loader" in heading.lower() for heading in headings)
    names = [plain(row.cells[0]).lower() for row in table.rows]
    columns: list[Column] = []
    for index, heading in enumerate(headings):
        cells = [row.cells[index] for row in table.rows]
        quantity = chosen.get(heading) or _quantity(heading, cells, known, names, loads_data)
        if quantity == "speedup" and heading.lower()[:2] == "x " and columns and columns[-1].quantity not in RESULTS:
            quantity = None  # of the memory before it
        if heading not in chosen and quantity in taken:
            quantity = None  # of two columns with one quantity nothing says which is meant
        column = _column(heading, quantity or _other(heading), cells)
        name, unit = _canonical(heading)
        word = WORD_OF.get(name) if unit != "%" else None
        word = None if word == MODEL and any(map(_OF_A_FILE.fullmatch, cells)) else word
        if word and word not in taken and not any(column.figures):
            column, quantity = Column(heading, None, column.figures, column.texts, word), word
        taken |= {quantity} if quantity else set()
        columns.append(column)
    for quantity, text in named.items():
        if text not in headings:
            columns.append(_column(f"{quantity}={text}", quantity, [text] * len(table.rows)))
    columns = [replace(column, quantity=None, figures=(None,) * len(column.figures))
               if column.quantity == "speedup" and _is_of_no_row(column, columns) else column
               for column in columns]  # fmt: skip
    said = said_of_table(table, _named(table, columns))
    columns += _said_columns(columns, taken, said)
    return Grid(
        path=path,
        lines=tuple(row.line for row in table.rows),
        columns=tuple(_with_all_rates(_with_all_devices(columns))),
        is_to_a_loss=_TO_A_LOSS.search(table.around) is not None or any(map(_TO_A_TARGET.match, headings)),
        said=said,
        warning=said.warning or (path.name if value_of(STATUS, re.sub("[_-]", " ", path.stem)) else ""),
        is_of_one=_OF_ONE_DEVICE.search(f"{table.around} {table.section}") is not None,
        scaling=_scaling_in(f"{' '.join(headings)} {table.around}"),
    )


def _in_one_line(heading: str) -> str:
    """Return a heading without markup; of three lines the first two where only they are known: the rest is a set-up."""
    parts = re.split(r"<br ?/?>", heading)
    first = plain(" ".join(parts[:2]))
    return first if len(parts) > 2 and quantity_of(first) and not quantity_of(plain(heading)) else plain(heading)


def _other(heading: str) -> str | None:
    """Return what a heading that is not known has the unit of: of a rate, or of a time."""
    name, unit = _canonical(heading)
    inside = re.search(r"[(\[]([^()\[\]]*)[)\]]", name)  # Runtime (ms) on V100
    unit = unit or (inside[1] if inside else "")
    if not name or _IS_NO_RESULT.search(name):
        return None
    if _IS_RATE.search(f"{name} {unit}"):
        return "other_rate"
    is_time = unit.partition("/")[0] in SECONDS or name.partition("/")[0] in SECONDS or "latency" in name
    return "other_time" if is_time or _with_unit_behind(name)[1] else None


def _named(table: Table, columns: Sequence[Column]) -> Named:
    """Return the rows of a table as a text may name them: the first that a ratio is 1 of, or of such a name, is the
    reference."""
    words = [column for column in columns if not column.quantity or not any(column.figures)]
    rows = range(len(table.rows))
    names = [next((name for column in words if (name := name_in(column.texts[row]))), "") for row in rows]
    ratio = next((column.figures for column in columns if column.quantity == "speedup"), ())
    ones = [row for row, figure in enumerate(ratio) if figure and figure.value == 1]
    ones += [row for row, name in enumerate(names) if _OF_REFERENCE.search(name)]
    results = [column for column in columns if column.quantity in RESULTS and column.quantity not in RATIOS]
    digits = [
        {number for column in results if len(re.sub(r"\D|0+$", "", number := _leading_number(column.texts[row]))) > 2}
        for row in rows
    ]
    count = Counter(number for each in digits for number in each)
    figures = tuple(frozenset(number for number in each if count[number] == 1) for each in digits)
    return Named(tuple(names), figures, ones[0] if ones else 0)


def _leading_number(text: str) -> str:
    return match[0].replace(",", "") if (match := re.match(r"\d[\d,]*(?:\.\d+)?", text)) else ""


def _scaling_in(text: str) -> str:
    found = {*re.findall(r"\b(weak|strong)[ _-]scal", text.lower())}
    return found.pop() if len(found) == 1 else ""


def _with_all_devices(columns: list[Column]) -> list[Column]:
    """Return columns whose devices are those of all nodes.

    Devices beside nodes are those of each ("4x V100") where they do not grow with the nodes.
    """
    by_name = {column.quantity: column for column in columns}
    nodes, devices = by_name.get("nodes"), by_name.get("devices") or by_name.get("per_node")
    if nodes is None or devices is None:
        return columns
    both = list(zip(nodes.figures, devices.figures, strict=True))
    counts = [(number.value, count.value) for number, count in both if number and count]
    are_of_each = any(count < number for number, count in counts) or len({count for _, count in counts}) == 1
    if devices.quantity == "devices" and not are_of_each:
        return columns
    of_each = next((count.value for _, count in both if count), 0.0)
    figures = (number and exactly(number.value * (count.value if count else of_each)) for number, count in both)
    return [replace(column, quantity="devices", figures=tuple(figures)) if column is devices else column
            for column in columns]  # fmt: skip


def _with_all_rates(columns: list[Column]) -> list[Column]:
    """Return columns in which a rate of one GPU, beside others of all, is that of all."""
    devices = next((column.figures for column in columns if column.quantity == "devices"), ())
    found = []
    names = columns[0].texts if not columns[0].quantity else ()
    by_name = {row for row, name in enumerate(names) if _OF_ONE_CELL.search(name)}
    for column in columns:
        cells = [re.sub(r"\(.*?\)", "", text) for text in column.texts] if column.quantity in RATES else ()
        of_one = [row for row, text in enumerate(cells) if _OF_ONE_CELL.search(text) or row in by_name]
        figures = list(column.figures)
        if of_one and devices and any(figure for row, figure in enumerate(figures) if row not in of_one):
            for row in of_one:
                each, count = figure_of(cells[row], "number", _scale(column.heading, "number")), devices[row]
                ends = (each.value, each.low, each.high) if each and count else ()
                figures[row] = Figure(*(count.value * end for end in ends)) if count and ends else None
        found.append(replace(column, figures=tuple(figures)))
    return found


def _quantity(
    heading: str, cells: Sequence[str], known: set[str | None], names: Sequence[str], loads_data: bool
) -> str | None:
    """Return the quantity of a column, by its heading, or by its figures where the other columns leave no doubt.

    Args:
        names: the first cells of the rows.
        loads_data: the table is about loaders of data, whose workers are no devices.
    """
    quantity, name = quantity_of(heading), _canonical(heading)[0]
    is_of_one = bool(known & {*RESULTS, "devices", "nodes"}) and re.match(r"(?:vs\.?|versus|relative to) ", name)
    is_ratio = is_of_one or name in (
        "speed",
        "training speed",
        "scaling",
        "scaling factor",
        "factor",
        "faster",
        "faster by",
    )
    if quantity is None and ((is_ratio and are_factors(cells)) or _is_over_a_row(name, cells, names)):
        return "speedup"
    if quantity is None and name in ("scaling", "scaling factor") and are_shares(cells):
        return "efficiency"
    if (
        name in ("speed", "training speed")
        and any(cells)
        and all(re.fullmatch(r"(?:[\d.,]+ ?s)?", plain(cell)) for cell in cells)
    ):
        return "step_s"  # 129.0s
    if quantity is None and known & {"speedup", "efficiency"} and name in COMPUTE and not loads_data:
        return "devices"
    if quantity is None and quantity_of(plain_name := _OF_AN_ESTIMATE.sub("", name)) not in known:
        quantity = quantity_of(plain_name)  # of which the heading says that it was not measured
    if quantity in ("score", "error") and not _is_a_score(heading, quantity, cells):
        return None
    return quantity


def _is_of_no_row(ratio: Column, columns: Sequence[Column]) -> bool:
    is_any_ratio = _canonical(ratio.heading)[0] == "ratio" and not any(
        figure and figure.value == 1 for figure in ratio.figures
    )
    return is_any_ratio or _is_of_two_columns(ratio, columns)


def _is_of_two_columns(ratio: Column, columns: Sequence[Column]) -> bool:
    """Return whether a speed-up is of two columns of its row, and refers to no row: fp32 to mixed precision."""
    if _BETWEEN.search(ratio.heading) or len({*_PRECISIONS.findall(ratio.heading.lower())}) > 1:
        return True
    rows = [row for row, figure in enumerate(ratio.figures) if figure]
    others = [[figure_of(text, "number") for text in each.texts] for each in columns
              if each.quantity in (None, *TIMES, *RATES, *OTHERS) and each is not ratio]  # fmt: skip
    known = [figures for figures in others if len(rows) > 1 and all(figures[row] for row in rows)]
    return any(_is_quotient(ratio, one, two, rows) for one in known for two in known if one is not two)


def _is_quotient(
    ratio: Column, one: Sequence[Figure | None], two: Sequence[Figure | None], rows: Sequence[int]
) -> bool:
    for row in rows:
        stated, above, below = ratio.figures[row], one[row], two[row]
        gain = above.over(below) if above and below else None
        if not stated or not gain or not (gain.low <= stated.high and gain.high >= stated.low):
            return False
    return True


def _is_over_a_row(name: str, cells: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether a heading names the row that is 1: `x baseline`, or `x H100` if the ratio of row H100 is 1."""
    over = {*name.split()[1:]} if name.startswith("x ") else set()
    ones = [row for row, cell in zip(names, map(plain, cells), strict=True) if re.fullmatch(r"1(?:\.0+)? ?x?", cell)]
    return bool(over and len(ones) == 1) and (all(map(is_reference, over)) or over <= {*re.findall(r"\w+", ones[0])})


def _is_a_score(heading: str, quantity: str, cells: Sequence[str]) -> bool:
    """Return whether a column has scores, and no differences of them, another direction, or whole numbers alone, as
    `acc` of accumulation has."""
    arrow = "\N{DOWNWARDS ARROW}" if quantity == "score" else "\N{UPWARDS ARROW}"
    are_counts = "%" not in heading and all(re.fullmatch(r"\d*|-+", plain(cell)) for cell in cells)
    return not (_IS_DIFFERENCE.search(heading.lower()) or arrow in heading or are_counts)


def _said_columns(columns: Sequence[Column], taken: set[str], said: SaidOfTable) -> list[Column]:
    """Return a column for each condition that no column has and that words say: those of a row, or else of the text.

    What is said of a row alone goes before what is said of all.
    """
    of_all = _rows_of(columns, len(said.named.names))
    of_words = _rows_of([
        column for column in columns
        if column.quantity is None and not re.search("train(?:ed|able)|active|updated", column.heading.lower())
    ], len(said.named.names))  # fmt: skip
    found: list[Column] = []
    batch_is_known = bool({*BATCHES} & taken)
    for name in FORMS:
        if name in taken or (batch_is_known and name in BATCHES):
            continue
        cells = [value_of(name, row) for row in (of_all if name in (*OF_FIGURES_ALONE, DEVICE) else of_words)]
        if name == WARM_UP:  # low-res warm-up is a method
            cells = [cell if _OF_THE_CLOCK.search(cell) else "" for cell in cells]
        where = "row's words" if any(cells) else "text"
        cells = [one or other for one, other in zip(cells, said.told(name), strict=True)]
        is_open = not any(cells) if name in (MODEL, PRECISION, DEVICE) else not all(cells)
        if name in OF_ALL_ROWS and is_open and (of_everyone := said.of_all(name)):
            cells = [cell or of_everyone for cell in cells]
        if any(cells):
            quantity = name if name in QUANTITIES else None
            read = _column(f"{name.removeprefix('any_')} in the {where}", quantity, cells)
            found.append(replace(read, word=None if quantity else name, is_of_words=True))
    return found


def _rows_of(columns: Sequence[Column], num_rows: int) -> list[str]:
    if not columns:
        return [""] * num_rows
    rows = (" | ".join(cells)[: 4 * LONGEST] for cells in zip(*(column.texts for column in columns), strict=True))
    return [multiplied(row.replace("_", " ")) for row in rows]  # AGNews_4 GPUs, ddp_bs16


def quantity_of(heading: str) -> str | None:
    """Return the quantity that a heading names without doubt; None: another one, or one that has to be guessed."""
    name, unit = _canonical(heading)
    dotted = re.match(r"[\w ]+[./:](?=[a-z])(.*)", name)  # args.batch_size, train/samples_per_second
    name = dotted[1] if dotted and name not in _HEADING and _HEADING.get(dotted[1], "devices") != "devices" else name
    if name not in _HEADING:
        name = _OF_SOME_RUN.sub("", name.rstrip("."))
        of_one_kind = rf"(?:(?:number )?of )?(?:{DEVICES})s|(?:{DEVICES}) gpus?"
        name = "gpus" if re.fullmatch(of_one_kind, name, re.I) else name
    if name not in _HEADING and not unit:  # train hours, and not GPU hours
        words = _with_unit_behind(name)
        name, unit = words if QUANTITIES.get(_HEADING.get(words[0], ""), ("time",))[0] == "time" else (name, unit)
    if name in ("step", "iter", "iteration") and unit in SECONDS:
        return "step_s"
    if (name in OF_TIME_ALONE and unit not in SECONDS) or (unit == "%" and _HEADING.get(name) == "devices"):
        return None
    if name == "throughput/gpu" and unit:
        return _HEADING.get(f"{unit.removesuffix('/gpu')}/gpu")
    if name not in _HEADING and not re.search(f",|{_IS_DIFFERENCE.pattern}", name):  # wikitext2 ppl
        name = next((each for each in _LEARNT if name.endswith(f" {each}")), name)
    of_a_unit = _OF_A_UNIT.fullmatch(f"{name} {unit}".strip())  # Throughput, tokens/s
    if of_a_unit and (named := _HEADING.get(of_a_unit[1])) in RESULTS:
        return named
    return _HEADING.get(name)


def _with_unit_behind(name: str) -> tuple[str, str]:
    """Return a heading that ends with a unit of time, and the unit: "train hours"; "seconds" alone is a time."""
    first, _, last = name.rpartition(" ")
    return (first or "time", last) if last in SECONDS else (name, "")


def _canonical(heading: str) -> tuple[str, str]:
    """Return a heading in the words of QUANTITIES, and what stands behind it in brackets; a long one is a text."""
    if len(heading) > LONGEST:
        return "", ""
    if re.match(r"[A-Za-z]+(?: ?[(\[]|$)", heading):  # GlobalBatchSize
        heading = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=GPU)(?=[A-Z][a-z])", " ", heading)
    name = heading.translate(SIGNS).lower()
    for written, meant in _SPELLINGS.items():
        name = re.sub(written, meant, name)
    match = re.fullmatch(r"(.*?) ?[(\[](.*)[)\]]", name)
    return (match[1], match[2]) if match else (name, "")


def _column(heading: str, quantity: str | None, cells: Iterable[str]) -> Column:
    texts = tuple(plain(cell) for cell in cells)
    if quantity is None:
        return Column(heading, None, (None,) * len(texts), texts)
    kind, scale = QUANTITIES[quantity][0], _scale(heading, QUANTITIES[quantity][0])
    read = _figures_of(quantity, texts)
    last = last_place(read)
    figures = [figure_of(text, kind, scale, last) for text in read]
    is_bare = kind == "share" and scale == 1 and not any("%" in text for text in texts)
    if is_bare and any(figure and figure.value > 1.5 for figure in figures):  # of percent without its sign
        figures = [figure_of(text, kind, 0.01, last) for text in read]
    return Column(heading, quantity, tuple(figures), texts)


def _scale(heading: str, kind: str) -> float:
    """Return by what the figures below a heading are multiplied, of its unit: ms, %, kTok/s, tokens (B)."""
    name, unit = _canonical(heading)
    if kind == "time":
        before = name.partition("/")[0]  # minutes/epoch
        unit = before if before in SECONDS else unit or _with_unit_behind(name)[1]
        return SECONDS.get(unit.removesuffix("/step"), 1.0)
    if kind == "share":
        return 0.01 if "%" in heading or unit == "%" else 1.0
    large = re.search(r"(?i)\(([bm])\)$", heading) if kind == "number" else None
    large = large or re.search(r"(?i)(?:^|[\W_])([km]) ?tok", heading)
    return SUFFIXES[large[1].lower()] if large else 1.0


def _figures_of(quantity: str, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the figures in the cells of a column: the 4 of "4x A100"."""
    if quantity == "devices":
        read = ("1" if text.lower() in ("single", "one") else multiplied(text) for text in texts)
        return tuple(re.sub(rf"^(\d{{1,5}}) ?x? ?(?:{DEVICES}).*$", r"\1", text, flags=re.I) for text in read)
    if quantity in RATES:  # one cell is of a GPU, another of all
        of_one = [_OF_ONE_CELL.search(text) is not None for text in texts]
        are_figures = [re.search(r"\d", text) is not None for text in texts]
        is_mixed = any(of_one) and of_one != are_figures
        return tuple("" if is_mixed and is_one else text for text, is_one in zip(texts, of_one, strict=True))
    if quantity in ("length", "batch", "any_batch"):  # 2k tokens are 2,048
        return tuple(re.sub(r"^(1|2|4|8|16|32|64|128)[kK]$", lambda n: str(1024 * int(n[1])), text) for text in texts)
    return texts
