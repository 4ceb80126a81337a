"""What an arm is called, what else may explain a difference, and how much of its file a run keeps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from metrics_examples import example_metrics, save
from scaling_examples import metrics_of, report_of, write_arm

from testbed.analysis.arms import Arm, arm_names, group_into_arms, strategies_of
from testbed.analysis.audit.claims import FAILS, NOTE, audit
from testbed.analysis.comparison.confounders import DEVICE, MACHINE, SOFTWARE, confounders
from testbed.analysis.comparison.text import comparison_text
from testbed.analysis.comparison.two_arms import compare_arms
from testbed.analysis.report.subject import subject_of
from testbed.analysis.runs import Run, find_runs, load_run
from testbed.analysis.scaling.tables import scaling_table, table_004


def load(folder: Path) -> list[Run]:
    return [load_run(path) for path in find_runs(folder)]


def write_variants(folder: Path) -> None:
    """A sweep's variants: settings, a switch, a stage of ZeRO, and a process that drives two devices."""
    zero = {"training_config": {"deepspeed_enabled": True, "zero_stage": 2}, "settings": {"zero_stage": 2}}
    write_arm(folder, "baseline", 1, 1000)
    write_arm(folder, "ddp", 2, 1800, settings={"bucket_cap_mb": 25.0, "compile": False})
    write_arm(folder, "ddp", 2, 1900, name="compiled", settings={"bucket_cap_mb": 1.0, "compile": True})
    write_arm(folder, "optimized", 2, 1700, **zero)
    for number in range(5):
        save(folder / "dp" / f"{number}", metrics_of("dp", 1, 1200 + number, hardware={"num_devices": 2}))


NAMES = {
    "baseline on 1 rank",
    "ddp, bucket_cap_mb 25 on 2 ranks",
    "ddp, bucket_cap_mb 1, compile on 2 ranks",
    "optimized ZeRO-2 on 2 ranks",
    "dp on 2 devices",
}


def test_report_scaling_table_and_comparison_call_an_arm_the_same(tmp_path):
    write_variants(tmp_path)
    runs = load(tmp_path)
    report = report_of(tmp_path)
    arms = group_into_arms(runs)
    assert {entry.name for entry in subject_of(runs).entries} == NAMES
    assert {row["name"] for row in report["arms"]} == NAMES
    assert set(arm_names(arms)) == NAMES
    by_name = dict(zip(arm_names(arms), arms, strict=True))
    pair = [by_name[name] for name in ("ddp, bucket_cap_mb 25 on 2 ranks", "ddp, bucket_cap_mb 1, compile on 2 ranks")]
    comparison = compare_arms(*pair)
    assert "ddp, bucket_cap_mb 25 on 2 ranks" in comparison.verdict_sentence()
    assert "A  ddp, bucket_cap_mb 25 on 2 ranks (CPU (1 thread), fp32): 5 runs" in comparison_text(
        compare_arms(*pair, names=("A", "B"))
    )
    table = scaling_table(report)
    assert all(f"| {name.rpartition(' on ')[0]} | 8 | {name.split()[-2]} |" in table for name in NAMES)


def test_a_plan_changes_what_is_typed_and_not_what_is_read(tmp_path):
    write_variants(tmp_path)
    variants = {"compiled_2": "ddp:bucket_cap_mb=1+compile", "optimized_2": "optimized:zero_stage=2"}
    cells = {
        run.path.parent: {
            "name": "x",
            "variant": variants.get(run.path.parent.parent.name, run.run_type),
            "batch_size": 8,
        }
        for run in load(tmp_path)
    }
    report = report_of(tmp_path, cells=cells)
    assert {row["name"] for row in report["arms"]} == NAMES
    assert {row["strategy"] for row in report["arms"]} >= set(variants.values())
    named = table_004(report, ["ddp, bucket_cap_mb 25", "ddp, bucket_cap_mb 1, compile"])
    assert named == table_004(report, ["ddp", "ddp:bucket_cap_mb=1+compile"])


def test_variants_that_differ_in_work_alone_keep_their_own_names(tmp_path):
    for rate in (1e-3, 2e-3):
        write_arm(tmp_path, "ddp", 2, 1800, name=f"ddp{rate}", training_config={"lr": rate})
    cells = {run.path.parent: {"name": "x", "variant": run.path.parent.parent.name[:-2], "batch_size": 8}
             for run in load(tmp_path)}  # fmt: skip
    names = {row["name"] for row in report_of(tmp_path, cells=cells)["arms"]}
    assert names == {"ddp (ddp0.001) on 2 ranks", "ddp (ddp0.002) on 2 ranks"}


