"""--tensorboard, --skip_gradient_sync and --profile as a person uses them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.metrics_examples import example_metrics
from support.programs import TINY_RUN, data_flags
from support.settings import stand_in

from testbed.metrics.file import read_metrics
from testbed.metrics.recorder import RunRecorder
from testbed.profiling.attribution import words_on_attribution

SHORT = ["--max_train_steps", "4", "--timing_warmup_steps", "1", "--global_batch_size", "4", "--sample_tokens", "0"]


@pytest.mark.launches
@pytest.mark.slow
def test_tensorboard_shows_the_rows_of_the_file(ranks, tmp_path, token_files):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = [*TINY_RUN, *SHORT, *data_flags(token_files), "--eval_every", "2", "--max_val_steps", "1", "--tensorboard"]
    done = ranks.run_program([*flags, "--checkpoint_path", str(tmp_path / "run")], tmp_path / "ranks")
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = read_metrics(tmp_path / "run" / "training_metrics.json")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name, column in {
        "train/loss": "loss",
        "train/grad_norm": "grad_norm",
        "train/learning_rate": "lr",
        "speed/step_time_s": "step_time_s",
    }.items():
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx({row["step"]: row[column] for row in metrics["steps"]}, rel=1e-6), name
    rates = [event.value for event in events.Scalars("speed/tokens_per_s")]
    assert rates == pytest.approx([4 * 32 / row["step_time_s"] for row in metrics["steps"]], rel=1e-5)
    losses = {event.step: event.value for event in events.Scalars("validation/loss")}
    assert losses == pytest.approx({row["step"]: row["val_loss"] for row in metrics["evaluations"]}, rel=1e-6)


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.parametrize(
    ("run_type", "skipped", "said", "travels"),
    [
        ("allreduce", "all", "gradients are not synchronised", {3: False, 4: False}),
        ("ddp", "all", "gradients are not synchronised", {3: False, 4: False}),
        ("allreduce", "alternate", "gradients of every even step are not synchronised", {3: True, 4: False}),
        ("ddp", "alternate", "gradients of every even step are not synchronised", {3: True, 4: False}),
    ],
)
def test_steps_without_synchronisation_send_nothing_and_are_no_training(
    ranks, tmp_path, token_files, run_type, skipped, said, travels
):
    flags = ["--run_type", run_type, *TINY_RUN, *SHORT, *data_flags(token_files), "--global_batch_size", "8"]
    flags += ["--timing_warmup_steps", "2"]  # in step 2 DDP agrees on its buckets, once, with a small broadcast
    flags += ["--skip_gradient_sync", skipped, "--profile", "--profile_steps", "2"]
    done = ranks.run_program([*flags, "--checkpoint_path", str(tmp_path / "run")], tmp_path / "ranks", 2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "it is not training" in done.stdout
    metrics = read_metrics(tmp_path / "run" / "training_metrics.json")
    assert metrics["training_config"]["math_changes"] == [f"{said}: this is not training"]
    assert metrics["instrumented"] is True and not (tmp_path / "run" / "model.safetensors").exists()
    for of_rank in metrics["attribution"]["per_rank"]:
        assert {step["step"]: step["num_collectives"] > 0 for step in of_rank["steps"]} == travels
        assert all(travels[step["step"]] or step["communication_s"] == 0 for step in of_rank["steps"])
    assert skipped != "all" or metrics["attribution"]["bound"] is None


@pytest.mark.launches
def test_one_rank_alone_calls_collectives_that_send_nothing(ranks, tmp_path, token_files):
    flags = ["--run_type", "ddp", *TINY_RUN, *SHORT, *data_flags(token_files), "--profile", "--profile_steps", "3"]
    done = ranks.run_program([*flags, "--checkpoint_path", str(tmp_path / "run")], tmp_path / "ranks")
    assert done.returncode == 0, done.stderr[-2000:]
    assert " x 1 data rank of " in done.stdout and not re.search(r"\b1 (ranks|threads|steps)\b", done.stdout)
    attribution = read_metrics(tmp_path / "run" / "training_metrics.json")["attribution"]
    assert attribution["bound"] is None
    assert all(row["num_per_step"] and not row["bus_bytes_per_step"] for row in attribution["collectives"])
    said = done.stdout.partition("profiled steps 2 to 4: ")[2].splitlines()
    assert "forward" in said[0] and "exposed" not in said[0], "one rank exposes no communication"
    assert said[1].startswith(f"operators: python scripts/profiling/parse_nsys_stats.py --run_dir {tmp_path / 'run'};")


def test_a_profiled_run_says_where_its_time_went():
    parts = {"forward_s": 0.2, "backward_s": 0.4, "optimizer_s": 0.1, "data_wait_s": 0.0, "idle_s": 0.05}
    rows = [{"step": step, **parts, "exposed_communication_s": seconds} for step, seconds in ((6, 0.2), (7, 0.3))]
    said = words_on_attribution({"per_rank": [{"rank": rank, "steps": rows} for rank in (0, 1)]}, Path("a run"))
    assert said.splitlines() == [
        "profiled steps 6 to 7: 1.000 s each (slower than without --profile) = forward 20%, backward 40%, optimizer "
        "10%, data wait 0%, exposed communication 25%, idle or other 5%",
        "operators: python scripts/profiling/parse_nsys_stats.py --run_dir 'a run'; timeline: open a "
        "run/profiler_logs/rank0.pt.trace.json in ui.perfetto.dev",
    ]


def test_a_run_that_was_instrumented_before_it_was_resumed_stays_so(tmp_path):
    """Its slowed rows stay among the measured ones."""
    for before, now, expected in ((True, False, True), (False, True, True), (False, False, False)):
        settings = stand_in(run_type="baseline")
        facts = example_metrics(instrumented=now, training_config={"math_changes": []})
        recorder = RunRecorder(tmp_path, settings, facts, is_writer=True)
        recorder.restore(example_metrics(instrumented=before), step=10, steps_done=10, elapsed_s=1.0, useful_wall_s=1.0)
        assert recorder.metrics["instrumented"] is expected
