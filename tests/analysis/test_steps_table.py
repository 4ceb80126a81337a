"""The steps of a run from Python: `testbed.load_run(path).steps`."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from support.metrics_examples import example_metrics, v1_metrics

import testbed


def saved(folder, metrics):
    (folder / "training_metrics.json").write_text(json.dumps(metrics))
    return folder


def test_every_step_is_a_row_of_a_frame(tmp_path, monkeypatch):
    metrics = example_metrics()
    saved(tmp_path, metrics)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    frame = testbed.load_run(f"~/{tmp_path.name}").steps
    columns = ["step", "tokens", "loss", "grad_norm", "learning_rate", "step_time_s", "train_time_s", "is_warmup"]
    assert list(frame.columns) == columns
    per_step = metrics["training_config"]["global_batch_size"] * metrics["training_config"]["seq_len"]
    assert frame["tokens"].tolist() == [row["step"] * per_step for row in metrics["steps"]]
    assert frame["learning_rate"].tolist() == [row["lr"] for row in metrics["steps"]]
    assert frame["step"].tolist() == [row["step"] for row in metrics["steps"]]
    assert frame["loss"].tolist() == [row["loss"] for row in metrics["steps"]]
    assert frame["train_time_s"].iloc[-1] == pytest.approx(sum(row["step_time_s"] for row in metrics["steps"]))
    assert frame[frame.is_warmup].step.tolist() == [row["step"] for row in metrics["steps"] if row["is_warmup"]]


def test_without_pandas_the_columns_are_arrays_and_old_files_have_no_rows(tmp_path, monkeypatch):
    run = testbed.load_run(saved(tmp_path, example_metrics()))
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert isinstance(run.steps["loss"], np.ndarray) and len(run.steps["loss"]) == len(run.train_steps)
    assert len(testbed.load_run(saved(tmp_path, v1_metrics())).steps["step"]) == 0


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = testbed.no_such_name
