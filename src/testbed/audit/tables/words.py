"""Hold what a row, or a sentence beside a table, may say in words: DP=16, 4x A100, bs 8, bf16, projected.

A row writes "bs=8", a sentence "a batch size of sixteen": BEFORE has the words of both, IN_WORDS the forms of a row,
and IN_SENTENCES those of a sentence.
"""

from __future__ import annotations

import re

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
    WARM_UP,
)

# also of CPUs, which no row counts as devices
PROCESSORS = (
    r"(?:Apple )?M[1-4](?: (?:Pro|Max|Ultra))?(?: Mac(?:Book)?| CPU| GPU)|Apple M[1-4](?: (?:Pro|Max|Ultra))?"
    r"|(?:\d{1,3}-(?:core|thread) )CPU|Xeon|EPYC|Threadripper|Ryzen|Core i\d"
)
DEVICES = (
    r"A100|H100|H200|H800|A800|V100|P100|T4|L4|L40S?|A10G?|A40|B200|GB200|(?:RTX ?)?A[456]000|RTX ?\d{4}(?: ?Ti)?"
    r"|MI\d{3}X?"
)
WORDS = {word: number for number, word in enumerate(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
)} | {"single": 1, "thirty-two": 32, "sixty-four": 64}  # fmt: skip
NUMBER = rf"(\d[\d,]*(?:\.\d+)?k?|{'|'.join(WORDS)})"  # of a sentence
_EACH = r"(?:gpu|device|card|rank|worker)"
# quantity -> what stands before its number, and the number as a row writes it
BEFORE = {
    "micro_batch": (r"mbs|micro[- ]?batch(?:[- ]size)?", r"\d{1,6}"),
    "batch": (r"gbs|global[- ]batch(?:[- ]size)?", r"\d{1,7}"),
    "any_batch": (r"bs|batch(?:[- ]size)?", r"\d{1,7}"),
    "val_loss": (r"(?:val\w*|eval\w*|test)[. -]+loss", r"\d{1,2}\.\d{2,5}"),
    "length": (r"(?:seq|sequence|context)(?:[- ]?len(?:gth)?)?", r"\d{2,7}k?"),
}
_COUNT = r"\d{1,3}(?:,\d{3})+|\d{1,6}"
_OF_JOB = r"(?!(?:[ -]?\d+ ?GB)?s? ?(?:per|/|in (?:each|every|one)) ?(?:node|machine|host|server))"
IN_WORDS = {
    name: re.compile(pattern, re.I)
    for name, pattern in {
        "devices": rf"(?<![\d,.])({_COUNT})[ -]?(?:x ?)?(?:gpus?|devices?|ranks?)\b{_OF_JOB}"
        rf"|(?<![\d,.-])({_COUNT}) ?(?:x ?)?(?:{DEVICES})\b{_OF_JOB}|\b(single|one) (?:nvidia )?(?:gpu|{DEVICES})\b"
        r"|\bv[2-6][ep]?-(\d{1,5})\b",  # a slice of TPUs
        "dp": r"\bdp ?=? ?(\d{1,5})\b",
        "tp": r"\btp ?=? ?(\d{1,5})\b",
        "pp": r"\bpp ?=? ?(\d{1,5})\b",
        **{name: rf"\b(?:{words})(?: of| ?[=:])? ?({number})\b(?!,\d)" for name, (words, number) in BEFORE.items()},
        MODEL: r"\b((?:depth|layers|hidden|d_model|n_layer|n_embd) ?=? ?\d{1,6})\b|\b(\d{1,5} layers)\b"
        r"|\b(\d+(?:\.\d+)?[MB](?: params| parameters)?)\b"
        r"(?! ?(?:samples|images|tokens|steps|sequences|examples|docs|\d{1,2} ?s\b))",
        PRECISION: r"\b(fp32|tf32|fp16|bf16|bfloat16|float16|float32|fp8|amp)\b",
        DEVICE: rf"\b({DEVICES}|{PROCESSORS})\b|(?<=\()(CPU)(?=\))",
        "nodes": r"(?<![\d,.])(\d{1,5})[ -]?nodes?\b",
        STATUS: r"(?<!\bthan )(?<!\bas )\b(expected|projected|predicted|estimated?|theoretical|extrapolated"
        r"|simulat(?:ed|or|ion)|modell?ed|planned|not (?:been )?(?:re-?)?(?:run|measured)|roofline|est(?=\.|\))"
        r"|placeholder|ETA"
        r"|(?<=is )(?:stale|outdated)|(?<=are )(?:stale|outdated)"
        r"|assum(?:es|ed|ing) [^.;|]{0,30}\b(?:linear|perfect|ideal|efficiency|scaling)|cost model|(?:data|spec) ?sheet"
        r"|scaled (?:up|linearly|from)|from (?:the|their) (?:paper|blog|slides|docs)"
        r"|(?:from|in|by) their (?:own )?(?:paper|readme|repo\w*|report|website|authors)"
        r"|(?:copied|quoted|cited) from)\b",
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
_TOLD = {name: rf"\b(?:{words})(?: of| was| is| at)? {NUMBER}\b" for name, (words, _) in BEFORE.items()}
# how a sentence says them, in the order in which one is looked for
IN_SENTENCES = {
    name: re.compile(pattern, re.I)
    for name, pattern in {
        "batch": _TOLD["batch"],
        "micro_batch": rf"\b{NUMBER} (?:sequences|samples|images|examples) (?:per|on each|on every) {_EACH}\b"
        rf"|\bper[- ]{_EACH}[- ]?batch(?:[- ]size)?(?: of| was| is)? {NUMBER}\b|{_TOLD['micro_batch']}",
        "any_batch": _TOLD["any_batch"],
        "devices": rf"\b{NUMBER}[- ]?(?:x )?(?:{DEVICES}|gpus?|cards?|accelerators)s?\b|\bv[2-6][ep]?-(\d{{1,5}})\b",
        "nodes": rf"\b{NUMBER} (?:nodes?|machines?|hosts?)\b",
        "length": _TOLD["length"],
        "val_loss": rf"\b{BEFORE['val_loss'][0]}(?: of| was| is| at)? ({BEFORE['val_loss'][1]})\b",
    }.items()
}
OF_ONE_ROW = (STATUS, INSTRUMENTS, WARM_UP)  # what any cell may say, or a note on the row
# what a sentence beside a table may say of all its rows
OF_ALL_ROWS = (MODEL, PRECISION, DEVICE, "devices", "length", "batch", "any_batch", "micro_batch")


def only(pattern: re.Pattern[str], text: str) -> str | None:
    """Return what a pattern finds in a text, its first group that took part; None: nothing, or several values."""
    found = {next(group for group in match.groups() if group) for match in pattern.finditer(text)}
    return found.pop() if len(found) == 1 else None
