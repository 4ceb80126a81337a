"""peers.json, which scripts/compare_peers.py writes: checked, and what follows from its raw times.

One number per run, its tokens/s by the wall clock over all steps after warm-up: the one clock that is of the same kind
for every trainer, because what each of them calls a step begins and ends elsewhere. The ratio is ours over the peer's,
of medians over runs, with the interval of `statistics.compare`. Raw times and results stand in one file; `results`
makes the second from the first.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.analysis.document.words import rate
from testbed.analysis.statistics import MIN_REPEATS, NOT_ENOUGH, compare, median_interval
from testbed.io import check_schema, read_checked, write_text

PEERS_FILE = "peers.json"
OURS = "ours"
SET_TITLES = {"own": "each as it runs of itself", "fp32": "all in fp32", "bf16": "all in bf16"}
LOSS_TOLERANCE = 0.02  # of peers with our batches and weights: what bf16 may move the loss in so few steps


@dataclass(frozen=True)
class Result:
    """A peer in a set: the lists have one number per run, in the order of the rounds. Ratios are ours over the peer's;
    None for ours itself, and the bounds also below five runs of either. `set`: its names, joined by +."""

    set: str
    peer: str
    precision: str
    tokens_per_s: list[float]  # by the wall clock over the measured steps, what lies between them included
    step_tokens_per_s: list[float]  # of the median step, as each trainer times its own
    share_of_ceiling: list[float | None]  # model FLOP/s over the matrix product's in the same round: MFU
    median_tokens_per_s: float
    median_step_tokens_per_s: float
    low_tokens_per_s: float | None
    high_tokens_per_s: float | None
    median_share_of_ceiling: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    verdict: str | None
    loss: float
    loss_of: str


def read_peers(path: Path) -> dict[str, Any]:
    """A peers.json, or the one in a folder. ValueError, one sentence that names the file, when it is none."""
    path = path / PEERS_FILE if path.is_dir() else path
    return read_checked(path, check_peers)


def write_peers(path: Path, content: dict[str, Any]) -> None:
    """Work the results out, check the whole, and replace `path` in one move. ValueError when it breaks the schema."""
    content = {**content, "results": [dataclasses.asdict(result) for result in results(content)]}
    check_peers(content)
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def check_peers(content: Any) -> None:
    """Raise ValueError, one sentence that names the place, unless `content` is a whole peers.json."""
    check_schema(content, "experiments/peers/peers.schema.json")
    for run in content["runs"]:
        if len(run["step_times_s"]) <= content["work"]["warmup_steps"]:
            raise ValueError(f"the run of {run['peer']} in round {run['round']} has no step after warm-up")


def results(content: Mapping[str, Any]) -> list[Result]:
    """A result for every peer that was measured, set by set, in the order of the arms."""
    found = []
    for each in content["sets"]:
        ours = _arm(each, OURS)
        for arm in each["arms"]:
            if _runs(content, arm):
                found.append(_result(content, "+".join(each["names"]), arm, ours))
    return found


def _arm(of_set: Mapping[str, Any], peer: str) -> dict[str, str] | None:
    return next((arm for arm in of_set["arms"] if arm["peer"] == peer), None)


def _runs(content: Mapping[str, Any], arm: Mapping[str, str]) -> list[dict[str, Any]]:
    of_arm = [run for run in content["runs"] if (run["peer"], run["precision"]) == (arm["peer"], arm["precision"])]
    return sorted(of_arm, key=lambda run: run["round"])


def _result(content: Mapping[str, Any], set_name: str, arm: dict[str, str], ours: dict[str, str] | None) -> Result:
    runs, work = _runs(content, arm), content["work"]
    rates = [_rate(run, work) for run in runs]
    shares = [_share(content, run, speed) for run, speed in zip(runs, rates, strict=True)]
    known = [share for share in shares if share is not None]
    of_steps = [_step_rate(run, work) for run in runs]
    median, low, high = median_interval(rates)
    assert median is not None  # an arm of the file has runs
    against = _runs(content, ours) if ours is not None and arm["peer"] != OURS else []
    ratio = compare([_rate(run, work) for run in against], rates) if against else None
    loss, loss_of = _loss(runs)
    return Result(
        set=set_name,
        peer=arm["peer"],
        precision=arm["precision"],
        tokens_per_s=rates,
        step_tokens_per_s=of_steps,
        share_of_ceiling=shares,
        median_tokens_per_s=median,
        median_step_tokens_per_s=statistics.median(of_steps),
        low_tokens_per_s=low,
        high_tokens_per_s=high,
        median_share_of_ceiling=statistics.median(known) if known else None,
        ratio=None if ratio is None else ratio.ratio,
        ratio_low=None if ratio is None else ratio.low,
        ratio_high=None if ratio is None else ratio.high,
        verdict=None if ratio is None else ratio.verdict,
        loss=loss,
        loss_of=loss_of,
    )


def _rate(run: Mapping[str, Any], work: Mapping[str, Any]) -> float:
    """Tokens/s from the end of warm-up to the end of the last step."""
    steps = len(run["step_times_s"]) - work["warmup_steps"]
    return steps * work["batch_size"] * work["seq_length"] / run["measured_loop_s"]


def _step_rate(run: Mapping[str, Any], work: Mapping[str, Any]) -> float:
    """Tokens/s of the median step after warm-up."""
    median_s = statistics.median(run["step_times_s"][work["warmup_steps"] :])
    return work["batch_size"] * work["seq_length"] / median_s


def _share(content: Mapping[str, Any], run: Mapping[str, Any], tokens_per_s: float) -> float | None:
    """Of the matrix product's rate in the same round at the same precision; None where that failed."""
    for ceiling in content["ceilings"]:
        if (ceiling["precision"], ceiling["round"]) == (run["precision"], run["round"]):
            return tokens_per_s * content["work"]["flops_per_token_palm"] / ceiling["flops_per_s"]
    return None