def test_strategies_of_other_ranks_and_batches_are_one(tmp_path):
    write_arm(tmp_path, "ddp", 1, 900, settings={"micro_batch_size_per_gpu": 8})
    write_arm(tmp_path, "ddp", 2, 1800, batch=16, settings={"micro_batch_size_per_gpu": 4})
    assert {strategy.name for strategy in strategies_of(load(tmp_path))} == {"ddp"}


SPOILS = {
    "gpu name": (DEVICE, {"hardware": {"device_type": "cuda", "gpu_name": "B"}}),
    "instance type": (DEVICE, {"hardware": {"instance_type": "b"}}),
    "cpu threads per rank": (DEVICE, {"hardware": {"cpu_threads_per_rank": 2}}),
    "machine": (MACHINE, {"host": {"hostname": "node1"}}),
    "cpu cores visible": (MACHINE, {"hardware": {"cpu_cores_visible": 64}}),
    "torch version": (SOFTWARE, {"env": {"torch_version": "2.12"}}),
    "python version": (SOFTWARE, {"env": {"python_version": "3.9.1"}}),
}


@pytest.mark.parametrize("what", SPOILS)
def test_comparison_and_audit_know_the_same_confounders(tmp_path, what):
    """Each is a warning of the comparison, and in the audit a note, or the claim falls where the device differs."""
    kind, changed = SPOILS[what]
    common = {"hardware": {"device_type": "cuda", "gpu_name": "A", "instance_type": "a"}} if what == "gpu name" else {}
    if what == "instance type":
        common = {"hardware": {"instance_type": "a"}}
    folders = []
    for side, overrides in (("a", common), ("b", changed)):
        for number in range(5):
            own = {"run_id": f"{side}{number}", "timestamp_utc": f"2026-01-01T12:{2 * number + (side == 'b'):02}:00Z"}
            path = save(tmp_path / side / f"{number}", example_metrics(num_steps=8, **own, **overrides))
            folders.append(path.parent)
    arms = [Arm(side, tuple(load(tmp_path / side))) for side in "ab"]
    found = confounders(*(arm.runs for arm in arms))
    assert (kind, what) in {(item.kind, item.what) for item in found}
    assert any(text.startswith(f"{what} differs: ") for text in compare_arms(*arms).warnings)
    if kind == DEVICE:  # of other devices are other arms; machine and software are looked at within an arm too
        said = [finding for finding in audit(folders) if finding.rule == "equal devices"]
        assert [finding.severity for finding in said if what in finding.message] == [FAILS]
    else:
        other = [save(tmp_path / "c" / f"{number}", example_metrics(
            num_steps=8, run_id=f"c{number}", timestamp_utc=f"2026-01-01T12:{2 * number + 1:02}:00Z",
            settings={"run_type": "ddp"}, training_config={"run_type": "ddp"}, **changed)).parent
            for number in range(5)]  # fmt: skip
        said = [finding for finding in audit([*folders[:5], *other]) if finding.rule == "equal devices"]
        assert [finding.severity for finding in said if what in finding.message] == [NOTE]


def size_of(value: object, seen: set[int]) -> int:
    """Bytes of a value and all that only it holds."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(size_of(each, seen) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return size + sum(size_of(each, seen) for each in value)
    return size + (size_of(vars(value), seen) if hasattr(value, "__dict__") else 0)


def test_a_run_keeps_numbers_of_its_steps_and_not_their_rows(tmp_path):
    """Under 100 bytes a step: seven arrays of eight, however many ranks; the rows take over 700."""
    steps = 2000
    metrics = example_metrics(num_steps=steps, world_size=4)
    run = load_run(save(tmp_path, metrics))
    assert size_of(metrics["steps"], set()) > 700 * steps
    assert size_of(run, set()) < 100 * steps + 100_000
    assert run.record["steps"] == metrics["steps"]  # read again where every row is asked for
    assert list(run.slowest_rank_times_s) == [max(row["per_rank_step_time_s"]) for row in metrics["steps"]]
    with pytest.raises(KeyError):
        run.record["no such field"]
