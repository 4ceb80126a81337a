"""What configurations are called in a report, in what order they stand, and what spoils a run."""

import pytest
from support.metrics_examples import example_metrics, save
from support.report_cases import arms, load, repeats, write_sweep

from testbed.analysis.charts.style import strategy_colour
from testbed.analysis.report.cautions import cautions
from testbed.analysis.report.verdicts import WORSE, compared
from testbed.analysis.runs.entries import subject_of

WARNINGS = {
    "Instrumented": {"instrumented": True},
    "Not complete": {"status": "failed", "failure": {"reason": "x", "step": 3}},
    "Dirty checkout": {"git_dirty": True},
    "Ranks share cores": {"hardware": {"device_type": "cpu", "cpu_cores_visible": 1, "cpu_threads_per_rank": 4}},
    "Commit unknown": {"git_commit": None},
    "Several commits": {"git_commit": "1" * 40},
    "Several machines": {"host": {"hostname": "node1"}},
    "Several versions": {"env": {"torch_version": "2.14.0"}},
    "Copied files": {"run_id": "20260101T120000Z-0123abcd"},
    "Unquiet machine": {"timing": {"step_time_p95_above_median": 0.2, "num_measured_steps": 40}},
}


@pytest.mark.parametrize("title", WARNINGS)
def test_what_spoils_a_run_is_told_with_its_number(tmp_path, title):
    """One run of ten is spoilt: the warning appears, and not without it."""
    quiet = {"timing": {"step_time_p95_above_median": 0.02}}
    files = [
        example_metrics(num_steps=8, step_time_s=0.2 + 0.001 * number, run_id=f"run-{number}", **quiet)
        for number in range(5)
    ]
    save(tmp_path / "twin", example_metrics(num_steps=8, run_id="20260101T120000Z-0123abcd", **quiet))
    clean = cautions(arms(tmp_path, a=files))
    assert [warning.title for warning in clean] == []
    save(tmp_path / "spoilt", example_metrics(num_steps=8, **({"run_id": "spoilt", **quiet} | WARNINGS[title])))
    found = {warning.title: warning for warning in cautions(subject_of(load(tmp_path)))}
    assert title in found
    number = next(n for n, run in enumerate(subject_of(load(tmp_path)).runs, 1) if "spoilt" in str(run.path))
    assert not found[title].runs or number in found[title].runs


def test_one_strategy_has_one_colour_and_a_name_of_its_own(tmp_path):
    write_sweep(tmp_path, ("baseline", "allreduce", "ddp"), repeats=2)
    subject = subject_of(load(tmp_path))
    colours = {(entry.strategy, strategy_colour(entry.look)) for entry in subject.entries}
    assert len(colours) == 3 == len({colour for _, colour in colours})
    names = [entry.name for entry in subject.entries]
    assert len(set(names)) == len(names)
    assert "ddp on 2 ranks" in names and "ddp on 2 ranks, instrumented" in names
    assert [entry.ranks for entry in subject.measured] == [1, 1, 1, 2, 2]


def test_settings_that_tell_two_arms_apart_are_in_their_names(tmp_path):
    files = {f"b{size}": repeats("ddp", 0.2, settings={"bucket_cap_mb": size}) for size in (25, 50)}
    assert {entry.name for entry in arms(tmp_path, **files).entries} == {
        "ddp, bucket_cap_mb 25 on 2 ranks",
        "ddp, bucket_cap_mb 50 on 2 ranks",
    }


def test_the_same_strategy_on_other_work_has_a_name_of_its_own(tmp_path):
    other_batch = {"training_config": {"global_batch_size": 16}, "settings": {"global_batch_size": 16}}
    subject = arms(tmp_path, a=repeats("ddp", 0.2), b=repeats("ddp", 0.4, **other_batch))
    assert [entry.name for entry in subject.entries] == [
        "ddp on 2 ranks, global batch size 8",
        "ddp on 2 ranks, global batch size 16",
    ]
    assert len({entry.look for entry in subject.entries}) == 1


def test_arms_that_only_the_micro_batch_tells_apart_are_accused_by_side(tmp_path):
    """The arm that learns worse is the slower one: both names must differ, and the good arm is not called worse."""
    subject = arms(
        tmp_path,
        a=repeats("baseline", 0.3),
        b=repeats("ddp", 0.2, settings={"micro_batch_size_per_gpu": 4}),
        c=repeats("ddp", 0.25, loss=0.05, settings={"micro_batch_size_per_gpu": 2}),
    )
    good, bad = "ddp, micro_batch_size_per_gpu 4 on 2 ranks", "ddp, micro_batch_size_per_gpu 2 on 2 ranks"
    assert [entry.name for entry in subject.entries] == [good, bad, "baseline on 2 ranks"]
    by_name = {entry.name: entry for entry in subject.entries}
    pair = compared(by_name[good], by_name[bad])
    assert pair.kind == "faster" and pair.worse is by_name[bad]
    assert compared(by_name[bad], by_name["baseline on 2 ranks"]).kind == WORSE


def test_names_that_no_setting_tells_apart_are_numbered(tmp_path):
    other_cpu = {"hardware": {"cpu_threads_per_rank": 7}}
    names = [entry.name for entry in arms(tmp_path, a=repeats("ddp", 0.2), b=repeats("ddp", 0.3, **other_cpu)).entries]
    assert len(set(names)) == 2
    same = {"hardware": {"cpu_name": "Another CPU"}}
    names = [e.name for e in arms(tmp_path / "x", a=repeats("ddp", 0.2), b=repeats("ddp", 0.3, **same)).entries]
    assert names == ["ddp on 2 ranks [1]", "ddp on 2 ranks [2]"]


def test_one_order_by_the_median_of_all_runs(tmp_path):
    """allreduce has the single fastest run and the lower median: profiled arms must not follow that run."""
    lucky = repeats("allreduce", 0.25)
    lucky[0] = repeats("allreduce", 0.1, 1)[0]
    profiled = {"instrumented": True, "settings": {"profile": True}}
    subject = arms(
        tmp_path, a=lucky, b=repeats("ddp", 0.2), c=repeats("allreduce", 0.4, 1, **profiled),
        d=repeats("ddp", 0.4, 1, **profiled),
    )  # fmt: skip
    assert [entry.strategy for entry in subject.entries] == ["ddp", "allreduce"] * 2
