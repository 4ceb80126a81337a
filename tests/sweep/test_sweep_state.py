"""What a sweep keeps of an earlier one, and what it refuses to replace."""

from __future__ import annotations

import re
import shlex

import pytest
from support.metrics_examples import save, v1_metrics
from support.sweep_cases import as_sweep, finish, request

from testbed.sweep.plan import COMPLETE, FAILED, PENDING, plan
from testbed.sweep.request import Machine
from testbed.sweep.state import continue_sweep, read_sweep, shortfalls, take_over


def test_finished_runs_of_the_same_command_are_kept_and_no_others(tmp_path):
    first = as_sweep(request("ddp"))
    first.write(tmp_path)
    kept, of_another_seed, unfinished, never_made, of_other_ranks = first.cells[:5]
    finish(kept, tmp_path)
    finish(of_another_seed, tmp_path, command_line="src/gpt2.py " + shlex.join(of_another_seed.gpt2_arguments[:-1]))
    finish(unfinished, tmp_path, status="failed")
    finish(of_other_ranks, tmp_path, hardware={"num_devices": 7})
    again = as_sweep(request("ddp"))
    assert "1 of them finished" in take_over(again, tmp_path, allow_mismatch=False)
    assert [cell.folder for cell in again.cells if cell.status == COMPLETE] == [kept.folder]
    assert never_made.status == PENDING


def test_a_sweep_can_grow(tmp_path):
    first = as_sweep(request("ddp"))
    first.cells[0].status, first.cells[0].seconds = COMPLETE, 12.5
    finish(first.cells[0], tmp_path)
    first.write(tmp_path)
    larger = as_sweep(request("ddp,fsdp", ranks=(1, 2, 4), batch_sizes=(8, 16), repeats=5, profile_runs=1))
    said = take_over(larger, tmp_path, allow_mismatch=False)
    assert "fsdp_1rank_batch8" in said and "not interleaved" in said
    assert [(cell.folder, cell.seconds) for cell in larger.cells if cell.status == COMPLETE] == [
        (first.cells[0].folder, 12.5)
    ]
    assert larger.created_utc == first.created_utc


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"protocol": "weak"}, "--protocol strong, not weak"),
        ({"repeats": 2}, "repeat 3, which this call does not ask for"),
        ({"variants": "baseline"}, "ddp on 1 rank,"),
        ({"seed": 1}, "--seed 42 (this call: 1)"),
        ({"passed_on": ["--precision", "bf16"]}, "--precision fp32 (this call: bf16)"),
        ({"passed_on": ["--compile"]}, "no --compile (this call: set)"),
    ],
)
def test_another_plan_is_refused_and_what_differs_is_named(tmp_path, changes, named):
    as_sweep(request()).write(tmp_path)
    variants = changes.pop("variants", "baseline,ddp")
    with pytest.raises(ValueError, match=re.escape(named)):
        take_over(as_sweep(request(variants, **changes)), tmp_path, allow_mismatch=True)


def test_code_of_another_commit_makes_no_repeats(tmp_path):
    earlier, now = as_sweep(request()), as_sweep(request(), commit="d" * 40)
    with pytest.raises(ValueError, match="cccccccc, and the code is now at dddddddd"):
        continue_sweep(earlier, now, tmp_path, allow_mismatch=False)
    assert continue_sweep(earlier, now, tmp_path, allow_mismatch=True) == []


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"git_commit": "d" * 40}, "was made by commit dddddddd, and the sweep is of cccccccc"),
        ({"git_dirty": True}, "was made with files changed since its commit, and now they are as its commit"),
        ({"training_config": {"dataset_sha256": {"train": "e" * 64}}}, "was made from other data than"),
    ],
)
def test_a_finished_run_of_other_code_or_data_is_refused_and_named(tmp_path, changes, said):
    sweep = as_sweep(request("ddp"))
    sweep.git_dirty = False
    sweep.write(tmp_path)
    finish(sweep.cells[0], tmp_path)
    finish(sweep.cells[1], tmp_path, **changes)
    again = as_sweep(request("ddp"))
    again.git_dirty = False
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        take_over(again, tmp_path, allow_mismatch=False)
    assert sweep.cells[1].folder in str(caught.value) and "\n" not in str(caught.value)
    assert "2 of them finished" in take_over(as_sweep(request("ddp")), tmp_path, allow_mismatch=True)


def test_runs_of_a_changed_tree_are_kept_while_it_is_changed_and_that_is_said(tmp_path):
    sweep = as_sweep(request("ddp"))
    sweep.git_dirty = True
    sweep.write(tmp_path)
    finish(sweep.cells[0], tmp_path, git_dirty=True)
    assert "whether with the same changes, no file says" in take_over(sweep, tmp_path, allow_mismatch=False)
    finish(sweep.cells[0], tmp_path, git_dirty=False)
    with pytest.raises(ValueError, match="now they are changed since its commit"):
        take_over(sweep, tmp_path, allow_mismatch=False)


def test_the_commit_of_runs_that_were_kept_stays_on_record(tmp_path):
    as_sweep(request("ddp")).write(tmp_path)
    for commit in "de":
        now = as_sweep(request("ddp"), commit=commit * 40)
        take_over(now, tmp_path, allow_mismatch=True)
        now.write(tmp_path)
    assert read_sweep(tmp_path).earlier_commits == ["c" * 40, "d" * 40]


def test_a_file_of_another_version_in_a_cells_folder_is_not_the_cells_run(tmp_path):
    sweep = as_sweep(request("ddp"))
    sweep.write(tmp_path)
    save(tmp_path / sweep.cells[0].folder, v1_metrics())
    assert "0 of them finished" in take_over(sweep, tmp_path, allow_mismatch=False)


def test_runs_that_no_sweep_made_are_not_replaced(tmp_path):
    sweep = as_sweep(request())
    finish(sweep.cells[0], tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"{sweep.cells[0].folder} holds a run")):
        take_over(sweep, tmp_path, allow_mismatch=False)


def test_a_broken_sweep_file_is_refused_in_one_sentence(tmp_path):
    for text in ("{", "[]", '{"schema": 2}', '{"schema": 1, "cells": [{"name": "x"}]}', "\xff"):
        (tmp_path / "sweep.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"sweep\.json is not a sweep's file") as caught:
            read_sweep(tmp_path)
        assert "\n" not in str(caught.value)


def test_what_did_not_run_is_named_with_its_reason():
    cells = plan(request(machine=Machine(num_cores=1)))
    for cell in cells:
        if cell.run_type == "ddp":
            cell.status = COMPLETE
    alone = next(cell for cell in cells if cell.run_type == "baseline" and cell.ranks == 1)
    alone.status, alone.reason = FAILED, "the disk was full"
    assert shortfalls(cells) == [
        "baseline_1rank_batch8: 1 failed: the disk was full; 2 not made yet",
        "ddp_2ranks_batch8: oversubscribed: fewer cores than threads",
        "baseline_2ranks_batch8: not applicable: baseline is one process",
    ]
