"""Which rank the others wait for inside collectives of NCCL: from made-up dumps of PyTorch's flight recorder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.metrics_examples import example_metrics

from testbed.analysis.diagnosis.diagnose import Diagnosis, diagnose
from testbed.analysis.diagnosis.words import NOTHING, SHOWN, SHOWN_OF_DEVICES, text_of
from testbed.metrics.file import check_metrics
from testbed.profiling.flight_recorder import calls_of
from testbed.profiling.timed_collectives import timed_collectives

STEP_S, TRANSFER_S = 0.2, 0.002
PAIRS = {("tensor", 0): (0, 1), ("tensor", 1): (2, 3), ("data", 0): (0, 2), ("data", 1): (1, 3)}


class Gpus:
    """Ranks that compute, and wait for each other inside collectives. `times` of each: when its kernels are done."""

    def __init__(self, ranks: int):
        self.computed_s, self.free_s = np.zeros(ranks), np.zeros(ranks)
        self.dumps: list[list[dict]] = [[] for _ in range(ranks)]

    def collective(self, group: str, ranks: tuple[int, ...], size: int) -> None:
        """Run one on a stream of its own, as DDP does: nothing waits for it but the next one."""
        start_s = {rank: max(self.computed_s[rank], self.free_s[rank]) for rank in ranks}
        end_s = max(start_s.values()) + TRANSFER_S
        for rank in ranks:
            number = sum(entry["process_group"][0] == group for entry in self.dumps[rank]) + 1
            self.dumps[rank].append({
                "process_group": [group, "undefined"], "collective_seq_id": number, "is_p2p": False,
                "profiling_name": "nccl:all_reduce", "time_created_ns": int(1e18 + 1e9 * self.computed_s[rank]),
                "duration_ms": 1e3 * (end_s - start_s[rank]), "input_sizes": [[size]], "input_dtypes": ["Float"],
            })  # fmt: skip
            self.free_s[rank] = end_s

    def wait(self, ranks: tuple[int, ...]) -> None:
        """Let the computing of these ranks wait for their collectives."""
        for rank in ranks:
            self.computed_s[rank] = max(self.computed_s[rank], self.free_s[rank])


def diagnosed(gpus: Gpus, ranks_of: dict[str, tuple[int, ...]] | None = None, steps: int = 60) -> Diagnosis:
    world = tuple(range(len(gpus.dumps)))
    per_rank = [
        calls_of({"entries": entries}, lambda name: (ranks_of or {}).get(name, world)) for entries in gpus.dumps
    ]
    metrics = example_metrics(num_steps=steps, world_size=len(world), step_time_s=STEP_S)
    metrics["hardware"]["device_type"] = "cuda"
    metrics["timing"]["step_time_p50_sec"] = float(gpus.computed_s.max()) / steps
    metrics["timed_collectives"] = json.loads(json.dumps(timed_collectives(per_rank, lambda ranks: "copies")))
    check_metrics(metrics)
    return diagnose(metrics)


def ddp(slow: dict[int, float], ranks: int = 4, steps: int = 60, buckets: int = 5, seed: int = 0) -> Gpus:
    """Train `steps` steps of DDP: buckets during backward. `slow`: ranks that compute so much longer, as a share."""
    gpus, random = Gpus(ranks), np.random.default_rng(seed)
    factor = np.array([1 + slow.get(rank, 0.0) for rank in range(ranks)])
    for _ in range(steps):
        gpus.computed_s += STEP_S / 3 * factor * random.normal(1, 0.003, ranks)
        for bucket in range(buckets):
            gpus.computed_s += STEP_S * 2 / 3 / buckets * factor * random.normal(1, 0.003, ranks)
            gpus.collective("0", tuple(range(ranks)), 1000 * (bucket + 1))
        gpus.wait(tuple(range(ranks)))
    return gpus


@pytest.mark.parametrize("ranks", [2, 4, 9])
def test_the_rank_that_comes_last_is_named_and_no_other(ranks):
    slow = ranks - 1
    diagnosis = diagnosed(ddp({slow: 0.03}, ranks))
    assert [(one.cause, one.rank) for one in diagnosis.findings] == [("late", slow)]
    details = diagnosis.findings[0].details
    assert details["collective"] == "all_reduce along copies" and details["calls"] == pytest.approx(1, rel=0.1)
    assert 0.5 * 0.03 * STEP_S < diagnosis.findings[0].shift.seconds < 1.2 * 0.03 * STEP_S
    said = text_of(diagnosis)
    assert f"rank {slow} comes last to collectives (most in all_reduce along copies of" in said
    assert SHOWN_OF_DEVICES in said and SHOWN not in said


def test_gpus_that_are_alike_are_not_told_apart():
    for seed in range(10):
        assert (found := diagnosed(ddp({}, seed=seed))).findings == () and NOTHING in text_of(found)


def test_who_is_late_because_it_waited_for_a_slow_rank_is_not_named():
    gpus, random, groups = (
        Gpus(4),
        np.random.default_rng(0),
        {f"{axis}{place}": ranks for (axis, place), ranks in PAIRS.items()},
    )
    for _ in range(60):
        for _ in range(4):  # layers: tensor ranks wait for each other in each
            gpus.computed_s += STEP_S / 4 * np.array([1, 1, 1, 1.05]) * random.normal(1, 0.003, 4)
            for place in (0, 1):
                gpus.collective(f"tensor{place}", groups[f"tensor{place}"], 1000)
                gpus.wait(groups[f"tensor{place}"])
        for place in (0, 1):
            gpus.collective(f"data{place}", groups[f"data{place}"], 4000)
            gpus.wait(groups[f"data{place}"])
    assert [one.rank for one in diagnosed(gpus, groups).findings] == [3]


def test_a_phase_without_collectives_that_is_longer_there_is_named():
    gpus = ddp({1: 0.05}, ranks=2)
    metrics = example_metrics(num_steps=60, world_size=2, step_time_s=STEP_S)
    for row in metrics["steps"]:
        row["per_rank_forward_s"] = [0.06, 0.07]
    metrics["timed_collectives"] = timed_collectives(
        [calls_of({"entries": one}, lambda name: (0, 1)) for one in gpus.dumps], lambda ranks: "copies"
    )
    assert "its forward takes longer; most in all_reduce" in text_of(diagnose(metrics))


def test_what_was_not_timed_or_not_on_all_ranks_is_left_out():
    gpus = ddp({}, ranks=2, steps=3)
    gpus.dumps[1][4]["duration_ms"] = 0.0
    gpus.dumps[0][5]["is_p2p"] = True
    per_rank = [calls_of({"entries": one}, lambda name: (0, 1)) for one in gpus.dumps]
    assert [len(calls) for calls in per_rank] == [14, 14]
    assert timed_collectives(per_rank, lambda ranks: "")["collectives"] == []  # of each kind there are three or fewer
    assert timed_collectives([[], []], lambda ranks: "") == {"seconds": 0.0, "collectives": []}


def test_times_of_other_ranks_than_the_run_had_are_refused():
    metrics = example_metrics(world_size=2)
    row = {
        "name": "all_reduce",
        "axes": "copies",
        "bytes": 8,
        "ranks": [0, 1],
        "num": 20,
        "per_rank_s": [[0.1, 0.2]] * 10,
    }
    metrics["timed_collectives"] = {"seconds": 1.0, "collectives": [row]}
    check_metrics(metrics)
    for wrong in ({"ranks": [0, 2]}, {"ranks": [0]}, {"per_rank_s": [[0.1]] * 10}):
        metrics["timed_collectives"]["collectives"] = [row | wrong]
        with pytest.raises(ValueError, match=r"timed_collectives\.collectives\[0\] does not fit"):
            check_metrics(metrics)
