"""Runs that the program of 53ea84c began: tests/earlier_runs has one of each run type.

Each was made in `runs/TYPE` with six steps, --save_every 3 and --stop_at_step 3. to_step_6.json is what the same
program recorded when it went on to the end. Their metrics are compared with today's. DeepSpeed's checkpoints are
resumed: steps 4 to 6 come out the same, within the agreement test's tolerance. (Bits depend on the processor, so they
are in no file: tests/checkpoint/test_resume.py compares them.) The others had a pickled description, and are refused.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from support.agreement import TOLERANCE
from support.programs import REPOSITORY

from testbed.analysis.runs.comparability import differing_work
from testbed.analysis.runs.load import load_run
from testbed.metrics.file import read_metrics

pytestmark = [pytest.mark.launches, pytest.mark.slow]

ARCHIVE = Path(__file__).parents[1] / "earlier_runs" / "53ea84c.tar.xz"
RANKS = {"baseline": 1, "allreduce": 2, "ddp": 2, "fsdp": 2, "optimized": 2, "model_parallel": 2, "pipeline": 2}
RANKS |= {"tensor": 2}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder / "runs")
    return folder


def resume(ranks, tmp_path: Path, earlier: Path, run_type: str, *flags: str):
    folder = earlier / "runs" / run_type
    flags = ("--config", str(folder / "effective_config.json"), "--resume", "auto", "--stop_at_step", "6", *flags)
    return ranks.run_program(list(flags), tmp_path, RANKS[run_type], cwd=earlier)


@pytest.mark.parametrize("run_type", RANKS)
def test_metrics_of_an_earlier_program_are_compared_with_its_own(earlier, run_type):
    run = earlier / "runs" / run_type
    assert differing_work([load_run(run / "to_step_6.json"), load_run(run / "training_metrics.json")]) != []
    assert differing_work([load_run(run / "to_step_6.json")] * 2) == []


@pytest.mark.parametrize("run_type", ["baseline", "fsdp"])
def test_a_checkpoint_with_a_pickled_description_is_refused(ranks, tmp_path, earlier, run_type):
    result = resume(ranks, tmp_path, earlier, run_type)
    assert result.returncode == 1 and "saved by an earlier version, in a form that is no longer read" in result.stderr
    assert "--init_from" in result.stderr and "Traceback" not in result.stderr


def test_a_checkpoint_of_an_earlier_deepspeed_run_is_resumed(ranks, tmp_path, earlier):
    run = earlier / "runs" / "optimized"
    file = str(REPOSITORY / "src" / "deepspeed_config.json")

    result = resume(ranks, tmp_path, earlier, "optimized", "--deepspeed_config", file)

    assert result.returncode == 0, result.stderr[-3000:]
    before, now = (read_metrics(run / name)["steps"] for name in ("to_step_6.json", "training_metrics.json"))
    assert [row["step"] for row in now] == [1, 2, 3, 4, 5, 6]
    for old, new in zip(before, now, strict=True):
        for figure in ("loss", "grad_norm"):
            assert abs(new[figure] - old[figure]) <= TOLERANCE * max(1, abs(old[figure])), (old["step"], figure)
    assert differing_work([load_run(run / "to_step_6.json"), load_run(run / "training_metrics.json")]) == []
