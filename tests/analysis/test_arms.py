"""What an arm is called, what else may explain a difference, and how much of its file a run keeps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.metrics_examples import example_metrics, save, v1_metrics
from support.scaling_examples import cell, metrics_of, report_of, write_arm

from testbed.analysis.comparison.confounders import DEVICE, MACHINE, SOFTWARE, confounders
from testbed.analysis.comparison.document import comparison_text, labelled_verdict
from testbed.analysis.comparison.two_arms import compare_arms
from testbed.analysis.report.build import report_of as page_of
from testbed.analysis.report.cautions import cautions
from testbed.analysis.runs.arms import Arm, arm_names, group_into_arms, strategies_of
from testbed.analysis.runs.entries import subject_of
from testbed.analysis.runs.load import Run, find_runs, load_run
from testbed.analysis.scaling.tables import scaling_table
from testbed.audit.claims import FAILS, NOTE, audit


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
    assert "ddp, bucket_cap_mb 25 on 2 ranks" in labelled_verdict(comparison)
    said = comparison_text(compare_arms(*pair, names=("A", "B")))
    assert "A  ddp, bucket_cap_mb 25 on 2 ranks (CPU (1 thread), fp32): 5 runs" in said
    table = scaling_table(report)
    assert all(f"| {name.rpartition(' on ')[0]} | 8 | {name.split()[-2]} |" in table for name in NAMES)


def test_a_plan_changes_what_is_typed_and_not_what_is_read(tmp_path):
    write_variants(tmp_path)
    variants = {"compiled_2": "ddp:bucket_cap_mb=1+compile", "optimized_2": "optimized:zero_stage=2"}
    cells = {run.path.parent: cell(variants.get(run.path.parent.parent.name, run.run_type)) for run in load(tmp_path)}
    report = report_of(tmp_path, cells=cells)
    assert {row["name"] for row in report["arms"]} == NAMES
    assert {row["strategy"] for row in report["arms"]} >= set(variants.values())
    named = scaling_table(report, "004", ["ddp, bucket_cap_mb 25", "ddp, bucket_cap_mb 1, compile"])
    assert named == scaling_table(report, "004", ["ddp", "ddp:bucket_cap_mb=1+compile"])


def test_variants_that_differ_in_work_alone_keep_their_own_names(tmp_path):
    for rate in (1e-3, 2e-3):
        write_arm(tmp_path, "ddp", 2, 1800, name=f"ddp{rate}", training_config={"lr": rate})
    cells = {run.path.parent: cell(run.path.parent.parent.name[:-2]) for run in load(tmp_path)}
    names = {row["name"] for row in report_of(tmp_path, cells=cells)["arms"]}
    assert names == {"ddp (ddp0.001) on 2 ranks", "ddp (ddp0.002) on 2 ranks"}


def test_strategies_of_other_ranks_and_batches_are_one(tmp_path):
    write_arm(tmp_path, "ddp", 1, 900, settings={"micro_batch_size_per_gpu": 8})
    write_arm(tmp_path, "ddp", 2, 1800, batch=16, settings={"micro_batch_size_per_gpu": 4})
    assert {strategy.name for strategy in strategies_of(load(tmp_path))} == {"ddp"}


SPOILS = {
    "gpu name": (DEVICE, {"hardware": {"device_type": "cuda", "gpu_name": "B"}}),
    "cpu threads per rank": (DEVICE, {"hardware": {"cpu_threads_per_rank": 2}}),
    "machine": (MACHINE, {"host": {"hostname": "node1"}}),
    "torch version": (SOFTWARE, {"env": {"torch_version": "2.12"}}),
}


@pytest.mark.parametrize("what", SPOILS)
def test_comparison_and_audit_know_the_same_confounders(tmp_path, what):
    """Each is a warning of the comparison, and in the audit a note, or the claim falls where the device differs."""
    kind, changed = SPOILS[what]
    common = {"hardware": {"device_type": "cuda", "gpu_name": "A"}} if what == "gpu name" else {}

    def write(side: str, **overrides) -> list[Path]:
        return [
            save(tmp_path / side / f"{number}", example_metrics(
                num_steps=8, run_id=f"{side}{number}",
                timestamp_utc=f"2026-01-01T12:{2 * number + (side != 'a'):02}:00Z", **overrides)).parent
            for number in range(5)
        ]  # fmt: skip

    folders = [write("a", **common), write("b", **changed)]
    arms = [Arm(side, tuple(load(tmp_path / side))) for side in "ab"]
    assert (kind, what) in {(item.kind, item.what) for item in confounders(*(arm.runs for arm in arms))}
    assert any(text.startswith(f"{what} differs: ") for text in compare_arms(*arms).warnings)
    expected = FAILS if what == "gpu name" else NOTE  # of other cores nothing else differs: they are what is compared
    if kind != DEVICE:  # of other devices are other arms; machine and software are looked at within an arm too
        folders[1] = write("c", settings={"run_type": "ddp"}, training_config={"run_type": "ddp"}, **changed)
    said = [finding for finding in audit([*folders[0], *folders[1]]) if finding.rule == "equal devices"]
    assert [finding.severity for finding in said if what in finding.message] == [expected]


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
    """Under 100 bytes a step: eight arrays, however many ranks; the rows take over 700. And the file is not read again:
    another run may lie there by then."""
    steps = 2000
    metrics = example_metrics(num_steps=steps, world_size=4)
    run = load_run(save(tmp_path, metrics))
    assert size_of(metrics["steps"], set()) > 700 * steps
    assert size_of(run, set()) < 100 * steps + 100_000
    save(tmp_path, example_metrics(num_steps=3))
    assert "steps" not in run.record
    for kept, name in ((run.train_steps, "step"), (run.is_warmup, "is_warmup"), (run.all_step_times_s, "step_time_s")):
        assert list(kept) == [row[name] for row in metrics["steps"]]
    assert list(run.slowest_rank_times_s) == [max(row["per_rank_step_time_s"]) for row in metrics["steps"]]


# --- what the program chose because nobody did, and what earlier versions called it


def chosen(attention: str = "flash", compile: bool = True) -> dict:
    """A file in which both were left to the program, as it stands on a GPU."""
    choices = {"attention": attention, "compile": compile}
    return {"settings": choices, "training_config": {"automatic_choices": choices, "attention": f"sdpa {attention}"}}


def given(**settings) -> dict:
    return {"settings": settings, "training_config": {"automatic_choices": {}}}


def side(folder: Path, run_type: str = "ddp", runs=({},) * 5) -> Arm:
    """One run for each entry of `runs`."""
    for number, more in enumerate(runs):
        save(folder / str(number), metrics_of(run_type, 2, 1800 + number, run_id=f"{folder.name}{number}", **more))
    return Arm(folder.name, tuple(load(folder)))


def test_what_the_program_chose_makes_no_arm_and_what_a_person_set_does(tmp_path):
    sides = {
        "automatic": [chosen(), chosen("cudnn"), chosen(compile=False)],
        "off": [given(compile=False)],
        "on": [given(compile=True)],
        "kernel": [given(attention="flash", compile=True)],
        "reading": [given(num_workers=0, compile=True)],
    }
    for name, runs in sides.items():
        side(tmp_path / name, runs=runs)
    arms = group_into_arms(load(tmp_path))
    assert sorted(len(arm.runs) for arm in arms) == [1, 1, 1, 1, 3]
    assert set(arm_names(arms)) == {
        f"ddp{added} on 2 ranks"
        for added in ("", ", compile", ", compile off", ", attention flash, compile", ", compile, num_workers 0")
    }


def test_choices_that_differ_in_an_arm_or_between_arms_are_warned_of(tmp_path):
    """Looking at every run: the odd one is the last."""
    alike = side(tmp_path / "a", runs=[chosen()] * 5)
    odd = side(tmp_path / "b", "fsdp", [chosen()] * 4 + [chosen("cudnn")])
    other = side(tmp_path / "c", "fsdp", [chosen(compile=False)] * 5)
    by_hand = side(tmp_path / "d", "fsdp", [given(compile=False, attention="flash")] * 5)

    def said(*arms):
        return [text for text in compare_arms(*arms).warnings if "automatically" in text]

    assert said(alike, alike) == []
    assert said(alike, odd) == [
        "automatically chosen attention differs: flash against cudnn, flash; it may explain the ratio"
    ]
    assert said(alike, other) == ["automatically chosen compile differs: True against False; it may explain the ratio"]
    assert said(alike, by_hand) == [], "what was set on one side is what is compared"
    assert "compile auto (True) / off" in compare_arms(alike, by_hand).settings
    titles = [caution.text for caution in cautions(subject_of([*alike.runs, *odd.runs]))]
    assert any("automatically chosen attention differs: cudnn and flash" in text for text in titles)
    warned = report_of(tmp_path / "b")["warnings"]
    assert any("fsdp: automatically chosen attention differs from run to run (cudnn, flash)" in text for text in warned)


def test_a_reference_that_compiled_by_itself_is_told(tmp_path):
    """Of all runs: the first one alone did as the strategy's runs do."""
    for number in range(5):
        more = chosen(compile=number > 0)
        save(tmp_path / "baseline" / str(number), metrics_of("baseline", 1, 1000, run_id=f"b{number}", **more))
    side(tmp_path / "ddp", runs=[chosen(compile=False)] * 5)
    notes = [row["reference_note"] for row in report_of(tmp_path)["arms"] if row["ranks"] == 2]
    assert len(notes) == 1 and "differs in compile (False against False and True)" in notes[0]


