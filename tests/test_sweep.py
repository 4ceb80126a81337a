"""The sweep: its plan, what it keeps when it is called again, and that no process outlives it."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY, TINY_RUN, data_flags, write_token_files
from metrics_examples import example_metrics, save, v1_metrics

from testbed import sweep_run, sweep_state
from testbed.flags import parse_command_line
from testbed.sweep import (
    COMPLETE,
    FAILED,
    NOT_APPLICABLE,
    PENDING,
    Cell,
    check_cells,
    order_of_round,
    plan,
)
from testbed.sweep_request import Machine, Request, parse_numbers, parse_variants, shared_arguments
from testbed.sweep_run import Runner, Stop, only_sweep_in, seconds_left
from testbed.sweep_state import Sweep, continue_sweep, disagreements, read_sweep, table, take_over

SCRIPT = REPOSITORY / "scripts" / "run_scaling_benchmarks.py"
REPRODUCE = REPOSITORY / "docs" / "reproduce.md"
NOTHING_GIVEN = dict.fromkeys(("steps", "seq_length", "epochs", "dataset_mode", "deepspeed_config"))
SIX_STEPS = {**NOTHING_GIVEN, "steps": 6}


def request(variants: str = "baseline,ddp", **changes) -> Request:
    machine = changes.pop("machine", Machine(num_cores=2))
    protocol = changes.pop("protocol", "strong")
    fields = {
        "protocol": protocol,
        "variants": parse_variants(variants),
        "ranks": (1, 2),
        "batch_sizes": (8,),
        "repeats": 3,
        "seed": 42,
        "shared": shared_arguments(protocol, machine.kind, SIX_STEPS, changes.pop("passed_on", [])),
        "machine": machine,
        "folder": "sweep",
        "program": "src/gpt2.py",
    }
    return Request(**{**fields, **changes})


def runs_of(cells: list[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.status != NOT_APPLICABLE]


def flag(cell: Cell, name: str) -> str:
    return cell.command[cell.command.index(name) + 1]


# --- the plan


def test_each_round_makes_every_cell_once_before_the_next_begins():
    cells = runs_of(plan(request("baseline,ddp,fsdp", repeats=4)))
    names = {cell.name for cell in cells}
    assert len(names) == 5  # baseline on two ranks is none
    for number in range(1, 5):
        of_round = cells[(number - 1) * 5 : number * 5]
        assert {cell.repeat for cell in of_round} == {number} and {cell.name for cell in of_round} == names


@pytest.mark.parametrize("num_cells", [2, 4, 5, 10])
def test_over_as_many_rounds_as_cells_each_has_been_in_every_place(num_cells):
    rounds = [order_of_round(num_cells, number) for number in range(3, 3 + num_cells)]
    for place in range(num_cells):
        assert sorted(order[place] for order in rounds) == list(range(num_cells))
    if num_cells % 2 == 0:  # Williams: and each has followed each other one once
        follows = Counter((first, second) for order in rounds for first, second in itertools.pairwise(order))
        assert set(follows.values()) == {1} and len(follows) == num_cells * (num_cells - 1)


def test_protocols_hold_fixed_what_they_are_named_for():
    strong, weak = (runs_of(plan(request("ddp", protocol=name))) for name in ("strong", "weak"))
    assert {flag(cell, "--global_batch_size") for cell in strong} == {"8"}
    assert {(cell.ranks, flag(cell, "--global_batch_size")) for cell in weak} == {(1, "8"), (2, "16")}
    assert {flag(cell, "--seed") for cell in strong + weak} == {"42"}
    to_loss = runs_of(plan(request("ddp,fsdp", protocol="time_to_loss", target_val_loss=6.0)))
    assert {(cell.repeat, flag(cell, "--seed")) for cell in to_loss} == {(1, "42"), (2, "43"), (3, "44")}


def test_cells_that_make_no_sense_here_are_not_applicable_and_say_why():
    def reasons(variants: str, machine: Machine) -> dict[tuple[str, int], str]:
        cells = plan(request(variants, ranks=(1, 2, 4), machine=machine))
        return {(cell.run_type, cell.ranks): cell.reason for cell in cells if cell.status == NOT_APPLICABLE}

    on_cpu = reasons("baseline,dp,ddp,pipeline,tensor", Machine(num_cores=4))
    assert on_cpu.keys() == {
        *(("baseline", 2), ("baseline", 4), ("dp", 1), ("dp", 2), ("dp", 4), ("pipeline", 1), ("tensor", 1)),
    }
    assert on_cpu["baseline", 2] == "baseline is one process" and "no CUDA device" in on_cpu["dp", 2]
    on_gpus = reasons("dp,ddp", Machine(num_cores=4, cuda_devices=("0", "1")))
    assert on_gpus.keys() == {("dp", 1), ("dp", 4), ("ddp", 4)}
    assert on_gpus["ddp", 4] == "PyTorch sees 2 CUDA devices"


def test_dp_takes_as_many_devices_as_the_cell_has_ranks_in_one_process():
    machine = Machine(num_cores=8, cuda_devices=("4", "5", "6", "7"))
    cell = runs_of(plan(request("dp", ranks=(2,), machine=machine)))[0]
    assert cell.command[:4] == ["env", "OMP_NUM_THREADS=8", "CUDA_VISIBLE_DEVICES=4,5", "python"]
    assert "torch.distributed.run" not in cell.command


def test_a_core_is_a_device_and_more_ranks_than_cores_are_marked():
    cells = runs_of(plan(request("ddp", ranks=(1, 2, 4))))
    assert {(cell.ranks, cell.oversubscribed) for cell in cells} == {(1, False), (2, False), (4, True)}
    assert all(cell.command[:2] == ["env", "OMP_NUM_THREADS=1"] for cell in cells)
    assert Machine(num_cores=4, threads_per_rank=4).is_oversubscribed(2)


def test_profiled_runs_come_after_the_repeats_and_share_their_cell():
    cells = runs_of(plan(request("ddp", repeats=2, profile_runs=1)))
    assert [cell.profiled for cell in cells] == [False] * 4 + [True] * 2
    assert {"--profile" in cell.command for cell in cells if cell.profiled} == {True}
    assert {cell.name for cell in cells if cell.profiled} == {cell.name for cell in cells if not cell.profiled}
    assert len({cell.folder for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    "text, rule",
    [
        ("ddd", "not one of baseline"),
        ("ddp:bucket_cap=5", "unrecognized arguments"),
        ("ddp:seed=3", "--seed is set by the sweep"),
        ("ddp:checkpoint_path=x", "use --out_dir"),
        ("ddp,ddp", "twice"),
        ("", "no run type"),
    ],
)
def test_a_variant_that_gpt2_would_not_take_is_refused_at_once(text, rule):
    with pytest.raises(ValueError, match=re.escape(rule)):
        parse_variants(text)


def test_variants_carry_flags_with_and_without_values():
    variant = parse_variants("optimized:zero_stage=3+offload=optimizer+compile")[0]
    assert variant.arguments == ("--zero_stage", "3", "--offload", "optimizer", "--compile")
    with pytest.raises(ValueError, match=r"--ranks '1,x'"):
        parse_numbers("1,x", "--ranks")


def test_what_is_given_replaces_the_default_work_and_nothing_is_said_twice():
    words = shared_arguments("strong", "cpu", SIX_STEPS, ["--seq_length", "32", "--model", "gpt2", "--profile"])
    values = parse_command_line(list(words)).values
    assert (values["seq_length"], values["model"], values["max_train_steps"], values["profile"]) == (
        32,
        "gpt2",
        6,
        True,
    )
    assert values["learning_rate"] == 3e-3  # the default work's, which nobody replaced
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags))
    assert words[-5:] == ("--seq_length", "32", "--model", "gpt2", "--profile")
    with pytest.raises(ValueError, match="--seq_length stands after -- too"):
        shared_arguments("strong", "cpu", {**SIX_STEPS, "seq_length": 64}, ["--seq_length", "32"])
    with pytest.raises(ValueError, match="--max_train_steps is set by the sweep itself; use --steps"):
        shared_arguments("strong", "cpu", SIX_STEPS, ["--max_train_steps", "5"])


# --- what gpt2.py would refuse, and unequal work


@pytest.fixture
def in_folder_with_data(tmp_path, monkeypatch):
    """Token files under their usual names in the current folder."""
    train, val = write_token_files(tmp_path, train_tokens=300_000)
    for path, name in ((train, "train_small"), (val, "val_small")):
        path.rename(tmp_path / f"{name}.bin")
        path.with_suffix(".json").rename(tmp_path / f"{name}.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_cell_that_gpt2_would_refuse_fails_alone(in_folder_with_data):
    cells = plan(request("baseline,tensor", passed_on=["--num_heads", "3", "--embedding_size", "96"]))
    settings = check_cells(cells, allow_mismatch=False)
    failed = [cell for cell in cells if cell.status == FAILED]
    assert {(cell.run_type, cell.ranks) for cell in failed} == {("tensor", 2)}
    assert "--num_heads 3" in failed[0].reason
    assert settings.keys() == {"baseline_1rank_batch8"}


def test_a_sweep_of_which_no_run_can_start_is_refused(in_folder_with_data):
    Path("train_small.bin").unlink()
    with pytest.raises(ValueError, match=r"python download_data.py && python preprocess_small.py") as caught:
        check_cells(plan(request()), allow_mismatch=False)
    assert "\n" not in str(caught.value)


def test_steps_that_are_all_warm_up_are_refused(in_folder_with_data):
    shared = shared_arguments("strong", "cpu", {**NOTHING_GIVEN, "steps": 5}, [])
    with pytest.raises(ValueError, match="none to measure"):
        check_cells(plan(request(shared=shared)), allow_mismatch=False)


def test_variants_that_would_do_other_work_are_refused_unless_allowed(in_folder_with_data):
    cells = plan(request("baseline,ddp:learning_rate=1"))
    with pytest.raises(ValueError, match=r"learning_rate 1.0 instead of 0.003.*--allow_mismatch"):
        check_cells(cells, allow_mismatch=False)
    check_cells(cells, allow_mismatch=True)
    check_cells(plan(request("ddp,ddp:bucket_cap_mb=5", protocol="weak")), allow_mismatch=False)


def test_a_time_to_loss_may_compare_recipes_but_not_tasks(in_folder_with_data, program):
    """docs/scaling.md: optimizer, schedule and precision may differ; model, data, length and validation may not."""

    def check(variant: str) -> None:
        asked = request(f"ddp,{variant}", protocol="time_to_loss", target_val_loss=6.0)
        check_cells(plan(asked), allow_mismatch=False, protocol="time_to_loss")

    check("ddp:learning_rate=1+warmup_steps=2+weight_decay=0+precision=bf16")
    words = ["--protocol", "time_to_loss", "--target_val_loss", "6", "--run_types", "ddp,ddp:learning_rate=1"]
    assert program([*words, "--ranks", "1", "--dry_run"]) == 0
    assert program(["--run_types", "ddp,ddp:learning_rate=1", "--ranks", "1", "--dry_run"]) == 2
    for variant in ("ddp:num_layers=3", "ddp:seq_length=64", "ddp:max_val_steps=1"):
        with pytest.raises(ValueError, match="would do other work"):
            check(variant)


# --- calling it again


def as_sweep(asked: Request, commit: str = "c" * 40) -> Sweep:
    return Sweep(asked.protocol, "python scripts/run_scaling_benchmarks.py", commit, plan(asked), asked.target_val_loss)


def finish(cell: Cell, out_dir: Path, **changes) -> None:
    """What a finished run of the cell leaves."""
    from_another_folder = shlex.join(["../src/gpt2.py", *cell.gpt2_arguments, "--checkpoint_path", "elsewhere"])
    metrics = {"command_line": from_another_folder, "hardware": {"num_devices": cell.ranks}}
    metrics |= {"git_commit": "c" * 40, "run_id": cell.folder, **changes}
    save(out_dir / cell.folder, example_metrics(world_size=cell.ranks, **metrics))


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
        ({"variants": "baseline"}, "ddp on 1 ranks"),
        ({"seed": 1}, "--seed 42 (this call: 1)"),
        ({"passed_on": ["--learning_rate", "1"]}, "--learning_rate 3e-3 (this call: 1)"),
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


def test_the_time_left_comes_from_the_runs_that_were_made(in_folder_with_data):
    cells = plan(request("baseline,ddp", repeats=2))
    settings = check_cells(cells, allow_mismatch=False)
    machine = Machine(num_cores=2)
    alone = {cell.folder: seconds_left([cell], settings, machine) for cell in runs_of(cells)}
    finished = runs_of(cells)[:2]  # of three, each ten times slower than guessed
    for cell in finished:
        cell.status, cell.seconds = COMPLETE, 10 * alone.pop(cell.folder)
    assert seconds_left(cells, settings, machine) == pytest.approx(10 * sum(alone.values()))


def test_the_table_shows_medians_and_what_is_missing(tmp_path):
    cells = plan(request())
    for cell, speed in zip(
        [cell for cell in cells if cell.run_type == "ddp" and cell.ranks == 2], (1, 9, 5), strict=True
    ):
        cell.status = COMPLETE
        finish(cell, tmp_path, timing={"tokens_per_sec_global": speed * 1000.0})
    alone = next(cell for cell in cells if cell.run_type == "baseline" and cell.ranks == 1)
    alone.status, alone.reason = FAILED, "the disk was full"
    rows = {tuple(line.split()[:2]): line for line in table(cells, tmp_path).splitlines()}
    assert rows["ddp", "2"].split()[2:5] == ["8", "3", "5,000"]
    assert "1 failed: the disk was full; 2 not made yet" in rows["baseline", "1"]
    assert rows["baseline", "2"].endswith("not applicable: baseline is one process")


# --- carrying it out: a stand-in for gpt2.py that ends in every way in which gpt2.py ends

STAND_IN = """
    import shlex, subprocess, sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from metrics_examples import example_metrics, save

    def value(flag):
        return sys.argv[sys.argv.index(flag) + 1]

    folder, run_type = Path(value("--checkpoint_path")), value("--run_type")
    if run_type == "allreduce":
        sys.exit("gpt2.py: error: this cannot be")
    if run_type == "fsdp":
        raise RuntimeError("a tensor is not where it was")
    if run_type == "ddp":
        (folder / "RUN_FAILED.txt").write_text("[Rank 0] RUN_FAILED reason=out of memory timestamp_utc=2026Z\\n")
        sys.exit(1)
    if run_type == "optimized":  # like torchrun: a rank in a session of its own; and it does not listen to SIGTERM
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        (folder / "pids").write_text(str(child.pid))
        time.sleep(600)
    metrics = example_metrics(world_size=1, command_line=shlex.join(sys.argv), hardware={{"num_devices": 1}})
    save(folder, metrics)
    (folder / "model.safetensors").write_text("weights")
