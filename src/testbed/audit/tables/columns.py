"""Name what a column of a table holds, by its exact heading or by `--columns`.

A heading that is not in QUANTITIES is not guessed: the column is not read, and the page says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
from testbed.audit.tables.figures import LONGEST, SECONDS, SIGNS, SUFFIXES, Figure, figure_of, last_place, plain
from testbed.audit.tables.grid import Table, warning_in

# quantity -> its kind of figure, and its headings as `_canonical` writes them
QUANTITIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "devices": ("count", ("gpus", "gpu", "devices", "ranks", "world size", "gpu count", "gpu num", "gpu number",
                          "ngpus", "accelerators", "chips", "tpus", "world")),  # workers may load data
    "per_node": ("count", ("gpus/node", "devices/node")),
    "nodes": ("count", ("nodes", "nnodes", "node count", "machines")),
    "dp": ("count", ("dp", "dp size", "data parallel", "data parallel size", "data ranks")),
    "tp": ("count", ("tp", "tp size", "tensor parallel", "tensor parallel size")),
    "pp": ("count", ("pp", "pp size", "pipeline parallel", "pipeline parallel size")),
    "micro_batch": ("count", ("micro batch", "micro batch size", "mbs", "micro bs", "micro bsz",
                              "micro bs/gpu", "local batch size",
                              "batch/gpu", "batch size/gpu", "batch size/dp", "batch/dp", "micro batch/gpu",
                              "micro batch size/gpu", "per gpu batch size", "batch size per rank", "bsz/gpu",
                              "bs/gpu", "per gpu batch", "gpu batch", "per device batch", "per device batch size")),
    "accumulation": ("count", ("accumulation", "accumulation steps", "gradient accumulation",
                               "gradient accumulation steps", "grad accum", "grad accum steps", "ga", "gas",
                               "accum")),
    "batch": ("count", ("global batch", "global batch size", "global bs", "global bsz",
                        "gbs", "effective batch size", "total batch size",
                        "effective batch", "total batch", "sequences/step", "seqs/step", "samples/step",
                        "sequences/optimizer step", "seqs/optimizer step", "samples/optimizer step")),
    "any_batch": ("count", ("batch", "batch size", "batchsize", "bs", "bsz",  # of one device or of all
                            "tokens/step", "tok/step", "tokens/update", "tok/update", "batch tokens")),
    "length": ("count", ("sequence length", "seq len", "seq length", "seqlen", "context length", "block size", "seq",
                         "ctx len", "max seq len", "max length", "cutoff len", "context")),
    "params": ("number", ("parameters", "params", "num params", "num parameters", "number of parameters")),
    "steps": ("count", ("steps", "optimizer steps", "training steps", "iterations")),
    "tokens": ("number", ("tokens", "training tokens", "total tokens", "tokens processed", "tokens seen",
                          "tokens trained", "trained tokens")),
    "step_s": ("time", ("step time", "time/step", "iteration time", "iter time", "time/iteration", "s/step", "ms/step",
                        "s/iteration", "ms/iteration", "s/it", "ms/it", "s/iter", "ms/iter", "seconds/step",
                        "step duration", "time/iter", "step ms", "iter ms", "step time ms", "iter time ms",
                        "sec/step", "sec/iter", "sec/iteration", "sec/optimizer step", "s/optimizer step",
                        "s/update", "sec/update", "ms/update", "seconds/update")),
    "time_s": ("time", ("time", "training time", "train time", "total time", "wall time", "wall clock time",
                        "epoch time", "time/epoch", "run time", "runtime", "duration", "elapsed time", "elapsed",
                        "wall clock", "epoch", "train", "training", "total", "training time/epoch",
                        "train time/epoch", "total training time", "total train time", "total time cost",
                        "pre training time", "total pre training time")),
    "token_rate": ("number", ("tokens/s", "tok/s", "total tokens/s", "global tokens/s")),
    "device_token_rate": ("number", ("tokens/s/gpu", "tok/s/gpu", "tokens/gpu/s", "tgs", "tps/gpu")),
    "sample_rate": ("number", ("samples/s", "sequences/s", "images/s", "img/s", "seq/s", "train samples/s")),
    "step_rate": ("number", ("steps/s", "it/s", "iter/s", "iters/s", "iterations/s")),
    "rate": ("number", ("throughput",)),
    "mfu": ("share", ("mfu",)),
    "tflops": ("number", ("tflops", "tflop/s", "tflops/gpu", "tflop/s/gpu", "tflops/s/gpu", "tflops/s")),
    "speedup": ("factor", ("speedup", "speed up", "relative speed", "rel speed", "relative throughput", "relative",
                           "gain", "x", "acceleration", "faster by", "s(p)", "s(n)")),
    "efficiency": ("share", ("efficiency", "scaling efficiency", "parallel efficiency", "eff.", "eff", "scaling eff.",
                             "scaling eff", "parallel eff", "weak scaling efficiency", "strong scaling efficiency",
                             "e(p)", "e(n)")),
    "val_loss": ("number", ("val loss", "val. loss", "validation loss", "eval loss", "test loss", "bpb", "val bpb",
                            "bits/byte")),
    "perplexity": ("number", ("ppl", "perplexity", "val ppl", "validation perplexity", "test ppl", "eval ppl",
                              "valid perplexity")),
    "train_loss": ("number", ("loss", "train loss", "training loss", "final loss", "final train loss")),
    # of what was trained: more is better, and less is
    "score": ("share", ("accuracy", "acc", "acc@1", "top 1", "top1", "top 1 acc", "top1 acc", "top 1 accuracy",
                        "top1 accuracy", "val acc", "val accuracy", "validation accuracy", "test acc", "test accuracy",
                        "eval accuracy", "bleu", "map", "m ap", "box map", "box ap", "miou", "m io u", "iou", "io u",
                        "psnr", "f1", "rouge l", "mmlu", "hellaswag", "hella swag", "auc", "gsm8k",
                        "lambada", "eval score", "win rate")),
    "error": ("share", ("wer", "cer", "fid", "error rate", "top 1 error", "top1 error", "val error", "rmse", "mae")),
}  # fmt: skip
# what else a row says, in words: name -> its headings
WORDS: dict[str, tuple[str, ...]] = {
    STRATEGY: ("strategy", "method", "parallelism", "parallel strategy", "run type", "approach", "framework",
               "technique", "configuration", "config", "setup", "setting", "experiment", "variant", "mode", "run",
               "name", "optimization", "optimizer", "attention", "implementation", "algorithm", "kernel", "backend",
               "stack", "layout"),
    MODEL: ("model", "model size", "model name", "network", "architecture"),
    PRECISION: ("precision", "dtype", "data type", "datatype", "training precision"),
    DEVICE: ("gpu type", "gpu model", "hardware", "device type", "accelerator type", "gpu", "device", "accelerator",
             "machine"),
    COMPILED: ("compile", "torch.compile", "compiled"),
    RECOMPUTED: ("activation checkpointing", "gradient checkpointing", "recompute", "recomputation",
                 "activation recomputation"),
    DATA: ("dataset", "data"),
    PASS: ("pass", "phase", "workload", "task"),
    INSTRUMENTS: ("profiler", "profiling", "instrumentation", "torch profiler", "profiler enabled", "debug", "nsys",
                  "anomaly detection", "detect anomaly", "cuda launch blocking"),
    WARM_UP: ("warmup", "warm up", "warmup steps", "warm up steps", "warmup iters", "warmup iterations",
              "warmup excluded", "warm up excluded", "incl. warmup", "includes warmup", "warmup included"),
    RESOLUTION: ("resolution", "image size", "img size", "input size", "image resolution", "input resolution", "crop",
                 "train res", "train resolution", "res"),
}  # fmt: skip
RATES = ("token_rate", "device_token_rate", "sample_rate", "step_rate", "rate")
TIMES = ("step_s", "time_s")
RESULTS = ("step_s", "time_s", "token_rate", "device_token_rate", "sample_rate", "step_rate", "rate", "mfu", "tflops",
           "speedup", "efficiency")  # fmt: skip
# what counts devices beside a speed-up; elsewhere workers load data, as num_workers of a DataLoader always do
COMPUTE = ("workers", "cpus", "cores", "processes", "procs", "nprocs", "threads")
# what a row may say in its words; a quantity or a setting -> its value in a group
_DEVICES = (
    r"A100|H100|H200|H800|A800|V100|P100|T4|L4|L40S?|A10G?|A40|B200|GB200|(?:RTX ?)?A[456]000|RTX ?\d{4}(?: ?Ti)?"
    r"|MI\d{3}X?"
)
_COUNT = r"\d{1,3}(?:,\d{3})+|\d{1,6}"
IN_WORDS = {
    name: re.compile(pattern, re.I)
    for name, pattern in {
        "devices": rf"(?<![\d,.])({_COUNT})[ -]?(?:x ?)?(?:gpus?|devices?|ranks?)\b"
        rf"|(?<![\d,.-])({_COUNT}) ?(?:x ?)?(?:{_DEVICES})\b|\b(single|one) (?:nvidia )?(?:gpu|{_DEVICES})\b"
        r"|\bv[2-6][ep]?-(\d{1,5})\b",  # a slice of TPUs
        "dp": r"\bdp ?=? ?(\d{1,5})\b",
        "tp": r"\btp ?=? ?(\d{1,5})\b",
        "pp": r"\bpp ?=? ?(\d{1,5})\b",
        "micro_batch": r"\b(?:mbs|micro[- ]?batch(?:[- ]size)?) ?=? ?(\d{1,6})\b",
        "batch": r"\b(?:gbs|global[- ]batch(?:[- ]size)?) ?=? ?(\d{1,7})\b",
        "any_batch": r"\b(?:bs|batch(?:[- ]size)?) ?=? ?(\d{1,7})\b",
        "length": r"\b(?:seq(?:[- ]?len(?:gth)?)?|sequence(?:[- ]length)?|context(?:[- ]length)?) ?=? ?(\d{2,7}k?)\b",
        MODEL: r"\b((?:depth|layers|hidden|d_model|n_layer|n_embd) ?=? ?\d{1,6})\b|\b(\d{1,5} layers)\b"
        r"|\b(\d+(?:\.\d+)?[MB](?: params| parameters)?)\b"
        r"(?! ?(?:samples|images|tokens|steps|sequences|examples|docs|\d{1,2} ?s\b))",
        PRECISION: r"\b(fp32|tf32|fp16|bf16|bfloat16|float16|float32|fp8|amp)\b",
        DEVICE: rf"\b({_DEVICES})\b",
        "nodes": r"(?<![\d,.])(\d{1,5})[ -]?nodes?\b",
        STATUS: r"(?<!than )(?<!as )\b(expected|projected|predicted|estimated|estimate|theoretical|extrapolated"
        r"|simulat(?:ed|or|ion)|fitted|modell?ed|planned|not (?:been )?(?:run|measured)|roofline|est(?=\.|\))"
        r"|assum(?:es|ed|ing) (?:linear|perfect|ideal)|cost model|vendor|(?:data|spec) ?sheet|marketing|press release"
        r"|keynote|placeholder|ETA|(?:time|rate)s? scales?|scaled (?:up|linearly|from|the (?:time|rate)s?)"
        r"|run times (?:\w+ight|t\w+|four|\d+)|haven't (?:had|run|measured)|stopped after (?:step|iteration)"
        r"|from (?:the|their) (?:paper|blog|slides|docs))\b",
        INSTRUMENTS: r"(?<!no )(?<!without )(?<!without a )(?<!w/o )\b((?:torch\.)?profil(?:er|ing|ed)"
        r"(?! (?:is |was |were )?(?:off|disabled|not))|nsys"
        r"|nsight(?: systems| compute)?|wall_clock_breakdown|cuda_launch_blocking|(?:autograd )?anomaly detection"
        r"|detect_anomaly|debug mode)\b",
        WARM_UP: r"([^|.;\n]{0,60}\b(?:(?<!window )(?<!len )(?<!lr )(?<!rate )warm-?ups?|warmed up"
        r"|compilation|compile time|first epoch|cold start)\b"
        r"[^|.;\n]{0,60}|\b(?:in|ex)cl(?:ud\w+|\.)[^|.;\n]{0,40}\b(?:data ?load\w*|start-?up|set-?up|initiali[sz]ation"
        r"|validation|evaluation|(?<!gradient )(?<!activation )checkpoint(?:s|ing)?|(?:data|disk) cach(?:e|ing))\b)",
        RESOLUTION: r"\b(\d{2,4}) ?px\b|\bimages? (?:of )?(\d{2,4}) ?x ?\d{2,4}\b",
        RECOMPUTED: r"(?<!without )(?<!no )(?<!w/o )\b((?:activation|gradient)[- ]checkpointing|recompute)\b",
        PASS: r"\b(forward[- ]only|inference)\b",
        DATA: r"\b(synthetic)\b",
        COMPILED: r"\b(torch\.compile|compiled)\b",
    }.items()
}  # fmt: skip
OF_ONE_ROW = (STATUS, INSTRUMENTS, WARM_UP)  # what any cell may say, or a note on the row
SHORTEST_NAME = 3  # characters, of a row in a text
OF_NAMES = r"[a-z][\w+-]{3,}"  # words of a name that may stand for it
# what a sentence beside a table may say of all its rows
OF_ALL_ROWS = (MODEL, PRECISION, DEVICE, "devices", "length", "batch", "any_batch", "micro_batch")
OF_TIME_ALONE = ("epoch", "train", "training", "total")  # headings that are a time only with its unit
WORD_OF = {heading: name for name, headings in WORDS.items() for heading in headings}
# a heading's unit, where its words are not known: of a rate, or of a time
_OF_RATE = re.compile(
    r"(?:^|[\W_])([a-z]{2,12})"
    r"(?: ?/ ?| per |_per_)(s(?:ec(?:ond)?)?s?|min(?:ute)?)(?![a-z])"
    r"|(?:^|[\W_])(im(?:age|g)s?|tok(?:en)?s?|samples?|seqs?)_s(?![a-z])"
)
_OF_TIME = re.compile(rf"(?:^|[^\w/]|_)({'|'.join(SECONDS)})(?![a-z0-9])")
_EFFECTIVE = re.compile(r"(?i)\(=? ?(\d[\d,]{0,8}) (?:effective|global|in all|total)\)")
_OF_LINKS = re.compile(r"(?i)\b(?:\d+ ?gbe|\d+ ?gbit\S*|infiniband|ethernet|roce|efa|nvlink)\b")
_TO_A_LOSS = re.compile(
    r"(?i)\b(?:to|until|reach\w*) (?:a |the |the same )?(?:[\d.]+ )?(?:val\w*|eval\w*|target)?[. ]*"
    r"(?:loss|perplexity)\b"
)
_TO_A_TARGET = re.compile(r"(?i)(?:time|hours|minutes) to (?:target|solution|accuracy|quality|convergence)\b")
# headings that begin so, the longer ones first
_CHINESE = {
    "GPU数": "gpus",
    "显卡数": "gpus",
    "卡数": "gpus",
    "训练时间": "training time",
    "训练耗时": "training time",
    "时间": "time",
    "耗时": "time",
    "加速比": "speedup",
    "加速效率": "efficiency",
    "效率": "efficiency",
    "吞吐量": "throughput",
    "吞吐": "throughput",
    "批大小": "batch size",
    "批次大小": "batch size",
    "相对速度": "speed",
    "准确率": "accuracy",
    "精度": "accuracy",
}
_OF_NO_RUN = re.compile(
    r"price|cost|(?:gpu|node|core)[- ]?h|[$€]|usd|\bmem|\bload|compil|inference|latency|start|\bwait|\bsav(?:e|ing)\b"
    r"|per param"
)
_HEADING = {heading: quantity for quantity, (_, headings) in QUANTITIES.items() for heading in headings}


@dataclass(frozen=True)
class Column:
    heading: str
    quantity: str | None  # a key of QUANTITIES
    figures: tuple[Figure | None, ...]  # one for each row
    texts: tuple[str, ...]
    word: str | None = None  # a key of WORDS, of a column without figures
    is_of_words: bool = False  # no column of the table: read from the words of its rows
    is_by_unit: bool = False  # its words are not known; the only column with such a unit


@dataclass(frozen=True)
class Grid:
    """The columns of one table, with the line of each row."""

    lines: tuple[int, ...]
    columns: tuple[Column, ...]
    is_to_a_loss: bool  # the text says that the times are to one loss
    footnotes: tuple[str, ...]  # of each row
    notes: tuple[str, ...]  # of each row, what its footnotes and other sentences say of it alone
    warning: str = ""  # a sentence of the page that its figures were not measured
    scaling: str = ""  # "weak" or "strong", where the text or a heading says one of them

    def column(self, quantity: str) -> Column | None:
        return next((column for column in self.columns if column.quantity == quantity), None)

    def figure(self, quantity: str, row: int) -> Figure | None:
        column = self.column(quantity)
        return column.figures[row] if column else None

    def name(self, row: int) -> str:
        """Return the words of a row's first cell; "" where that is a figure."""
        first = self.columns[0]
        return "" if first.figures[row] or first.is_of_words else first.texts[row].lower()

    @cached_property
    def names(self) -> dict[str, tuple[int, ...]]:
        """Return what a text may call rows, longer names first: the first cell, or "8 gpus" where that is a count."""
        found: dict[str, tuple[int, ...]] = {}
        for row in range(len(self.lines)):
            names = {self.name(row), re.sub(r"\s*\([^()]*\)", "", self.name(row)).strip(), *self._counted(row)}
            for name in names:
                if len(name) >= SHORTEST_NAME and re.search("[a-z]", name):
                    found[name] = (*found.get(name, ()), row)
        return dict(sorted(found.items(), key=lambda each: -len(each[0])))

    @cached_property
    def own_words(self) -> dict[str, int]:
        """Return the row of each word that the first cell of this row alone has."""
        words = [{*re.findall(OF_NAMES, self.name(row))} for row in range(len(self.lines))]
        count = Counter(word for each in words for word in each)
        return {word: row for row, each in enumerate(words) for word in each if count[word] == 1}

    def _counted(self, row: int) -> set[str]:
        first, text = self.columns[0].heading.lower(), self.columns[0].texts[row]
        if not re.fullmatch(r"\d{1,5}", text) or not re.fullmatch(r"[a-z]{3,12}s", first):
            return set()
        one = first.removesuffix("s")
        return {f"{text} {first}", f"{text} {one}", *([f"one {one}", f"single {one}"] if text == "1" else [])}


