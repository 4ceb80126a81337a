"""The plan of a sweep: rounds, protocols, variants, and what is refused before anything trains."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.programs import REPOSITORY, run_here, write_token_files
from support.sweep_cases import NOTHING_GIVEN, SCRIPT, SIX_STEPS, request

from testbed.config.flags import parse_command_line
from testbed.errors import InputError
from testbed.sweep.plan import (
    COMPLETE,
    EQUAL_WORK,
    FAILED,
    NOT_APPLICABLE,
    Cell,
    check_cells,
    compile_alike,
    order_of_round,
    plan,
)
from testbed.sweep.request import Machine, parse_numbers, parse_variants, shared_arguments
from testbed.sweep.runner import Runner, seconds_left

REPRODUCE = REPOSITORY / "docs" / "reproduce.md"


def runs_of(cells: list[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.status != NOT_APPLICABLE]


def flag(cell: Cell, name: str) -> str:
    return cell.command[cell.command.index(name) + 1]


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
    meshes = reasons("mesh:pipeline_stages=2+tensor_parallel_size=2,fsdp:shard_size=2", Machine(num_cores=4))
    assert meshes == {
        **{("mesh", ranks): "its axes need a multiple of 4 ranks" for ranks in (1, 2)},
        ("fsdp", 1): "its axes need a multiple of 2 ranks",
    }
    on_context_ranks = reasons("mesh:context_parallel_size=2+shard_size=4", Machine(num_cores=4))
    assert on_context_ranks.keys() == {("mesh", 1), ("mesh", 2)}, "shards lie on context ranks"


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


def test_the_threads_that_a_variant_asks_for_are_those_of_its_plan():
    """They stood beside OMP_NUM_THREADS=1, and nobody counted them against the cores."""
    cells = runs_of(plan(request("ddp,ddp:threads_per_rank=2", repeats=1)))
    found = {(cell.variant, cell.ranks): (cell.command[1], cell.oversubscribed) for cell in cells}
    assert found == {
        ("ddp", 1): ("OMP_NUM_THREADS=1", False),
        ("ddp", 2): ("OMP_NUM_THREADS=1", False),
        ("ddp:threads_per_rank=2", 1): ("OMP_NUM_THREADS=2", False),
        ("ddp:threads_per_rank=2", 2): ("OMP_NUM_THREADS=2", True),
    }
    cells = plan(request("baseline:threads_per_rank=2", repeats=1))
    assert [cell.oversubscribed for cell in cells] == [False, False], "what is not applicable takes no core"
    beside_others = plan(request("ddp:threads_per_rank=1", machine=Machine(num_cores=2, threads_per_rank=2)))
    assert {cell.command[1] for cell in beside_others} == {"OMP_NUM_THREADS=1"}


def test_a_plan_says_that_it_is_oversubscribed(in_folder_with_data, program):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    words = ["--run_types", "ddp", "--ranks", "2", "--steps", "6"]
    done = program(*words, "--dry_run", "--", "--threads_per_rank", str(cores))
    said = f"# oversubscribed: ddp on 2 ranks of {cores} threads needs more than the {cores} core"
    assert done.returncode == 0 and said in done.stdout
    done = program(*words, "--dry_run", "--", "--threads_per_rank", "1")
    assert done.returncode == 0 and ("oversubscribed" not in done.stdout or cores < 2)


def test_a_dry_run_has_the_command_of_each_configuration_once(in_folder_with_data, program):
    words = ["--run_types", "baseline,ddp,dp", "--ranks", "1,2", "--steps", "12", "--dry_run"]
    done = program(*words, "--repeats", "4", "--profile_runs", "1")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    commands = [line for line in lines if line.startswith("env ")]
    assert len(commands) == 6 == len(set(commands))
    names = ("baseline_1rank_batch32", "ddp_1rank_batch32", "ddp_2ranks_batch32")
    for name in names:
        assert f"# {name}: 4 runs" in lines and f"# {name} profiled: 1 run" in lines
    assert any(line.startswith("# not applicable: dp_1rank_batch32: dp splits") for line in lines)


def test_a_dry_run_says_once_what_gpt2_would_refuse(in_folder_with_data, program):
    done = program("--run_types", "ddp", "--ranks", "1,3", "--repeats", "2", "--dry_run")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    (place,) = (place for place, line in enumerate(lines) if line.startswith("# gpt2.py would refuse: "))
    assert "--global_batch_size 32" in lines[place]
    assert lines[place + 1].startswith("# env ") and "ddp_3ranks_batch32/run_1" in lines[place + 1]
    assert [line for line in lines if "ddp_3ranks_batch32" in line] == [lines[place + 1]]


@pytest.mark.parametrize("repeats, profile_runs", [(2, 1), (2, 2), (1, 3)])
def test_profiled_runs_end_their_round_and_share_their_cell(repeats, profile_runs):
    """In a block after all others a drift of the machine would meet them alone."""
    cells = runs_of(plan(request("ddp", repeats=repeats, profile_runs=profile_runs)))
    kinds = [(cell.repeat, cell.profiled) for cell in cells]
    assert kinds == sorted(kinds) and kinds.count((profile_runs, True)) == 2 == kinds.count((repeats, False))
    assert len(kinds) == 2 * (repeats + profile_runs)
    assert {"--profile" in cell.command for cell in cells if cell.profiled} == {True}
    assert {cell.name for cell in cells if cell.profiled} == {cell.name for cell in cells if not cell.profiled}
    assert len({cell.folder for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    "text, rule",
    [
        ("ddd", "not one of baseline"),
        ("ddp:bucket_cap=5", "--bucket_cap is not a flag (did you mean --bucket_cap_mb?)"),
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
    for text in ("1,x", "²", "0", "9" * 5000):
        with pytest.raises(InputError, match="--ranks '"):
            parse_numbers(text, "--ranks")


def test_what_is_given_replaces_the_default_work_and_nothing_is_said_twice():
    words = shared_arguments("strong", "cpu", SIX_STEPS, ["--seq_length", "32", "--model", "gpt2", "--profile"])
    values = parse_command_line(list(words)).values
    assert (values["seq_length"], values["model"], values["max_train_steps"]) == (32, "gpt2", 6) and values["profile"]
    assert values["precision"] == "fp32"  # the default work's, which nobody replaced
    assert "--learning_rate" not in words  # the model's default, which differs between optimizers
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags))
    assert words[-5:] == ("--seq_length", "32", "--model", "gpt2", "--profile")
    with pytest.raises(ValueError, match="--seq_length stands after -- too"):
        shared_arguments("strong", "cpu", {**SIX_STEPS, "seq_length": 64}, ["--seq_length", "32"])
    with pytest.raises(ValueError, match="--max_train_steps is set by the sweep itself; use --steps"):
        shared_arguments("strong", "cpu", SIX_STEPS, ["--max_train_steps", "5"])


@pytest.fixture
def in_folder_with_data(tmp_path, monkeypatch):
    """Token files under their usual names in the current folder."""
    write_token_files(tmp_path, train_tokens=300_000, suffix="_small")
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


def test_cells_agree_in_all_work_that_the_sweep_does_not_set_itself():
    assert {"total_steps", "math_changes", "num_layers", "learning_rate", "muon_momentum"} <= {*EQUAL_WORK}
    assert not {"global_batch_size", "seed", "run_type", "max_val_steps", "zero_stage", "epochs"} & {*EQUAL_WORK}


def test_variants_that_would_do_other_work_are_refused_unless_allowed(in_folder_with_data):
    cells = plan(request("baseline,ddp:learning_rate=1"))
    with pytest.raises(ValueError, match=r"learning_rate 1 instead of 0.004.*--allow_mismatch"):
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
    assert program(*words, "--ranks", "1", "--dry_run").returncode == 0
    assert program(*words[4:], "--ranks", "1", "--dry_run").returncode == 2
    for variant in ("ddp:num_layers=3", "ddp:seq_length=64", "ddp:max_val_steps=1"):
        with pytest.raises(ValueError, match="would do other work"):
            check(variant)


def test_the_time_left_comes_from_the_runs_that_were_made(in_folder_with_data):
    cells = plan(request("baseline,ddp", repeats=2))
    settings = check_cells(cells, allow_mismatch=False)
    machine = Machine(num_cores=2)
    alone = {cell.folder: seconds_left([cell], settings, machine) for cell in runs_of(cells)}
    finished = runs_of(cells)[:2]  # of three, each ten times slower than guessed
    for cell in finished:
        cell.status, cell.seconds = COMPLETE, 10 * alone.pop(cell.folder)
    assert seconds_left(cells, settings, machine) == pytest.approx(10 * sum(alone.values()))


@pytest.fixture
def program(monkeypatch):
    """The script on a machine with as many CUDA devices as the test says, in the folder of the test."""

    def call(*words: str, devices: int = 0) -> subprocess.CompletedProcess[str]:
        facts = {"devices": devices, "commit": "c" * 40, "is_dirty": False}
        monkeypatch.setattr("testbed.sweep.request.facts_of_machine", lambda: facts)
        return run_here(SCRIPT, *words, cwd=Path.cwd())

    return call


def commands_in(page: Path) -> list[list[str]]:
    """The words after the script's name of every command on the page, continued lines joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [
        shlex.split(found, comments=True) for found in re.findall(rf"^python scripts/{SCRIPT.name}(.*)$", text, re.M)
    ]


