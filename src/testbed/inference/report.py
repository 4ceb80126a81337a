"""inference_metrics.json, which scripts/evaluate.py leaves in a checkpoint's folder: checked, and its tables.

A ratio compares a scheme with the weights as they were saved ("none"): of perplexities paired window by window, of
decode rates with repeats interleaved. Its interval, not its value, decides what is said of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.analysis.document.words import digits, rate
from testbed.analysis.runs.comparability import LOSS_NOISE
from testbed.analysis.statistics import MIN_REPEATS, NO_DIFFERENCE, NOT_ENOUGH
from testbed.errors import one_line
from testbed.io import check_schema, read_checked

INFERENCE_FILE = "inference_metrics.json"
REFERENCE = "none"  # the scheme that the others are compared with
SERVED = "bf16"  # what models are served in: speed is compared with it too
WORSE, BETTER = "worse", "better"
SMALL = math.expm1(LOSS_NOISE)  # of perplexity: what the other comparisons of losses do not hold against a run
BARELY = f", but by too little to matter (under {SMALL:.1%})"
EQUAL = "equal within 0.01%"
EAGER = ("int8_dynamic", "int8_weight_only", "int4_weight_only")  # torchao's, made for torch.compile
ONE_PROCESS = "all in one process: the interval says nothing of another start"
SIZES = ("num_products", "num_quantized_products", "bytes_in_memory", "bytes_on_disk", "bytes_expected")
WRAPPED = {
    "plain": "plain module",
    "training_engine": "DeepSpeed's training engine",
    "init_inference": "deepspeed.init_inference",
}


def read_inference(path: Path) -> dict[str, Any]:
    """An inference_metrics.json, or the one in a folder. ValueError, one sentence naming the file, when it is none."""
    path = Path(path)
    path = path / INFERENCE_FILE if path.is_dir() else path
    return read_checked(path, check_inference)


def check_inference(content: Any) -> None:
    """Raise ValueError, one sentence that names the place, unless `content` is an inference_metrics.json."""
    check_schema(content, "inference/inference_metrics.schema.json")


def measured_schemes(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The schemes that ran, by name, in the order of the file."""
    return {
        name: scheme
        for name, scheme in content["schemes"].items()
        if scheme["unavailable"] is None and all(scheme[count] is not None for count in SIZES)
    }


def quality_ratio(ratio: Mapping[str, Any]) -> str:
    """`1.0800x [1.0795, 1.0805]`; in words where all of it would read 1.0000."""
    known = [bound for bound in (ratio["value"], ratio["low"], ratio["high"]) if bound is not None]
    if {f"{bound:.4f}" for bound in known} == {f"{1:.4f}"}:
        return EQUAL
    return bounded(ratio["value"], ratio["low"], ratio["high"], "{:.4f}".format, "x")


def quality_verdict(ratio: Mapping[str, float] | None) -> str:
    """What the interval of a ratio of perplexities says of the scheme; empty without one.

    Paired windows tell a ten-thousandth from nothing, and nobody would choose by it: the verdict then says how small.
    """
    if ratio is None or ratio["low"] is None:
        return ""
    verdict = WORSE if ratio["low"] > 1 else BETTER if ratio["high"] < 1 else NO_DIFFERENCE
    is_small = ratio["low"] > 1 - SMALL and ratio["high"] < 1 + SMALL
    return verdict + BARELY if is_small and verdict != NO_DIFFERENCE else verdict


def decode_rates(latency: Mapping[str, Any]) -> list[float]:
    """Tokens per second after the first token, one number per repeat; none where only one token was asked for."""
    return [len(times_s) / sum(times_s) for times_s in latency["per_token_s"] if times_s]


def report(content: Mapping[str, Any]) -> str:
    """Markdown: what was measured, a table of each kind that the file has, then what a reader must know."""
    tables = [size_table(content), speed_table(content), load_table(content), wrapped_table(content)]
    parts = [f"{model_in_words(content)}; {place_in_words(content)}", *tables]
    return "\n\n".join([part for part in parts if part] + ["\n".join(f"- {note}" for note in notes(content))])