def grid_of(table: Table, named: Mapping[str, str]) -> Grid:
    """Return the columns of a table, by their headings or as `named` names them."""
    headings = [plain(heading) for heading in table.header]
    chosen = {heading: quantity for quantity, heading in named.items() if heading in headings}
    is_of_speed = any(quantity_of(heading) in (*RESULTS, "devices", "nodes") for heading in headings)
    is_of_ratios = any(quantity_of(heading) in ("speedup", "efficiency") for heading in headings)
    columns = []
    taken: set[str] = {*named}
    for index, heading in enumerate(headings):
        cells = [row.cells[index] for row in table.rows]
        quantity = chosen.get(heading) or quantity_of(heading)
        if quantity is None and _is_ratio_to(heading, cells, is_of_speed):
            quantity = "speedup"
        if quantity is None and is_of_ratios and _canonical(heading)[0] in COMPUTE and "num_" not in heading:
            quantity = "devices"
        if quantity in ("score", "error") and not _is_a_score(heading, quantity, cells):
            quantity = None
        if heading not in chosen and quantity in taken:
            quantity = None  # of two columns with one quantity nothing says which is meant
        column = _column(heading, quantity, cells)
        name, unit = _canonical(heading) if len(heading) <= LONGEST else ("", "")
        word = WORD_OF.get(name) if unit != "%" else None
        if name == "network" and any(map(_OF_LINKS.search, cells)):
            word = None
        if word and word not in taken and not any(column.figures):
            column, quantity = Column(heading, None, column.figures, column.texts, word), word
        taken |= {quantity} if quantity else set()
        columns.append(column)
    for quantity, text in named.items():
        if text not in headings:
            columns.append(_column(f"{quantity}={text}", quantity, [text] * len(table.rows)))
    columns = _by_units(columns)
    footnotes = tuple(row.footnote for row in table.rows)
    notes = tuple(f"{row.footnote} {row.said}".strip() for row in table.rows)
    columns += _said_in_words(columns, taken, notes)
    columns += _said_around(table, columns)
    is_to_a_loss = _TO_A_LOSS.search(table.around) is not None or any(map(_TO_A_TARGET.match, headings))
    lines = tuple(row.line for row in table.rows)
    scaling = only(re.compile(r"\b(weak|strong)[ _-]scal"), f"{' '.join(headings)} {table.around}".lower()) or ""
    return Grid(lines, tuple(columns), is_to_a_loss, footnotes, notes, warning_in(table.around), scaling)