SAME_AS_BEFORE = {
    "a switch that became a choice, on": ({"skip_gradient_sync": True}, {"skip_gradient_sync": "all"}),
    "the kernel's older flag": ({"use_flash_attention": True}, {"attention": "flash"}),
    "a number that the program chooses now": ({"num_workers": 0}, {"num_workers": 1}),
    "a flag that came later": (
        {},
        {"muon_momentum": None, "matmul": "default", "compile": False, "some_switch": False},
    ),
}


@pytest.mark.parametrize(("before", "now"), SAME_AS_BEFORE.values(), ids=SAME_AS_BEFORE)
def test_an_older_file_is_a_repeat_of_a_new_one_that_did_the_same(tmp_path, before, now):
    choices = {"compile": False} | {name: value for name, value in now.items() if name == "num_workers"}
    automatic = {"training_config": {"automatic_choices": choices}}
    save(tmp_path / "old", metrics_of("ddp", 2, 1800, settings=before))
    save(tmp_path / "new", metrics_of("ddp", 2, 1801, settings={"compile": False} | now, **automatic))
    assert [len(arm.runs) for arm in group_into_arms(load(tmp_path))] == [2]
    save(tmp_path / "other", metrics_of("ddp", 2, 1802, settings={"attention": "math"}))
    assert len(group_into_arms(load(tmp_path))) == 2


