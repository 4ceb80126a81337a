"""Hold what a row, or a sentence beside a table, may say in words: DP=16, 4x A100, bs 8, bf16, projected."""

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

# what a row may say in its words; a quantity or a setting -> its value in a group
# also of CPUs, which no row counts as devices
PROCESSORS = (
    r"(?:Apple )?M[1-4](?: (?:Pro|Max|Ultra))?(?: Mac(?:Book)?| CPU| GPU)|Apple M[1-4](?: (?:Pro|Max|Ultra))?"
    r"|(?:\d{1,3}-(?:core|thread) )CPU|Xeon|EPYC|Threadripper|Ryzen|Core i\d"
)
DEVICES = (
    r"A100|H100|H200|H800|A800|V100|P100|T4|L4|L40S?|A10G?|A40|B200|GB200|(?:RTX ?)?A[456]000|RTX ?\d{4}(?: ?Ti)?"
    r"|MI\d{3}X?"
)
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
        "micro_batch": r"\b(?:mbs|micro[- ]?batch(?:[- ]size)?) ?=? ?(\d{1,6})\b",
        "batch": r"\b(?:gbs|global[- ]batch(?:[- ]size)?) ?=? ?(\d{1,7})\b",
        "any_batch": r"\b(?:bs|batch(?:[- ]size)?)(?: of|[=:])? ?(\d{1,7})\b",
        "val_loss": r"\bval\w*\.?[ -]loss ?[=:]? ?(\d{1,2}\.\d{2,5})\b",
        "length": r"\b(?:seq(?:[- ]?len(?:gth)?)?|sequence(?:[- ]length)?|context(?:[- ]length)?) ?=? ?(\d{2,7}k?)\b",
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
OF_ONE_ROW = (STATUS, INSTRUMENTS, WARM_UP)  # what any cell may say, or a note on the row
# what a sentence beside a table may say of all its rows
OF_ALL_ROWS = (MODEL, PRECISION, DEVICE, "devices", "length", "batch", "any_batch", "micro_batch")


def only(pattern: re.Pattern[str], text: str) -> str | None:
    """Return what a pattern finds in a text, its first group that took part; None: nothing, or several values."""
    found = {next(group for group in match.groups() if group) for match in pattern.finditer(text)}
    return found.pop() if len(found) == 1 else None