def _is_a_score(heading: str, quantity: str, cells: Sequence[str]) -> bool:
    """Return whether a column has scores, and no differences of them, another direction, or whole numbers alone, as
    `acc` of accumulation has."""
    is_difference = re.search(r"(?i)\bvs\b|\bover\b|relative|delta|\bgain|\bdrop|change", heading) is not None
    arrow = "\N{DOWNWARDS ARROW}" if quantity == "score" else "\N{UPWARDS ARROW}"
    are_counts = "%" not in heading and all(re.fullmatch(r"\d*|-+", plain(cell)) for cell in cells)
    return not (is_difference or arrow in heading or are_counts)


def by_unit(heading: str) -> tuple[str, float, str] | None:
    """Return quantity, seconds of its unit, and the text of the unit of a heading whose words are not known."""
    name = heading.lower()[:LONGEST]
    if _OF_NO_RUN.search(name):
        return None
    if rate := _OF_RATE.search(name):
        is_of_one = re.search(r"(?:/|per )(?:gpu|device|rank)", name) is not None
        token = "device_token_rate" if is_of_one else "token_rate"
        what = (rate[1] or rate[3]).lstrip("km")[:3]
        scale = 1 / 60 if (rate[2] or "").startswith("min") else 1.0
        kinds = {"tok": token, "it": "step_rate", "its": "step_rate", "ste": "step_rate", "ite": "step_rate"}
        return kinds.get(what, "device_token_rate" if is_of_one else "sample_rate"), scale, rate[0]
    if time := _OF_TIME.search(name):
        return ("step_s" if re.search("step|iter", name) else "time_s"), SECONDS[time[1]], time[0]
    return None


