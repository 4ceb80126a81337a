"""Compare the conditions under which two sides were measured. Each condition is the same, differs, or is unknown.

A condition that differs either invalidates the ratio, or it is the change that is being compared. Audit rules, the page
of a claim and the rows of tables all use `conditions`.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from testbed.analysis.runs.comparability import (
    IN_PROPORTION,
    LOSS_NOISE_OF_ONE_RUN,
    Difference,
    differing_work,
    loss_noise,
)
from testbed.audit.reported import (
    BATCH,
    COMPILED,
    DATA,
    INSTRUMENTS,
    LAYOUT,
    MODEL,
    PASS,
    PRECISION,
    QUALITY,
    RECOMPUTED,
    RESOLUTION,
    ROW,
    SIZES,
    STATUS,
    STRATEGY,
    WARM_UP,
    ZERO,
    Claim,
    Reported,
    Side,
)
from testbed.audit.words import DEVICES
from testbed.config.run_types import REFERENCE
from testbed.errors import value_text

SAME, DIFFERS, UNKNOWN = "same", "differs", "unknown"
SCALING, OF_STRATEGY, OF_BOTH = "more devices", "another strategy", "another strategy on more devices"
# names of a run without a strategy
ONE_DEVICE = ("baseline", "single", "reference", "vanilla", "serial", "none", "zero-0")
# removed before two names of strategies are compared: devices and their number, batch and mesh sizes, brackets
_NOT_OF_A_NAME = re.compile(
    r"\(.*?\)|\b(?:on |with )?(?:\d+|one|single) ?x? ?(?:gpus?|devices?|ranks?|nodes?|[ahvltb]\d{1,3}s?|rtx ?\d+)\b"
    r"|\b(?:exp(?:eriment)?|run|trial|test|job|case|config|setup|version)[ _-]?\d+[a-z]?\b|\bx ?\d+\b"
    r"|\bv\d[a-z]?-\d+\b|\b[a-z]+\d[a-z]*\.\d*x?large\b|\b(?:bs|batch|dp|tp|pp) ?=? ?\d+\b|\bprojected\b"
)
_OF_ANY_RUN = re.compile(
    r"^(?:offline )?run \d{8} \d{6} \w+$"  # of W&B
    r"|\b(?:train(?:ing|er)?|logs?|outputs?|stdout|stderr|main|runs?|jobs?|files|state|metrics|results?|version|world|rank"
    r"|seed|rep|trial|checkpoint"
    r"|bs|bsz|batch|size|global|micro|(?:n|num)? ?(?:gpus?|nodes?|ranks?|devices?)|scaling|slurm|wandb|csv|data|tmp"
    r"|[a-z]{0,5}\d+(?:gpus?|nodes?|g|n)?)\b"
)
_BITS = r"\b(?:bf|fp|tf)(?:8|16|32)\b"
_OF_PRECISION = re.compile(r"(?i)[\s(\[-]*\b(?:bf|fp|tf|int)\d{1,2}\b[)\]]?")  # beside the name of a model
# names of what spreads work over devices
_SPREADS = re.compile(
    r"\b(?:ddp|fsdp\d?|zero|deepspeed|horovod|megatron|hsdp)\b|parallel|distrib|all-?reduce|gpu"
    r"|nccl|pipeline|shard|sync|multi|node|rank"
)
# of a start-up, or of other work than the steps
_LEFT_OUT = re.compile(
    r"exclu|without|left out|leaves? out|\bnot in|alone|only|skip|discard|ignor|w/o|minus|after|no warm|steady|loop\b"
    r"|warm-?ups? ?[=:]? ?[1-9]|^[1-9][\d,.]*k?(?: ?(?:steps?|iters?|iterations?|%))?$|^(?:yes|true|on)$"
)
_INSIDE = re.compile(r"inclu|whole|cover|holds|with\b|wall|end-to-end|first|cold|start|^(?:no|none|0|false|off)$")
BATCHES = ("global batch size", "batch size")
RARE = ("resolution", QUALITY, "training tokens")  # conditions that are not looked for where no side says them
COUNTS = ("ranks", "global batch size", "batch size", "optimizer steps", "tokens", "training tokens")
MEASURED, TRAINING, NOT_SAID = "measured", "training", "not said"
NEAR = 5  # points of a training curve whose median stands for the loss at their end
NOISE_OF_A_TARGET = 0.01  # modded-nanogpt's records end within 0.003 of 3.28
NOISE_OF_BITS = 0.01  # per byte
OF_ANOTHER_KIND = 20  # times another loss, which is no loss of one task
NOISE_OF_SCORES, NOISE_OF_ERRORS = 0.015, 0.05  # of themselves: between seeds an accuracy of 76 % moves by 0.2 points
ON_THE_WAY = "loss at equal tokens"  # of which one side's is from the middle of its run
LEARNS = ("loss", ON_THE_WAY, QUALITY)  # conditions that a faster run must not pay with
Value = int | float | str | None


@dataclass(frozen=True)
class Condition:
    """One condition of both sides. A value that is None is in no file."""

    name: str
    a: Value
    b: Value
    state: str  # SAME, DIFFERS or UNKNOWN
    spoils: bool = False  # it differs, and this invalidates the ratio
    is_work: bool = False
    decides: bool = False  # if unknown, the verdict is "cannot be known"
    effect: str = ""  # what its difference does

    @property
    def against(self) -> str:
        """Return both values as text: "global batch size 16 against 64 (4 times)"."""
        if self.name not in COUNTS or not isinstance(self.a, int) or not isinstance(self.b, int) or not self.a:
            a, b = (in_words(each) if isinstance(each, float) else value_text(each) for each in (self.a, self.b))
            return f"{self.name} {a} against {b}"
        times = f" ({self.b / self.a:.3g} times)" if abs(self.b / self.a - 1) > 0.005 else ""
        return f"{self.name} {self.a:,} against {self.b:,}{times}"


@dataclass(frozen=True)
class Fact:
    """One row of FACTS: how to read a condition, and what a difference means. `fields`: its names in WORK_FIELDS."""

    name: str
    read: Callable[[Claim], tuple[Value, Value]]
    effect: str = ""
    fields: tuple[str, ...] = ()
    is_work: bool = False
    decides: bool = False
    spoils: Callable[[Claim], bool] | bool = True  # whether it invalidates the ratio, if it differs
    differs: Callable[[Claim, Value, Value], bool] | None = None  # None: whenever the values do


def conditions(claim: Claim) -> list[Condition]:
    """Return every condition of a claim, those of FACTS first, then what else our own files show to differ."""
    own = {item.field: item for item in differing_fields(claim)} if _are_runs(claim) else {}
    found = [_condition(fact, claim, own) for fact in FACTS]
    are_of_images = any(item.rate_unit == "images/s" or RESOLUTION in item.settings for item in claim.firsts)
    rare = (*RARE, "sequence length") if are_of_images else RARE
    found = [each for each in found if each.name not in rare or (each.a, each.b) != (None, None)]
    named = {name for fact in FACTS for name in fact.fields}
    for name, item in own.items():
        if name not in named:
            a, b = item.values if isinstance(item.recorded[0], str) else item.recorded
            state = UNKNOWN if item.is_unknown_only else DIFFERS
            found.append(Condition(name.replace("_", " "), a, b, state, state == DIFFERS, is_work=True))
    return found


def _condition(fact: Fact, claim: Claim, own: dict[str, Difference]) -> Condition:
    a, b = fact.read(claim)
    of_fact = [own[name] for name in fact.fields if name in own]
    told = next((item for item in of_fact if not item.is_unknown_only), None)
    if fact.fields and _are_runs(claim):
        is_named = a is not None and _text(a) == _text(b)  # an earlier version's file says it in fewer fields
        state = DIFFERS if told else UNKNOWN if of_fact and not is_named else SAME
        if told and a == b:  # one of several fields, of which the words of this fact do not show each
            a, b = told.values
        spoils = state == DIFFERS
    else:
        if a is None or b is None:
            state = UNKNOWN
        else:
            state = DIFFERS if (fact.differs(claim, a, b) if fact.differs else _text(a) != _text(b)) else SAME
        spoils = state == DIFFERS and (fact.spoils if isinstance(fact.spoils, bool) else fact.spoils(claim))
    batch_is_known = fact.name not in BATCHES or None not in map(_batch, claim.firsts)
    name = fact.name if batch_is_known or state == UNKNOWN else BATCHES[1]  # a table may not say whose batch it is
    if name == "loss" and state != UNKNOWN and claim.protocol != "time_to_loss" and _is_of_other_tokens(claim):
        name = ON_THE_WAY
    return Condition(name, a, b, state, spoils, fact.is_work, fact.decides, fact.effect)


def _are_runs(claim: Claim) -> bool:
    return claim.baseline.first.run is not None and claim.other.first.run is not None


def differing_fields(claim: Claim) -> list[Difference]:
    """Return the fields of equal work in which two of our own runs differ or that a file lacks, by the protocol."""
    base, other = claim.firsts
    assert base.run is not None and other.run is not None  # the caller looked
    protocol = "time_to_loss" if claim.protocol == "time_to_loss" else "strong"
    # a printed or recorded number of data ranks counts for the proportion too, so this is asked here
    exempt = set(IN_PROPORTION) if claim.protocol == "weak" and batch_is_in_proportion(base, other) else set()
    seeds, others = ({run.work.get("seed") for run in runs} for runs in claim.measured_runs)
    if seeds == others and None not in seeds:
        exempt.add("seed")  # a protocol may vary it, in both arms alike
    return [item for item in differing_work([base.run, other.run], protocol) if item.field not in exempt]


def batch_is_in_proportion(base: Reported, other: Reported) -> bool:
    """Return whether the global batches are one batch for each device, or for each data rank."""

    def per_rank(item: Reported) -> set[float]:
        ranks = {item.world_size, item.data_ranks, item.config.get("data_world_size")}
        return {item.global_batch_size / count for count in ranks if count and item.global_batch_size}

    return bool(per_rank(base) & per_rank(other))


def kind_of(claim: Claim) -> str:
    """Return what the sides differ in on purpose: devices, strategy, or both.

    A run without a strategy on fewer devices is what any strategy scales from.
    """
    ranks = claim.baseline.first.world_size, claim.other.first.world_size
    if None in ranks or ranks[0] == ranks[1]:
        return OF_STRATEGY
    fewer = claim.baseline if (ranks[0] or 0) < (ranks[1] or 0) else claim.other
    names = [str(strategy_of(side)).lower() for side in claim.sides]
    is_of_scaling = any(
        fewer.first.details.get("is_series") or (fewer.first.world_size == 1 and _SPREADS.search(name))
        for name in names
    )
    is_plain = is_of_scaling and any(word in str(strategy_of(fewer)).lower() for word in ONE_DEVICE)
    return SCALING if not is_another_strategy(claim) or is_plain else OF_BOTH


def is_another_strategy(claim: Claim) -> bool:
    """Return whether both sides name a strategy, and not the same: the devices and sizes beside a name are no part."""
    names = [_without_sizes(strategy_of(side) or "", side.first) for side in claim.sides]
    plain = [" ".join(re.sub(r"[^\w+]+", " ", _NOT_OF_A_NAME.sub(" ", name.lower())).split()) for name in names]
    return bool(plain[0] and plain[1]) and plain[0] != plain[1]


def _without_sizes(name: str, item: Reported) -> str:
    """Return a row's name without the numbers in it that repeat its batch or devices: the 1k of pipeline-1k."""
    if item.form != ROW:
        return name
    sizes = {item.world_size, item.global_batch_size, item.micro_batch_size, int(item.settings.get(BATCH) or 0)}
    number = re.compile(r"(?i)(?<!zero)(?<!stage)[-_ ](\d{1,9})(k?)\b(?: ?(?:gpu|device|rank)s?\b)?")
    return number.sub(lambda n: "" if int(n[1]) * (1024 if n[2] else 1) in sizes else n[0], name)