def model_in_words(content: Mapping[str, Any]) -> str:
    """Which weights."""
    model = content["checkpoint"]
    return one_line(
        f"{model['name']}: {model['model_size']}, {model['num_parameters']:,} parameters, a vocabulary of "
        f"{model['vocab_size']:,}, weights {(model['weights_sha256'] or 'of the hub')[:12]}"
    )


def place_in_words(content: Mapping[str, Any]) -> str:
    """Where, with what, and at which commit."""
    environment, threads = content["environment"], content["threads"]
    hardware, versions = environment["hardware"], environment["env"]
    where = hardware["gpu_name"] or f"{hardware['cpu_name']}, {threads} thread{'s' * (threads > 1)}"
    commit = (content["git_commit"] or "unknown")[:10] + (" with changes" if content["git_dirty"] else "")
    return one_line(f"{where}, torch {versions.get('torch_version')}, commit {commit}")


def size_table(content: Mapping[str, Any]) -> str:
    """Markdown: bytes and perplexity of every scheme that ran; empty where none did."""
    schemes = measured_schemes(content)
    lines = [
        "| scheme | bits | products quantized | MiB in memory | of what the bits say | MiB on disk | "
        f"bits per byte of text | perplexity | against {REFERENCE} | verdict |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, scheme in schemes.items():
        ratio, found = scheme["perplexity_ratio"], scheme["perplexity"]
        cells = (
            name,
            scheme["bits"],
            f"{scheme['num_quantized_products']} of {scheme['num_products']}",
            digits(scheme["bytes_in_memory"] / 2**20),
            f"{scheme['bytes_in_memory'] / scheme['bytes_expected']:.1%}",
            digits(scheme["bytes_on_disk"] / 2**20),
            "" if found is None or found["bits_per_byte"] is None else f"{found['bits_per_byte']:.4f}",
            "" if found is None else bounded(found["value"], found["low"], found["high"], digits),
            "" if ratio is None else quality_ratio(ratio),
            quality_verdict(ratio),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) if schemes else ""


def speed_table(content: Mapping[str, Any]) -> str:
    """Markdown: one request at a time under every scheme that was timed; empty where none was."""
    timed = {name: scheme for name, scheme in measured_schemes(content).items() if scheme["latency"] is not None}
    if not timed:
        return ""
    lines = [
        "| scheme | prefill, ms p50 | first token, ms p50 / p95 | per token, ms p50 / p95 / p99 | prefill tokens/s | "
        f"decode tokens/s | decode against {REFERENCE} | verdict | decode against {SERVED} | verdict |",
        "|---|---:|---:|---:|---:|---:|---:|---|---:|---|",
    ]
    for name, scheme in timed.items():
        latency = scheme["latency"]
        of = latency["percentiles"]
        cells = (
            name,
            _milliseconds(of["prefill_s"], "p50"),
            _milliseconds(of["time_to_first_token_s"], "p50", "p95"),
            _milliseconds(of["per_token_s"], "p50", "p95", "p99"),
            rate(latency["prefill_tokens_per_s"]),
            rate(latency["decode_tokens_per_s"]),
            *_ratio_cells(scheme["speed_ratio"]),
            *_ratio_cells(scheme["speed_ratio_bf16"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio_cells(ratio: Mapping[str, Any] | None) -> tuple[str, str]:
    """A ratio of rates with its interval, and its verdict."""
    if ratio is None:
        return "", ""
    return bounded(ratio["ratio"], ratio["low"], ratio["high"], "{:.2f}".format, "x"), ratio["verdict"]


def load_points(content: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every load that was offered, in words, with what came of it: closed loops first."""
    load = content["load"] or {"closed": [], "open": []}
    closed = [(f"{point['concurrency']} at once", point) for point in load["closed"]]
    return closed + [(f"{point['rate_per_s']:g} requests/s", point) for point in load["open"]]


def load_table(content: Mapping[str, Any]) -> str:
    """Markdown: a row for each load; empty where none was offered."""
    points = load_points(content)
    lines = [
        "| load | requests | completed | rejected | tokens/s | latency, s p50 / p95 / p99 | first token, s p50 / p95 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for words, point in points:
        counts = [f"{point[name]:,}" for name in ("requests", "completed", "rejected")]
        latency, first = point["latency_s"], point["time_to_first_token_s"]
        cells = (
            *(words, *counts, rate(point["tokens_per_s"])),
            *(_in_turn(latency, ("p50", "p95", "p99"), 1), _in_turn(first, ("p50", "p95"), 1)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if points else ""


def wrapped_table(content: Mapping[str, Any]) -> str:
    """Markdown: the same prompts through the plain module and through what DeepSpeed makes of it; empty without."""
    arms = measured_arms(content)
    lines = [
        "| module | whole answer, s median | decode tokens/s, median | decode against the plain module | verdict | "
        "same tokens |",
        "|---|---:|---:|---:|---|---|",
    ]
    for name, arm in arms.items():
        ratio, latency_s = content["wrapped"]["comparisons"].get(name), statistics.median(arm["latency_s"])
        cells = (
            WRAPPED[name],
            digits(latency_s),
            rate(statistics.median(arm["decode_tokens_per_s"])),
            *_ratio_cells(ratio),
            {None: "", True: "yes", False: "NO"}[arm["same_tokens"]],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if arms else ""


def measured_arms(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The modules of `wrapped` that ran, by name."""
    arms = (content["wrapped"] or {"arms": {}})["arms"]
    return {name: arm for name, arm in arms.items() if arm["latency_s"] and arm["decode_tokens_per_s"]}


def bounded(value: float, low: float | None, high: float | None, spelled: Any, unit: str = "") -> str:
    """`1.52x [1.48, 1.57]`; without the bounds where there are too few repeats for them."""
    bounds = "" if low is None or high is None else f" [{spelled(low)}, {spelled(high)}]"
    return f"{spelled(value)}{unit}{bounds}"


def _milliseconds(percentiles: Mapping[str, float], *names: str) -> str:
    return _in_turn(percentiles, names, 1e3)


def _in_turn(percentiles: Mapping[str, float | None], names: Sequence[str], factor: float) -> str:
    known = [percentiles[name] for name in names]
    return " / ".join("n/a" if value is None else digits(value * factor) for value in known)


def notes(content: Mapping[str, Any]) -> list[str]:
    """What a reader must know beside the numbers, most important first."""
    lines = [f"UNFINISHED: the file's status is {content['status']}."] * (content["status"] != "complete")
    lines += [f"NOT MEASURED, {sentence}" for sentence in unmeasured(content)]
    schemes = measured_schemes(content)
    verdicts = [scheme["speed_ratio"]["verdict"] for scheme in schemes.values() if scheme["speed_ratio"] is not None]
    if NOT_ENOUGH in verdicts:
        lines.append(f"Fewer than {MIN_REPEATS} repeats of a scheme: no interval, and no claim.")
    lines += [*quality_notes(content), *speed_notes(content), *load_notes(content), *_other_notes(content)]
    return list(map(one_line, lines))


def unmeasured(content: Mapping[str, Any]) -> list[str]:
    """A sentence for each scheme and module that was asked for and does not run here."""
    schemes = [(name, scheme["unavailable"]) for name, scheme in content["schemes"].items()]
    arms = [(WRAPPED[name], arm["unavailable"]) for name, arm in (content["wrapped"] or {"arms": {}})["arms"].items()]
    return [f"{name}: {reason.rstrip('.')}." for name, reason in schemes + arms if reason is not None]


def quality_notes(content: Mapping[str, Any]) -> list[str]:
    """How perplexity was measured; empty where it was not."""
    data = content["data"]
    if data is None:
        return []
    found = [scheme["perplexity"] for scheme in measured_schemes(content).values() if scheme["perplexity"] is not None]
    has_no_interval = any(each["low"] is None for each in found)
    windows = f"{data['num_windows']:,} windows of {data['window']} tokens, one every {data['stride']}"
    return [
        f"Perplexity on {data['name']}: {data['num_target_tokens']:,} tokens predicted in {windows}; 95 % bootstrap "
        f"over windows. Against {REFERENCE} window by window, so that what makes a window hard cancels.",
        *["Too few windows for an interval: no claim about quality."] * has_no_interval,
    ]


def speed_notes(content: Mapping[str, Any]) -> list[str]:
    """What one request was; empty where none was timed."""
    timed = {name: scheme for name, scheme in measured_schemes(content).items() if scheme["latency"] is not None}
    latencies = [scheme["latency"] for scheme in timed.values()]
    if not latencies:
        return []
    first, is_eager = latencies[0], any(name in EAGER for name in timed)
    eager = (
        "Eager, not compiled: torchao widens or sums int8 weights again for each product, which torch.compile would "
        "fuse or fold; slower here says nothing of compiled models."
    )
    return [
        f"One request at a time: {first['prompt_tokens']} prompt tokens, {first['new_tokens']} new ones, "
        f"{first['repeats']} repeats of each scheme in turn after {first['warmup']} of warm-up, {ONE_PROCESS}.",
        *[eager] * is_eager,
    ]


def load_notes(content: Mapping[str, Any]) -> list[str]:
    """What each request of the load was, and where throughput stopped growing; empty without a load."""
    load = content["load"]
    if load is None:
        return []
    return [
        f"Load: half to all of {load['prompt_tokens']} prompt tokens and of {load['new_tokens']} new ones per request, "
        f"weights {load['scheme']}, at most {load['max_batch']} in the batch and {load['max_queue']} waiting. "
        "Requests/s: arrivals at random (Poisson), latency from the drawn arrival on.",
        cache_in_words(load),
        *(f"{words}." for words in saturation_in_words(content)),
    ]


def cache_in_words(load: Mapping[str, Any]) -> str:
    """What keys and values take, and what the device held at most."""
    cache = f"{digits(load['cache_bytes'] / 2**20)} MiB of keys and values for {load['max_batch']} slots"
    if load["peak_allocated_bytes"] is None:
        return f"{cache}, allocated beforehand."
    peak = digits(load["peak_allocated_bytes"] / 2**20)
    return f"{cache}, allocated beforehand; at most {peak} MiB on the device, the weights of all schemes included."


def saturation_in_words(content: Mapping[str, Any]) -> list[str]:
    """Where more load brings no more throughput, or that no load was enough to show it; up to which rate requests start
    at once."""
    load = content["load"]
    found, said = load["saturation"] or {}, []
    if found.get("concurrency") is not None:
        best, where = f"{rate(found['tokens_per_s'])} tokens/s", f"at {_requests(found['concurrency'])} at once"
        if len(load["closed"]) == 1:
            said.append(f"{best} {where}")  # nothing is known of how it grows
        elif saturating_concurrency(content) is not None:
            said.append(f"Throughput stops growing {where}: at most {best}")
        else:
            said.append(f"Throughput still grows {where}: {best}")
    if load["open"] and found:
        kept = found["rate_per_s"]
        is_last = kept is not None and limiting_rate(content) is None
        tried = ", the most that was tried," if is_last else ""
        where = "At none of the rates" if kept is None else f"Up to {kept:g} requests/s{tried}"
        said.append(f"{where} {'do ' * (kept is None)}most requests start at once")
    return said


def _requests(number: int) -> str:
    return f"{number} request{'s' * (number > 1)}"


def saturating_concurrency(content: Mapping[str, Any]) -> int | None:
    """The fewest requests at once that give almost the best throughput; None where only the most that were tried do."""
    load = content["load"]
    found = (load["saturation"] or {"concurrency": None})["concurrency"]
    return None if found == max((point["concurrency"] for point in load["closed"]), default=None) else found


def limiting_rate(content: Mapping[str, Any]) -> float | None:
    """The highest rate at which most requests start at once; None where none is, or where no higher one was tried."""
    load = content["load"]
    found = (load["saturation"] or {"rate_per_s": None})["rate_per_s"]
    return None if found == max((point["rate_per_s"] for point in load["open"]), default=None) else found


def _other_notes(content: Mapping[str, Any]) -> list[str]:
    lines = []
    if content["wrapped"] is not None:
        wrapped = content["wrapped"]
        lines.append(
            f"Wrapped: {wrapped['prompt_tokens']} prompt tokens, {wrapped['new_tokens']} new ones, "
            f"{wrapped['repeats']} repeats of each module in turn; ratio of medians with its 95 % interval, "
            f"{ONE_PROCESS}."
        )
    if content["bleu"] is not None:
        bleu = content["bleu"]
        lines.append(
            f"BLEU {bleu['score']:.2f} over {bleu['pairs']:,} pairs ({bleu['signature']}), at most "
            f"{bleu['max_new_tokens']} tokens each, {bleu['num_empty']} answers empty."
        )
    return lines
