"""peers.json of scripts/more/compare_peers.py: its fields, its first record, and what follows from its times.

One number per run, its tokens/s by the wall clock over all steps after warm-up: the one clock that is of the same kind
for every trainer, because what each of them calls a step begins and ends elsewhere. The ratio is ours over the peer's,
of medians over runs, with the interval of `statistics.compare`.
"""

from __future__ import annotations

import dataclasses
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from testbed.analysis.statistics import compare, median_interval
from testbed.config.settings import CheckedRun
from testbed.data.windows import num_windows
from testbed.errors import InputError
from testbed.experiments.peers import PEERS, nanogpt
from testbed.experiments.peers.plan import OURS, Plan, merged_sets
from testbed.experiments.peers.running import PeerRunner
from testbed.metrics.fields.types import AboveZero, Count, Name, Number, OneOrMore, Positive
from testbed.metrics.result_file import ResultFile
from testbed.model.flops import flops_per_token_palm
from testbed.model.shape import size_name

Precision = Literal["fp32", "bf16"]
NanoGPT = TypedDict("NanoGPT", {"commit": str | None, "train.py_sha256": str, "model.py_sha256": str})


class Work(TypedDict):
    model_name: str
    model_size: str
    num_parameters: Positive
    vocab_size: Positive
    padded_vocab_size: Positive
    batch_size: Positive
    micro_batch_size: Positive
    seq_length: Positive
    steps: Positive
    warmup_steps: Count
    learning_rate: Number
    seed: int
    val_sequences: Count
    flops_per_token_palm: Positive
    repeats: Positive
    only_ours: list[str]


class PeerRecord(TypedDict):
    summary: str
    differs: list[str]
    has_our_batches: bool
    commands: dict[str, str]  # by precision


class ArmRecord(TypedDict):
    peer: str
    precision: Precision


class SetRecord(TypedDict):
    names: OneOrMore[Literal["own", "fp32", "bf16"]]
    arms: list[ArmRecord]


class Run(TypedDict):
    peer: str
    precision: Precision
    round: Positive
    started_utc: str
    seconds: AboveZero
    step_times_s: OneOrMore[AboveZero]
    losses: OneOrMore[Number]
    val_loss: Number | None
    measured_loop_s: AboveZero


class Ceiling(TypedDict):
    """The rate of a large matrix product, measured in every round."""

    precision: Precision
    round: Positive
    started_utc: str
    seconds: AboveZero
    flops_per_s: AboveZero
    source: str


class Content(TypedDict):
    schema_version: str
    status: Literal["running", "complete", "interrupted"]
    timestamp_utc: str
    command_line: str
    git_commit: str | None
    git_dirty: bool | None
    env: dict[str, str | None]
    host: dict[str, str]
    hardware: dict[str, Any]
    is_bf16_fast: bool
    threads: Positive
    nanogpt: NanoGPT | None
    work: Work
    peers: dict[str, PeerRecord]
    sets: list[SetRecord]
    not_measured: dict[str, Name]
    skipped: dict[str, Name]
    runs: list[Run]
    ceilings: list[Ceiling]
    results: list[dict]


@dataclass(frozen=True)
class Result:
    """The result of a peer in a set: lists have one number per run, in the order of the rounds. Ratios are ours over
    the peer's; None for ours itself, and the bounds also below five runs of either. `set`: its names, joined by +."""

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