def strategy_of(side: Side) -> str | None:
    """Return the name of a side's strategy, as its files give it."""
    name, stage, layout = (side.first.settings.get(what) for what in (STRATEGY, ZERO, LAYOUT))
    is_plain = name is None or (name != REFERENCE and side.first.run is not None)
    if stage is not None and is_plain:
        return f"ZeRO-{stage}"
    of_file = _name_of_file(side.first.path) if side.first.run is None and side.first.form != ROW else None
    return name or ", ".join(each for each in (of_file, layout) if each) or None


def _name_of_file(path: Path) -> str | None:
    """Return what the name of a log, or of its folder, calls the run, without sizes and words of any run."""
    is_named = re.search(rf"[a-z]{{3}}|{_BITS}", path.stem.lower())
    for part in (path.stem, path.parent.name, path.parent.parent.name) if is_named else ():
        whole = re.sub(r"[_.-]+", " ", part.lower())
        name = _OF_ANY_RUN.sub(" ", whole)
        if len(words := " ".join(re.findall(r"(?:\bno )?[^\W\d]\w{2,}|\d[a-z]\d[a-z]", name))) > 2:
            return words
        if found := re.search(_BITS, whole):
            return found[0]
    return None


def loss_of(item: Reported) -> float | None:
    """Return the loss that tells how well a run learned: validation's, or else training's."""
    return item.train_loss if item.val_loss is None else item.val_loss


