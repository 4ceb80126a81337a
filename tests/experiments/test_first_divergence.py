"""scripts/first_divergence.py: planted faults are named where they are, and sound runs do not part."""

from __future__ import annotations

import random
import shlex
import subprocess
import sys

import pytest
from support.divergence import SOUND, Sides
from support.divergence_faults import EXPECTED, FAULTS
from support.planted_bugs import PLANTED_BUGS
from support.programs import REPOSITORY
from support.variants import slow_but

pytestmark = pytest.mark.launches
EVERY_DAY_FAULTS = (
    "sum_instead_of_mean",
    "a_rank_skips_a_step",
    "positions_of_another_rank",
    "attention_sees_the_future",
)
EVERY_DAY_RUNS = ("pipeline", "shards x tensor")


def pytest_generate_tests(metafunc):
    """Try those of every day, and others up to the count, always the same; the whole table takes half an hour."""
    for argument, every_day, every in (("fault", EVERY_DAY_FAULTS, EXPECTED), ("name", EVERY_DAY_RUNS, SOUND)):
        if argument in metafunc.fixturenames:
            others = [name for name in every if name not in every_day]
            random.Random(0).shuffle(others)
            wanted = {*every_day, *others[: max(0, metafunc.config.getoption("--divergences") - len(every_day))]}
            metafunc.parametrize(argument, slow_but(every_day, [name for name in every if name in wanted]))


@pytest.fixture(scope="module")
def sides(ranks, token_files, pair_files, tmp_path_factory) -> Sides:
    return Sides(ranks, tmp_path_factory.mktemp("sides"), token_files, pair_files)


def test_every_fault_has_a_place():
    assert EXPECTED.keys() == PLANTED_BUGS.keys() | FAULTS.keys()


def test_a_planted_fault_is_named_where_it_is(sides, fault):
    where = EXPECTED[fault]
    sides.answer(fault, where.flags, where.ranks, where)


def test_sound_runs_do_not_part(sides, name):
    run_type, ranks, flags = SOUND[name]
    sides.answer(name, ["--run_type", run_type, *flags.split()], ranks)


def call(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPOSITORY / "scripts/first_divergence.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)


def test_the_program_compares_a_file_with_a_run(tmp_path):
    """A side that was saved, with transformers' model."""
    saved = call("--a", "transformers", "--save", tmp_path / "side.npz", "--steps", 1, "--", "--precision", "fp32")
    assert saved.returncode == 0, saved.stdout + saved.stderr
    assert "No divergence" in saved.stdout
    other = shlex.quote(str(tmp_path / "side.npz"))
    again = call("--a", other, "--b", "--run_type ddp", "--steps", 1, "--", "--precision", "fp32")
    assert again.returncode == 0, again.stdout + again.stderr
