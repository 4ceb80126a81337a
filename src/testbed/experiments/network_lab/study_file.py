"""network_study.json, which scripts/network_study.py writes: made of the runs' files, checked, and what follows.

One number per run, its tokens/s over the measured steps. Whether two arms differ is for `statistics.compare`. Exposed
communication comes from profiled runs of their own, which enter no time: of the rank that waits least in each step,
since what another one waits beyond that is for a slower rank, not for the network.

The bound is that of a ring all-reduce of the gradients (bounds.py). The bytes are those of the model's
parameters in fp32; no strategy must move exactly these, and what ZeRO and FSDP move more shows against it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np

from testbed.analysis.statistics import compare, median_interval
from testbed.experiments.network_lab.bounds import BYTES_PER_NUMBER, bound_of, bound_s
from testbed.experiments.result_file import ResultFile
from testbed.metrics.fields.types import AboveZero, Amount, Count, OneOrMore, Positive, Rule
from testbed.metrics.file import read_metrics

BEST_OF = 5
ONE_BUCKET, SMALL_BUCKETS = "buckets of 200 MiB", "buckets of 1 MiB"


class ArmRecord(TypedDict):
    part: Literal["strategies", "levers"]
    strategy: str
    hosts: Positive
    link: str
    lever: str | None
    name: str
    title: str
    changes_work: bool


class LinkRecord(TypedDict):
    rate_bit_per_s: Positive | None
    delay_s: Amount | None
    name: str
    title: str
    reference: str | None  # the link that it is compared to


class Work(TypedDict):
    num_parameters: Positive
    model_name: str
    model_size: str
    vocab_size: Positive
    seq_len: Positive
    precision: str
    gradient_bytes: Positive
    steps: Positive
    warmup_steps: Count


class Traced(TypedDict):
    """A number per profiled step, of the rank that waits least or has most collectives."""

    exposed_s: OneOrMore[Amount]
    communication_s: OneOrMore[Amount]
    idle_s: OneOrMore[Amount]
    num_collectives: list[Amount]
    bus_bytes_per_step: Amount | None
    bus_bandwidth_bytes_per_s: Amount | None
    source: str | None


class Run(TypedDict):
    arm: str
    kind: Literal["timed", "profiled"]
    repeat: Positive
    started_utc: str | None
    seconds: Amount | None
    run_id: str
    git_commit: str | None
    tokens_per_step: Positive
    step_times_s: OneOrMore[AboveZero]
    last_loss: float
    traced: Traced | None


class Content(TypedDict):
    schema_version: str
    status: Literal["complete", "interrupted"]
    timestamp_utc: str
    command_line: str
    repeats: Positive
    arms: OneOrMore[ArmRecord]
    links: OneOrMore[LinkRecord]
    git_commits: OneOrMore[str]
    git_dirty: bool
    env: dict[str, str | None]
    hardware: Annotated[dict, Rule("required", ["cpu_name", "cpu_cores_visible", "backend"])]
    work: Work
    runs: OneOrMore[Run]
    not_measured: dict[str, str]
    results: dict


@dataclass(frozen=True)
class Summary:
    """One arm. Times in seconds; bounds of intervals are None below five runs, what was not profiled is None."""

    arm: str
    num_runs: int
    median_step_s: float
    low_step_s: float | None
    high_step_s: float | None
    median_tokens_per_s: float
    exposed_s: float | None
    communication_s: float | None
    idle_s: float | None  # neither computing nor communicating; of a pipeline its bubble, and waiting for transfers
    covered_s: float | None  # communication less what of it is exposed, step by step, 0 at least; None of a pipeline
    num_profiled: int
    profiled_over_timed: float | None  # a step of the profiled runs over one of the timed: what profiling did to it
    num_collectives: float | None  # of a profiled step, of the rank that has most
    # bytes that a ring needs for a step's collectives over those of the gradients' all-reduce; None without a trace
    traffic: float | None
    # of a ring all-reduce of the gradients at the link's rate, of a pipeline's own traffic; None without a rate
    bound_s: float | None


@dataclass(frozen=True)
class LinkComparison:
    """`faster` over `slower`, the names say what was asked: tokens/s of the one over those of the other, which at equal
    work is the ratio of the other's time to the one's."""

    question: str
    faster: str
    slower: str
    ratio: float
    low: float | None
    high: float | None
    verdict: str
    num_faster: int
    num_slower: int


@dataclass(frozen=True)
class MeasuredAllReduce:
    """The gradients' all-reduce with nothing beside it, measured at the end of profiled runs: best of BEST_OF each,
    as profiling.attribution.measured_bus_bandwidth keeps it."""

    hosts: int
    link: str
    seconds: float
    bound_s: float | None
    num_runs: int

    @property
    def over_bound(self) -> float | None:
        return None if self.bound_s is None else self.seconds / self.bound_s


def study_of(head: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], out_dir: Path) -> dict[str, Any]:
    """What network_study.json holds, of the runs that are complete.

    Args:
        head: command_line, repeats, arms and links as records.
        cells: rows of sweep.json.
    """
    runs, not_measured, first = [], {}, None
    for cell in cells:
        if cell["status"] == "complete":
            metrics = read_metrics(out_dir / cell["folder"] / "training_metrics.json")
            first = first or metrics
            runs.append(_row(cell, metrics))
        elif cell["status"] == "failed":
            not_measured[cell["folder"]] = cell["reason"] or "unknown"
    if first is None:
        raise ValueError(f"{out_dir} holds no finished run of a network study")
    is_whole = all(cell["status"] in ("complete", "failed") for cell in cells)
    is_dirty = [run.pop("git_dirty") for run in runs]
    commits = sorted({run["git_commit"] or "unknown" for run in runs})
    config = first["training_config"]
    names = ("num_parameters", "model_name", "model_size", "vocab_size", "seq_len", "precision")
    return {
        **STUDY_FILE.head(head["command_line"]),
        "status": "complete" if is_whole else "interrupted",
        **head,
        "git_commits": commits,
        "git_dirty": any(is_dirty),
        "env": first["env"],
        "hardware": {name: first["hardware"][name] for name in ("cpu_name", "cpu_cores_visible", "backend")},
        "work": {
            **{name: config[name] for name in names},
            "gradient_bytes": BYTES_PER_NUMBER * config["num_parameters"],
            "steps": len(first["steps"]),
            "warmup_steps": sum(step["is_warmup"] for step in first["steps"]),
        },
        "runs": runs,
        "not_measured": not_measured,
    }


def _row(cell: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    rows = metrics["steps"]
    return {
        "arm": cell["name"],
        "kind": "profiled" if cell["profiled"] else "timed",
        "repeat": cell["repeat"],
        "started_utc": cell["started_utc"],
        "seconds": cell["seconds"],
        "run_id": metrics["run_id"],
        "git_commit": metrics["git_commit"],
        "git_dirty": bool(metrics["git_dirty"]),
        "tokens_per_step": metrics["training_config"]["global_batch_size"] * metrics["training_config"]["seq_len"],
        "step_times_s": [row["step_time_s"] for row in rows],
        "last_loss": rows[-1]["loss"],
        "traced": _traced(metrics) if cell["profiled"] else None,
    }


def _traced(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the profiled steps; None where a trace could not be read."""
    found = metrics["attribution"]
    if found is None:
        return None
    steps = list(zip(*(rank["steps"] for rank in found["per_rank"]), strict=True))
    bound = found["bound"]
    return {
        "exposed_s": [min(rank["exposed_communication_s"] for rank in step) for step in steps],
        "communication_s": [min(rank["communication_s"] for rank in step) for step in steps],
        "idle_s": [min(rank["idle_s"] for rank in step) for step in steps],
        "num_collectives": [max(rank["num_collectives"] for rank in step) for step in steps],
        "bus_bytes_per_step": None if bound is None else bound["bus_bytes_per_step"],
        "bus_bandwidth_bytes_per_s": None if bound is None else bound["bus_bandwidth_bytes_per_s"],
        "source": None if bound is None else bound["source"],
    }