def _each(read: Callable[[Side], Value]) -> Callable[[Claim], tuple[Value, Value]]:
    return lambda claim: (read(claim.baseline), read(claim.other))


def _of_runs(read: Callable[[Reported], Value]) -> Callable[[Claim], tuple[Value, Value]]:
    """Return a reader of both sides: the value that all runs of a side share, or all of their values."""

    def side(side: Side) -> Value:
        values = list(dict.fromkeys(map(read, side.runs)))
        if None in values:
            return None
        return values[0] if len(values) == 1 else " / ".join(map(in_words, values))

    return _each(side)


def _field(name: str) -> Callable[[Claim], tuple[Value, Value]]:
    return _of_runs(lambda item: getattr(item, name))


def _setting(name: str) -> Callable[[Claim], tuple[Value, Value]]:
    return _of_runs(lambda item: item.settings.get(name))


def _is_all_of_it(claim: Claim, words: str) -> bool:
    """Return whether the sides have one name but for such words, which are then what is compared."""
    own = rf"[\s(\[+-]*(?:\bwith )?\b(?:{words}|baseline)\b[)\]]?"
    names = [re.sub(own, "", strategy_of(side) or "", flags=re.I).strip().lower() for side in claim.sides]
    is_said = claim.other.first.form == ROW or _is_named(claim, words)
    return is_said and (names[0] == names[1] or "" in names)