def _by_units(columns: Sequence[Column]) -> list[Column]:
    """Return the columns, and the only one with a unit of rates, or of times, as one where none is known."""
    known = {column.quantity for column in columns}
    found = list(columns)
    for group in (RATES, TIMES):
        units = [(at, unit) for at, column in enumerate(columns) if not column.quantity and not column.word
                 and (unit := by_unit(column.heading)) and unit[0] in group]  # fmt: skip
        units = [unit for unit in units if unit[1][1] >= 1] or units if group == RATES else units  # not of a minute
        if len(units) == 1 and not known & {*group}:
            at, (quantity, seconds, _) = units[0]
            read = _column(columns[at].heading, quantity, columns[at].texts, seconds)
            found[at] = replace(read, is_by_unit=True)
    return found


def _said_in_words(columns: Sequence[Column], taken: set[str], notes: Sequence[str]) -> list[Column]:
    """Return a column for each quantity or setting that the words of some rows name: DP=16, 8 GPUs, 4x A100, bf16.

    `notes` say whether a row was measured as the others were.
    """
    found = []
    of_all = _rows_of(columns)
    of_words = _rows_of([
        column for column in columns
        if column.quantity is None and not re.search("train(?:ed|able)|active|updated", column.heading.lower())
    ])  # fmt: skip
    for name, pattern in IN_WORDS.items():
        if name in OF_ONE_ROW:
            texts = (f"{row} | {note}" for row, note in zip(of_all, notes, strict=True))
            cells = [match[1].strip() if (match := pattern.search(text)) else "" for text in texts]
        else:
            cells = [only(pattern, row) or "" for row in (of_all if name == DEVICE else of_words)]
        if name in taken or not any(cells):
            continue
        column = _column(f"{name} in the row's words", name if name in QUANTITIES else None, cells)
        found.append(replace(column, word=None if name in QUANTITIES else name, is_of_words=True))
    return found