def results(content: Mapping[str, Any]) -> dict[str, Any]:
    """All that follows from the runs, as it stands in the file."""
    return {
        "summaries": [dataclasses.asdict(summary) for summary in summaries(content)],
        "comparisons": [dataclasses.asdict(comparison) for comparison in comparisons(content)],
        "all_reduces": [{**dataclasses.asdict(each), "over_bound": each.over_bound} for each in all_reduces(content)],
        "largest_loss_difference": largest_loss_difference(content),
    }


def rates_of(content: Mapping[str, Any], arm: str) -> list[float]:
    """Tokens/s of each timed run of an arm, in the order of the rounds."""
    warmup = content["work"]["warmup_steps"]
    runs = [run for run in content["runs"] if (run["arm"], run["kind"]) == (arm, "timed")]
    return [
        run["tokens_per_step"] * len(run["step_times_s"][warmup:]) / sum(run["step_times_s"][warmup:]) for run in runs
    ]


def steps_of(content: Mapping[str, Any], arm: str, kind: str = "timed") -> list[float]:
    """The median step of each run of an arm, in seconds; only timed ones unless `kind` is "profiled"."""
    warmup = content["work"]["warmup_steps"]
    runs = [run for run in content["runs"] if (run["arm"], run["kind"]) == (arm, kind)]
    return [statistics.median(run["step_times_s"][warmup:]) for run in runs]


