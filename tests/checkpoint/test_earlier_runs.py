"""Today's program goes on with runs that the program of 53ea84c began: tests/earlier_runs has one of each run type.

Each was made in `runs/TYPE` with six steps, --save_every 3 and --stop_at_step 3. to_step_6.json is what the same
program recorded when it went on to the end. Steps 4 to 6 must come out the same here, within the agreement test's
tolerance. (Bits depend on the processor, so they are in no file: tests/checkpoint/test_resume.py compares them.)
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


@pytest.mark.parametrize("run_type", RANKS)
def test_a_run_of_an_earlier_program_is_gone_on_with(ranks, tmp_path, earlier, run_type):
    run = earlier / "runs" / run_type
    flags = ["--config", str(run / "effective_config.json"), "--resume", "auto", "--stop_at_step", "6"]
    if run_type == "optimized":
        flags += ["--deepspeed_config", str(REPOSITORY / "src" / "deepspeed_config.json")]

    result = ranks.run_program(flags, tmp_path, RANKS[run_type], cwd=earlier)

    assert result.returncode == 0, result.stderr[-3000:]
    before, now = (read_metrics(run / name)["steps"] for name in ("to_step_6.json", "training_metrics.json"))
    assert [row["step"] for row in now] == [1, 2, 3, 4, 5, 6]
    for old, new in zip(before, now, strict=True):
        for figure in ("loss", "grad_norm"):
            assert abs(new[figure] - old[figure]) <= TOLERANCE * max(1, abs(old[figure])), (old["step"], figure)
    assert differing_work([load_run(run / "to_step_6.json"), load_run(run / "training_metrics.json")]) == []
