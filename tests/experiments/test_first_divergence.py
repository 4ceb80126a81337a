"""scripts/first_divergence.py: planted faults are named where they are, and sound runs do not part."""

from __future__ import annotations

import random
import shlex

import pytest
from support.divergence import SOUND, Sides
from support.divergence_faults import EXPECTED, FAULTS
from support.planted_bugs import PLANTED_BUGS
from support.programs import run_here
from support.variants import slow_but

from testbed.experiments.divergence import run_sides

pytestmark = pytest.mark.launches
EVERY_DAY_FAULTS = ("sum_instead_of_mean", "a_rank_skips_a_step")
EVERY_DAY_RUNS = ("shards x tensor",)
COMPILED_RUN = "bf16, fsdp, compiled"


def pytest_generate_tests(metafunc):
    """Try those of every day, and others up to the count, always the same; the whole table takes half an hour. Of the
    compiled runs, which take longest, one is tried before the table is."""
    kinds = (("fault", EVERY_DAY_FAULTS, (), EXPECTED), ("name", EVERY_DAY_RUNS, (COMPILED_RUN,), SOUND))
    for argument, every_day, first, every in kinds:
        if argument in metafunc.fixturenames:
            others = [name for name in every if name not in every_day]
            random.Random(0).shuffle(others)
            others.sort(key=lambda name, first=first: (name not in first, "compiled" in name))
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


def test_the_program_compares_a_file_with_a_run(ranks, tmp_path, monkeypatch):
    """A side that was saved, with transformers' model."""
    monkeypatch.setattr(run_sides, "run", ranks.in_place_of_launches(tmp_path))

    def call(*words: object) -> None:
        done = run_here("scripts/first_divergence.py", *words, "--steps", 1, "--", "--precision", "fp32")
        assert done.returncode == 0 and "No divergence" in done.stdout, done.stdout + done.stderr

    call("--a", "transformers", "--save", tmp_path / "side.npz")
    call("--a", shlex.quote(str(tmp_path / "side.npz")), "--b", "--run_type ddp")
