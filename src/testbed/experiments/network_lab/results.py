"""Work out what follows from the runs of a network study.

One number per run, its tokens/s over the measured steps. Whether two arms differ is for `statistics.compare`. Exposed
communication comes from profiled runs of their own, which enter no time: of the rank that waits least in each step,
since what another one waits beyond that is for a slower rank, not for the network.

The bound is that of a ring all-reduce of the gradients (bounds.py). The bytes are those of the model's
parameters in fp32; no strategy must move exactly these, and what ZeRO and FSDP move more shows against it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.analysis.statistics import compare, median_interval
from testbed.experiments.network_lab.bounds import bound_of, bound_s

BEST_OF = 5
ONE_BUCKET, SMALL_BUCKETS = "buckets of 200 MiB", "buckets of 1 MiB"


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
    """The gradients' all-reduce with nothing else running, measured at the end of profiled runs: best of BEST_OF each,
    as profiling.attribution.measured_bus_bandwidth keeps it."""

    hosts: int
    link: str
    seconds: float
    bound_s: float | None
    num_runs: int

    @property
    def over_bound(self) -> float | None:
        return None if self.bound_s is None else self.seconds / self.bound_s


def results(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that follows from the runs, as it stands in the file."""
    return {
        "summaries": [dataclasses.asdict(summary) for summary in summaries(content)],
        "comparisons": [dataclasses.asdict(comparison) for comparison in comparisons(content)],
        "all_reduces": [{**dataclasses.asdict(each), "over_bound": each.over_bound} for each in all_reduces(content)],
        "largest_loss_difference": largest_loss_difference(content),
    }


def _runs(content: Mapping[str, Any], arm: str, kind: str) -> list[tuple[dict[str, Any], list[float]]]:
    """Return each run of an arm with its step times after warm-up, in the order of the rounds."""
    warmup = content["work"]["warmup_steps"]
    runs = [run for run in content["runs"] if (run["arm"], run["kind"]) == (arm, kind)]
    return [(run, run["step_times_s"][warmup:]) for run in runs]


def rates_of(content: Mapping[str, Any], arm: str) -> list[float]:
    """Return the tokens/s of each timed run of an arm."""
    return [run["tokens_per_step"] * len(times) / sum(times) for run, times in _runs(content, arm, "timed")]


def steps_of(content: Mapping[str, Any], arm: str, kind: str = "timed") -> list[float]:
    """Return the median step of each run of an arm, in seconds."""
    return [statistics.median(times) for _, times in _runs(content, arm, kind)]


def summaries(content: Mapping[str, Any]) -> list[Summary]:
    """Return a summary of each arm that has a timed run, in the order of the plan."""
    return [_summary(content, arm) for arm in content["arms"] if steps_of(content, arm["name"])]


def _summary(content: Mapping[str, Any], arm: Mapping[str, Any]) -> Summary:
    steps, profiled = (steps_of(content, arm["name"], kind) for kind in ("timed", "profiled"))
    median_s, low_s, high_s = median_interval(steps)
    assert median_s is not None  # there are steps
    traced = _traced_runs(content, arm["name"])
    return Summary(
        arm=arm["name"],
        num_runs=len(steps),
        median_step_s=median_s,
        low_step_s=low_s,
        high_step_s=high_s,
        median_tokens_per_s=statistics.median(rates_of(content, arm["name"])),
        exposed_s=_median(each["exposed_s"] for each in traced),
        idle_s=_median(each["idle_s"] for each in traced),
        # a transfer between a pipeline's stages is no collective: what waits for it counts as idle
        covered_s=None if arm["strategy"] == "pipeline" else _median(map(_covered, traced)),
        num_profiled=len(traced),
        profiled_over_timed=statistics.median(profiled) / statistics.median(steps) if profiled else None,
        num_collectives=_median(each["num_collectives"] for each in traced),
        traffic=_traffic(traced, arm["hosts"], content["work"]["gradient_bytes"]),
        bound_s=bound_of(content, arm),
    )


def _traced_runs(content: Mapping[str, Any], arm: str) -> list[dict[str, Any]]:
    return [run["traced"] for run in content["runs"] if run["arm"] == arm and run["traced"] is not None]


def _covered(traced: Mapping[str, Any]) -> list[float]:
    pairs = zip(traced["communication_s"], traced["exposed_s"], strict=True)
    return [max(0.0, communication_s - exposed_s) for communication_s, exposed_s in pairs]


def _median(steps_of_runs: Iterable[Sequence[float]]) -> float | None:
    """Return the median over runs of the median over steps; None without runs."""
    medians = [float(statistics.median(steps)) for steps in steps_of_runs]
    return statistics.median(medians) if medians else None


def tokens_of(content: Mapping[str, Any], arm: str) -> int:
    """Return the tokens of one step of an arm that has runs."""
    return next(run["tokens_per_step"] for run in content["runs"] if run["arm"] == arm)


