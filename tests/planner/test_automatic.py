"""The plan's best run for `--run_type auto`, and what the race asks the plan."""

from __future__ import annotations

import pytest
from support.programs import TINY_RUN, data_flags
from support.settings import checked_run, launch

from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.errors import InputError
from testbed.planner.automatic import best_plan, job_on
from testbed.planner.calibration import CALIBRATION
from testbed.planner.machines import machine_here
from testbed.planner.measured_rates import constants_here
from testbed.planner.step_time import step_time
from testbed.sweep.field import field_of, predictions_of
from testbed.sweep.request import Machine, Request, parse_variants


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(token_files, *flags: str):
    return parse_command_line([*TINY_RUN, *data_flags(token_files), "--run_type", "auto", *flags])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_plans_best_is_a_run_that_the_program_accepts(place, token_files, ranks):
    taken = best_plan(asked(token_files), launch(ranks))
    assert (taken.run_type == "baseline") == (ranks == 1)
    assert "the plan's fastest of " in taken.why and "uncalibrated" in taken.why
    checked = check_run(asked(token_files), launch(ranks), best_plan)
    assert checked.settings.training.run_type == taken.run_type
    for name, value in taken.flags.items():
        assert checked.settings.value(name) == value, name


def test_no_other_candidate_is_predicted_to_be_faster(place, token_files):
    """Against the step time of plain settings of every run type, made without the list of candidates."""
    taken = best_plan(asked(token_files), launch(2))
    settings = check_run(asked(token_files), launch(2), lambda *_: taken).settings
    machine, constants = machine_here(2, 2, None), constants_here()
    best = step_time(job_on(settings, machine), machine, constants).seconds
    for run_type in ("allreduce", "ddp", "fsdp", "optimized", "tensor", "model_parallel", "pipeline"):
        other = checked_run(token_files, "--run_type", run_type, world_size=2).settings
        assert best <= step_time(job_on(other, machine), machine, constants).seconds * 1.0001, run_type


def test_what_was_given_is_kept(place, token_files):
    taken = best_plan(asked(token_files, "--micro_batch_size_per_gpu", "2"), launch(2))
    assert taken.flags["micro_batch_size_per_gpu"] == 2
    offloaded = best_plan(asked(token_files, "--zero_stage", "2", "--global_batch_size", "8"), launch(2))
    assert offloaded.run_type != "optimized" or offloaded.flags["zero_stage"] == 2
    left_open = best_plan(asked(token_files, "--micro_batch_size_per_gpu", "auto"), launch(2))
    assert left_open.flags == best_plan(asked(token_files), launch(2)).flags, "every size is looked at"


def test_a_broken_calibration_is_no_reason_not_to_start(place, token_files):
    CALIBRATION.parent.mkdir()
    CALIBRATION.write_text("{}")
    assert best_plan(asked(token_files), launch(2)) is None
    assert check_run(asked(token_files), launch(2), best_plan).settings.training.run_type == "ddp"
    with pytest.raises(InputError):
        constants_here(CALIBRATION)


def test_the_race_has_a_prediction_of_every_configuration(place, token_files):
    shared = (
        *TINY_RUN,
        *data_flags(token_files),
        "--max_train_steps",
        "8",
        "--timing_warmup_steps",
        "2",
        "--epochs",
        "9",
    )
    request = Request(
        "strong", parse_variants("baseline,ddp,tensor"), (1, 2), (8,), 1, 42, shared, Machine(2), "race", "src/gpt2.py"
    )
    field = field_of(request, (), constants_here())
    found = predictions_of(field.cells, field.settings, constants_here())
    assert found.keys() == {cell.name for cell in field.cells} and len(found) == 3
    for said in found.values():
        assert 0 < said.low < said.seconds < said.high and said.does_not_fit is None
        assert not said.is_scored, "widths of published GPU runs exclude nothing on a CPU"
