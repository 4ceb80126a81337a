"""One decision on equal work: whoever compares runs reaches it, whichever way round, and over files of any form."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.metrics_examples import example_metrics, save, v1_metrics, v20_metrics
from support.mutations import broken_json
from support.scaling_examples import arm_of, metrics_of, report_of, write_arm

from testbed.analysis.comparison.document import comparison_text, json_of
from testbed.analysis.comparison.two_arms import compare_arms
from testbed.analysis.report.build import summary
from testbed.analysis.runs.arms import Arm
from testbed.analysis.runs.comparability import compiler_with_strategy, differing_work, mismatches, unlike_skips
from testbed.analysis.runs.entries import subject_of
from testbed.analysis.runs.load import Run, load_run
from testbed.analysis.scaling.report import scaling_report
from testbed.analysis.scaling.tables import scaling_table
from testbed.config.run_types import STRATEGIES
from testbed.errors import InputError
from testbed.sweep.request import PROTOCOLS

FILES = [
    v1_metrics(1),
    v20_metrics(),
    v20_metrics(world_size=2, deepspeed_config=None),
    example_metrics(num_steps=3, warmup_steps=1),
    example_metrics(num_steps=2, warmup_steps=0, world_size=1, evaluations=[]),
    example_metrics(num_steps=3, warmup_steps=0, instrumented=True, settings={"profile": True}),
    example_metrics(num_steps=2, status="failed", failure={"reason": "loss is not finite", "step": 2}, completion=None),
]
any_file = st.sampled_from(FILES)
whole_or_broken = any_file.map(lambda metrics: json.dumps(metrics).encode()) | any_file.flatmap(broken_json)
in_a_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def arm(folder, rates: list[float], run_type: str, ranks: int, **more) -> Arm:
    paths = [
        save(folder / str(number), metrics_of(run_type, ranks, rate, **copy.deepcopy(more)))
        for number, rate in enumerate(rates)
    ]
    return Arm(run_type, tuple(map(load_run, paths)))


def compare_both_ways(one: Run, other: Run) -> None:
    """Do all that compares two runs. A refusal is an InputError."""
    for protocol in PROTOCOLS:
        for pair in ((one, other), (other, one)):
            differing_work(pair, protocol)
            try:
                report = scaling_report(pair, protocol, target=3.0)
            except InputError:
                continue
            json.dumps(report, allow_nan=False)
            scaling_table(report).encode()
    for pair in ((one, other), (other, one)):
        try:
            found = compare_arms(*(Arm(run.label, (run,)) for run in pair))
        except InputError:
            continue
        comparison_text(found).encode()
        json.dumps(json_of(found), allow_nan=False)
    summary([one, other]).encode()


@in_a_folder
@given(st.tuples(whole_or_broken, whole_or_broken))
def test_any_two_metrics_files_compare_without_a_traceback(tmp_path, texts):
    runs = []
    for name, text in zip("ab", texts, strict=True):
        path = tmp_path / name / "training_metrics.json"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text)
        try:
            runs.append(load_run(path))
        except InputError:
            return
    compare_both_ways(*runs)


rates = st.lists(st.floats(900, 1100), min_size=5, max_size=7)


@settings(in_a_folder, max_examples=15)
@given(rates, rates, st.floats(0.5, 2), st.booleans())
def test_swapping_two_arms_inverts_the_ratio(tmp_path, one, other, factor, is_equal):
    a = arm(tmp_path / "a", one, "baseline", 1)
    b = arm(tmp_path / "b", [factor * rate for rate in other], "ddp", 2, training_config={"lr": 3e-4 * (2 - is_equal)})
    there, back = compare_arms(a, b), compare_arms(b, a)
    assert there.ratio.ratio * back.ratio.ratio == pytest.approx(1)
    assert there.ratio.low * back.ratio.high == pytest.approx(1)
    turned = {"faster": "slower", "slower": "faster"}
    assert turned.get(there.ratio.verdict, there.ratio.verdict) == back.ratio.verdict
    assert [(item.field, item.a, item.b) for item in there.mismatches] == [
        (item.field, item.b, item.a) for item in back.mismatches
    ]
    assert {"a": "b", "b": "a", None: None}[there.worse_side] == back.worse_side


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        (None, {}),
        ("precision", {"training_config": {"precision": "bf16"}}),
        ("lr", {"training_config": {"lr": 1e-3}}),
        ("optimizer_steps", {"num_steps": 24}),
        ("global_batch_size", {"batch": 16}),
        ("seed", {"seed": 2}),
        ("hardware.cpu_name", {"hardware": {"cpu_name": "another"}}),
        ("hardware.cpu_threads_per_rank", {"hardware": {"cpu_threads_per_rank": 2}}),
    ],
)
def test_comparison_report_and_scaling_study_agree_on_equal_work(tmp_path, field, changed):
    """Unequal work is named and gets no speed-up. A scaling study wants equal devices too."""
    write_arm(tmp_path, "baseline", 1, 1000)
    write_arm(tmp_path, "ddp", 2, 1800, **changed)
    report = report_of(tmp_path)
    found = {item["field"] for item in report["mismatches"]}
    assert bool(found) == bool(field)
    if field:
        assert field in found and field in scaling_table(report)
        assert report["status"] == "invalid_comparison" and arm_of(report, "ddp", 2)["speedup"] is None
        allowed = report_of(tmp_path, allow_mismatch=True)
        assert allowed["status"] == "mismatch_allowed" and allowed["mismatches"] == report["mismatches"]
        assert arm_of(allowed, "ddp", 2)["speedup"]["ratio"] == pytest.approx(1.8)
        assert "UNEQUAL WORK" in scaling_table(allowed)
    sides = [tuple(map(load_run, sorted((tmp_path / name).rglob("*.json")))) for name in ("baseline_1", "ddp_2")]
    compared = {item.field for item in compare_arms(*(Arm("", side) for side in sides)).mismatches}
    assert compared == {name for name in found if not name.startswith("hardware.")}
    # a report's groups leave the seed to the verdicts
    assert len(subject_of([*sides[0], *sides[1]]).workloads) == (1 if compared <= {"seed"} else 2)


def test_steps_that_fp16_skipped_are_unequal_work_in_a_scaling_study_too(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000)
    for path in write_arm(tmp_path, "ddp", 2, 1800):
        metrics = json.loads(path.read_text())
        for row in metrics["steps"][:4]:
            row.update(is_skipped=True, grad_norm=None)
        save(path.parent, metrics)
    report = report_of(tmp_path)
    assert [item["field"] for item in report["mismatches"]] == ["steps skipped by fp16 overflow"]
    assert report["status"] == "invalid_comparison"


def run_of(folder, *, skipped: int = 0, **more) -> Run:
    """A run of 20 steps, of which fp16 skipped the first `skipped`."""
    metrics = metrics_of("baseline", 1, num_steps=20, **more)
    for row in metrics["steps"][:skipped]:
        row.update(is_skipped=True, grad_norm=None)
    return load_run(save(folder, metrics))


@pytest.mark.parametrize(("skipped", "is_unequal"), [(0, False), (1, False), (2, False), (3, True), (20, True)])
def test_where_a_loss_scale_begins_explains_two_steps_and_no_third(tmp_path, skipped, is_unequal):
    runs = run_of(tmp_path / "a"), run_of(tmp_path / "b", skipped=skipped)
    for pair in (runs, runs[::-1]):
        assert bool(unlike_skips(pair)) == is_unequal


@pytest.mark.parametrize(
    ("seeds", "others", "is_equal"),
    [([1, 2, 3], [1, 2], True), ([1], [1, 2], True), ([1, 2], [2, 3], False), ([1], [2], False)],
)
def test_seeds_of_one_list_are_equal_work_and_seeds_of_two_are_not(tmp_path, seeds, others, is_equal):
    sides = [
        [run_of(tmp_path / f"{side}{seed}", seed=seed) for seed in values]
        for side, values in (("a", seeds), ("b", others))
    ]
    for a, b in (sides, sides[::-1]):
        assert [item.field for item in mismatches(a, b)] == ([] if is_equal else ["seed"])


@pytest.mark.parametrize(("stages", "found"), [((1, 2), ["compile, of unlike run types"]), ((2, 2), [])])
def test_another_zero_stage_is_another_strategy_where_one_alone_was_compiled(tmp_path, stages, found):
    config = {"run_type": "optimized", "deepspeed_enabled": True}
    runs = [
        run_of(tmp_path / name, training_config=config | {"zero_stage": stage, "compile": name == "a"})
        for name, stage in zip("ab", stages, strict=True)
    ]
    assert [item.field for item in compiler_with_strategy(runs)] == found


def test_the_ranks_of_a_strategy_that_differs_are_work(tmp_path, monkeypatch):
    other = dataclasses.replace(STRATEGIES["allreduce"], equals_baseline=False, differs_because="weights are averaged")
    a, b = (
        load_run(save(tmp_path / str(ranks), metrics_of("allreduce", ranks))) for ranks in (2, 4)
    )  # as ddp is, of equal work on any ranks
    assert differing_work([a, b]) == []
    monkeypatch.setitem(STRATEGIES, "allreduce", other)
    assert [item.recorded for item in differing_work([a, b])] == [(2, 4)]
    assert differing_work([a, a]) == [] and differing_work([a, b], "time_to_loss") == []