def _loss(runs: list[dict[str, Any]]) -> tuple[float, str]:
    """The median over runs, and of what: validation where every run has it."""
    validated = [run["val_loss"] for run in runs if run["val_loss"] is not None]
    if len(validated) == len(runs):
        return statistics.median(validated), "validation"
    return statistics.median(run["losses"][-1] for run in runs), "last training step"


def peers_table(content: Mapping[str, Any]) -> str:
    """Markdown: a table per set, then what was not measured, what was left out, and what is not equal."""
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
    """What every run did."""
    work = content["work"]
    return (
        f"{work['model_name']} ({work['model_size']}, {work['num_parameters']:,} parameters, a vocabulary of "
        f"{work['vocab_size']:,} in {work['padded_vocab_size']:,} rows), {work['batch_size']} "
        f"sequences of {work['seq_length']} tokens per step, {work['steps']} steps, the first {work['warmup_steps']} "
        "warm-up"
    )


def place_in_words(content: Mapping[str, Any]) -> str:
    """Where, with what, and at which commit."""
    hardware, threads = content["hardware"], content["threads"]
    where = hardware["gpu_name"] or f"{hardware['cpu_name']}, {threads} thread{'s' * (threads > 1)}"
    commit = (content["git_commit"] or "unknown")[:10] + (" with changes" if content["git_dirty"] else "")
    return f"{where}, torch {content['env']['torch_version']}, commit {commit}"


def set_title(name: str) -> str:
    title = " = ".join(SET_TITLES[part] for part in name.split("+"))
    return title[0].upper() + title[1:]


def _line(result: Result) -> str:
    speed = rate(result.median_tokens_per_s) + _bounds(result.low_tokens_per_s, result.high_tokens_per_s, rate)
    ratio = "" if result.ratio is None else times(result)
    share = "n/a" if result.median_share_of_ceiling is None else f"{result.median_share_of_ceiling:.1%}"
    loss = f"{result.loss:.4f}" + ("" if result.loss_of == "validation" else " (training)")
    of_step = rate(result.median_step_tokens_per_s)
    columns = (len(result.tokens_per_s), speed, ratio, result.verdict or "", of_step, share, loss)
    return f"| {' | '.join(map(str, (result.peer, result.precision, *columns)))} |"


def times(result: Result) -> str:
    """`1.52x [1.48, 1.57]`; without the bounds where there are too few runs for them."""
    return f"{result.ratio:.2f}x" + _bounds(result.ratio_low, result.ratio_high, "{:.2f}".format)


def _bounds(low: float | None, high: float | None, spelled: Any) -> str:
    return "" if low is None or high is None else f" [{spelled(low)}, {spelled(high)}]"


def notes(content: Mapping[str, Any]) -> list[str]:
    """What a reader must know beside the numbers, most important first."""
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
    """What is not equal, each once with all trainers that it is true of."""
    trainers: dict[str, list[str]] = {}
    for name, peer in content["peers"].items():
        for text in peer["differs"] if name in measured else ():
            trainers.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}." for text, names in trainers.items()]


def unmeasured(content: Mapping[str, Any]) -> list[str]:
    """A sentence for each trainer that was asked for and could not be measured."""
    return [f"{name}: {reason}" for name, reason in content["not_measured"].items()]


def _unequal_losses(content: Mapping[str, Any], found: list[Result]) -> list[str]:
    """A faster trainer that learns something else is not faster. Only where batches and weights are ours too."""
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
