"""Which rank the others wait for inside collectives of NCCL: from made-up entries of PyTorch's flight recorder."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from support.metrics_examples import example_metrics, v1_metrics

from testbed.analysis.diagnosis.diagnose import NOT_COMPARED, OF_DEVICES, Diagnosis, diagnose
from testbed.analysis.diagnosis.words import NOTHING, SHOWN, text_of
from testbed.analysis.document import markdown
from testbed.analysis.report.build import report_of
from testbed.analysis.runs.load import load_run
from testbed.metrics.file import check_metrics, read_metrics, write_metrics
from testbed.profiling.timed_collectives import TimedCalls, calls_of, timed_collectives
from testbed.train import report

STEP_S, TRANSFER_S, STEPS = 0.2, 0.002, 40
BEGAN_NS = 1_700_000_000 * 10**9


class Gpus:
    """Ranks that compute and wait for each other inside collectives, in steps and between them."""

    rank_0_s = 0.003
    buckets = 5

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
        for bucket in range(self.buckets):
            self.compute(STEP_S * 2 / 3 / self.buckets)
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

    def known_steps(self) -> list[tuple[int, int, int]]:
        return [
            (step, BEGAN_NS + int(1e9 * begin) - 1000, BEGAN_NS + int(1e9 * end)) for step, begin, end in self.steps
        ]

    def metrics(self, size_of_group: int | None = None) -> dict:
        steps = self.known_steps()
        size = self.num if size_of_group is None else size_of_group
        per_rank = [calls_of(entries, steps, lambda name: size, self.num) for entries in self.entries]
        metrics = example_metrics(num_steps=len(steps), world_size=self.num, step_time_s=STEP_S)
        metrics["hardware"]["device_type"] = "cuda"
        metrics["timing"]["step_time_p50_sec"] = float(np.median([end - begin for _, begin, end in self.steps]))
        metrics["timed_collectives"] = json.loads(json.dumps(timed_collectives(per_rank)))
        check_metrics(metrics)
        return metrics


class Blocking(Gpus):
    """Ranks wait for each other before and after each of ten layers, all of other sizes."""

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
@pytest.mark.parametrize("kind", [Gpus, Blocking])
def test_the_rank_that_comes_last_is_named_and_no_other(ranks, kind):
    slow = ranks - 1
    share = 0.1 if kind is Blocking else 0.03
    diagnosis = diagnose(kind(ranks, {slow: share}).metrics())
    assert late(diagnosis) == [slow]
    cost_s = share * STEP_S / (10 if kind is Blocking else 1)  # the longest wait of a step, once
    assert 0.8 * cost_s < diagnosis.findings[0].shift.seconds < 1.2 * cost_s
    said = text_of(diagnosis)
    assert f"rank {slow} comes last to collectives, and in one of them the other GPUs wait for it so long" in said
    assert OF_DEVICES in said and SHOWN not in said


@pytest.mark.parametrize("buckets", [20, 40])
def test_one_lateness_counts_once_in_however_many_buckets_ranks_wait_for_it(buckets, monkeypatch):
    monkeypatch.setattr(Gpus, "buckets", buckets)
    monkeypatch.setitem(globals(), "TRANSFER_S", 0.001)
    (found,) = diagnose(Gpus(8, {7: 0.01}).metrics()).findings
    assert found.rank == 7 and 0.8 * 0.01 < found.share < 1.2 * 0.01
    (found,) = diagnose(Gpus(8, {7: 0.05}).metrics()).findings
    assert found.rank == 7 and 0.007 < found.share < 0.05, "no wait is longer than from one bucket to the next"
    for seed in range(3):  # cores that differ by 0.2 %, as those of one machine do
        alike = dict(enumerate(np.random.default_rng(seed).normal(0, 0.002, 8)))
        assert late(diagnose(Gpus(8, alike, seed).metrics())) == []


def test_ranks_that_leave_a_collective_a_moment_apart_are_not_late():
    gpus = Blocking(4)
    metrics = gpus.metrics()
    metrics["timing"]["step_time_p50_sec"] /= 100  # so that it is more than the least share
    for rows in metrics["timed_collectives"]["per_rank_s"]:
        rows[:] = [0.00004, 0.00004, 0.00004, 0.0]
    assert late(diagnose(metrics)) == []
    for rows in metrics["timed_collectives"]["per_rank_s"]:
        rows[:] = [0.00006, 0.00006, 0.00006, 0.0]
    assert late(diagnose(metrics)) == [3]


@pytest.mark.parametrize("kind", [Gpus, Blocking])
def test_gpus_that_are_alike_are_not_told_apart_whatever_rank_0_does_between_the_steps(kind, monkeypatch):
    monkeypatch.setattr(Gpus, "rank_0_s", 0.05)
    for seed in range(10):
        found = diagnose(kind(4, seed=seed).metrics())
        assert late(found) == [] and NOTHING in text_of(found)


def test_a_phase_without_collectives_that_is_longer_there_is_named():
    metrics = Gpus(2, {1: 0.05}).metrics()
    for seconds, words in ((0.09, "(its forward takes longer), and"), (0.061, "collectives, and")):
        for row in metrics["steps"]:
            row["per_rank_forward_s"] = [0.06, seconds]
        assert words in text_of(diagnose(metrics))
    for row in metrics["steps"]:
        row["per_rank_forward_s"] = [0.06, 0.06 + np.random.default_rng(row["step"]).normal(0.01, 0.05)]
    assert "its forward" not in text_of(diagnose(metrics)), "it varies too much"
    for row in metrics["steps"]:
        row["per_rank_data_wait_s"] = [0.001, 0.02]
    said = text_of(diagnose(metrics))
    assert "(its data wait takes longer)" in said and "--num_workers 2" in said and "nvidia-smi" not in said


def test_only_what_all_ranks_timed_alike_in_a_step_counts():
    """On rank 0 alone each change would make a wait of seconds."""
    gpus = Gpus(2)
    inside = [entry for entry in gpus.entries[0] if "barrier" not in entry["profiling_name"]][5::7]
    changes = [
        {"collective_seq_id": 10_000},
        {"input_sizes": [[1, 2]]},  # another call under the same number
        {"profiling_name": "nccl:broadcast"},
        {"time_created_ns": BEGAN_NS - 1},  # before the steps
    ]
    for entry, change in zip(inside, changes, strict=False):
        entry.update(change, duration_ms=9e3)
    inside[4]["duration_ms"] = 0.0  # not timed
    found = gpus.metrics()["timed_collectives"]
    assert found["num_steps"] == STEPS - 2 and np.max(found["per_rank_s"]) < 0.1
    inside[5]["duration_ms"] = 9e3
    assert np.max(gpus.metrics()["timed_collectives"]["per_rank_s"]) > 1


def test_reads_of_different_moments_match_by_the_numbers_of_steps():
    gpus = Gpus(2)
    steps = gpus.known_steps()
    reads = [
        calls_of(entries, known, lambda name: 2, 2)
        for entries, known in zip(gpus.entries, (steps, steps[9:]), strict=True)
    ]
    assert [len({call[0] for call in one.seconds}) for one in reads] == [STEPS, STEPS - 9]
    assert timed_collectives(reads)["num_steps"] == STEPS - 11


def test_ranks_keep_the_same_reads_however_much_of_them_the_recorder_has_noted(monkeypatch):
    """Validations after steps 26, 30 and 43 of a start, of which 5 warm up, and its end after step 45."""
    gpus, kept = Gpus(2), []
    monkeypatch.setattr(report.process_group, "size_of_group", lambda name: 2)
    for rank, entries in enumerate(gpus.entries):
        one = object.__new__(report.Report)
        one.launch, one._times_collectives, one._timed = SimpleNamespace(world_size=2), True, TimedCalls({})
        one._read_at, one._kept = 5, 0
        for one._num_steps in (26, 30, 43, 45):
            known = gpus.known_steps()[: one._num_steps - 5]
            noted = [entry for entry in entries if entry["time_created_ns"] <= known[-1][2]][-90:]
            noted = noted[: -18 * rank or None] if one._num_steps > 40 else noted  # three steps fewer
            one._steps_ns = known
            monkeypatch.setattr(report, "recorded", lambda noted=noted: noted)
            one.keep_timed_collectives()
        kept.append(one._timed)
    steps = [sorted({call[0] for call in one.seconds}) for one in kept]
    assert steps == [list(range(29, 44)), list(range(29, 41))]
    assert timed_collectives(kept)["num_steps"] == 10


def test_a_short_read_does_not_replace_a_long_one(monkeypatch):
    one, reads = object.__new__(report.Report), []
    one.launch, one._times_collectives, one._timed = SimpleNamespace(world_size=2), True, TimedCalls({})
    one._read_at, one._kept, one._steps_ns = 5, 0, []
    monkeypatch.setattr(report, "recorded", lambda: reads.append(one._num_steps) or [])
    for one._num_steps in (205, 220, 310):
        one.keep_timed_collectives()
    assert reads == [205, 310]


def test_reasons_why_nothing_is_known():
    metrics = Gpus(4).metrics()
    metrics["timed_collectives"]["has_smaller_groups"] = True
    assert diagnose(metrics).unknown == NOT_COMPARED
    for size in (2, 0):  # 0: a group that is gone
        smaller = Gpus(4).metrics(size_of_group=size)["timed_collectives"]
        assert smaller["has_smaller_groups"] and smaller["num_steps"] == 0
    for noted in ({"is_p2p": True}, {"profiling_name": "nccl:coalesced", "input_sizes": [], "input_dtypes": []}):
        gpus = Gpus(2, {1: 0.1})
        gpus.entries[0][9].update(noted)
        assert diagnose(gpus.metrics()).unknown == NOT_COMPARED
    del metrics["timed_collectives"]
    assert "several ranks on NCCL with --watch_collectives every_step" in diagnose(metrics).unknown
    assert "takes more steps" in diagnose(Gpus(2, steps=12).metrics()).unknown
    assert timed_collectives([TimedCalls({})] * 2)["num_steps"] == 0


def test_the_report_says_that_gpus_were_never_tried(tmp_path):
    write_metrics(tmp_path / "training_metrics.json", Gpus(2, {1: 0.05}).metrics())
    page = markdown.text(report_of([load_run(tmp_path)], tmp_path), "pictures")
    assert "comes last to collectives" in page and OF_DEVICES in page and SHOWN not in page


def test_times_that_do_not_fit_the_run_are_refused_or_answered():
    metrics = Gpus(2, {1: 0.05}).metrics()
    timed = metrics["timed_collectives"]
    for wrong in (
        {"per_rank_s": [[0.1]] * 10}, {"per_rank_s": [[0.1, 0.1]] * 11}, {"num_steps": -1},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="timed_collectives"):
            check_metrics(metrics | {"timed_collectives": timed | wrong})
    for seconds in (1.7e308, 1e9):
        other = metrics | {"timed_collectives": timed | {"per_rank_s": [[seconds, 0.0]] * 10}}
        check_metrics(other)
        assert "longer than its steps" in diagnose(other).unknown
    assert "takes more steps" in diagnose(metrics | {"timed_collectives": timed | {"per_rank_s": []}}).unknown


def test_what_an_earlier_version_calls_by_that_name_is_not_read(tmp_path):
    (tmp_path / "old.json").write_text(json.dumps(v1_metrics(4) | {"timed_collectives": "boo"}))
    assert diagnose(read_metrics(tmp_path / "old.json")).unknown
