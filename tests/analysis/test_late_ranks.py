"""Which rank the others wait for inside collectives of NCCL: from made-up entries of PyTorch's flight recorder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.metrics_examples import example_metrics

from testbed.analysis.diagnosis.diagnose import Diagnosis, diagnose
from testbed.analysis.diagnosis.words import NOTHING, SHOWN, SHOWN_OF_DEVICES, text_of
from testbed.analysis.document import markdown
from testbed.analysis.report.build import report_of
from testbed.analysis.runs.load import load_run
from testbed.metrics.file import check_metrics, write_metrics
from testbed.profiling.timed_collectives import NONE, calls_of, timed_collectives

STEP_S, TRANSFER_S, STEPS = 0.2, 0.002, 40
BEGAN_NS = 1_700_000_000 * 10**9


class Gpus:
    """Ranks that compute and wait for each other inside collectives, in steps and between them."""

    rank_0_s = 0.003

    def __init__(self, ranks: int, slow: dict[int, float] | None = None, seed: int = 0, steps: int = STEPS):
        self.num = ranks
        self.slow = np.array([1 + (slow or {}).get(rank, 0.0) for rank in range(ranks)])
        self.random = np.random.default_rng(seed)
        self.computed_s, self.free_s = np.zeros(ranks), np.zeros(ranks)  # when each has done its kernels
        self.entries: list[list[dict]] = [[] for _ in range(ranks)]
        self.steps = [(6 + step, *self.step(step)) for step in range(steps)]

    def step(self, step: int) -> tuple[float, float]:
        """Do one step; return when it began and ended. DDP: buckets travel during backward."""
        self.between()
        began_s = float(self.computed_s.max())
        self.compute(STEP_S / 3)
        for bucket in range(5):
            self.compute(STEP_S * 2 / 15)
            self.collective(1000 * (bucket + 1), is_waited_for=False)
        self.computed_s[:] = max(self.computed_s.max(), self.free_s.max())
        return began_s, float(self.computed_s.max())

    def compute(self, seconds: float) -> None:
        self.computed_s += seconds * self.slow * self.random.normal(1, 0.003, self.num)

    def between(self) -> None:
        """Rank 0 keeps rows and prints; the others wait for it in the barrier before the next step."""
        self.computed_s[0] += self.rank_0_s
        self.collective(1, "all_reduce_barrier")

    def collective(self, size: int, name: str = "all_reduce", is_waited_for: bool = True) -> None:
        """Run one on a stream of its own."""
        start_s = np.maximum(self.computed_s, self.free_s)
        end_s = start_s.max() + TRANSFER_S
        for rank, entries in enumerate(self.entries):
            entries.append({
                "process_group": ["0", "default_pg"], "collective_seq_id": len(entries) + 1, "is_p2p": False,
                "profiling_name": f"nccl:{name}", "input_sizes": [[size]], "input_dtypes": ["Float"],
                "time_created_ns": BEGAN_NS + int(1e9 * self.computed_s[rank]),
                "duration_ms": 1e3 * (end_s - start_s[rank]),
            })  # fmt: skip
        self.free_s[:] = end_s
        if is_waited_for:
            self.computed_s[:] = end_s

    def metrics(self, size_of_group: int | None = None) -> dict:
        steps = [
            (step, BEGAN_NS + int(1e9 * begin) - 1000, BEGAN_NS + int(1e9 * end)) for step, begin, end in self.steps
        ]
        size = size_of_group or self.num
        per_rank = [calls_of(entries, steps, lambda name: size, self.num) for entries in self.entries]
        metrics = example_metrics(num_steps=len(steps), world_size=self.num, step_time_s=STEP_S)
        metrics["hardware"]["device_type"] = "cuda"
        metrics["timing"]["step_time_p50_sec"] = float(np.median([end - begin for _, begin, end in self.steps]))
        metrics["timed_collectives"] = json.loads(json.dumps(timed_collectives(per_rank)))
        check_metrics(metrics)
        return metrics


class Fsdp(Gpus):
    """Ranks wait for each other in each of ten layers, all of other sizes."""

    def step(self, step: int) -> tuple[float, float]:
        self.between()
        began_s = float(self.computed_s.max())
        for layer in range(10):
            self.collective(1000 + layer, "_all_gather_base")
            self.compute(STEP_S / 10)
        self.collective(4000, "_reduce_scatter_base")
        return began_s, float(self.computed_s.max())


def late(diagnosis: Diagnosis) -> list[int | None]:
    assert diagnosis.unknown is None and {one.cause for one in diagnosis.findings} <= {"late"}
    return [one.rank for one in diagnosis.findings]


@pytest.mark.parametrize("ranks", [2, 4, 9])
@pytest.mark.parametrize("kind", [Gpus, Fsdp])
def test_the_rank_that_comes_last_is_named_and_no_other(ranks, kind):
    slow = ranks - 1
    diagnosis = diagnose(kind(ranks, {slow: 0.03}).metrics())
    assert late(diagnosis) == [slow]
    cost_s = 0.03 * STEP_S  # what DDP waits for in its buckets overlaps: up to five times as much is said
    assert 0.8 * cost_s < diagnosis.findings[0].shift.seconds < (4 if kind is Gpus else 1.2) * cost_s
    said = text_of(diagnosis)
    assert f"rank {slow} comes last to collectives (most in " in said
    assert SHOWN_OF_DEVICES in said and SHOWN not in said


@pytest.mark.parametrize("kind", [Gpus, Fsdp])
def test_gpus_that_are_alike_are_not_told_apart_whatever_rank_0_does_between_the_steps(kind, monkeypatch):
    monkeypatch.setattr(Gpus, "rank_0_s", 0.05)
    for seed in range(10):
        found = diagnose(kind(4, seed=seed).metrics())
        assert late(found) == [] and NOTHING in text_of(found)


def test_a_phase_without_collectives_that_is_longer_there_is_named():
    metrics = Gpus(2, {1: 0.05}).metrics()
    for seconds, words in ((0.09, "(its forward takes longer; most in"), (0.061, "(most in")):
        for row in metrics["steps"]:
            row["per_rank_forward_s"] = [0.06, seconds]
        assert words in text_of(diagnose(metrics))


def test_only_what_all_ranks_timed_alike_in_a_step_counts():
    gpus = Gpus(2)
    whole = gpus.metrics()["timed_collectives"]
    assert (whole["num_steps"], [kind["num"] for kind in whole["kinds"]]) == (STEPS - 1, [STEPS - 1] * 5)
    apart = [np.ptp(kind["per_rank_s"]) for kind in whole["kinds"]]
    assert apart == sorted(apart, reverse=True)
    first, second = gpus.entries
    inside = [entry for entry in first if "barrier" not in entry["profiling_name"]][5:]
    inside[0]["duration_ms"] = 0.0  # not timed
    inside[1]["is_p2p"] = True
    for entries in gpus.entries:
        one = [entry for entry in entries if "barrier" not in entry["profiling_name"]][7]
        one["profiling_name"] = "nccl:broadcast"
    inside[3]["input_sizes"] = [[1, 2]]  # another call under the same number
    del second[-1]
    found = gpus.metrics()["timed_collectives"]
    assert sorted(kind["num"] for kind in found["kinds"]) == [STEPS - 2] * 5 and found["num_steps"] == STEPS - 1


def test_reads_of_different_moments_match_by_the_numbers_of_steps():
    gpus = Gpus(2)
    steps = [(step, BEGAN_NS + int(1e9 * begin) - 1000, BEGAN_NS + int(1e9 * end)) for step, begin, end in gpus.steps]
    reads = [
        calls_of(entries, known, lambda name: 2, 2)
        for entries, known in zip(gpus.entries, (steps, steps[9:]), strict=True)
    ]
    assert [one.num_steps for one in reads] == [STEPS, STEPS - 9]
    assert timed_collectives(reads)["num_steps"] == STEPS - 10


def test_reasons_why_nothing_is_known():
    metrics = Gpus(4).metrics()
    metrics["timed_collectives"]["has_smaller_groups"] = True
    assert "ranks of a mesh or a pipeline are not compared" in diagnose(metrics).unknown
    smaller = Gpus(4).metrics(size_of_group=2)["timed_collectives"]
    assert smaller["has_smaller_groups"] and smaller["num_steps"] == 0
    del metrics["timed_collectives"]
    assert "several ranks on NCCL with --watch_collectives every_step" in diagnose(metrics).unknown
    assert "takes more steps" in diagnose(Gpus(2, steps=12).metrics()).unknown
    assert timed_collectives([NONE, NONE])["num_steps"] == 0


def test_the_report_says_that_gpus_were_never_tried(tmp_path):
    write_metrics(tmp_path / "training_metrics.json", Gpus(2, {1: 0.05}).metrics())
    page = markdown.text(report_of([load_run(tmp_path)], tmp_path), "pictures")
    assert "comes last to collectives" in page and SHOWN_OF_DEVICES in page and SHOWN not in page


def test_times_that_do_not_fit_the_run_are_refused_or_answered():
    metrics = Gpus(2, {1: 0.05}).metrics()
    timed = metrics["timed_collectives"]
    for wrong in (
        {"per_rank_s": [[0.1]] * 10}, {"per_rank_s": [[0.1, 0.1]] * 11}, {"kinds": [timed["kinds"][0] | {"num": 0}]},
        {"kinds": [timed["kinds"][0] | {"per_rank_s": [0.1] * 3}]}, {"kinds": timed["kinds"] * 13},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="timed_collectives"):
            check_metrics(metrics | {"timed_collectives": timed | wrong})
    for seconds in (1.7e308, 1e9):
        other = metrics | {"timed_collectives": timed | {"per_rank_s": [[seconds, 0.0]] * 10}}
        check_metrics(other)
        assert "longer than its steps" in diagnose(other).unknown
    assert "takes more steps" in diagnose(metrics | {"timed_collectives": timed | {"per_rank_s": []}}).unknown
    assert late(diagnose(metrics | {"timed_collectives": timed | {"kinds": []}})) == [1]
