"""Ask the planner in this process, and start in thought what it prints."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import runpy
from collections.abc import Iterable
from typing import Any

import pytest

from support.programs import REPOSITORY
from testbed.config.compatibility import check_on_device
from testbed.config.flags import parse_command_line
from testbed.config.initial_shape import check_shape, positions_of_new_model
from testbed.config.mesh import options_of_run_type, spread_over_ranks
from testbed.config.run_types import STRATEGIES
from testbed.memory_model.job import Job, Machine, job_of
from testbed.model.shape import MODEL_SIZES, ModelShape
from testbed.planner.command import command_of
from testbed.planner.question import Question

EVERY_DAY = 6  # of so many questions about few devices one judges every change: each takes seconds


def mostly_slow(questions: Iterable[Any]) -> list[Any]:
    """Return the questions as parameters of a test, all but every sixth of those about few devices marked slow."""
    questions = list(questions)
    every_day = [each for each in questions if not re.search(r"--gpus \d{3}", str(each))][::EVERY_DAY]
    return [pytest.param(each, marks=[] if each in every_day else [pytest.mark.slow]) for each in questions]


def asked(words: str) -> Question:
    """Return the question that flags of scripts/plan.py ask. InputError as the program raises it."""
    program = runpy.run_path(str(REPOSITORY / "scripts/plan.py"), run_name="plan")
    with contextlib.redirect_stderr(io.StringIO()):
        arguments, typed = program["parse_arguments"](words.split())
    return program["questions_of"](arguments, typed)[0][0]


def read_back(job: Job, there: Machine, work: tuple[str, ...]) -> Job:
    """Return the run that gpt2.py would settle on, started with the job's command."""
    words = command_of(job, there, work)
    flags = parse_command_line(words[words.index("src/gpt2.py") + 1 :])
    values = {**flags.values, **options_of_run_type(flags.values, flags.typed)}
    base = dataclasses.asdict(MODEL_SIZES[values["model"]])
    base |= {"max_position_embeddings": positions_of_new_model(values, MODEL_SIZES[values["model"]])}
    shape = {name: values[name] or number for name, number in base.items()}
    check_shape(shape, values["seq_length"])
    values |= {**shape, "device": there.device.kind}
    settled, mesh = spread_over_ranks(values, there.devices if STRATEGIES[job.run_type].is_distributed else 1)
    check_on_device(settled)
    return job_of(settled, mesh, ModelShape(**shape), there)
