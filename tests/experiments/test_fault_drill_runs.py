"""Drill stand-in programs that keep or break their word."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.fault_drill_cases import VARIANTS, fault
from support.programs import REPOSITORY, run_here

from testbed.distributed.processes import Stop
from testbed.experiments.fault_drill import drills as drills_module
from testbed.experiments.fault_drill.damage import TMPFS, disk_full_backend
from testbed.experiments.fault_drill.drill_file import (
    DRILL_FILE,
    beginning,
    summary,
    table,
    take_over,
)
from testbed.experiments.fault_drill.drills import Drills
from testbed.experiments.fault_drill.faults import (
    KINDS,
    LAUNCH,
    PROCESSES,
    Moment,
)
from testbed.experiments.fault_drill.start import marked_processes
from testbed.experiments.fault_drill.verdict import problems_of_resuming
from testbed.experiments.fault_drill.work import Work

STAND_IN = REPOSITORY / "tests/support/drill_stand_in.py"


def stand_in(out_dir: Path, jobs: int = 1) -> Drills:
    work = Work(STAND_IN, out_dir / "data", "tiny", 12, 3, 4, 1)  # 4 s: a rank may have to wait for a core
    drills = Drills(work, {"ddp": VARIANTS[0]}, out_dir, disk_full_backend(), Stop(), jobs)
    drills.make_reference("ddp")
    return drills


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Drills:
    return stand_in(tmp_path_factory.mktemp("honest"), jobs=2)


@pytest.mark.launches
@pytest.mark.slow
def test_a_program_that_keeps_its_word_survives(honest):
    """One fault of every kind that needs no launcher, and some moments more; all strike, nothing is left of them."""
    one = {"target": "rank 1"}
    faults = [
        fault("kill_rank", **one, moments=(Moment(LAUNCH, 0.7), Moment(LAUNCH, 0.6))),
        fault("kill_rank", target="rank 0", moments=(Moment("metrics", 0.5),)),
        fault("kill_rank_saving", target="rank 0", moments=(Moment("save 6", 0.5),)),
        fault("kill_everything", moments=(Moment("weights", 0.1),)),
        fault("sigterm", **one),
        fault("sigusr1", target="all ranks", moments=(Moment("save 3", 0.5),)),
        fault("disk_full", target="disk", moments=(), shares=(0.5, 0.0)),
        fault("truncated_checkpoint", form="removed"),
        fault("flipped_bit"),
        fault("flipped_bit", moments=(Moment("saved 3", 0.2),)),  # the only checkpoint: from the first step again
        fault("corrupt_metrics"),
        fault("half_written_temporary"),
    ]
    faults = [dataclasses.replace(each, number=number) for number, each in enumerate(faults, start=1)]
    rows = sorted(honest.run_all(faults), key=lambda row: row["number"])
    assert [row["problems"] for row in rows] == [[]] * len(faults)
    assert all(row["struck"] and row["survived"] for row in rows)
    starts = {row["number"]: row["starts"] for row in rows}
    assert starts[3][0]["struck"]["saving"], "the kill came within the save"
    assert len(starts[1]) == 3, "struck twice"
    assert starts[5][0]["exit_codes"] == [143, 143] and starts[5][0]["mark"] == "preempted"
    assert any("damaged" in line for line in starts[9][1]["said"])
    assert not list((honest.out_dir / "runs").glob("fault_*")) and marked_processes(honest.session) == []


FLAWS = {
    "forgets": ("kill_everything", "other weights"),
    "trusts_the_disk": ("flipped_bit", "other weights"),
    "begins_at_step_1": ("kill_everything", "went on after step 0, not after "),  # with the right weights in the end
    "goes_on_from_an_older": ("kill_everything", "went on after step ", ", not after "),
    "fails_once": ("kill_everything", "start 2, which nothing disturbed, ended with [1, 1]"),
    "loses_a_row": ("kill_everything", "not 1 to 12 once each"),
    "leaves_halves": ("half_written_temporary", "half-written files are left: ", ".training_metrics.json.999999.tmp"),
    "leaves_a_process": ("kill_everything", "these processes were left"),
    "leaves_a_lock": ("kill_everything", "locks are left"),
    "hangs": ("kill_rank", "these processes were left"),
    "dies_of_a_signal": ("sigterm", "did not end the run in order: mark None"),
}


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.parametrize("flaw", FLAWS)
def test_what_a_program_loses_is_found(flaw, honest, monkeypatch, tmp_path):
    """Planted flaws: each is found, by its name."""
    kind, *words = FLAWS[flaw]
    monkeypatch.setenv("STAND_IN_FLAW", flaw)
    monkeypatch.setattr(drills_module, "SPARE_S", 2.0)
    monkeypatch.setattr(drills_module, "START_LIMIT_S", 6.0 if flaw in ("hangs", "leaves_a_process") else 60.0)
    monkeypatch.setattr(drills_module, "MOST_STARTS", 2)
    drills = dataclasses.replace(honest, out_dir=tmp_path, session=f"flaw-{flaw}")
    (tmp_path / "torch_extensions").mkdir()
    target = {"kill_rank": "rank 0", "sigterm": "all ranks"}.get(kind, "everything")
    row = drills.run(fault(kind, target=target, shares=(0.99, 0.0003) if flaw == "trusts_the_disk" else (0.0, 0.5)))
    found = [problem for problem in row["problems"] if all(each in problem for each in words)]
    assert row["survived"] is False and found, row["problems"]
    assert marked_processes(drills.session) == [], "whatever the program does, the drill leaves nothing running"
    assert (tmp_path / "lost" / "fault_0001").is_dir(), "for whoever looks into it"


@pytest.mark.parametrize(
    ("begun", "first_step", "found"),
    [
        (1, 1, []),  # the signal came with the last step: nothing was left to stop, and nothing was started again
        (2, 10, []),
        (2, 1, ["its last start went on after step 0, though step 9 was saved"]),
    ],
)
def test_a_run_that_torchrun_started_again_went_on(begun, first_step, found):
    start = {"struck": {"newest_saved": 9}, "begun": begun, "mark": "complete", "newest_whole": 12}
    start["saves"] = [3, 6, 9, 12]
    assert problems_of_resuming([start], [{"first_step": 1}, {"first_step": first_step}]) == found


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.parametrize("flaw", ["", "waits_for_the_dead"])
def test_a_rank_whose_other_never_came_must_end_by_itself(flaw, honest, tmp_path, monkeypatch):
    """Killed at once, before they could meet: no launcher stands above the two, and the drill ends neither."""
    monkeypatch.setenv("STAND_IN_FLAW", flaw)
    if flaw:
        monkeypatch.setattr(drills_module, "SPARE_S", 2.0)
    (tmp_path / "torch_extensions").mkdir()
    drills = dataclasses.replace(honest, out_dir=tmp_path, session=f"alone{flaw}")
    row = drills.run(fault("kill_rank", target="rank 0", moments=(Moment(LAUNCH, 0.0),)))
    first = row["starts"][0]
    assert first["struck"]["what"] == "SIGKILL to rank 0"
    if flaw:
        assert any("these processes were left" in problem for problem in row["problems"]), row["problems"]
        return
    assert row["problems"] == [] and row["survived"]
    assert first["exit_codes"] == [-signal.SIGKILL, 1]
    assert first["ended_after_s"] > 2, "--collective_timeout is 4 s"
    assert row["starts"][1]["begun"] == 1


@pytest.mark.launches
def test_a_fault_that_comes_too_late_is_neither_survived_nor_lost(honest, tmp_path, monkeypatch):
    monkeypatch.setattr(drills_module, "TRIES", 1)
    (tmp_path / "torch_extensions").mkdir()
    drills = dataclasses.replace(honest, out_dir=tmp_path, session="late")
    row = drills.run(fault("kill_everything", moments=(Moment(LAUNCH, 30.0),)))
    assert row["struck"] is False and row["survived"] is None and row["problems"] == []


def content_with(rows: list[dict], work: Work, **changes: object) -> dict:
    content = beginning("scripts/fault_drill.py", 1, 12, ["ddp"], work, 1, TMPFS)
    return {**content, "status": "complete", "faults": rows, **changes}


@pytest.fixture
def rows() -> list[dict]:
    start = {
        "launcher": PROCESSES, "exit_codes": [-9, 1], "seconds": 3.0, "ended_after_s": 1.5, "mark": None,
        "begun": 1, "newest_whole": 6, "saves": [3, 6], "said": ["rank 1 failed"],
        "struck": {"what": "SIGKILL to rank 0", "after_s": 2.0, "saving": True, "newest_saved": 3},
    }  # fmt: skip
    return [
        {
            **dataclasses.asdict(fault("kill_rank", number)), "shares": [0.0, 0.5], "tries": 1, "moments": [],
            "started_utc": "2026-01-01T00:00:00Z", "seconds": 9.0, "struck": survived is not None,
            "survived": survived, "problems": [], "lost_steps": 2, "starts": [start],
        }
        for number, survived in enumerate((True, True, False, None), start=1)
    ]  # fmt: skip


def test_the_summary_counts(rows):
    (of_kind, of_all) = summary(rows)
    assert of_kind["kind"] == "kill_rank" and of_all["kind"] == "all"
    assert [of_all[name] for name in ("faults", "survived", "lost", "missed")] == [4, 2, 1, 1]
    assert of_all["while_saving"] == 3 and of_all["lost_steps"] == 6 and of_all["longest_ended_after_s"] == 1.5
    assert table(summary(rows)).splitlines()[1].split()[:6] == ["kill_rank", "4", "2", "1", "1", "-"]


def test_the_summary_tells_what_a_run_did_that_was_asked_to_end(rows):
    """Only a run that was in the middle of its work shows that it finishes its step and saves it."""
    marks = ["preempted", "preempted", "complete", None, "failed"]
    asked = [
        {**rows[0], "kind": kind, "starts": [{**rows[0]["starts"][0], "mark": mark}]}
        for kind in ("sigterm", "kill_launcher")
        for mark in marks
    ]
    by_kind = {row["kind"]: row for row in summary([*rows, *asked])}
    assert by_kind["kill_rank"]["asked"] is None, "it was not asked"
    assert by_kind["sigterm"]["asked"] == {"in_order": 2, "in_start_up": 2, "completed": 1}
    assert by_kind["all"]["asked"] == {"in_order": 4, "in_start_up": 4, "completed": 2}
    assert "  2/2/1  " in table(summary(asked))


def test_a_drill_is_continued_only_as_it_began(rows, tmp_path):
    work, file = Work(STAND_IN, tmp_path, "tiny", 12, 3, 1, 1), tmp_path / "fault_drill.json"
    DRILL_FILE.write(file, content_with(rows, work))
    again = content_with([], work)
    take_over(again, file)
    assert [row["number"] for row in again["faults"]] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="seed 1, not 2"):
        take_over({**again, "seed": 2}, file)
    content = DRILL_FILE.read(file)
    del content["faults"][0]["problems"]
    with pytest.raises(ValueError, match="problems"):
        DRILL_FILE.check(content)
    file.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        DRILL_FILE.read(file)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--save_every", "9"), "saves less than twice"),
        (("--steps", "9" * 18), "is above 10,000"),
        (("--grace_seconds", "9" * 18), "is above 86,400"),
        (("--only", "one"), "--only 'one'"),
        (("--run_types", "baseline"), "baseline"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words, said, tmp_path):
    done = run_here("scripts/fault_drill.py", *words, "--out_dir", tmp_path / "drill")
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert done.stderr.startswith("fault_drill.py: error: ") and len(done.stderr.splitlines()) == 1


def test_the_plan_is_printed_and_nothing_runs(tmp_path):
    done = run_here("scripts/fault_drill.py", "--dry_run", "--faults", "24", "--out_dir", tmp_path / "drill")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 26 and not (tmp_path / "drill").exists()
    one = run_here("scripts/fault_drill.py", "--dry_run", "--only", "17", "--out_dir", tmp_path / "drill")
    assert one.stdout.splitlines()[0] == done.stdout.splitlines()[16]


@pytest.mark.launches
@pytest.mark.alone  # what must end in time is held to it, so nothing else may take the time
def test_twelve_faults_lose_nothing(tmp_path):
    """The short form: one fault of every kind on real runs of two ranks. The long form is in docs/fault_drill.md."""
    words = ["--faults", "12", "--run_types", "ddp,fsdp", "--model", "tiny", "--jobs", "2"]
    command = [sys.executable, str(REPOSITORY / "scripts" / "fault_drill.py"), *words, "--out_dir", tmp_path / "drill"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    content = DRILL_FILE.read(tmp_path / "drill" / "fault_drill.json")
    assert {row["kind"] for row in content["faults"]} == set(KINDS) and content["status"] == "complete"
    assert sum(row["survived"] is True for row in content["faults"]) >= 11, "one may come too late on a slow machine"
    assert done.stdout.count("survived;") >= 11 and " left" in done.stdout
