"""Write the table of a comparison with peers in Markdown, and what a reader must know with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.analysis.document.words import BRACKETS, Number, rate
from testbed.analysis.statistics import MIN_REPEATS, NOT_ENOUGH
from testbed.experiments.peers.results_file import OURS, Result, results

SET_TITLES = {"own": "each as it runs of itself", "fp32": "all in fp32", "bf16": "all in bf16"}
LOSS_TOLERANCE = 0.02  # of peers with our batches and weights: what bf16 may move the loss in these few steps


def peers_table(content: Mapping[str, Any]) -> str:
    """Return Markdown: a table per set, then what was not measured, what was left out, and what is not equal."""
    work = content["work"]
    lines = [f"{work_in_words(content)}; {place_in_words(content)}", ""]
    found = results(content)
    for name in dict.fromkeys(result.set for result in found):
        lines += [
            f"**{set_title(name)}**",
            "",
            "| trainer | precision | runs | tokens/s | ours / it | verdict: ours is | median step, tokens/s | "
            f"of the matrix rate | loss after {work['steps']} steps |",
            "|---|---|---:|---:|---:|---|---:|---:|---:|",
            *(_line(result) for result in found if result.set == name),
            "",
        ]
    return "\n".join(lines + [f"- {note}" for note in notes(content)])


def work_in_words(content: Mapping[str, Any]) -> str:
    """Describe what every run did."""
    work = content["work"]
    return (
        f"{work['model_name']} ({work['model_size']}, {work['num_parameters']:,} parameters, a vocabulary of "
        f"{work['vocab_size']:,} in {work['padded_vocab_size']:,} rows), {work['batch_size']} "
        f"sequences of {work['seq_length']} tokens per step, {work['steps']} steps, the first {work['warmup_steps']} "
        "warm-up"
    )


def place_in_words(content: Mapping[str, Any]) -> str:
    """Describe the machine, the versions and the commit."""
    hardware, threads = content["hardware"], content["threads"]
    where = hardware["gpu_name"] or f"{hardware['cpu_name']}, {threads} thread{'s' * (threads > 1)}"
    commit = (content["git_commit"] or "unknown")[:10] + (" with changes" if content["git_dirty"] else "")
    return f"{where}, torch {content['env']['torch_version']}, commit {commit}"


def set_title(name: str) -> str:
    title = " = ".join(SET_TITLES[part] for part in name.split("+"))
    return title[0].upper() + title[1:]


def _line(result: Result) -> str:
    bounds = (result.low_tokens_per_s, result.high_tokens_per_s)
    speed = Number(result.median_tokens_per_s, rate, *bounds, interval=BRACKETS)
    ratio = "" if result.ratio is None else times(result)
    share = "n/a" if result.median_share_of_ceiling is None else f"{result.median_share_of_ceiling:.1%}"
    loss = f"{result.loss:.4f}" + ("" if result.loss_of == "validation" else " (training)")
    of_step = rate(result.median_step_tokens_per_s)
    columns = (len(result.tokens_per_s), speed, ratio, result.verdict or "", of_step, share, loss)
    return f"| {' | '.join(map(str, (result.peer, result.precision, *columns)))} |"


def times(result: Result) -> str:
    """Return `1.52x [1.48, 1.57]`; without the bounds where there are too few runs for them."""
    return str(Number(result.ratio, ".2f", result.ratio_low, result.ratio_high, "x", BRACKETS))


def notes(content: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know with the numbers, most important first."""
    found = results(content)
    lines = [f"NOT MEASURED, {sentence}" for sentence in unmeasured(content)]
    lines += _unequal_losses(content, found)
    if any(result.verdict == NOT_ENOUGH for result in found):
        lines.append(f"Fewer than {MIN_REPEATS} runs of a trainer: no interval, and no claim.")
    if any(share is not None and share > 1 for result in found for share in result.share_of_ceiling):
        lines.append("A share above 100 % of the matrix rate: other work disturbed this machine; measure again alone.")
    lines.append(
        "tokens/s, the ratio and the verdict: by the wall clock over all steps after warm-up, what lies between them "
        "included, alike for all; the median step is as each trainer times its own, and decides nothing."
    )
    lines += [f"Left out: {SET_TITLES[name]}: {reason}." for name, reason in content["skipped"].items()]
    if content["work"]["only_ours"]:
        lines.append(f"Only our runs got {' '.join(content['work']['only_ours'])}.")
    kinds = {result.loss_of for result in found}
    lines.append(
        f"Loss: over the same {content['work']['val_sequences']} validation windows, median over runs"
        + ("." if kinds <= {"validation"} else "; (training): of the last step, where the weights could not be had.")
    )
    for source in dict.fromkeys(f"{ceiling['precision']}: {ceiling['source']}" for ceiling in content["ceilings"]):
        lines.append(f"Matrix rate, in every round, {source}.")
    return lines + _differences(content, {result.peer for result in found})


def _differences(content: Mapping[str, Any], measured: set[str]) -> list[str]:
    """Return what is not equal, each once with all trainers that it is true of."""
    trainers: dict[str, list[str]] = {}
    for name, peer in content["peers"].items():
        for text in peer["differs"] if name in measured else ():
            trainers.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}." for text, names in trainers.items()]


def unmeasured(content: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each trainer that was asked for and could not be measured."""
    return [f"{name}: {reason}" for name, reason in content["not_measured"].items()]


def _unequal_losses(content: Mapping[str, Any], found: list[Result]) -> list[str]:
    """Name trainers with our batches and weights whose loss differs: a faster one that learns something else is not
    faster."""
    lines = []
    for result in found:
        ours = next((each for each in found if (each.set, each.peer) == (result.set, OURS)), None)
        if ours is None or result.loss_of != ours.loss_of or not content["peers"][result.peer]["has_our_batches"]:
            continue
        if abs(result.loss - ours.loss) > LOSS_TOLERANCE:
            lines.append(
                f"LEARNS DIFFERENTLY: {result.peer} {result.precision} ends at {result.loss:.4f} and ours at "
                f"{ours.loss:.4f} from the same weights and batches, more than {LOSS_TOLERANCE} apart."
            )
    return list(dict.fromkeys(lines))
