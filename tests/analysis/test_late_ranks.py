"""Which rank the others wait for inside collectives of NCCL: from made-up entries of PyTorch's flight recorder."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from support.metrics_examples import example_metrics

from testbed.analysis.diagnosis.diagnose import Diagnosis, diagnose
from testbed.analysis.diagnosis.words import NOTHING, SHOWN, SHOWN_OF_DEVICES, text_of
from testbed.analysis.document import markdown
from testbed.analysis.report.build import report_of
from testbed.analysis.runs.load import load_run
from testbed.distributed.mesh import MeshSizes
from testbed.metrics.file import check_metrics, write_metrics
from testbed.profiling.timed_collectives import calls_of, timed_collectives

STEP_S, TRANSFER_S, STEPS = 0.2, 0.002, 40
BEGAN_NS = 1_700_000_000 * 10**9


class Gpus:
    """Ranks that compute and wait for each other inside collectives, of a mesh of data x tensor ranks."""

    def __init__(self, data: int, tensor: int = 1, slow: dict[int, float] | None = None, seed: int = 0):
        self.mesh = MeshSizes(data=data, tensor=tensor)
        self.num = data * tensor
        self.slow = np.array([1 + (slow or {}).get(rank, 0.0) for rank in range(self.num)])
        self.random = np.random.default_rng(seed)
        self.computed_s, self.free_s = np.zeros(self.num), np.zeros(self.num)  # when each has done its kernels
        self.entries: list[list[dict]] = [[] for _ in range(self.num)]
        self.steps_s: list[tuple[float, float]] = []
        self.numbers: dict[str, int] = {}
        self.ranks_of = {"0": tuple(range(self.num))}
        for place in range(data):
            self.ranks_of[f"tensor {place}"] = tuple(range(place * tensor, (place + 1) * tensor))
        for place in range(tensor):
            self.ranks_of[f"data {place}"] = tuple(range(place, self.num, tensor))

    def compute(self, seconds: float) -> None:
        self.computed_s += seconds * self.slow * self.random.normal(1, 0.003, self.num)

    def collective(self, groups: str, size: int = 1000, name: str = "all_reduce", is_waited_for: bool = True) -> None:
        """Run one in all groups of this name, on a stream of its own."""
        for group, ranks in self.ranks_of.items():
            if not group.startswith(groups) or len(ranks) < 2:
                continue
            start_s = {rank: max(self.computed_s[rank], self.free_s[rank]) for rank in ranks}
            end_s = max(start_s.values()) + TRANSFER_S
            self.numbers[group] = self.numbers.get(group, 0) + 1
            for rank in ranks:
                self.entries[rank].append({
                    "process_group": [group, "undefined"], "collective_seq_id": self.numbers[group], "is_p2p": False,
                    "profiling_name": f"nccl:{name}", "input_sizes": [[size]], "input_dtypes": ["Float"],
                    "time_created_ns": BEGAN_NS + int(1e9 * self.computed_s[rank]),
                    "duration_ms": 1e3 * (end_s - start_s[rank]),
                })  # fmt: skip
                self.free_s[rank] = end_s
                if is_waited_for:
                    self.computed_s[rank] = end_s

    def between(self, seconds: Sequence[float]) -> None:
        """Let ranks do something between the steps, and wait for each other in the barrier before the next."""
        self.computed_s += seconds
        self.collective("0", size=1, name="all_reduce_barrier")

    def begin(self) -> float:
        """Begin a step; returns when."""
        return float(self.computed_s.max())

    def end(self, began_s: float) -> None:
        self.computed_s[:] = max(self.computed_s.max(), self.free_s.max())
        self.steps_s.append((began_s, float(self.computed_s.max())))

    def metrics(self) -> dict:
        steps_ns = [(BEGAN_NS + int(1e9 * begin) - 1000, BEGAN_NS + int(1e9 * end)) for begin, end in self.steps_s]
        per_rank = [calls_of(entries, steps_ns, self.ranks_of.__getitem__) for entries in self.entries]
        metrics = example_metrics(num_steps=len(steps_ns), world_size=self.num, step_time_s=STEP_S)
        metrics["hardware"]["device_type"] = "cuda"
        metrics["timing"]["step_time_p50_sec"] = float(np.median([end - begin for begin, end in self.steps_s]))
        metrics["timed_collectives"] = json.loads(json.dumps(timed_collectives(per_rank, self.mesh.axes_of)))
        check_metrics(metrics)
        return metrics


def late(diagnosis: Diagnosis) -> list[int | None]:
    assert diagnosis.unknown is None and {one.cause for one in diagnosis.findings} <= {"late"}
    return [one.rank for one in diagnosis.findings]


def ddp(ranks: int = 4, slow: dict[int, float] | None = None, seed: int = 0, rank_0_s: float = 0.003) -> Gpus:
    """Buckets travel during backward; between the steps rank 0 keeps rows and prints."""
    gpus = Gpus(ranks, slow=slow, seed=seed)
    for _ in range(STEPS):
        gpus.between([rank_0_s] + [0.0] * (ranks - 1))
        began_s = gpus.begin()
        gpus.compute(STEP_S / 3)
        for bucket in range(5):
            gpus.compute(STEP_S * 2 / 15)
            gpus.collective("0", 1000 * (bucket + 1), is_waited_for=False)
        gpus.end(began_s)
    return gpus


def fsdp_x_tensor(data: int, tensor: int, slow: dict[int, float] | None = None) -> Gpus:
    """Ranks wait for each other in each of four layers, along the tensor axis and along the data axis."""
    gpus = Gpus(data, tensor, slow)
    for _ in range(STEPS):
        gpus.between([0.0] * gpus.num)
        began_s = gpus.begin()
        for _ in range(4):
            gpus.collective("data", 4000, "_all_gather_base")
            gpus.compute(STEP_S / 4)
            gpus.collective("tensor", 1000)
        gpus.collective("data", 4000, "_reduce_scatter_base")
        gpus.end(began_s)
    return gpus


@pytest.mark.parametrize("ranks", [2, 4, 9])
def test_the_rank_that_comes_last_is_named_and_no_other(ranks):
    slow = ranks - 1
    diagnosis = diagnose(ddp(ranks, {slow: 0.03}).metrics())
    assert late(diagnosis) == [slow]
    details, shift = diagnosis.findings[0].details, diagnosis.findings[0].shift
    assert details["collective"] == "all_reduce along copies" and details["calls"] == 1
    assert 0.4 * 0.03 * STEP_S < shift.low < 0.03 * STEP_S
    said = text_of(diagnosis)
    assert f"rank {slow} comes last to collectives (most in all_reduce along copies of" in said
    assert SHOWN_OF_DEVICES in said and SHOWN not in said


def test_gpus_that_are_alike_are_not_told_apart_whatever_rank_0_does_between_the_steps():
    for seed in range(10):
        found = diagnose(ddp(seed=seed, rank_0_s=0.05).metrics())
        assert late(found) == [] and NOTHING in text_of(found)


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (4, 2), (2, 4), (4, 4), (8, 8)])
def test_who_is_late_because_it_waited_for_a_slow_rank_is_not_named(data, tensor):
    slow = data * tensor - 1
    assert late(diagnose(fsdp_x_tensor(data, tensor, {slow: 0.03}).metrics())) == [slow]
    assert late(diagnose(fsdp_x_tensor(data, tensor).metrics())) == []


def test_stages_which_end_at_different_times_by_design_are_not_compared():
    gpus = ddp(2, {1: 0.5})
    gpus.mesh = MeshSizes(pipeline=2)
    metrics = gpus.metrics()
    assert metrics["timed_collectives"] == {"per_rank_net_s": [0.0, 0.0], "collectives": []}
    assert "of fewer than 12 steps" in diagnose(metrics).unknown


def test_a_phase_without_collectives_that_is_longer_there_is_named():
    metrics = ddp(2, {1: 0.05}).metrics()
    for seconds, words in ((0.07, "(its forward takes longer; most in"), (0.061, "(most in")):
        for row in metrics["steps"]:
            row["per_rank_forward_s"] = [0.06, seconds]
        assert words in text_of(diagnose(metrics))


def test_only_what_is_timed_in_a_step_alike_and_on_all_ranks_counts():
    gpus = ddp(2)
    first, second = gpus.entries
    inside = [entry for entry in first if "barrier" not in entry["profiling_name"]]
    inside[0]["duration_ms"] = 0.0  # not timed
    inside[1]["is_p2p"] = True
    inside[2]["profiling_name"] = "nccl:broadcast"
    inside[3]["input_sizes"] = [[1, 2]]  # another call under the same number
    del second[-1]
    (group, *others) = gpus.metrics()["timed_collectives"]["collectives"]
    assert sorted(row["num"] for row in (group, *others)) == [STEPS - 1] * 5
    assert {row["num_steps"] for row in (group, *others)} == {STEPS - 1}


def test_reasons_why_nothing_is_known():
    metrics = ddp(2).metrics()
    del metrics["timed_collectives"]
    assert "several ranks on NCCL with --watch_collectives every_step" in diagnose(metrics).unknown
    short = ddp(2)
    short.steps_s = short.steps_s[:11]
    assert "train more steps" in diagnose(short.metrics()).unknown


def test_the_report_says_that_gpus_were_never_tried(tmp_path):
    write_metrics(tmp_path / "training_metrics.json", ddp(2, {1: 0.05}).metrics())
    page = markdown.text(report_of([load_run(tmp_path)], tmp_path), "pictures")
    assert "comes last to collectives" in page and SHOWN_OF_DEVICES in page and SHOWN not in page


def test_times_that_do_not_fit_the_run_are_refused():
    row = ddp(2).metrics()["timed_collectives"]["collectives"][0]
    for wrong in (
        {"ranks": [0, 2]}, {"ranks": [0]}, {"ranks": [1, 0]}, {"ranks": [0, 0]}, {"per_rank_s": [[0.1]] * 10},
        {"per_rank_s": row["per_rank_s"][:9]}, {"num": 0},
    ):  # fmt: skip
        metrics = ddp(2).metrics()
        metrics["timed_collectives"]["collectives"] = [row | wrong]
        with pytest.raises(ValueError, match="timed_collectives"):
            check_metrics(metrics)
    metrics["timed_collectives"] = {"per_rank_net_s": [0.0], "collectives": []}
    with pytest.raises(ValueError, match=r"per_rank_net_s has 1 entries for 2 ranks"):
        check_metrics(metrics)


def test_times_of_any_size_are_answered():
    metrics = ddp(2, {1: 0.05}).metrics()
    for seconds in (1.7e308, 1e9):
        for row in metrics["timed_collectives"]["collectives"]:
            row["per_rank_s"] = [[seconds, 0.0]] * 10
        metrics["timed_collectives"]["per_rank_net_s"] = [-seconds, seconds]
        check_metrics(metrics)
        assert "longer than its steps" in (diagnose(metrics).unknown or "")