def last_loss_of(content: Mapping[str, Any], arm: str) -> float:
    """Return the median over the timed runs of an arm, which all trained alike."""
    return statistics.median(run["last_loss"] for run in content["runs"] if (run["arm"], run["kind"]) == (arm, "timed"))


def _traffic(traced: Sequence[Mapping[str, Any]], hosts: int, gradient_bytes: int) -> float | None:
    seen = [each["bus_bytes_per_step"] for each in traced if each["bus_bytes_per_step"] is not None]
    return statistics.median(seen) / (2 * (hosts - 1) / hosts * gradient_bytes) if seen else None


def comparisons(content: Mapping[str, Any]) -> list[LinkComparison]:
    """Compare the pairs of arms that the study was made for, where both were measured. All but some levers do equal
    work; those say so by their names."""
    rates = {arm["name"]: rates_of(content, arm["name"]) for arm in content["arms"]}
    found = []
    for question, faster, slower in _questions(content):
        if faster is not None and slower is not None and rates[faster] and rates[slower]:
            ratio = compare(rates[faster], rates[slower])
            numbers = (ratio.ratio, ratio.low, ratio.high, ratio.verdict, ratio.n_a, ratio.n_b)
            found.append(LinkComparison(question, faster, slower, *numbers))
    return found


def _questions(content: Mapping[str, Any]) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield what is asked of which two arms; None for an arm that the study does not have."""
    known = {(arm["strategy"], arm["hosts"], arm["link"], arm["lever"]): arm["name"] for arm in content["arms"]}

    def named(strategy: str, hosts: int, link: str, lever: str | None = None) -> str | None:
        return known.get((strategy, hosts, link, lever))

    for link in content["links"]:
        for arm in content["arms"]:
            if link["reference"] is not None and (arm["link"], arm["lever"]) == (link["name"], None):
                yield "link", named(arm["strategy"], arm["hosts"], link["reference"]), arm["name"]
    for arm in content["arms"]:
        name, place = arm["name"], (arm["hosts"], arm["link"])
        if arm["lever"] is not None:
            yield "lever", name, named(arm["strategy"], *place)
        elif arm["strategy"] == "ddp":
            yield "ddp", name, named("allreduce", *place)
            yield "coalescing", named("ddp", *place, ONE_BUCKET), named("allreduce", *place)
            yield "both", named("ddp", *place, SMALL_BUCKETS), named("allreduce", *place)
            yield "overlap", named("ddp", *place, SMALL_BUCKETS), named("ddp", *place, ONE_BUCKET)
        elif arm["strategy"] != "allreduce":
            yield "strategy", name, named("ddp", *place)


def all_reduces(content: Mapping[str, Any]) -> list[MeasuredAllReduce]:
    """Return one for each link and number of hosts on which a strategy that all-reduces just the gradients was
    profiled."""
    found = []
    places = [
        (hosts, link["name"])
        for hosts in sorted({arm["hosts"] for arm in content["arms"]})
        for link in content["links"]
    ]
    for hosts, link in places:
        known = [(strategy, hosts, link, None) for strategy in ("ddp", "allreduce")]
        arms = [a["name"] for a in content["arms"] if (a["strategy"], a["hosts"], a["link"], a["lever"]) in known]
        traced = [each for arm in arms for each in _traced_runs(content, arm)]
        bandwidths = [each["bus_bandwidth_bytes_per_s"] for each in traced if each["bus_bandwidth_bytes_per_s"]]
        if bandwidths:
            on_bus = 2 * (hosts - 1) / hosts * content["work"]["gradient_bytes"]
            seconds = on_bus / statistics.median(bandwidths)
            bound = bound_s(content, hosts, link)
            found.append(MeasuredAllReduce(hosts, link, seconds, bound, len(bandwidths)))
    return found


def largest_loss_difference(content: Mapping[str, Any]) -> float | None:
    """Return the largest difference between the last losses of two runs that did equal work: from the same weights and
    batches they must agree, whatever carries the bytes. None without two such runs."""
    changed = {arm["name"] for arm in content["arms"] if arm["changes_work"]}
    losses = [run["last_loss"] for run in content["runs"] if run["arm"] not in changed]
    return max(losses) - min(losses) if len(losses) > 1 else None


Arms = list[dict[str, Any]]


def pictures(content: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Arms]]]:
    """Return what is worth drawing: name -> title, and the arms of each panel by its heading."""
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
    without = [arm for arm in plain if arm["strategy"] in turned and (arm["hosts"], arm["link"]) in places]
    usual = {tokens_of(content, arm["name"]) for arm in without}
    levers = [arm for arm in levers if tokens_of(content, arm["name"]) in usual]
    groups["levers"] = ("What helps over a slow link", [*without, *levers] if levers else [])
    return {name: (title, panels(of)) for name, (title, of) in groups.items() if of}