def beginning(
    command_line: str, facts: Mapping[str, Any], plan: Plan, runner: PeerRunner, peers: Sequence[str], repeats: int
) -> dict[str, Any]:
    """Return the file before its first run; `facts` are those of PeerRunner.facts."""
    settings = runner.settings
    assert runner.checked is not None
    return {
        **PEERS_FILE.head(command_line),
        "status": "running",
        **facts,
        "threads": runner.threads,
        "nanogpt": None if runner.nanogpt_dir is None else nanogpt.identity(runner.nanogpt_dir),
        "work": {
            "model_name": size_name(settings.shape),
            "model_size": settings.shape.describe(),
            "num_parameters": settings.shape.num_parameters,
            "vocab_size": settings.model.vocab_size,
            "padded_vocab_size": settings.shape.padded_vocab_size,
            "batch_size": settings.batch.global_batch_size,
            "micro_batch_size": settings.batch.micro_batch_size_per_gpu,
            "seq_length": settings.data.seq_length,
            "steps": settings.last_step,
            "warmup_steps": runner.warmup_steps,
            "learning_rate": settings.optimizer.learning_rate,
            "seed": settings.training.seed,
            "val_sequences": _val_sequences(runner.checked),
            "flops_per_token_palm": flops_per_token_palm(settings.shape, settings.data.seq_length),
            "repeats": repeats,
            "only_ours": list(runner.only_ours),
        },
        "peers": {peer: _peer(peer, plan, runner) for peer in peers},
        "sets": [
            {"names": names, "arms": [dataclasses.asdict(arm) for arm in arms]}
            for names, arms in merged_sets(plan.sets)
        ],
        "not_measured": dict(plan.not_measured),
        "skipped": dict(plan.skipped),
        "runs": [],
        "ceilings": [],
    }


def _val_sequences(checked: CheckedRun) -> int:
    """Return the number of windows that every trainer is validated on."""
    settings = checked.settings
    assert settings.training.max_val_steps is not None
    windows = num_windows(checked.val_file, settings.data.seq_length)
    return min(windows, settings.training.max_val_steps * settings.batch.global_batch_size)


def _peer(peer: str, plan: Plan, runner: PeerRunner) -> dict[str, Any]:
    entry = PEERS[peer]
    commands = {arm.precision: shlex.join(runner.command(arm)) for arm in plan.arms if arm.peer == peer}
    facts = {"summary": entry.summary, "differs": list(entry.differs), "has_our_batches": entry.has_our_batches}
    return {**facts, "commands": commands}


def results(content: Mapping[str, Any]) -> list[Result]:
    """Return a result for every peer that was measured, set by set, in the order of the arms."""
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
    """Return tokens/s from the end of warm-up to the end of the last step."""
    steps = len(run["step_times_s"]) - work["warmup_steps"]
    return steps * work["batch_size"] * work["seq_length"] / run["measured_loop_s"]


def _step_rate(run: Mapping[str, Any], work: Mapping[str, Any]) -> float:
    """Return tokens/s of the median step after warm-up."""
    median_s = statistics.median(run["step_times_s"][work["warmup_steps"] :])
    return work["batch_size"] * work["seq_length"] / median_s


def _share(content: Mapping[str, Any], run: Mapping[str, Any], tokens_per_s: float) -> float | None:
    """Return the share of the matrix product's rate in the same round and precision; None where that failed."""
    for ceiling in content["ceilings"]:
        if (ceiling["precision"], ceiling["round"]) == (run["precision"], run["round"]):
            return tokens_per_s * content["work"]["flops_per_token_palm"] / ceiling["flops_per_s"]
    return None


def _loss(runs: list[dict[str, Any]]) -> tuple[float, str]:
    """Return the median over runs, and of what: validation where every run has it."""
    validated = [run["val_loss"] for run in runs if run["val_loss"] is not None]
    if len(validated) == len(runs):
        return statistics.median(validated), "validation"
    return statistics.median(run["losses"][-1] for run in runs), "last training step"


def _check_rows(content: Mapping[str, Any]) -> None:
    for run in content["runs"]:
        if len(run["step_times_s"]) <= content["work"]["warmup_steps"]:
            raise InputError(f"the run of {run['peer']} in round {run['round']} has no step after warm-up")


def _derived(content: Mapping[str, Any]) -> dict[str, Any]:
    return {"results": [dataclasses.asdict(result) for result in results(content)]}


PEERS_FILE = ResultFile("peers.json", "1.1", Content, _derived, _check_rows)