def summaries(content: Mapping[str, Any]) -> list[Summary]:
    """Of each arm that has a timed run, in the order of the plan."""
    found = []
    for arm in content["arms"]:
        steps, profiled = (steps_of(content, arm["name"], kind) for kind in ("timed", "profiled"))
        if steps:
            traced = _traced_runs(content, arm["name"])
            median_s, low_s, high_s = median_interval(steps)
            assert median_s is not None  # there are steps
            found.append(
                Summary(
                    arm["name"],
                    len(steps),
                    median_s,
                    low_s,
                    high_s,
                    statistics.median(rates_of(content, arm["name"])),
                    _median_of_medians(traced, "exposed_s"),
                    _median_of_medians(traced, "communication_s"),
                    _median_of_medians(traced, "idle_s"),
                    # a transfer between a pipeline's stages is no collective: what waits for it counts as idle
                    None
                    if arm["strategy"] == "pipeline"
                    else _median_of_medians([_covered(each) for each in traced], "covered_s"),
                    len(traced),
                    statistics.median(profiled) / statistics.median(steps) if profiled else None,
                    _median_of_medians(traced, "num_collectives"),
                    _traffic(traced, arm["hosts"], content["work"]["gradient_bytes"]),
                    bound_of(content, arm),
                )
            )
    return found


def _traced_runs(content: Mapping[str, Any], arm: str) -> list[dict[str, Any]]:
    return [run["traced"] for run in content["runs"] if run["arm"] == arm and run["traced"] is not None]


def _covered(traced: Mapping[str, Any]) -> dict[str, list[float]]:
    pairs = zip(traced["communication_s"], traced["exposed_s"], strict=True)
    return {"covered_s": [max(0.0, communication_s - exposed_s) for communication_s, exposed_s in pairs]}


