"""--track through the program: what each real library holds of a resumed run is what training_metrics.json holds."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys

import pytest
from support.programs import PROGRAM, TINY_RUN, data_flags, run_program
from support.tracked_runs import READERS, without_credentials

# MLflow makes its tables for longer than 30 s on a busy machine, and this run takes two
PATIENT = """
import runpy, sys
from testbed.metrics import trackers
trackers.CLOSE_S = trackers.HANGING_S = 150.0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FILES = ("training_metrics.json", "effective_config.json", "launcher_metadata.json")
TOKENS_PER_STEP = 8 * 32


def rows_of(metrics: dict) -> dict[str, dict[int, float]]:
    """Every row of the file by the names that docs/configs.md gives."""
    steps = metrics["steps"]
    return {
        "train/loss": {row["step"]: row["loss"] for row in steps},
        "train/grad_norm": {row["step"]: row["grad_norm"] for row in steps},
        "train/learning_rate": {row["step"]: row["lr"] for row in steps},
        "train/tokens": {row["step"]: row["step"] * TOKENS_PER_STEP for row in steps},
        "speed/step_time_s": {row["step"]: row["step_time_s"] for row in steps},
        "speed/tokens_per_s": {row["step"]: TOKENS_PER_STEP / row["step_time_s"] for row in steps},
        "validation/loss": {row["step"]: row["val_loss"] for row in metrics["evaluations"]},
    }


@pytest.mark.slow
@pytest.mark.launches
def test_each_library_holds_every_row_the_configuration_and_the_files_of_a_resumed_run(
    tmp_path, token_files, monkeypatch
):
    if missing := [name for name in READERS if importlib.util.find_spec(name) is None]:
        pytest.skip(f"pip install {' '.join(missing)}")
    without_credentials(monkeypatch, tmp_path)
    folder = tmp_path / "run"
    flags = [*TINY_RUN, *data_flags(token_files), "--run_type", "baseline", "--track", ",".join(READERS)]
    flags += "--global_batch_size 8 --max_train_steps 9 --eval_every 2 --save_every 4 --max_val_steps 2".split()
    command = [sys.executable, "-c", PATIENT, str(PROGRAM), *flags, "--checkpoint_path", str(folder)]
    for more in (["--stop_at_step", "6"], ["--resume"]):
        done = run_program([*command, *more], timeout_s=600)
        assert done.returncode == 0 and "warning: --track" not in done.stdout, done.stdout + done.stderr
        if "--resume" not in more:
            shutil.rmtree(folder / "checkpoints" / "step_000006")  # as if it was killed before: 5 and 6 come again
    metrics, config = (json.loads((folder / name).read_text()) for name in FILES[:2])
    assert [row["step"] for row in metrics["steps"]] == list(range(1, 10)) and len(metrics["segments"]) == 2
    assert metrics["segments"][1]["first_step"] == 5 and len(metrics["evaluations"]) == 5
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackers" / "trackio"))
    flags_of_run = metrics["settings"]  # with what was chosen where effective_config.json says null
    assert flags_of_run.keys() == config.keys() - {"data_sha256"}
    facts = {name: metrics[name] for name in ("env", "host", "hardware")}
    for name, read in READERS.items():
        found, configuration, files = read(folder)
        for metric, rows in rows_of(metrics).items():
            exactly = 1e-6 if name == "tensorboard" else 0  # which keeps 32 bits
            assert found[metric] == pytest.approx(rows, rel=exactly, abs=0), (name, metric)
        if name == "tensorboard":  # which has the curves alone
            continue
        assert files.keys() >= set(FILES) and all(files[each] == (folder / each).read_text() for each in FILES)
        if name == "mlflow":
            flat = {f"{part}.{key}": value for part, held in facts.items() for key, value in held.items()}
            first = {"stop_at_step": 6}  # parameters stay those of the first start
            expected = {key: str(value) for key, value in (flags_of_run | first | flat).items()}
        else:
            expected = flags_of_run | facts
        assert {key: configuration.get(key, "missing") for key in expected} == expected, name