def _said_around(table: Table, columns: Sequence[Column]) -> list[Column]:
    """Return the settings of all rows, as columns, that the paragraph above or below the table gives: "all in bf16".

    A setting with several values in the text, or with a column of the table, is left out.
    """
    taken = {column.quantity or column.word for column in columns}
    around = table.around.translate(SIGNS)
    found = []
    for name in OF_ALL_ROWS:
        if name not in taken and (text := only(IN_WORDS[name], around)):
            column = _column(f"{name} in the text", name if name in QUANTITIES else None, [text] * len(table.rows))
            found.append(replace(column, word=None if name in QUANTITIES else name, is_of_words=True))
    return found


def _rows_of(columns: Sequence[Column]) -> list[str]:
    rows = (" | ".join(cells)[: 4 * LONGEST] for cells in zip(*(column.texts for column in columns), strict=True))
    return list(map(_multiplied, rows))


def _multiplied(text: str) -> str:
    """Return a text with the devices of several nodes in one number: 2 x 8 A100 are 16 A100."""
    nodes = rf"(?<![\w.,])(\d{{1,4}}) ?x ?(\d{{1,2}}) ?x? ?(?=(?:nvidia )?(?:{_DEVICES}|gpus?\b))"
    return re.sub(nodes, lambda two: f"{int(two[1]) * int(two[2])} ", text, flags=re.I)