def test_every_command_in_the_guide_parses_and_plans_runs(in_folder_with_data, program):
    commands = commands_in(REPRODUCE)
    assert len(commands) >= 7
    for words in commands:
        place = words.index("--") if "--" in words else len(words)
        words = [*words[:place], "--dry_run", *words[place:]]
        done = program(*words, devices=4 if "--gpus" in words else 0)
        assert done.returncode == 0, done.stderr
        assert "gpt2.py would refuse" not in done.stdout
        lines = [line for line in done.stdout.splitlines() if line.startswith("env ")]
        assert lines and "runs to make" in done.stdout
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
        (["--repeats", "0"], "--repeats: '0' is not a positive whole number"),
        (["--", "--seed", "1"], "--seed is set by the sweep itself; use --seed"),
        (["--", "--device", "cuda"], "PyTorch finds no CUDA device"),
        (["--ranks", "1024", "--batch_sizes", "1024"], "needs more than the"),
        (["--ranks", "2", "--", "--threads_per_rank", "512"], "on 2 ranks of 512 threads needs more than the"),
        (["--run_types", "ddp:threads_per_rank=999", "--ranks", "1"], "ddp:threads_per_rank=999 on 1 rank of 999"),
        (["--steps", "9", "--profile_runs", "1"], "give --steps 10 or more, or a smaller --profile_steps, or leave"),
        (
            ["--out_dir", "train_small.bin/x"],
            "train_small.bin/x lies below train_small.bin, which is a file; give",
        ),
        (["--out_dir", "train_small.bin", "--dry_run"], "--out_dir train_small.bin is a file, not a folder; give"),
    ],
)
def test_what_was_typed_wrong_is_one_sentence_and_exit_code_2(in_folder_with_data, program, monkeypatch, words, said):
    monkeypatch.setattr(Runner, "run_all", lambda *_: pytest.fail("it began to train"))
    done = program(*words)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize(
    ("variants", "kind", "is_added"),
    [
        ("ddp,optimized:zero_stage=3", "cuda", True),  # ZeRO 3 cannot be compiled
        ("ddp,fsdp,optimized", "cuda", False),  # auto compiles all of them
        ("optimized:zero_stage=3", "cuda", False),  # and none of these
        ("ddp:compile=on,ddp:compile=off,optimized:zero_stage=3", "cuda", False),  # what is typed is what is compared
        ("ddp,optimized:zero_stage=3", "cpu", False),  # where auto compiles nothing
    ],
)
def test_no_sweep_sets_a_compiled_strategy_against_an_uncompiled_one(in_folder_with_data, variants, kind, is_added):
    machine = Machine(num_cores=2, cuda_devices=("0", "1") if kind == "cuda" else ())
    cells = runs_of(plan(request(variants, ranks=(2,), machine=machine, passed_on=["--device", "auto"])))
    note = compile_alike(cells, machine)
    assert (note is not None) is is_added
    assert {"--compile off" in " ".join(cell.command) for cell in cells if "compile" not in cell.variant} == {is_added}
    check_cells(cells, allow_mismatch=False)