def _is_named(claim: Claim, words: str) -> bool:
    return any(re.search(rf"\b(?:{words})\b", strategy_of(side) or "", re.I) for side in claim.sides)


def _are_models(claim: Claim) -> bool:
    """Return whether the rows of a table are models, and no ways to train one: models are what is compared."""
    return all(item.details.get("is_model") for item in claim.firsts)


def _are_lengths(claim: Claim) -> bool:
    """Return whether the rows differ by the length of their sequences alone, which is then what is compared."""
    words = r"(?:\d+k?|longer|shorter|long|short)? ?(?:context|sequences?|seq\w*(?: len\w*)?)"
    return _is_named(claim, words) and _is_all_of_it(claim, words)


def _is_one_number_of_tokens(claim: Claim) -> bool:
    items = claim.firsts
    sizes = [(_batch(item) or int(item.settings.get(BATCH) or 0)) * (item.sequence_length or 0) for item in items]
    return sizes[0] == sizes[1] > 0


def _is_mixed_too(a: str, b: str) -> bool:
    """Return whether one precision is called mixed, and the other is one that mixed training uses."""
    mixed, plain = {"amp", "mixed precision", "mixed", "half precision"}, {"bf16", "fp16"}
    return (a in mixed and b in mixed | plain) or (b in mixed and a in mixed | plain)


def _marked(
    name: str, usual: str, of_file: Callable[[Reported], Value] | None = None
) -> Callable[[Claim], tuple[Value, Value]]:
    """Return a reader of what a row is marked as, and of what `of_file` finds in other files.

    Beside a side that is marked, a row without a mark is as usual. So is a log whose program would print the mark.
    """
    of_files = _of_runs(of_file or (lambda item: item.settings.get(name) or usual))

    def read(claim: Claim) -> tuple[Value, Value]:
        items = claim.firsts
        are_rows = items[0].form == ROW
        a, b = [item.settings.get(name) for item in items] if are_rows else of_files(claim)
        is_one_program = name in (INSTRUMENTS, COMPILED) and items[0].form == items[1].form
        is_told = name != COMPILED if are_rows else is_one_program
        return (a or usual, b or usual) if (a or b) and is_told else (a, b)

    return read


def _batch(item: Reported) -> int | None:
    if item.global_batch_size is not None:
        return item.global_batch_size
    factors = item.micro_batch_size, item.accumulation, item.data_ranks or item.world_size
    return math.prod(factor for factor in factors if factor) if None not in factors else None