"""


@pytest.fixture
def stand_in(tmp_path):
    program = tmp_path / "gpt2.py"
    program.write_text(textwrap.dedent(STAND_IN.format(tests=str(REPOSITORY / "tests"))))
    return program


@contextlib.contextmanager
def a_runner(stand_in: Path, variants: str, **options):
    out_dir = stand_in.parent / "out"
    asked = request(variants, ranks=(1,), repeats=2, folder=str(out_dir), program=str(stand_in))
    sweep = as_sweep(asked)
    with Stop() as stop, only_sweep_in(out_dir) as lock:
        yield Runner(sweep, out_dir, asked.machine, SETTINGS_OF_ANY, stop, lock, **options)


class _Any(dict):
    """The time left is not what these tests are about."""

    def __contains__(self, key):
        return False


SETTINGS_OF_ANY = _Any()


@pytest.fixture(autouse=True)
def no_estimate(request, monkeypatch):
    if "stand_in" in request.fixturenames:
        monkeypatch.setattr(sweep_run, "seconds_left", lambda *_: 0.0)


def is_alive(pid: int) -> bool:
    """A zombie is not: its parent ended first, and nobody collected it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_failed_run_is_recorded_with_its_reason_and_the_sweep_goes_on(stand_in, capsys):
    with a_runner(stand_in, "baseline,allreduce,ddp,fsdp") as runner:
        runner.run_all(warmup_runs=1)
    written = read_sweep(runner.out_dir)
    outcome = {cell.run_type: (cell.status, cell.reason) for cell in written.cells}
    assert outcome == {
        "baseline": (COMPLETE, None),
        "allreduce": (FAILED, "this cannot be"),
        "ddp": (FAILED, "out of memory"),
        "fsdp": (FAILED, "exit code 1: RuntimeError: a tensor is not where it was"),
    }
    assert len(written.cells) == 8 and all(cell.seconds > 0 and cell.started_utc for cell in written.cells)
    folder = runner.out_dir / "baseline_1rank_batch8" / "run_1"
    assert not (folder / "model.safetensors").exists()  # 500 MB each with GPT-2 124M
    assert (folder / "train.log").read_text().startswith("$ env OMP_NUM_THREADS=1 python ")
    # the warm-up run is on record, and nowhere where a search for runs would find it
    assert [(row["name"], row["status"]) for row in written.warmup_runs] == [("baseline_1rank_batch8", COMPLETE)]
    assert len(list(runner.out_dir.rglob("training_metrics.json"))) == 2
    assert not list(runner.out_dir.glob(".warmup-*"))
    assert "nothing left" in capsys.readouterr().out


