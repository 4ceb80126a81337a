"""Read what words say of a condition: DP=16, 4x A100, a batch of sixteen, projected.

FORMS has every condition once, for the cells of a row, a heading, a caption, a footnote, a sentence and the name of a
file alike.
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

PROCESSORS = r"(?:Apple )?M[1-4](?: (?:Pro|Max|Ultra))?(?: Mac(?:Book)?| CPU| GPU)|Xeon|EPYC|Ryzen|Core i\d"
DEVICES = (
    r"A100|H100|H200|H800|A800|V100|P100|T4|L4|L40S?|A10G?|A40|B200|GB200|(?:RTX ?)?A[456]000|RTX ?\d{4}(?: ?Ti)?"
    r"|MI\d{3}X?"
)
SIGNS = str.maketrans({
    "\N{MULTIPLICATION SIGN}": "x", "\N{EN DASH}": "-", "\N{EM DASH}": "-", "\N{MINUS SIGN}": "-",
    "\N{HYPHEN}": "-", "\N{NON-BREAKING HYPHEN}": "-", "\N{ALMOST EQUAL TO}": "~", "\N{NO-BREAK SPACE}": " ",
})  # fmt: skip
# machines of AWS -> their GPUs
INSTANCES = {
    "p3.16xlarge": (8, "V100"), "p3dn.24xlarge": (8, "V100"), "p4d.24xlarge": (8, "A100"), "p4de.24xlarge": (8, "A100"),
    "p5.48xlarge": (8, "H100"), "p5e.48xlarge": (8, "H200"), "p5en.48xlarge": (8, "H200"),
    "p6-b200.48xlarge": (8, "B200"), "g4dn.12xlarge": (4, "T4"), "g5.12xlarge": (4, "A10G"), "g5.48xlarge": (8, "A10G"),
    "g6.48xlarge": (8, "L4"), "g6e.48xlarge": (8, "L40S"),
}  # fmt: skip
_INSTANCE = re.compile(
    r"(?i)(?:(?<![\w.,])([\d,]{1,6})(?: nodes?,?(?: of)?| ?x)? ?)?(?:\b|(?<=x))(?:ml\.)?"
    rf"({'|'.join(map(re.escape, INSTANCES))})(?: ?x ?(\d{{1,4}})(?![\w.]))?\b"
)
WORDS = {word: number for number, word in enumerate(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
)} | {"single": 1, "a": 1, "thirty-two": 32, "sixty-four": 64}  # fmt: skip
_WORDS = "|".join(word for word in WORDS if len(word) > 1)
_COUNT = rf"(\d{{1,3}}(?:,\d{{3}})+|\d{{1,7}}|{_WORDS})"
NUMBER = rf"(\d[\d,]*(?:\.\d+)?[kK]?|{_WORDS})(?![.,]?\d)"  # of a sentence
_EACH = r"(?:gpu|device|card|rank|worker|process|accelerator|chip)"
_PER = r"(?:per|on each|on every|for each|a|each|in each)"
_SAMPLES = r"(?:sequences|samples|images|examples|sentences|clips|items)"
_IS = r"(?:[-_ ]?size)?(?: \(?tokens\)?)?(?: ?(?:of|was|is|at|to|with|from)| ?[=:])?(?: (?:only|just|about|up to))? ?"
_NODE = r"(?:node|machine|host|server|VM|instance)"
_OF_JOB = rf"(?!(?:[ -]?\d+ ?GB)?s? ?(?:per|/|a|in (?:each|every|one)) ?{_NODE}\b)"
_OF_EACH_NODE = rf"\b(?:each|every|all) {_NODE}s?"
_ENDS = (
    r"(?:end(?:s|ed)?|finish(?:es|ed)?|stop(?:s|ped)?|stood|stands?|converge[sd]?|levels?|settle[sd]?|reach(?:es|ed)?)"
)
# of a figure that was not measured where it stands
_FROM_ELSEWHERE = (
    r"(?:from|in|of|by) (?:the|their|its) (?:own )?(?:paper|blog|slides|docs|read ?me|website|authors|documentation)"
    r"|(?:copied|quoted|cited) (?:from|by|in)\b|(?:reported|taken) (?:from|by|in)\b(?! (?:\w+ log|logs?|our|this|one|\d"
    r"|the (?:log|best|last|median|mean|average|same|run|table|tool)|a (?:run|single)|both|all|each|\w+smi|wandb)\b)"
    r"|as reported|(?:from|of|on) (?:an|the) (?:old(?:er)?|earlier|previous) (?:run|release|version|commit|cluster"
    r"|machine|driver|post|measurement)|from last year|published (?:number|figure|value)s?"
)
# condition -> how it is said, its value in the first group that takes part
FORMS = {
    name: re.compile(pattern, re.I)
    for name, pattern in {
        "devices": rf"(?<![\w,.-]){_COUNT}[ -]?(?:x ?)?(?:(?:nvidia|amd) )?(?:gpus?|devices?|ranks?|accelerators?|cards"
        rf"|tpus?|chips|workers|(?:{DEVICES})s?)\b{_OF_JOB}"
        rf"|\b(single|one|a) (?:(?:nvidia|amd|single) )?(?:gpu|card|{DEVICES})\b"
        r"|\bv[2-6][ep]?-(\d{1,5})\b|\b(?:world[ _]size|nproc_per_node|num_gpus)[ =:]+(\d{1,5})\b",
        "per_node": rf"(?<![\w,.-]){_COUNT}[ -]?x? ?(?:nvidia )?(?:gpus?|devices|{DEVICES})s?(?:[ -]?\d+ ?GB)?"
        rf" ?(?:per|/|a|in each|on each) ?{_NODE}\b"
        rf"|{_OF_EACH_NODE} (?:has|have|with|holds?) {_COUNT} ?x? ?(?:nvidia )?(?:gpus?|devices|{DEVICES})s?\b",
        "dp": r"\bdp ?=? ?(\d{1,5})\b",
        "tp": r"\btp ?=? ?(\d{1,5})\b",
        "pp": r"\bpp ?=? ?(\d{1,5})\b",
        "nodes": rf"(?<![\w,.]){_COUNT}[ -]?{_NODE}s?\b",
        "micro_batch": rf"\b(?:mbs|micro[- ]?batch){_IS}{NUMBER}\b(?!,\d)"
        rf"|\b{NUMBER} {_SAMPLES}(?: of [\w,]+ tokens)? {_PER} {_EACH}\b"
        rf"|\bper[- ]{_EACH}[- ](?:micro[- ]?)?batch{_IS}{NUMBER}\b(?!,\d)"
        rf"|\bbatch{_IS}{NUMBER} {_PER} {_EACH}\b|\b(\d{{1,4}}) (?:per|on each) {_EACH}\b",
        "batch": rf"\b(?:gbs|(?:global|effective|total|overall)[- ]batch){_IS}{NUMBER}\b(?!,\d)"
        rf"|\b{NUMBER} {_SAMPLES} (?:per|a|in a|in each|each) (?:optimi[sz]er )?(?:step|update|iteration)\b",
        "any_batch": rf"\b(?:bs|bsz|(?:mini[- ]?)?batch(?:es)?){_IS}{NUMBER}\b(?!,\d)|(?<=[- ])b(\d{{2,5}})\b"
        r"|(?<![\w.-])(\d[\d,]*)-(?:sample|sequence|image) batch",
        "length": rf"\b(?:seq|sequences?|context|seq_?len|ctx)(?:[- _]?len(?:gth)?)?(?: of)?(?: size| window)?{_IS}"
        rf"(\d{{2,7}}k?)\b(?! {_SAMPLES})|\blength{_IS}(\d{{2,7}}k?)\b"
        r"|\b(\d{3,7}k?)[- ]token (?:sequences|context|samples)|\b(?:packed|truncated|padded|cut) to (\d{2,7}k?)\b",
        "val_loss": r"\bloss(?: \w+){0,3}?[ (=:~]+(\d{1,2}\.\d{1,5})\b(?! ?(?:x\b|%|times))"
        rf"|\b(\d\.\d{{2,5}}) (?:val\w*|eval\w*|test|final)(?: \w+)? loss"
        rf"|\b{_ENDS} (?:off )?(?:at|with|on) (\d\.\d{{1,5}})\b(?! ?(?:x\b|%|h\b))",
        "tokens": r"\b(\d+(?:\.\d+)?[BMT])[ -]tokens\b",
        MODEL: r"\b((?:depth|layers|hidden|d_model|n_layer|n_embd) ?=? ?\d{1,6})\b|\b(\d{1,5} layers)\b"
        r"|(?<!\d,)\b(\d+(?:\.\d+)?[MB](?: params| parameters)?)\b"  # 92,170M is memory
        r"(?! \w+ tokens\b)"
        r"(?![ -]?(?:training |more )?(?:samples|images|tokens|steps|sequences|examples|\d{1,2} ?s\b))",
        PRECISION: r"\b(fp32|tf32|fp16|bf16|bfloat16|float(?:8|16|32)|fp8|amp|(?:full|single|half|mixed) precision)\b",
        DEVICE: rf"\b({DEVICES}|{PROCESSORS})s?\b|(?<=\()(CPU)(?=\))",
        STATUS: r"(?<!\bthan )(?<!\bas )\b(expected|projected|projections|predict(?:ed|ions?)|estimat(?:ed?|ions?)"
        r"|theoretical(?! (?:peak|max|FLOP|(?:\w+ )?performance))|extrapolat(?:ed|ions?)|simulat(?:ed|or|ions?)"
        r"|modell?ed|TBD|\w+[- ]sim|\w+\.predict|sim\.\w+|(?:not|never)(?: yet)? (?:been )?"
        r"(?:re-?)?(?:run|measured)|roofline|est(?=\.|\))|placeholder|calculated|forecast(?! model)|hypothetical"
        r"|targeted|(?:cost|performance|analytic(?:al)?|alpha-beta|\u03b1-\u03b2) model|(?<=is )(?:stale|outdated)"
        r"|back[- ]of[- ]the[- ]envelope|fitted (?:model|curve|line)"
        r"|(?<=\| )(?:(?:(?:theoretical|hardware|vendor|spec|SXM|PCIe|dense) ){1,2}peak\b"  # of a cell
        r"|peak(?= ?(?:[|,]|T?FLOP)))"
        r"|assum(?:es|ed|ing) [^.;|]{0,30}\b(?:linear|perfect|ideal|efficiency|scaling)|(?:data|spec) ?sheet"
        rf"|scaled (?:up|linearly|from)|(?:linear|perfect|ideal) scaling (?:from|of)|{_FROM_ELSEWHERE})(?!\w)",
        INSTRUMENTS: r"\b((?:torch\.)?(?<!memory )profil(?:er|ing|ed)(?! (?:is |was |were )?(?:off|disabled|not))|nsys"
        r"|nsight(?: systems| compute)?|wall_clock_breakdown|cuda_launch_blocking|(?:autograd )?anomaly detection"
        r"|detect_anomaly|debug (?:mode|build)|TORCH_DISTRIBUTED_DEBUG\w*|NCCL_DEBUG\w*"
        r"|(?:busy|shared) (?:machine|node|host)|other jobs?|throttl\w+)\b",
        WARM_UP: r"([^|.;\n]{0,60}\b(?:(?<!len )(?<!lr )(?<!rate )warm-?ups?|warmed up|compilation|compile time"
        r"|first epoch|cold start|loop alone|kernels? (?:time )?(?:alone|only)|end-to-end|wall[- ]clock|wall time"
        r"|whole (?:job|script|program|run)|(?:GPU )?(?:step|time|pass) alone|in the (?:time|clock)|start-?up)\b"
        r"[^|.;\n]{0,60}|\b(?:in|ex)cl(?:ud\w+|\.)[^|.;\n]{0,40}\b(?:data ?load\w*|start-?up|set-?up"
        r"|initiali[sz]ation|validation|evaluation|download\w*|preprocessing|(?<!gradient )(?<!activation )"
        r"checkpoint(?:s|ing)?)\b)",
        RESOLUTION: r"\b(\d{2,4}) ?px\b|\bimages? (?:of )?(\d{2,4}) ?x ?\d{2,4}\b|\bat (\d{2,4}) ?x ?\d{2,4}\b"
        r"|\bresolution(?: of)? (\d{2,4})\b",
        RECOMPUTED: r"\b((?:activation|gradient)[- ]checkpointing|recompute|recomputation)\b",
        PASS: r"\b(forward[- ](?:pass(?:es)? )?only|only (?:the )?forward|inference only|without (?:the )?backward)\b",
        DATA: r"\b(synthetic|random (?:data|tokens)|dummy data)\b",
        COMPILED: r"\b(torch\.compile|compiled)\b",
    }.items()
}  # fmt: skip
OF_FIGURES_ALONE = (STATUS, INSTRUMENTS, WARM_UP)  # what a sentence says of a figure, and may say of a method
# what may be said of all rows of a table
OF_ALL_ROWS = ("per_node", MODEL, PRECISION, DEVICE, "devices", "length", "batch", "any_batch", "micro_batch")
BATCHES = ("batch", "micro_batch", "any_batch")  # in the order in which a text is read: each takes its words out of it
_NEGATED = re.compile(
    r"(?i)\b(?:no|not|never|without|w/o|disabled)\W+(?:\w+\W+){0,2}$|\b(?:neither|nor)\b[^.;]*$|\b(?:no"
    r"|none)\b[^.;,]{0,40}$"
)


def value_of(name: str, text: str) -> str:
    """Return the only value that a text has of a condition and does not deny, of words the first; empty: none, or
    several."""
    for earlier in BATCHES[: BATCHES.index(name)] if name in BATCHES else ():
        text = FORMS[earlier].sub(" ", text)
    text = text.translate(SIGNS)
    text = _INSTANCE.sub(_as_devices, text) if name in ("devices", DEVICE) else text
    text = multiplied(re.sub(rf"(?i){_OF_EACH_NODE}\b[^.;,]*", " ", text)) if name == "devices" else text
    is_of_words = name in (*OF_FIGURES_ALONE, RECOMPUTED, PASS, COMPILED)
    found = dict.fromkeys(
        plain_number(next(group for group in match.groups() if group)).strip() for match in FORMS[name].finditer(text)
        if not (is_of_words and _NEGATED.search(text[: match.start()]))
    )  # fmt: skip
    return next(iter(found)) if len(found) == 1 or (found and name in OF_FIGURES_ALONE) else ""


def _as_devices(machines: re.Match[str]) -> str:
    """Return machines of a cloud as GPUs: 2 p4d.24xlarge are 16 x A100."""
    count, device = INSTANCES[machines[2].lower()]
    return f"{count * int((machines[1] or '1').replace(',', '')) * int(machines[3] or 1)} x {device}"


def multiplied(text: str) -> str:
    """Return a text with the devices of several nodes in one number: 2 x 8 A100 are 16 A100."""
    nodes = (
        r"(?<![\w.,])(\d{1,4})(?: (?:nodes|machines|hosts|servers|VMs|instances),?)? ?(?:x|with|of) ?(\d{1,2}) ?x? ?"
        rf"(?=(?:nvidia )?(?:{DEVICES}|gpus?\b))"
    )
    return re.sub(nodes, lambda two: f"{int(two[1]) * int(two[2])} ", text, flags=re.I)


def plain_number(number: str) -> str:
    return str(WORDS.get(number.lower(), number))


def said_in_name(name: str, file: str) -> str:
    """Return what the name of a file says of a condition: the 4 devices, or the batch of 16, of ddp_4gpu_bs16.log."""
    return value_of(name, re.sub(r"[_.-]+", " ", file))


def count_in_name(name: str, file: str) -> int | None:
    """Return the number that the name of a file says of a condition."""
    said = said_in_name(name, file).replace(",", "")
    return int(said) or None if said.isdecimal() else None