def _batches(claim: Claim) -> tuple[Value, Value]:
    """Return the global batches. Two that a table prints under "batch" differ, or are one if the devices are equal."""
    a, b = _of_runs(_batch)(claim)
    items = claim.firsts
    ranks = [item.data_ranks or item.world_size or 0 for item in items]
    ranks = ranks if all(ranks) and ranks[0] != ranks[1] else [1, 1]
    printed = [
        int(item.settings.get(BATCH) or 0) or (item.micro_batch_size or 0) * (item.accumulation or 1) * count
        for item, count in zip(items, ranks, strict=True)
    ]
    if None not in (a, b) or not all(printed):
        return a, b
    is_known = items[0].world_size == items[1].world_size or printed[0] != printed[1]
    return (printed[0], printed[1]) if is_known else (None, None)


def _is_another_device(claim: Claim, a: Value, b: Value) -> bool:
    """Return whether two names are of different devices. A100 matches NVIDIA A100 80GB. A count is ignored, as in
    8xA100 or the TPU slice v4-32."""
    names = (re.sub(r"^\d+ ?x ?|(?<=\bv\d)-\d+$|(?<=\bv\d[ep])-\d+$", "", str(name).lower()) for name in (a, b))
    plain = [re.sub(r"nvidia|tesla|geforce|[^a-z0-9]", "", name) for name in names]
    return plain[0] not in plain[1] and plain[1] not in plain[0]


def _model(claim: Claim) -> tuple[Value, Value]:
    """Return both models in the same terms: their shapes, their parameters, or their names."""
    items = claim.firsts
    found = [(_shape(item), item.num_parameters, item.settings.get(SIZES), item.settings.get(MODEL)) for item in items]
    for a, b in zip(*found, strict=True):
        if a is not None and b is not None:
            names = [_OF_PRECISION.sub("", str(each)).strip() for each in (a, b)]
            return (names[0], names[1]) if isinstance(a, str) else (a, b)
    a, b = (next((value for value in values if value is not None), None) for values in found)
    return (a, None) if a is not None else (None, b)


def _is_another_model(claim: Claim, a: Value, b: Value) -> bool:
    """Return whether two models differ, in their words or by 2 % of their parameters: 116M and 117M are variants."""
    if isinstance(a, int) and isinstance(b, int):
        return abs(a - b) > 0.02 * max(a, b)
    return _text(a) != _text(b)


def _shape(item: Reported) -> str | None:
    shape = [item.config.get(name) for name in ("num_layers", "num_heads", "embedding_size", "vocab_size")]
    return "{} layers, {} heads, width {}, vocabulary {}".format(*shape) if None not in shape else None


def _steps_decide(claim: Claim) -> bool:
    """Return whether steps are part of the quoted work: a rate or the time of one iteration is of any number."""
    items = claim.firsts
    is_of_any = any(
        item.losses or item.is_of_iteration or " to " in item.time_meaning or (item.form == ROW and item.has_own_rate)
        for item in items
    )
    return not is_of_any and "time_to_loss" not in (claim.protocol, *(item.protocol for item in items))


def _warm_up(item: Reported) -> str | None:
    if item.run is not None:
        return "left out" if item.run.num_warmup_steps else "inside"
    return "left out" if item.losses else None  # of a log, the first line is


def _warms_up_otherwise(claim: Claim, a: Value, b: Value) -> bool:
    """Return whether two times hold different things, as far as their words tell: in one what the other leaves out."""
    kinds = [_kind_of_clock(_text(value)) for value in (a, b)]
    return (
        kinds[0] != kinds[1] if "" not in kinds else NOT_SAID in (a, b) and kinds != ["", ""] and _text(a) != _text(b)
    )


def _kind_of_clock(text: str) -> str:
    """Return whether a time has its start-up or other work in it, or leaves it out; empty: the words do not say."""
    text = re.sub(r"\b(?:not|never) (?:exclu\w+|left out|skipp\w+|discard\w+|ignor\w+)", "included", text)
    return (
        text if text == NOT_SAID else "left out" if _LEFT_OUT.search(text) else "inside" if _INSIDE.search(text) else ""
    )


def _instruments(item: Reported) -> str | None:
    return "; ".join(item.instruments) or ("none" if item.run else item.settings.get(INSTRUMENTS))


