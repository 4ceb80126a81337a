"""Say in tables and notes what an inference_metrics.json of scripts/evaluate.py shows.

A ratio compares a scheme with the weights as they were saved ("none"): of perplexities paired window by window, of
decode rates with repeats interleaved. Its interval, not its value, decides what is said of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from testbed import typed_json
from testbed.analysis.document import markdown, terminal
from testbed.analysis.document.model import Cell, Document, Section, Table
from testbed.analysis.document.words import BRACKETS, Number, counted, digits, rate
from testbed.analysis.runs.comparability import LOSS_NOISE
from testbed.analysis.statistics import MIN_REPEATS, NO_DIFFERENCE, NOT_ENOUGH
from testbed.errors import InputError, one_line
from testbed.inference.fields import InferenceMetrics
from testbed.inference.schemes import NONE as REFERENCE
from testbed.inference.schemes import SCHEMES
from testbed.run_folder import INFERENCE

SERVED = "bf16"  # what models are served in: speed is compared with it too
WORSE, BETTER = "worse", "better"
SMALL = math.expm1(LOSS_NOISE)  # of perplexity: what the other comparisons of losses do not hold against a run
BARELY = f", but by too little to matter (under {SMALL:.1%})"
EQUAL = "equal within 0.01%"
ONE_PROCESS = "all in one process: the interval says nothing of another start"
EAGER = (
    "Eager, not compiled: torchao widens or sums int8 weights again for each product, which torch.compile would "
    "fuse or fold; slower here says nothing of compiled models."
)
SIZES = ("num_products", "num_quantized_products", "bytes_in_memory", "bytes_on_disk", "bytes_expected")
WAYS = {"by_character": "per character", "by_token": "per token", "by_sum": "by the whole ending"}
WRAPPED = {
    "plain": "plain module",
    "training_engine": "DeepSpeed's training engine",
    "init_inference": "deepspeed.init_inference",
}


def read_inference(path: Path) -> dict[str, Any]:
    """Read an inference_metrics.json, or the one in a folder. InputError, one sentence naming it, when it is none."""
    path = Path(path)
    return typed_json.read_checked(path / INFERENCE if path.is_dir() else path, check_inference)


def check_inference(content: Any) -> None:
    """Raise InputError, one sentence that names the place, unless `content` is an inference_metrics.json."""
    typed_json.check(content, InferenceMetrics)
    typed_json.check_finite(content)
    if (
        lacking := {"device_type", "gpu_name", "cpu_name", "cpu_cores_visible"}
        - content["environment"]["hardware"].keys()
    ):
        raise InputError(f"environment.hardware lacks {min(lacking)!r}")


def measured_schemes(content: Mapping[str, Any], part: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the schemes that ran, by name, in the order of the file; with `part`, those of which it was measured."""
    return {
        name: scheme
        for name, scheme in content["schemes"].items()
        if scheme["unavailable"] is None
        and all(scheme[count] is not None for count in SIZES)
        and (part is None or scheme[part] is not None)
    }