def _median_of_medians(traced: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return statistics.median(float(np.median(each[name])) for each in traced) if traced else None


def tokens_of(content: Mapping[str, Any], arm: str) -> int:
    """Tokens of one step of an arm that has runs."""
    return next(run["tokens_per_step"] for run in content["runs"] if run["arm"] == arm)


def last_loss_of(content: Mapping[str, Any], arm: str) -> float:
    """Median over the timed runs of an arm, which all trained alike."""
    return statistics.median(run["last_loss"] for run in content["runs"] if (run["arm"], run["kind"]) == (arm, "timed"))


def _traffic(traced: Sequence[Mapping[str, Any]], hosts: int, gradient_bytes: int) -> float | None:
    seen = [each["bus_bytes_per_step"] for each in traced if each["bus_bytes_per_step"] is not None]
    return statistics.median(seen) / (2 * (hosts - 1) / hosts * gradient_bytes) if seen else None


def comparisons(content: Mapping[str, Any]) -> list[LinkComparison]:
    """The questions that the study was made for, each between two arms of equal work that were both measured; the
    levers that change the work say so by their names."""
    arms = {arm["name"]: arm for arm in content["arms"]}
    rates = {name: rates_of(content, name) for name in arms}

    def named(strategy: str, hosts: int, link: str, lever: str | None = None) -> str | None:
        return next(
            (
                name
                for name, arm in arms.items()
                if (arm["strategy"], arm["hosts"], arm["link"], arm["lever"]) == (strategy, hosts, link, lever)
            ),
            None,
        )

    asked: list[tuple[str, str | None, str | None]] = []
    for link in content["links"]:
        if link["reference"] is not None:
            for name, arm in arms.items():
                if arm["link"] == link["name"] and arm["lever"] is None:
                    asked.append(("link", named(arm["strategy"], arm["hosts"], link["reference"]), name))
    for name, arm in arms.items():
        place = (arm["hosts"], arm["link"])
        if arm["strategy"] == "ddp" and arm["lever"] is None:
            asked.append(("ddp", name, named("allreduce", *place)))
            asked.append(("coalescing", named("ddp", *place, ONE_BUCKET), named("allreduce", *place)))
            asked.append(("both", named("ddp", *place, SMALL_BUCKETS), named("allreduce", *place)))
            asked.append(("overlap", named("ddp", *place, SMALL_BUCKETS), named("ddp", *place, ONE_BUCKET)))
        elif arm["lever"] is not None:
            asked.append(("lever", name, named(arm["strategy"], *place)))
        elif arm["strategy"] != "allreduce":
            asked.append(("strategy", name, named("ddp", *place)))
    found = []
    for question, faster, slower in asked:
        if faster is not None and slower is not None and rates[faster] and rates[slower]:
            ratio = compare(rates[faster], rates[slower])
            numbers = (ratio.ratio, ratio.low, ratio.high, ratio.verdict, ratio.n_a, ratio.n_b)
            found.append(LinkComparison(question, faster, slower, *numbers))
    return found


def all_reduces(content: Mapping[str, Any]) -> list[MeasuredAllReduce]:
    """Of each link and number of hosts on which a strategy that all-reduces just the gradients was profiled."""
    found = []
    for hosts in sorted({arm["hosts"] for arm in content["arms"]}):
        for link in content["links"]:
            arms = [
                arm["name"]
                for arm in content["arms"]
                if (arm["hosts"], arm["link"], arm["lever"]) == (hosts, link["name"], None)
                and arm["strategy"] in ("ddp", "allreduce")
            ]
            traced = [each for arm in arms for each in _traced_runs(content, arm)]
            bandwidths = [each["bus_bandwidth_bytes_per_s"] for each in traced if each["bus_bandwidth_bytes_per_s"]]
            if bandwidths:
                on_bus = 2 * (hosts - 1) / hosts * content["work"]["gradient_bytes"]
                seconds = on_bus / statistics.median(bandwidths)
                found.append(
                    MeasuredAllReduce(
                        hosts, link["name"], seconds, bound_s(content, hosts, link["name"]), len(bandwidths)
                    )
                )
    return found


def largest_loss_difference(content: Mapping[str, Any]) -> float | None:
    """Between the last losses of any two runs that did equal work: from the same weights and batches they must agree,
    whatever carries the bytes. None without two such runs."""
    changed = {arm["name"] for arm in content["arms"] if arm["changes_work"]}
    losses = [run["last_loss"] for run in content["runs"] if run["arm"] not in changed]
    return max(losses) - min(losses) if len(losses) > 1 else None


Arms = list[dict[str, Any]]


def pictures(content: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Arms]]]:
    """What is worth drawing of what was measured: name -> title, and the arms of each panel by its heading."""
    arms = [arm for arm in content["arms"] if steps_of(content, arm["name"])]
    plain = [arm for arm in arms if arm["lever"] is None]
    links = {link["name"]: link for link in content["links"]}

    def panels(of: Sequence[dict[str, Any]]) -> dict[str, Arms]:
        found: dict[str, Arms] = {}
        for arm in of:
            found.setdefault(f"{arm['hosts']} hosts, {links[arm['link']]['title']}", []).append(arm)
        return found

    pairs = [arm for arm in plain if arm["hosts"] == 2]
    groups = {
        "strategies": ("A step over each link", [a for a in pairs if links[a["link"]]["delay_s"] is None]),
        "delay": ("A step over a link with delay", [a for a in pairs if links[a["link"]]["delay_s"] is not None]),
        "hosts": ("A step on more hosts", [arm for arm in plain if arm["hosts"] > 2]),
    }
    # a step of another number of tokens is another quantity, and only the table has it
    levers = [arm for arm in arms if arm["lever"] is not None]
    places = {(arm["hosts"], arm["link"]) for arm in levers}
    turned = {"allreduce", *(arm["strategy"] for arm in levers)}
    beside = [arm for arm in plain if arm["strategy"] in turned and (arm["hosts"], arm["link"]) in places]
    usual = {tokens_of(content, arm["name"]) for arm in beside}
    levers = [arm for arm in levers if tokens_of(content, arm["name"]) in usual]
    groups["levers"] = ("What helps over a slow link", [*beside, *levers] if levers else [])
    return {name: (title, panels(of)) for name, (title, of) in groups.items() if of}


def _check_rows(content: Mapping[str, Any]) -> None:
    known = {each["name"] for each in (*content["arms"], *content["links"])}
    named = {run["arm"] for run in content["runs"]} | {arm["link"] for arm in content["arms"]}
    if named - known:
        raise ValueError(f"{min(named - known)!r} is neither an arm nor a link of this file")
    for run in content["runs"]:
        if len(run["step_times_s"]) <= content["work"]["warmup_steps"]:
            raise ValueError(f"the run {run['repeat']} of {run['arm']} has no step after warm-up")


STUDY_FILE = ResultFile(
    "network_study.json", "1.0", Content, lambda content: {"results": results(content)}, _check_rows
)