def _repeats(side: Side) -> str | None:
    if side.first.form == ROW:
        return None
    rates = [item.rate for item in side.runs if item.rate]
    spread = f", {max(rates) / min(rates) - 1:.1%} apart" if len(rates) > 1 else ""
    return f"{len(side.runs)}{spread}"


def _resumed(item: Reported) -> str | None:
    segments = item.run.record.get("segments") if item.run else None
    return None if not segments else "yes" if len(segments) > 1 else "no"


def _code(item: Reported) -> str | None:
    return (item.run.git_commit or "")[:10] or None if item.run else None


def _losses(claim: Claim) -> tuple[Value, Value]:
    """Return the losses of both sides at equal tokens, as far as the files tell."""
    a, b = (_middle_loss(side) for side in claim.sides)
    is_of_other_tokens = _is_of_other_tokens(claim)
    both_validate = None not in (claim.baseline.middle("val_loss"), claim.other.middle("val_loss"))
    if both_validate and not is_of_other_tokens:
        return a, b
    if (at_equal := _at_equal_tokens(*claim.firsts)) is not None:
        return at_equal
    steps = [side.first.optimizer_steps for side in claim.sides]
    are_other_steps = None not in steps and steps[0] != steps[1]
    if None in map(_tokens, claim.firsts) and are_other_steps and claim.protocol != "time_to_loss":
        return None, None
    return (None, None) if is_of_other_tokens and claim.protocol != "time_to_loss" else (a, b)


def _middle_loss(side: Side) -> float | None:
    of_validation = side.middle("val_loss")
    return side.middle("train_loss") if of_validation is None else of_validation


def _is_of_other_tokens(claim: Claim) -> bool:
    a, b = map(_tokens, claim.firsts)
    return bool(a and b) and abs(a / b - 1) > 0.01  # type: ignore[operator]


def _tokens(item: Reported) -> float | None:
    sizes = _batch(item), item.sequence_length, item.optimizer_steps
    return math.prod(size for size in sizes if size) if all(sizes) else None


def _at_equal_tokens(base: Reported, other: Reported) -> tuple[float, float] | None:
    """Return the training losses of two logs at the largest number of tokens that both reached."""
    curves = []
    for item in (base, other):
        batch, length = _batch(item), item.sequence_length
        points = [(step, loss) for step, loss in item.losses if math.isfinite(loss)]
        if not batch or not length or len(points) < 3 * NEAR:
            return None
        curves.append(([step * batch * length for step, _ in points], [loss for _, loss in points]))
    last = min(curve[0][-1] for curve in curves)
    found = []
    for tokens, losses in curves:
        at = bisect.bisect_right(tokens, last)
        if at < NEAR:
            return None
        found.append(median(losses[at - NEAR : at]))
    return found[0], found[1]


def losses_differ(claim: Claim, a: Value, b: Value) -> bool:
    """Return whether two losses are further apart than seeds and single runs explain."""
    assert isinstance(a, float | int) and isinstance(b, float | int)
    runs = [[loss for item in side.runs if (loss := loss_of(item)) is not None]
            for side in claim.sides]  # fmt: skip
    if any(item.details.get("is_in_bits") for item in claim.firsts):
        return abs(a - b) > NOISE_OF_BITS
    if max(a, b) > OF_ANOTHER_KIND * min(a, b):
        return False  # a loss, and a difference of losses
    noise = loss_noise(*runs)[0] if all(len(losses) > 1 for losses in runs) else LOSS_NOISE_OF_ONE_RUN
    if claim.protocol == "time_to_loss" and claim.other.first.run is None:  # runs that end at one loss, or did not
        noise = NOISE_OF_A_TARGET
    return abs(a - b) > noise


def qualities_differ(claim: Claim, a: Value, b: Value) -> bool:
    """Return whether two scores, or two errors, of one heading are further apart than single runs explain."""
    (heading, of_a), (other, of_b) = (side.first.details["quality"] for side in claim.sides)
    least = NOISE_OF_ERRORS if of_a < 0 else NOISE_OF_SCORES
    models = _model(claim)
    is_one_task = heading == other and (None in models or not _is_another_model(claim, *models))
    return is_one_task and abs(of_a - of_b) > least * max(abs(of_a), abs(of_b))


