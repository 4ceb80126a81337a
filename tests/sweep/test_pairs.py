"""Pairs of equal runs: their plan, and the program that makes a certificate of them."""

from __future__ import annotations

import numpy as np
import pytest
from support.certificate_cases import write_certificate
from support.programs import run_here, script, write_token_files
from support.sweep_cases import finish, request

from testbed.analysis.certificate import read_certificate
from testbed.analysis.statistics import detectable_effect, repeats_needed
from testbed.sweep.plan import NOT_APPLICABLE, PENDING, cells_of_pairs, check_cells, plan
from testbed.sweep.state import Sweep, read_sweep

PROGRAM, SWEEP_PROGRAM = "scripts/more/certify_machine.py", "scripts/run_scaling_benchmarks.py"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to work in, with the token files that a sweep takes by default."""
    write_token_files(tmp_path, suffix="_small")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_pair_is_one_command_in_two_folders_and_the_sides_take_turns():
    cells = cells_of_pairs(request("baseline,ddp"), ranks=2, pairs=4)
    assert len(cells) == 4 * 2 * 2
    by_pair = [cells[place : place + 2] for place in range(0, len(cells), 2)]
    for number, pair in enumerate(by_pair):
        repeat = number // 2 + 1
        assert {cell.repeat for cell in pair} == {repeat}
        assert [cell.name[-1] for cell in pair] == (["a", "b"] if repeat % 2 else ["b", "a"])
        assert len({cell.name[:-2] for cell in pair}) == 1
        assert pair[0].gpt2_arguments == pair[1].gpt2_arguments
        for cell in pair:
            assert cell.command[cell.command.index("--checkpoint_path") + 1] == f"sweep/{cell.folder}"
    assert {(cell.run_type, cell.ranks) for cell in cells} == {("baseline", 1), ("ddp", 2)}
    assert len({cell.folder for cell in cells}) == len(cells)
    assert set(check_cells(cells, allow_mismatch=False)) == {cell.name for cell in cells}


def test_what_cannot_run_here_says_why():
    (cell,) = cells_of_pairs(request("dp"), ranks=2, pairs=4)
    assert cell.status == NOT_APPLICABLE and "no CUDA device" in cell.reason


@pytest.fixture
def machine(monkeypatch):
    facts = {"devices": 0, "commit": "c" * 40, "is_dirty": False}
    monkeypatch.setattr("testbed.sweep.request.facts_of_machine", lambda: facts)
    monkeypatch.setattr("testbed.sweep.request.usable_cores", lambda: 2)


def finish_all(cells, out_dir, last_repeat=99, noise=0.01):
    """Leave what finished runs of a plan leave, with throughputs that scatter."""
    generator = np.random.default_rng(1)
    for cell in cells:
        if cell.repeat <= last_repeat:
            step_time_s = 0.2 * float(np.exp(generator.normal(0, noise)))
            finish(cell, out_dir, step_time_s=step_time_s, training_config={"run_type": cell.run_type})
    Sweep("strong", "python scripts/any.py", "c" * 40, cells).write(out_dir)


def test_the_program_makes_a_certificate_of_finished_runs_and_goes_on_with_more(machine, tmp_path):
    words = ["--pairs", "6", "--batch_size", "8", "--steps", "6", "--out_dir", "made"]
    planned = run_here(PROGRAM, *words, "--dry_run", cwd=tmp_path)
    assert planned.returncode == 0 and not (tmp_path / "made").exists()
    for name in ("baseline_1rank_batch8_a", "baseline_1rank_batch8_b", "ddp_2ranks_batch8_a", "ddp_2ranks_batch8_b"):
        assert f"# {name}: 6 runs" in planned.stdout
    assert planned.stdout.splitlines()[-1].startswith("# 24 runs to make, and warm-up: about 5 min (a guess that")
    finish_all(cells_of_pairs(asked(), ranks=2, pairs=6), tmp_path / "made")
    planned = run_here(PROGRAM, *words, "--dry_run", cwd=tmp_path)
    assert "6 runs, 6 of them finished" in planned.stdout and "from the finished runs" in planned.stdout
    assert [line[0] for line in planned.stdout.splitlines() if "gpt2.py" in line] == ["#"] * 4
    done = run_here(PROGRAM, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = read_certificate(tmp_path / "made")
    assert [each["name"] for each in content["configurations"]] == ["baseline on 1 rank", "ddp on 2 ranks"]
    assert [len(each["pairs"]) for each in content["configurations"]] == [6, 6]
    assert f"{content['found'][0]['noise']:.2%}" in done.stdout
    assert content["command_line"].startswith("python ") and "--pairs 6" in content["command_line"]
    assert len(read_sweep(tmp_path / "made").cells) == 24
    fewer = run_here(PROGRAM, *words[2:], "--pairs", "5", cwd=tmp_path)
    assert fewer.returncode == 2 and "which this call does not ask for" in fewer.stderr


def asked():
    """The request that the program makes of the words above."""
    program = script("more/certify_machine.py")
    arguments = program.parse_arguments(["--pairs", "6", "--batch_size", "8", "--steps", "6", "--out_dir", "made"])
    return program.request_from(arguments, {"devices": 0})[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pairs", "4"], "--pairs 4 is not from 5 to 1000"),
        (["--run_types", "nothing"], "'nothing' is not one of"),
        (["--run_types", "dp"], "no run of this sweep can start"),
        (["--", "--seed", "3"], "is set by the sweep itself"),
    ],
)
def test_what_is_typed_wrong_is_one_sentence(machine, tmp_path, words, said):
    done = run_here(PROGRAM, *words, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "checkpoint").exists()


@pytest.fixture
def certified(machine, tmp_path, monkeypatch):
    """A folder to work in, with the certificate of this machine in its place."""
    path = write_certificate(tmp_path / "checkpoint" / "certificate", noise=0.01)
    own = read_certificate(path)["machine"]
    monkeypatch.setattr("testbed.analysis.certificate.this_machine", lambda kind: own)
    return path


SWEEP = ["--run_types", "baseline,ddp", "--ranks", "1,2", "--batch_sizes", "8", "--steps", "6", "--out_dir", "made"]


def sweep_with(finished_repeats, out_dir, noise=0.01):
    """Finish the first runs of the sweep that the words above ask for."""
    program = script("run_scaling_benchmarks.py")
    words = program.parse_arguments([*SWEEP, "--repeats", "5"])
    cells = [cell for cell in plan(program.request_from(words, {"devices": 0})) if cell.status == PENDING]
    finish_all(cells, out_dir, finished_repeats, noise)


def test_a_dry_run_says_what_the_repeats_show_by_the_certificate_and_then_by_the_runs(certified, tmp_path):
    below = read_certificate(certified)["found"][0]["planning_noise"]
    said = run_here(SWEEP_PROGRAM, *SWEEP, "--repeats", "5", "--dry_run", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    expected = f"# 5 repeats find a difference of {detectable_effect(below, 5):.1%} in 80 % of cases; noise of a run"
    assert f"{expected} below {below:.1%}, from checkpoint/certificate/machine_certificate.json" in said.stdout
    assert f"3%: {repeats_needed(below, 0.03)} repeats (" in said.stdout
    sweep_with(3, tmp_path / "made", noise=0.1)
    said = run_here(SWEEP_PROGRAM, *SWEEP, "--repeats", "5", "--dry_run", cwd=tmp_path)
    assert "from 9 finished runs of this sweep" in said.stdout
    certified.unlink()
    said = run_here(SWEEP_PROGRAM, *SWEEP, "--repeats", "5", "--out_dir", "other", "--dry_run", cwd=tmp_path)
    assert "certify_machine.py measures the noise" in said.stdout


def test_the_certificate_travels_with_a_sweep(certified, tmp_path):
    sweep_with(5, tmp_path / "made")
    done = run_here(SWEEP_PROGRAM, *SWEEP, "--repeats", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_certificate(tmp_path / "made") == read_certificate(certified)