def only(pattern: re.Pattern[str], text: str) -> str | None:
    """Return what a pattern finds in a text, its first group that took part; None: nothing, or several values."""
    found = {next(group for group in match.groups() if group) for match in pattern.finditer(text)}
    return found.pop() if len(found) == 1 else None


def quantity_of(heading: str) -> str | None:
    """Return the quantity that a heading names without doubt; None: another one, or one that has to be guessed."""
    if len(heading) > LONGEST:
        return None
    name, unit = _canonical(heading)
    if f"{name}({unit})" in _HEADING:
        return _HEADING[f"{name}({unit})"]
    name = name if name in _HEADING else re.sub(r"^(?:avg\.?|average|mean|median|measured|achieved|overall) ", "", name)
    name = re.sub(rf"^(?:{_DEVICES.lower()}) (?=gpus?$)", "", name)
    name = "gpus" if re.fullmatch(rf"(?:number of |of )?(?:{_DEVICES.lower()})s", name) else name
    if name not in _HEADING and not unit:  # train hours, and not GPU hours
        words = _with_unit_behind(name)
        name, unit = words if QUANTITIES.get(_HEADING.get(words[0], ""), ("time",))[0] == "time" else (name, unit)
    if name in ("step", "iter", "iteration") and unit in SECONDS:
        return "step_s"
    name = re.sub(r"(?<=[a-z]) [bm]$", "", name.rstrip(".")) if name not in _HEADING else name  # tokens_trained_b
    name = name if name in _HEADING else re.sub(r"^(?:final|best|max\.?) ", "", name.replace("valid. ", "valid "))
    if name not in _HEADING:  # test-clean WER
        quality = re.fullmatch(
            r"(?:val\w*|eval\w*|test|dev|test clean|dev clean) (wer|cer|ppl|perplexity|f1|bleu)", name
        )
        name = quality[1] if quality else name
    if (name in OF_TIME_ALONE and unit not in SECONDS) or (unit == "%" and _HEADING.get(name) == "devices"):
        return None
    if re.fullmatch("throughput|rate|(training |train )?(speed|time)", name) and unit in _HEADING:
        return _HEADING[unit]
    return _HEADING.get(name)