ODD_PARTS = {"host": "node0", "env": ["torch", 2], "timing": "fast", "attribution": ["x"], "flops": 3, "utilization": 1}


def test_an_old_file_may_hold_anything_where_later_ones_have_an_object(tmp_path):
    paths = [save(tmp_path / name, v1_metrics(1) | ODD_PARTS) for name in "ab"]
    runs = [load_run(path) for path in paths]
    assert confounders(runs[:1], runs[1:]) == []
    compare_arms(*(Arm(name, (run,)) for name, run in zip("ab", runs, strict=True)))
    audit([path.parent for path in paths])
    page_of(runs, tmp_path)


@pytest.mark.parametrize(("a", "b", "words"), [
    ((False, True), (True,), ("in some runs", "in every run")),
    ((True,), (False,), ("in every run", "in no run")),
    ((False,), (False, True), ("in no run", "in some runs")),
])  # fmt: skip
def test_the_audit_says_of_both_sides_whether_their_trees_were_changed(tmp_path, a, b, words):
    folders = []
    for name, ranks, states in (("baseline", 1, a), ("ddp", 2, b)):
        for number, is_dirty in enumerate(states):
            path = save(tmp_path / name / str(number), metrics_of(name, ranks, 1000 * ranks, git_dirty=is_dirty))
            folders.append(path.parent)
    said = [each.message for each in audit(folders) if "differ from the commit" in each.message]
    assert len(said) == 1
    assert re.search(rf"commit: .*baseline.* {words[0]}, .*ddp.* {words[1]}", said[0])
