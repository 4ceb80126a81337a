"""Name what a column of a table holds, by its heading or by `--columns`, and read its figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from testbed.audit.tables.counts import count_in
from testbed.audit.tables.figures import UNITS, Figure, figures_of, plain
from testbed.audit.tables.grid import Table
from testbed.errors import InputError

_PER_DEVICE = r"(/|per)[ _-]?(gpu|device|chip|card|accelerator|rank|npu|tpu|core)\b"
_DEVICES = r"(gpus?|devices?|accelerators?|chips?|world[ _-]?size|ranks?|workers?|npus?|tpus?|cards?|processes|procs?)"
_DEGREE = r"([ _-]*(size|degree|ranks|stages))?"
_NUMBER_OF = r"(num(ber)?\.?( of)?|no\.?( of)?|# of|n|total"
_OF_KIND = r"((nvidia|amd|[abhv]\d{2,3}|mi\d{3}x?)[ -])?"
_PER_S = r"\s*(/|per)\s*s(ec(ond)?s?)?\b"
_STEP = r"(step|iter(ation)?|it|batch)"
_SAMPLES = r"(samples?|seq(uence)?s?|im(a)?ge?s?|imgs?|examples?|sentences?|mels?|frames?|items?)"
_HAS_NO_UNIT = r"throu(gh)?(t)?put|^speed$|^performance$|training speed"
# quantity -> (pattern of its heading in lower case, dimension of its figures). The first that fits counts.
QUANTITIES: dict[str, tuple[str, str]] = {
    "efficiency": (r"\beff(iciency)?\b|^eff\.", "share"),
    "speedup": (r"speed[- _]?up|(weak|strong|throughput)[ -]*scaling|scaling factor"
                r"|relative (speed|throughput|performance)", "factor"),
    "mfu": (r"\bmfu\b|model flops? util|percentage of (theoretical )?peak", "share"),
    "hfu": (r"\bhfu\b|hardware flops? util", "share"),
    "all_flops": (r"(aggr(egate)?|total|cluster|system)\b.*flop", "flops"),
    "flops": (r"(tera|peta|t|p|g)flops?\b|(tera|peta|t|p)flop/", "flops"),
    "device_token_rate": (rf"(?=.*{_PER_DEVICE}).*\btok(en)?s?{_PER_S}|tok(en)?s?\s*{_PER_DEVICE}\s*(/|per)\s*s"
                          r"|\btgs\b", "rate"),
    "token_rate": (rf"tok(en)?s?{_PER_S}|\btps\b|\bwps\b|tok/s", "rate"),
    "device_sample_rate": (rf"(?=.*{_PER_DEVICE}).*{_SAMPLES}{_PER_S}", "rate"),
    "sample_rate": (rf"{_SAMPLES}{_PER_S}|^fps\b", "rate"),
    "step_rate": (rf"\b({_STEP}s?|its|iters|batches){_PER_S}", "rate"),
    "device_rate": (rf"({_HAS_NO_UNIT}).*{_PER_DEVICE}", "rate"),
    "step_s": (rf"{_STEP}[ _.-]*(time|dt|latency|duration|med(ian)?|ms)\b|\b(ms|s|secs?|seconds?)\s*(/|per)\s*{_STEP}\b"
               rf"|time\s*(/|per)\s*{_STEP}|iter dt|^latency|^{_STEP}s? ?\((ms|s|secs?|seconds?)\)", "time"),
    "rate": (_HAS_NO_UNIT, "rate"),
    "device_hours": (r"(gpu|device|chip|card)[ -]?(hours?|h|hrs)\b", "number"),
    "memory": (r"\bmem(ory)?\b|\bvram\b|\bhbm\b", "memory"),
    "accumulation": (r"grad(ient)?[ _-]*acc|acc(um(ulation)?)?[ _-]*steps?|^gas?$|^accum\.?$|accumulation"
                     r"|^micro num", "count"),
    "micro_batch": (rf"^(max )?(micro|local|mic)[ _-]*(batch|bs)|\b[ml]bs\b|^mb$|batch.*{_PER_DEVICE}"
                    rf"|per[ _-]*(gpu|device)[ _-]*batch|local batch|^bsz?.*{_PER_DEVICE}", "count"),
    "batch": (r"(global|effective|total|glob)[ _-]*(mini[ _-]?)?(batch|bs)|\bgbs\b|^(mini[ _-]?)?batch([ _-]*size)?s?$"
              r"|^bs$|^bsz$|^tok(en)?s?\s*(/|per)\s*(step|batch|update)$", "count"),
    "devices_per_node": (rf"{_DEVICES}[ _a-z]*(/|per)[ _]?node", "count"),
    "dp": (rf"^(dp|fsdp){_DEGREE}$|data[ _-]parallel{_DEGREE}$", "count"),
    "tp": (rf"^(tp|mp){_DEGREE}$|(tensor|model)[ _-](model[ _-])?parallel{_DEGREE}$", "count"),
    "pp": (rf"^pp{_DEGREE}$|pipeline[ _-](model[ _-])?parallel{_DEGREE}$", "count"),
    "cp": (rf"^cp{_DEGREE}$|context[ _-]parallel", "count"),
    "devices": (rf"^{_NUMBER_OF}|device|count)?[ _#]*{_OF_KIND}{_DEVICES}"
                r"([ _-]*(num(ber)?|count|total|used))?$", "count"),
    "nodes": (rf"^{_NUMBER_OF})?[ _#]*(n?nodes?|hosts?|machines|servers)([ _-]*(num|count))?$", "count"),
    "length": (r"seq(uence)?s?[ _-]*len(gth)?|context[ _-]*(len(gth)?|window)?$|^seq$|^ctx([ _-]*len(gth)?)?$"
               r"|block[ _-]size|^seqlen", "count"),
    "params": (r"^(num(ber)?( of)?|no\. of|#)?\s*param(eter)?s?\b|model params", "number"),
    "tokens": (r"^(total |num |trained )?tokens( \(?(total|trained|seen|processed)\)?)?$", "count"),
    "steps": (r"^(optimizer |train(ing)? |total |num |max )?(steps|iterations|iters)$", "count"),
    "time_s": (r"(total|train(ing)?|wall|epoch|run|elapsed)[ _-]*(clock )?(time|\(s\))|time to \w+|^time\b"
               r"|^wall|^duration|^elapsed", "time"),
}  # fmt: skip
_OF_A_RUN = (
    r"flops?[ -]*days|flops?[ /]*(per|/) *(tok|sampl|image|img|seq|step|iter|pass|forward|example)|comput|budget"
)
# what else a heading of a quantity may speak of: a part of the memory, the FLOPs of a run and not of a second
NO_SUCH = {
    "memory": r"sav|reduc|bandwidth|%|activation|optim|grad|state|cache|overhead|extra|delta|layer|buffer|host|cpu",
    "flops": _OF_A_RUN,
    "all_flops": _OF_A_RUN,
}
# A column of factors is a speed-up, unless its heading says what else it is a ratio of.
NO_RATE = re.compile(
    r"memory|vram|compress|size|batch|context|length|param|cost|price|\$|energy|power|carbon|tokens?$|data|steps|loss|bits"
    r"|\blr\b|sched|epoch|width|depth|resolution"
)
EXACT = ("count",)
LONGEST_HEADING = 300  # characters; more is a text and names no quantity (the patterns take quadratic time)
RATES = ("device_token_rate", "token_rate", "device_sample_rate", "sample_rate", "rate", "device_rate", "step_rate")
MEASURED = {*RATES, "efficiency", "speedup", "mfu", "hfu", "flops", "all_flops", "step_s", "time_s", "memory",
            "device_hours", "ratio"}  # fmt: skip
UNCERTAIN = re.compile(
    r"\b(est|estimated?|estimates|expected|projected|theoretical|ideal|target|predicted|approx|peak [tpg]?flops?)\b",
    re.I,
)
PERCENTILE = re.compile(r"\bp[ _]?\d{2}|\d{2,3}(\.\d+)? ?%|percentile|\b(min|max|std|stddev)\b|_(min|max|std)\b")
TOPOLOGY = re.compile(r"\b(TP|DP|PP|CP)\s*[=:]\s*(\d{1,6})\b", re.I)


@dataclass(frozen=True)
class Column:
    heading: str
    quantity: str | None  # a key of QUANTITIES, or "ratio": figures with a x below another heading
    figures: tuple[Figure | None, ...]  # one for each row
    texts: tuple[str, ...]
    line: int | None = None  # of the file, where its cells stand in one

    @cached_property
    def is_setting(self) -> bool:
        """Return whether it says what was run, and not what came out."""
        if self.quantity:
            return self.quantity not in MEASURED
        if re.search(r"(?i)size|model|note|config", self.heading):
            return True
        numbers = [re.fullmatch(r"[-+~]?[\d,]*\.?\d+\s*\S{0,3}|-?", text) for text in self.texts]
        return not all(numbers) or not any("." in text or "%" in text for text in self.texts)


def columns_of(table: Table, named: Mapping[str, str] | None = None) -> list[Column]:
    """Return the columns of a table. `named` gives quantities by their heading, or as a number for every row."""
    headings = [plain(heading) for heading in table.header]
    chosen = _chosen(headings, named or {})
    columns: list[Column] = []
    labels: list[Column] = []
    for index, heading in enumerate(headings):
        cells = [row.cells[index] for row in table.rows]
        quantity = chosen.get(index) or quantity_of(heading, cells)
        line = table.lines_of_columns[index] if table.lines_of_columns else None
        found = [_column(heading, quantity, cells), *_topology(heading, cells)]
        columns += [replace(column, line=line) for column in found]
        labels += _counts(heading, cells) if quantity is None else []
    if not any(column.quantity in ("devices", "dp", "nodes") for column in columns):
        columns += labels[:1]
    for quantity, text in (named or {}).items():
        if is_number(text) and text not in headings:
            columns.append(_column(f"{quantity}={text}", quantity, [text] * len(table.rows)))
    return columns


def quantity_of(heading: str, cells: Sequence[str]) -> str | None:
    """Return what a heading names; None: something else, or figures that the source calls an estimate."""
    name = re.sub(r"\s+", " ", re.sub(r"[*`_]{2,}", "", heading).replace("_", " ")).strip().lower()
    if not 0 < len(name) <= LONGEST_HEADING or UNCERTAIN.search(name):
        return None
    found = next((quantity for quantity, (pattern, _) in QUANTITIES.items() if re.search(pattern, name)), None)
    plainly = re.sub(r"\s*[(\[][^)\]]*[)\]]", "", name).strip()
    if found is None and plainly != name:
        found = next((quantity for quantity, (pattern, _) in QUANTITIES.items() if re.search(pattern, plainly)), None)
    if found in ("mfu", "hfu") and re.search(rf"{found}\s*/", name):
        return None  # a ratio of it and something else
    if found == "efficiency" and re.search(r"memory|energy|power|data|token|sample|cost|compute", name):
        return None
    if found == "step_s" and PERCENTILE.search(name):
        return None
    if found in ("devices", "nodes", "dp") and "0" in cells:
        return None  # the number of a rank, not how many there are
    if found in NO_SUCH and re.search(NO_SUCH[found], name):
        return None
    factors = [cell for cell in cells if re.fullmatch(r"\d+(\.\d+)?\s*x", plain(cell))]
    if found is None and len(factors) >= 2 and 2 * len(factors) > len(cells) and not NO_RATE.search(name):
        return "ratio"
    if found in ("rate", None) and (unit := _unit_of_cells(cells)):
        of_unit = quantity_of(unit, [])
        return of_unit if of_unit in RATES else found
    return found


def _unit_of_cells(cells: Sequence[str]) -> str:
    """Return what stands behind the first figure of a column."""
    first = next((plain(cell) for cell in cells if re.match(r"[\d.,]", plain(cell))), "")
    return re.sub(r"^[\d.,\s]+[kmb]?\s*", "", first, flags=re.I)


def _column(heading: str, quantity: str | None, cells: Sequence[str]) -> Column:
    texts = tuple(plain(cell) for cell in cells)
    if quantity is None:
        return Column(heading, None, (None,) * len(texts), texts)
    dimension = "factor" if quantity == "ratio" else QUANTITIES[quantity][1]
    figures = figures_of(cells, dimension, _scale(heading.lower(), dimension, quantity))
    if dimension == "factor":  # +55 % or 55 % is another convention than 1.55x
        figures = [None if "%" in text else figure for figure, text in zip(figures, texts, strict=True)]
    return Column(heading, quantity, tuple(figures), texts)


def _scale(heading: str, dimension: str, quantity: str) -> float:
    """Return the unit that a heading states."""
    if dimension == "flops":
        return 1e15 if re.search(r"p(eta)?flop", heading) else 1e9 if "gflop" in heading else 1e12
    if dimension == "share":
        return 0.01 if "%" in heading else 1.0
    if dimension == "time":
        words = re.findall(r"[a-zµ]+", heading)
        units = [word for word in words if word in UNITS["time"] and word not in ("d", "m", "h")]
        return UNITS["time"][units[0]] if units else 1.0
    if dimension == "memory":
        words = [word for word in re.findall(r"[a-z]+", heading) if word in UNITS["memory"] and len(word) > 1]
        return UNITS["memory"][words[0]] if words else 1e9
    if quantity == "params" and re.search(r"\(?\b[bm]\b\)?|billion|million", heading):
        return 1e9 if re.search(r"\bb\b|billion", heading) else 1e6
    if dimension == "rate" and re.search(r"\bk ?tok|\(k\b|\bk(tokens|tok)", heading):
        return 1e3
    return 1.0


def _topology(heading: str, cells: Sequence[str]) -> list[Column]:
    """Return the columns of a cell like "TP=8 DP=4 PP=4". What a row leaves out is 1."""
    found = [{name.lower(): number for name, number in TOPOLOGY.findall(plain(cell))} for cell in cells]
    if sum(len(row) > 1 for row in found) < 2:
        return []
    names = {name for row in found for name in row}
    return [
        _column(f"{heading}: {name.upper()}", name, [row.get(name, "1") if len(row) > 1 else "" for row in found])
        for name in sorted(names)
    ]


def _counts(heading: str, cells: Sequence[str]) -> list[Column]:
    """Return the column of devices that labels like "1 GPU" and "8x H100" say, where each of them does."""
    counts = [count_in(plain(cell)) for cell in cells]
    if len(counts) < 2 or len(set(counts)) < 2 or None in counts:
        return []
    return [_column(f"{heading}: devices", "devices", [str(count) for count in counts])]


def _chosen(headings: Sequence[str], named: Mapping[str, str]) -> dict[int, str]:
    """Return the quantity of each column that --columns names."""
    return {headings.index(heading): quantity for quantity, heading in named.items() if heading in headings}


def is_number(text: str) -> bool:
    return re.fullmatch(r"\d[\d,.]*\s?[kKmMbB%]?", text) is not None


def check_names(named: Mapping[str, str], tables: Sequence[Table], path: str) -> None:
    """Raise InputError where --columns names a heading that no table of the file has."""
    headings = {plain(heading) for table in tables for heading in table.header}
    for heading in named.values():
        if heading not in headings and not is_number(heading):
            raise InputError(
                f"--columns: {path} has no column '{heading}'; it has "
                f"{', '.join(sorted(heading for heading in headings if heading)) or 'none'}"
            )