def _with_unit_behind(name: str) -> tuple[str, str]:
    """Return a heading that ends with a unit of time, and the unit: "train hours"; "seconds" alone is a time."""
    first, _, last = name.rpartition(" ")
    return (first or "time", last) if last in SECONDS else (name, "")


def _is_ratio_to(heading: str, cells: Sequence[str], is_of_speed: bool) -> bool:
    """Return whether a column is a speed-up by its form: headed "vs 1 GPU" or "Speed", and its figures end with x."""
    if len(heading) > LONGEST:
        return False
    is_speed = _canonical(heading)[0] in ("speed", "training speed", "scaling")
    of_one = is_of_speed and re.match(r"(?:vs\.?|versus|relative to) ", heading.lower().replace("_", " ")) is not None
    figures = [cell for cell in map(plain, cells) if re.search(r"\d", cell)]
    is_factor = all(re.match(r"~? ?\d+(?:[.,]\d+)?(?:-\d+(?:\.\d+)?)? ?x\b", figure) for figure in figures)
    is_factor |= (
        of_one
        and "1" in {figure.rstrip("0").rstrip(".") for figure in figures}
        and all(re.fullmatch(r"\d{1,3}[.,]\d+|\d", figure) for figure in figures)
    )
    return (of_one or is_speed) and bool(figures) and is_factor