def learns_worse(claim: Claim, each: Condition) -> bool:
    """Return whether the other side of a differing loss or quality is the worse one."""
    if each.name == QUALITY:
        return claim.other.first.details["quality"][1] < claim.baseline.first.details["quality"][1]
    return each.b > each.a  # type: ignore[operator]


def in_words(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else value_text(value)


def _text(value: Value) -> str:
    return in_words(value).strip().lower()


_COSTS = "a token costs another time"
FACTS: tuple[Fact, ...] = (
    Fact("ranks", _field("world_size"), "the ratio has their work in it",
         decides=True, spoils=lambda claim: kind_of(claim) == OF_BOTH),
    Fact("devices", _field("device_name"), "each computes at another rate", differs=_is_another_device,
         spoils=lambda claim: not _is_all_of_it(claim, rf"(?:\d+ ?x ?)?(?:nvidia )?(?:{DEVICES})(?:[ -]?\d+ ?gb?)?")),
    Fact("model", _model, _COSTS, ("num_layers", "num_heads", "embedding_size", "vocab_size"), is_work=True,
         decides=True, differs=_is_another_model, spoils=lambda claim: not _are_models(claim)),
    Fact("global batch size", _batches, "an update is of another number of sequences",
         ("global_batch_size",), is_work=True, decides=True,
         spoils=lambda claim: claim.protocol not in ("weak", "time_to_loss")
         and not (_are_lengths(claim) and _is_one_number_of_tokens(claim))),
    Fact("sequence length", _field("sequence_length"), _COSTS, ("seq_len",), is_work=True, decides=True,
         spoils=lambda claim: not _are_lengths(claim)),
    Fact("precision", _setting(PRECISION), "the arithmetic is another", ("precision",), is_work=True, decides=True,
         spoils=lambda claim: not _is_all_of_it(claim, r"(?:bf|fp|tf|int)\d{1,2}|amp|mixed[- ]precision"),
         differs=lambda claim, a, b: _text(a) != _text(b) and not _is_mixed_too(_text(a), _text(b))),
    Fact("optimizer steps", _field("optimizer_steps"), "the time is of another number of updates",
         ("optimizer_steps",), is_work=True, spoils=_steps_decide),
    Fact("training tokens", _each(lambda side: side.first.details.get("tokens")), "fewer tokens take less time",
         spoils=_steps_decide,
         differs=lambda claim, a, b: abs(float(a) / float(b) - 1) > 0.05),  # type: ignore[arg-type]
    Fact("data", _setting(DATA), "other data are other work", is_work=True),
    Fact("resolution", _setting(RESOLUTION), "an image costs another time"),
    Fact("kind of pass", _marked(PASS, TRAINING), "a forward pass is a third of a step", is_work=True),
    Fact("warm-up", _marked(WARM_UP, NOT_SAID, _warm_up),
         "the two times do not hold the same", differs=_warms_up_otherwise),
    Fact("compile", _marked(COMPILED, "off", lambda item: item.settings.get(COMPILED)),
         "the compiler's gain is in the ratio",
         spoils=lambda claim: (is_another_strategy(claim) or kind_of(claim) == SCALING)
         and not _is_all_of_it(claim, r"(?:torch\.)?compiled?|eager|inductor|jit")),
    Fact("recomputation", _setting(RECOMPUTED), "parts of the forward pass are computed twice",
         spoils=lambda claim: is_another_strategy(claim)
         and not _is_all_of_it(
             claim, r"(?:activation |gradient )?checkpointing|recompute(?: ?=? ?\d)?|recomputation|ckpt")),
    Fact("instrumentation", _marked(INSTRUMENTS, "none said", _instruments),
         "its times are not those of the plain program"),
    Fact("loss", _losses, "a faster run that learns worse is not faster", spoils=False,
         differs=losses_differ),
    Fact(QUALITY, _setting(QUALITY), "a faster run that learns worse is not faster", spoils=False,
         differs=qualities_differ),
    Fact("repeats", _each(_repeats), spoils=False,
         differs=lambda claim, a, b: str(a).split(",")[0] != str(b).split(",")[0]),
    Fact("resumed", _of_runs(_resumed), "a start in the middle is in the times", spoils=False),
    Fact("figures are", _marked(STATUS, MEASURED), "only measurements compare"),
    Fact("code version", _of_runs(_code), "the code changed too", spoils=False),
)  # fmt: skip