def test_warming_up_removes_nothing_that_was_there(stand_in):
    with a_runner(stand_in, "baseline") as runner:
        note = runner.out_dir / "warmup" / "notes.txt"
        note.parent.mkdir()
        note.write_text("mine")
        runner.run_all(warmup_runs=1)
    assert note.read_text() == "mine"


def test_a_run_that_takes_too_long_is_ended_with_all_its_processes(stand_in, monkeypatch):
    monkeypatch.setattr(sweep_run, "PATIENCE_S", 1.0)
    with a_runner(stand_in, "optimized", timeout_s=1.0) as runner:
        runner.sweep.cells = runner.sweep.cells[:1]
        runner.run_all(warmup_runs=0)
    cell = read_sweep(runner.out_dir).cells[0]
    assert (cell.status, cell.reason) == (FAILED, "it ran longer than --run_timeout_s 1 and was ended")
    assert not is_alive(int((runner.out_dir / cell.folder / "pids").read_text()))


@pytest.mark.parametrize("number, exit_code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_leaves_a_sweep_to_go_on_with(stand_in, monkeypatch, request, number, exit_code):
    monkeypatch.setattr(sweep_run, "PATIENCE_S", 1.0)
    pids = stand_in.parent / "out" / "optimized_1rank_batch8" / "run_1" / "pids"

    def send() -> None:
        while not pids.exists() or not pids.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    # a shell that starts the tests in the background has them ignore Ctrl-C, and a sweep leaves what is ignored alone
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with a_runner(stand_in, "optimized", timeout_s=60.0) as runner:
        sender.start()
        runner.run_all(warmup_runs=0)
        sender.join()
        assert runner.stop.exit_code == exit_code
    assert not is_alive(int(pids.read_text()))
    written = read_sweep(runner.out_dir)
    assert [(cell.status, cell.reason) for cell in written.cells] == [(PENDING, "interrupted"), (PENDING, None)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # as it was


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path):
    with (
        only_sweep_in(tmp_path),
        pytest.raises(ValueError, match="in use by another sweep"),
        only_sweep_in(tmp_path),
    ):
        pass
    with only_sweep_in(tmp_path):
        pass


def test_a_full_disk_ends_the_sweep_and_no_run_is_left(stand_in, monkeypatch):
    with a_runner(stand_in, "baseline") as runner:

        def full(path: Path, text: str) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(sweep_state, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            runner.run_all(warmup_runs=0)
    assert psutil.Process().children() == []


# --- the program


@pytest.fixture
def program(monkeypatch):
    """main() of the script on a machine with as many CUDA devices as the test says; returns exit code and output."""
    spec = importlib.util.spec_from_file_location("run_scaling_benchmarks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(words: list[str], devices: int = 0) -> int:
        facts = {"devices": devices, "commit": "c" * 40, "is_dirty": False}
        monkeypatch.setattr("testbed.sweep_request.facts_of_machine", lambda: facts)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
        monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: PTH123, SIM115
        return module.main()

    return call


def commands_in(page: Path) -> list[list[str]]:
    """The words after the script's name of every command on the page, continued lines joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [
        shlex.split(found, comments=True) for found in re.findall(rf"^python scripts/{SCRIPT.name}(.*)$", text, re.M)
    ]


def test_every_command_in_the_guide_parses_and_plans_runs(in_folder_with_data, program, capsys):
    commands = commands_in(REPRODUCE)
    assert len(commands) >= 8
    for words in commands:
        place = words.index("--") if "--" in words else len(words)
        words = [*words[:place], "--dry_run", *words[place:]]
        assert program(words, devices=4 if "--gpus" in words else 0) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert "gpt2.py would refuse" not in said
        lines = [line for line in said.splitlines() if line.startswith("env ")]
        assert lines and "runs to make" in said
        for line in lines:
            words_of_run = shlex.split(line)
            assert not [word for word in words_of_run if Path(word).is_absolute()]
    assert not Path("checkpoint").exists()  # a plan writes nothing


@pytest.mark.parametrize(
    "words, said",
    [
        (["--gpus", "1,2"], "needs 2 CUDA devices, but PyTorch sees 0 here"),
        (["--ranks", "1", "--gpus", "1"], "give one of them"),
        (["--protocol", "time_to_loss"], "needs --target_val_loss"),
        (["--target_val_loss", "6"], "is for --protocol time_to_loss"),
        (["--repeats", "0"], "--repeats 0 is below 1"),
        (["--run_timeout_s", "0"], "is not above 0"),
        (["--", "--seed", "1"], "--seed is set by the sweep itself; use --seed"),
        (["--", "--device", "cuda"], "PyTorch finds no CUDA device"),
        (["--ranks", "1024", "--batch_sizes", "1024"], "needs more than the"),
        (["--out_dir", "train_small.bin/x"], "cannot be written"),
    ],
)
def test_what_was_typed_wrong_is_one_sentence_and_exit_code_2(
    in_folder_with_data, program, capsys, monkeypatch, words, said
):
    monkeypatch.setattr(Runner, "run_all", lambda *_: pytest.fail("it began to train"))
    assert program(words) == 2
    output = capsys.readouterr()
    assert said in output.err and output.err.count("\n") == 1 and output.out == ""


def test_a_report_that_is_not_ok_says_so_and_where(tmp_path):
    row = {"strategy": "ddp", "batch_size": 8, "ranks": 2, "field": "precision", "baseline": "fp32", "mismatch": "bf16"}
    path = tmp_path / "scaling_report.json"
    path.write_text(json.dumps({"status": "invalid_comparison", "mismatches": [row]}))
    assert "invalid_comparison" in disagreements(path)[0]
    assert disagreements(path)[1].endswith("ddp, ranks 2, batch size 8: precision is bf16, the reference has fp32")
    path.write_text(json.dumps({"status": "ok", "mismatches": []}))
    assert disagreements(path) == []


def test_help_answers_before_anything_heavy_is_loaded():
    code = (
        "import sys, runpy\n"
        "sys.argv = ['x', '--help']\n"
        "try: runpy.run_path(sys.path.pop(), run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'deepspeed', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    code = code.replace("sys.path.pop()", repr(str(SCRIPT)))
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)


def test_a_real_sweep_of_two_runs(token_files, tmp_path):
    """A single process and a pipeline of two, on real data: both learn the same, and the report is there."""
    out_dir = tmp_path / "sweep"
    own = ["--run_types", "baseline,pipeline", "--ranks", "1,2", "--batch_sizes", "8", "--repeats", "1", "--steps", "7"]
    own += ["--warmup_runs", "0", "--yes", "--out_dir", str(out_dir), "--", *TINY_RUN, *data_flags(token_files)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *own], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = json.loads((out_dir / "sweep.json").read_text())
    assert Counter(cell["status"] for cell in sweep["cells"]) == {COMPLETE: 2, NOT_APPLICABLE: 2}
    assert "--out_dir sweep -- " in sweep["command_line"]
    losses = [
        json.loads(path.read_text())["summary"]["final_val_loss"] for path in out_dir.rglob("training_metrics.json")
    ]
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], abs=5e-6)  # float32 sums in another order
    assert (out_dir / "scaling_report.json").exists()
    assert "about" in done.stdout and "median tokens/s" in done.stdout
    assert "its status is" not in done.stdout


def test_the_end_of_a_sweep_prints_what_keeps_its_report_from_being_ok(tmp_path, capsys):
    cells = [cell for cell in plan(request("ddp", repeats=1)) if cell.status == PENDING]
    for cell in cells:
        cell.status = COMPLETE
        finish(cell, tmp_path, training_config={"precision": "fp32" if cell.ranks == 1 else "bf16"})
    spec = importlib.util.spec_from_file_location("run_scaling_benchmarks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sweep = as_sweep(request("ddp"))
    sweep.cells = cells
    sweep.write(tmp_path)
    module.report(cells, tmp_path)
    said = capsys.readouterr().out
    assert "its status is invalid_comparison" in said
    assert "ddp, ranks 2, batch size 8: precision is bf16, the reference has fp32" in said