def _canonical(heading: str) -> tuple[str, str]:
    """Return a heading in the words of QUANTITIES, and what stands behind it in brackets."""
    for chinese, words in _CHINESE.items():
        if heading.startswith(chinese):
            heading = words + heading.removeprefix(chinese).translate({0xFF08: "(", 0xFF09: ")"})
            break
    if re.match(r"[A-Za-z]+(?: ?[(\[]|$)", heading):  # GlobalBatchSize
        heading = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=GPU)(?=[A-Z][a-z])", " ", heading)
    name = " ".join(re.sub(r"[*`#_\N{UPWARDS ARROW}\N{DOWNWARDS ARROW}-]", " ", heading).lower().split())
    name = re.sub(r"^(?:time|days|hours) to (?:train|[\d.]+[mbt] tokens)", "time", name)
    name = re.sub(r"^(?:time|hours|minutes) to (?:target|solution|accuracy|quality|convergence)\b", "time", name)
    name = re.sub(r"(?<=\w)( @ ?\w[\w. ]{0,30}| (?:vs\.?|over|relative to|compared to) .{1,40})(?=$| ?[(\[])", "", name)
    name = re.sub(r"^(no\.|num|number|total number|total|n)( of)? (?=gpu|device|rank|worker|acc|node)", "", name)
    name = re.sub(r"^of (?=gpu|device|rank)", "", name)
    name = re.sub(r" ?(/| per ) ?", "/", re.sub(r"^[km] ?(?=tok)", "", name))
    name = re.sub(r"/(sec|second|secs)\b", "/s", name)
    name = re.sub(r"/(device|accelerator|rank|card|chip)\b", "/gpu", name)
    match = re.fullmatch(r"(.*?) ?[(\[](.*)[)\]]", name)
    return (match[1], match[2]) if match else (name, "")


def _is_of_one(text: str) -> bool:
    return re.search(r"(?i)(?:/|\bper )\s?(?:gpu|device|rank|card)\b", text) is not None


def _column(heading: str, quantity: str | None, cells: Iterable[str], seconds: float | None = None) -> Column:
    texts = tuple(plain(cell) for cell in cells)
    if quantity is None:
        return Column(heading, None, (None,) * len(texts), texts)
    if quantity == "speedup" and re.search("(?i)faster|gain|improve", heading):
        texts = tuple(re.sub(r"^(?=\d[\d.]* ?%$)", "+", text) for text in texts)
    if quantity == "length":  # 2k tokens are 2,048
        texts = tuple(re.sub(r"^(1|2|4|8|16|32|64|128)[kK]$", lambda n: str(1024 * int(n[1])), text) for text in texts)
    read = texts
    if quantity == "devices":  # 4x A100
        read = tuple("1" if text.lower() in ("single", "one") else _multiplied(text) for text in texts)
        read = tuple(re.sub(rf"^(\d{{1,5}}) ?x? ?(?:{_DEVICES}).*$", r"\1", text, flags=re.I) for text in read)
    if quantity in ("batch", "any_batch"):  # 64 per GPU (128 effective)
        read = tuple(whole[1] if (whole := _EFFECTIVE.search(text)) else text for text in read)
    kind, (name, unit) = QUANTITIES[quantity][0], _canonical(heading)
    is_in_ms = kind == "time" and re.match(r"ms/|.* ms$", name) is not None
    unit = "ms" if is_in_ms else unit or _with_unit_behind(name)[1]
    unit = unit.removesuffix("/iter").removesuffix("/step").removesuffix("/it")
    scale = SECONDS.get(unit, 1.0) if kind == "time" else 0.01 if "%" in heading and kind == "share" else 1.0
    scale = scale if seconds is None else seconds
    if kind == "number" and (times := re.search(r"(?i)(?:_([bm])|\(([bm])\))$", heading)):
        scale *= SUFFIXES[(times[1] or times[2]).lower()]
    if thousands := re.search(r"(?i)(?:^|[\W_])([km]) ?tok", heading):
        scale *= SUFFIXES[thousands[1].lower()]
    figured = [text for text in read if re.search(r"\d", text)]
    if quantity in RATES and 0 < sum(map(_is_of_one, figured)) < len(figured):  # one cell is of a GPU, another of all
        read = tuple("" if _is_of_one(text) else text for text in read)
    last = last_place(read)
    figures = [figure_of(text, kind, scale, last) for text in read]
    if kind == "share" and scale == 1 and not any("%" in text for text in texts):
        scale = 0.01 if any(figure and figure.value > 1.5 for figure in figures) else 1.0  # of percent without its sign
        figures = [figure_of(text, kind, scale, last) for text in texts]
    return Column(heading, quantity, tuple(figures), texts)