def measured_arms(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the modules of `wrapped` that ran, by name."""
    arms = (content["wrapped"] or {"arms": {}})["arms"]
    return {name: arm for name, arm in arms.items() if arm["latency_s"] and arm["decode_tokens_per_s"]}


def with_bounds(found: Mapping[str, Any], form: str | Callable[[float], str], unit: str = "") -> Number:
    """Return `1.52x [1.48, 1.57]`; without bounds where the repeats are too few for them."""
    value = found["value"] if "value" in found else found["ratio"]
    return Number(value, form, found["low"], found["high"], unit, BRACKETS)


def quality_ratio(ratio: Mapping[str, Any]) -> Number | str:
    """Return `1.0800x [1.0795, 1.0805]`; words where all of it would read 1.0000."""
    known = [bound for bound in (ratio["value"], ratio["low"], ratio["high"]) if bound is not None]
    return EQUAL if {f"{bound:.4f}" for bound in known} == {f"{1:.4f}"} else with_bounds(ratio, ".4f", "x")


def quality_verdict(ratio: Mapping[str, float] | None) -> str:
    """Return what the interval of a ratio of perplexities says of the scheme; "" without one.

    Paired windows tell a ten-thousandth from nothing, which matters to no choice: the verdict then says how small.
    """
    if ratio is None or ratio["low"] is None:
        return ""
    verdict = WORSE if ratio["low"] > 1 else BETTER if ratio["high"] < 1 else NO_DIFFERENCE
    is_small = ratio["low"] > 1 - SMALL and ratio["high"] < 1 + SMALL
    return verdict + BARELY if is_small and verdict != NO_DIFFERENCE else verdict


def decode_rates(latency: Mapping[str, Any]) -> list[float]:
    """Return tokens/s after the first token, one number per repeat; none where only one token was asked for."""
    return [len(times_s) / sum(times_s) for times_s in latency["per_token_s"] if times_s]


def report(content: Mapping[str, Any]) -> str:
    """Return Markdown: what was measured, a table of each kind that the file has, then what a reader must know."""
    return markdown.text(_document(content))


def report_for_terminal(content: Mapping[str, Any]) -> str:
    """Return the same in columns."""
    document = _document(content)
    return f"{document.lead}\n\n{terminal.text(document)}"


def _document(content: Mapping[str, Any]) -> Document:
    tables = [size_table(content), speed_table(content), load_table(content), wrapped_table(content)]
    return Document(
        lead=f"{model_in_words(content)}; {place_in_words(content)}",
        sections=[Section(blocks=[table for table in tables if table.rows])],
        notes=[[f"- {note}" for note in notes(content)]],
    )


def model_in_words(content: Mapping[str, Any]) -> str:
    model = content["checkpoint"]
    return one_line(
        f"{model['name']}: {model['model_size']}, {model['num_parameters']:,} parameters, a vocabulary of "
        f"{model['vocab_size']:,}, weights {(model['weights_sha256'] or 'of the hub')[:12]}"
    )


def place_in_words(content: Mapping[str, Any]) -> str:
    """Return the device, the version of torch and the commit."""
    hardware, versions = content["environment"]["hardware"], content["environment"]["env"]
    where = hardware["gpu_name"] or f"{hardware['cpu_name']}, {counted(content['threads'], 'thread')}"
    commit = (content["git_commit"] or "unknown")[:10] + (" with changes" if content["git_dirty"] else "")
    return one_line(f"{where}, torch {versions.get('torch_version')}, commit {commit}")


def size_table(content: Mapping[str, Any]) -> Table:
    """Return bytes and perplexity of every scheme that ran."""
    columns = (
        *("scheme", "bits", "products quantized", "MiB in memory", "of what the bits say", "MiB on disk"),
        *("bits per byte of text", "perplexity", f"against {REFERENCE}", "verdict"),
    )
    rows: list[list[Cell]] = []
    for name, scheme in measured_schemes(content).items():
        ratio, found = scheme["perplexity_ratio"], scheme["perplexity"]
        rows.append(
            [
                *(name, str(scheme["bits"]), f"{scheme['num_quantized_products']} of {scheme['num_products']}"),
                digits(scheme["bytes_in_memory"] / 2**20),
                f"{scheme['bytes_in_memory'] / scheme['bytes_expected']:.1%}",
                digits(scheme["bytes_on_disk"] / 2**20),
                "" if found is None or found["bits_per_byte"] is None else f"{found['bits_per_byte']:.4f}",
                "" if found is None else with_bounds(found, digits),
                "" if ratio is None else quality_ratio(ratio),
                quality_verdict(ratio),
            ]
        )
    return Table(columns, rows, text_columns=(0, 9))


def speed_table(content: Mapping[str, Any]) -> Table:
    """Return one request at a time under every scheme that was timed."""
    columns = (
        *("scheme", "prefill, ms p50", "first token, ms p50 / p95", "per token, ms p50 / p95 / p99"),
        *("prefill tokens/s", "decode tokens/s", f"decode against {REFERENCE}", "verdict"),
        *(f"decode against {SERVED}", "verdict"),
    )
    rows: list[list[Cell]] = []
    for name, scheme in measured_schemes(content, "latency").items():
        latency, of = scheme["latency"], scheme["latency"]["percentiles"]
        times = (_in_turn(of["prefill_s"], 1, 1e3), _in_turn(of["time_to_first_token_s"], 2, 1e3))
        rates = (rate(latency["prefill_tokens_per_s"]), rate(latency["decode_tokens_per_s"]))
        compared = (*_ratio_cells(scheme["speed_ratio"]), *_ratio_cells(scheme["speed_ratio_bf16"]))
        rows.append([name, *times, _in_turn(of["per_token_s"], 3, 1e3), *rates, *compared])
    return Table(columns, rows, text_columns=(0, 7, 9))


def load_table(content: Mapping[str, Any]) -> Table:
    """Return a row for each load: closed loops first."""
    columns = (
        *("load", "requests", "completed", "rejected", "tokens/s"),
        *("latency, s p50 / p95 / p99", "first token, s p50 / p95"),
    )
    load = content["load"] or {"closed": [], "open": []}
    points = [(f"{point['concurrency']} at once", point) for point in load["closed"]]
    points += [(f"{point['rate_per_s']:g} requests/s", point) for point in load["open"]]
    rows: list[list[Cell]] = []
    for words, point in points:
        counts = [f"{point[name]:,}" for name in ("requests", "completed", "rejected")]
        times = _in_turn(point["latency_s"], 3), _in_turn(point["time_to_first_token_s"], 2)
        rows.append([words, *counts, rate(point["tokens_per_s"]), *times])
    return Table(columns, rows, text_columns=(0,))


def wrapped_table(content: Mapping[str, Any]) -> Table:
    """Return the same prompts through the plain module and through what DeepSpeed makes of it."""
    columns = (
        *("module", "whole answer, s median", "decode tokens/s, median", "decode against the plain module"),
        *("verdict", "same tokens"),
    )
    rows: list[list[Cell]] = []
    for name, arm in measured_arms(content).items():
        medians = digits(statistics.median(arm["latency_s"])), rate(statistics.median(arm["decode_tokens_per_s"]))
        compared = _ratio_cells(content["wrapped"]["comparisons"].get(name))
        rows.append([WRAPPED[name], *medians, *compared, {None: "", True: "yes", False: "NO"}[arm["same_tokens"]]])
    return Table(columns, rows, text_columns=(0, 4, 5))


def _ratio_cells(ratio: Mapping[str, Any] | None) -> tuple[Number | str, str]:
    """Return a ratio of rates with its interval, and its verdict."""
    return ("", "") if ratio is None else (with_bounds(ratio, ".2f", "x"), ratio["verdict"])


def _in_turn(percentiles: Mapping[str, float | None], number: int, factor: float = 1) -> str:
    """Return the first percentiles: `0.08191 / 0.1203`."""
    known = [percentiles[name] for name in ("p50", "p95", "p99")[:number]]
    return " / ".join("n/a" if value is None else digits(value * factor) for value in known)


def notes(content: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know to read the numbers, most important first."""
    lines = [f"UNFINISHED: the file's status is {content['status']}."] * (content["status"] != "complete")
    lines += [f"NOT MEASURED, {sentence}" for sentence in unmeasured(content)]
    compared = measured_schemes(content, "speed_ratio").values()
    if NOT_ENOUGH in [scheme["speed_ratio"]["verdict"] for scheme in compared]:
        lines.append(f"Fewer than {MIN_REPEATS} repeats of a scheme: no interval, and no claim.")
    lines += [*quality_notes(content), *speed_notes(content), *load_notes(content)]
    if (wrapped := content["wrapped"]) is not None:
        lines.append(
            f"Wrapped: {wrapped['prompt_tokens']} prompt tokens, {wrapped['new_tokens']} new ones, "
            f"{wrapped['repeats']} repeats of each module in turn; ratio of medians with its 95 % interval, "
            f"{ONE_PROCESS}."
        )
    if (bleu := content["bleu"]) is not None:
        lines.append(
            f"BLEU {bleu['score']:.2f} over {bleu['pairs']:,} pairs ({bleu['signature']}), at most "
            f"{bleu['max_new_tokens']} tokens each, {bleu['num_empty']} answers empty."
        )
    if (choice := content.get("multiple_choice")) is not None:
        said = ", ".join(
            f"{_percent(choice['accuracy'][way])} {words}" for way, words in WAYS.items() if way in choice["accuracy"]
        )
        lines.append(
            f"Multiple choice on {choice['name']}: {said}; {choice['num_questions']:,} questions, guessing gives "
            f"{choice['chance']:.1%}."
        )
    return list(map(one_line, lines))


def _percent(share: Mapping[str, float]) -> str:
    return f"{share['value']:.1%} [{share['low']:.1%}, {share['high']:.1%}]"


def unmeasured(content: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each scheme and module that was asked for and does not run here."""
    arms = (content["wrapped"] or {"arms": {}})["arms"]
    asked = content["schemes"] | {WRAPPED[name]: arm for name, arm in arms.items()}
    reasons = {name: each["unavailable"] for name, each in asked.items()}
    return [f"{name}: {reason.rstrip('.')}." for name, reason in reasons.items() if reason is not None]


def quality_notes(content: Mapping[str, Any]) -> list[str]:
    """Return how perplexity was measured; nothing where it was not."""
    data = content["data"]
    if data is None:
        return []
    found = [scheme["perplexity"] for scheme in measured_schemes(content, "perplexity").values()]
    windows = f"{data['num_windows']:,} windows of {data['window']} tokens, one every {data['stride']}"
    return [
        f"Perplexity on {data['name']}: {data['num_target_tokens']:,} tokens predicted in {windows}; 95 % bootstrap "
        f"over windows. Against {REFERENCE} window by window, so that what makes a window hard cancels.",
        *["Too few windows for an interval: no claim about quality."] * any(each["low"] is None for each in found),
    ]


def speed_notes(content: Mapping[str, Any]) -> list[str]:
    """Return what one request was; nothing where none was timed."""
    timed = measured_schemes(content, "latency")
    if not timed:
        return []
    first = next(iter(timed.values()))["latency"]
    return [
        f"One request at a time: {first['prompt_tokens']} prompt tokens, {first['new_tokens']} new ones, "
        f"{first['repeats']} repeats of each scheme in turn after {first['warmup']} of warm-up, {ONE_PROCESS}.",
        *[EAGER] * any(SCHEMES[name].needs_torchao for name in timed),
    ]


def load_notes(content: Mapping[str, Any]) -> list[str]:
    """Return what each request of the load was, what it took, and where throughput stopped growing."""
    load = content["load"]
    if load is None:
        return []
    peak = ""
    if load["peak_allocated_bytes"] is not None:
        peak = f"; at most {digits(load['peak_allocated_bytes'] / 2**20)} MiB on the device, the weights of all "
        peak += "schemes included"
    return [
        f"Load: half to all of {load['prompt_tokens']} prompt tokens and of {load['new_tokens']} new ones per request, "
        f"weights {load['scheme']}, at most {load['max_batch']} in the batch and {load['max_queue']} waiting. "
        "Requests/s: arrivals at random (Poisson), latency from the drawn arrival on.",
        f"{digits(load['cache_bytes'] / 2**20)} MiB of keys and values for {load['max_batch']} slots, allocated "
        f"beforehand{peak}.",
        *(f"{words}." for words in saturation_in_words(content)),
    ]


def saturation_in_words(content: Mapping[str, Any]) -> list[str]:
    """Return where more load brings no more throughput, or that no load was enough to show it; and up to which rate
    requests start at once."""
    load = content["load"]
    found, said = load["saturation"] or {}, []
    if found.get("concurrency") is not None:
        best, where = (
            f"{rate(found['tokens_per_s'])} tokens/s",
            f"at {counted(found['concurrency'], 'request')} at once",
        )
        if len(load["closed"]) == 1:
            said.append(f"{best} {where}")  # nothing is known of how it grows
        elif saturating_concurrency(content) is not None:
            said.append(f"Throughput stops growing {where}: at most {best}")
        else:
            said.append(f"Throughput still grows {where}: {best}")
    if load["open"] and found:
        kept = found["rate_per_s"]
        if kept is None:
            said.append("At none of the rates do most requests start at once")
        else:
            tried = ", the most that was tried," if limiting_rate(content) is None else ""
            said.append(f"Up to {kept:g} requests/s{tried} most requests start at once")
    return said


def saturating_concurrency(content: Mapping[str, Any]) -> int | None:
    """Return the fewest requests at once that give almost the best throughput; None where only the most tried do."""
    return _below_the_most(content["load"], "closed", "concurrency")


def limiting_rate(content: Mapping[str, Any]) -> float | None:
    """Return the highest rate at which most requests start at once; None where there is none, or none above it."""
    return _below_the_most(content["load"], "open", "rate_per_s")


def _below_the_most(load: Mapping[str, Any], loop: str, name: str) -> Any:
    found = (load["saturation"] or {name: None})[name]
    return None if found == max((point[name] for point in load[loop]), default=None) else found
