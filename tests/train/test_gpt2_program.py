"""src/gpt2.py as a person starts it: what it leaves behind, what it refuses, how it resumes."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from support.programs import (
    SEQUENCE,
    TINY_RUN,
    VOCABULARY,
    data_flags,
    deepspeed_command,
    python_command,
    run_program,
    torchrun_command,
    write_token_files,
)
from support.settings import typed

from testbed.distributed.rendezvous import free_port
from testbed.metrics.file import read_metrics
from testbed.train.reasons import model_does_not_fit

pytestmark = pytest.mark.launches

SHORT_RUN = ["--global_batch_size", "16", "--max_train_steps", "7", "--timing_warmup_steps", "2"]


def flags_of(token_files, directory: Path, *more: str) -> list[str]:
    return [*TINY_RUN, *data_flags(token_files), *SHORT_RUN, "--checkpoint_path", str(directory), *more]


@pytest.fixture(scope="module")
def baseline_run(token_files, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("baseline") / "run"
    flags = flags_of(token_files, directory, "--eval_every", "3", "--keep_best")
    done = run_program([sys.executable, "-X", "importtime", *python_command()[1:], *flags])
    assert done.returncode == 0, done.stderr
    (directory.parent / "imported.txt").write_text(done.stderr)
    return directory


def test_the_run_leaves_its_files(baseline_run):
    imported = (baseline_run.parent / "imported.txt").read_text()
    assert "testbed.memory_model" in imported and "testbed.planner" not in imported
    names = {path.name for path in baseline_run.iterdir()}
    assert names == {
        *("training_metrics.json", "RUN_COMPLETE.txt", "launcher_metadata.json", "effective_config.json"),
        *("model.safetensors", "config.json", "best", "checkpoints", ".lock"),
    }
    line = (baseline_run / "RUN_COMPLETE.txt").read_text()
    assert line.startswith(f"[Rank 0] RUN_COMPLETE checkpoint_path={baseline_run} world_size=1 tokens_per_sec=")


def test_every_step_is_in_the_metrics(baseline_run):
    metrics = read_metrics(baseline_run / "training_metrics.json")
    rows = metrics["steps"]
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert [row["is_warmup"] for row in rows] == [True] * 2 + [False] * 5
    assert all(0 <= row["data_wait_s"] < row["step_time_s"] for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"], "it learns"
    measured = [row["step_time_s"] for row in rows[2:]]
    timing, tokens_per_s = metrics["timing"], metrics["summary"]["mean_tokens_per_sec_global"]
    assert timing["step_time_p50_sec"] == pytest.approx(np.median(measured))
    assert tokens_per_s == pytest.approx(5 * 16 * SEQUENCE / sum(measured))
    assert timing["wall_clock_tokens_per_sec_global"] <= tokens_per_s
    assert [row["step"] for row in metrics["evaluations"]] == [3, 6, 7]
    assert metrics["flops"]["mfu"] > 0 and metrics["flops"]["peak_source"].startswith("measured")
    assert metrics["memory"]["per_rank"][0]["peak_rss_bytes"] > 10_000_000
    assert metrics["status"] == "complete" and metrics["completion"]["printed_marker"]


@pytest.mark.slow
def test_two_deepspeed_ranks_do_the_work_of_the_baseline(baseline_run, token_files, tmp_path):
    flags = flags_of(token_files, tmp_path / "run", "--run_type", "optimized", "--eval_every", "3")
    done = run_program([*deepspeed_command(2, free_port()), *flags])
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (read_metrics(run / "training_metrics.json") for run in (baseline_run, tmp_path / "run"))
    assert two["hardware"]["world_size"] == 2
    assert all(len(row["per_rank_step_time_s"]) == 2 for row in two["steps"])
    assert all(row["step_time_s"] == max(row["per_rank_step_time_s"]) for row in two["steps"])
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in two["steps"]] == pytest.approx([row[key] for row in one["steps"]], abs=5e-6)
    for ours, theirs in zip(one["evaluations"], two["evaluations"], strict=True):
        assert ours["num_target_tokens"] == theirs["num_target_tokens"]
        assert ours["val_loss"] == pytest.approx(theirs["val_loss"], abs=5e-6)
    assert one["command_line"].startswith("python ") and two["command_line"].startswith("deepspeed --num_gpus 2 ")
    assert "--local_rank" not in two["command_line"]
    effective = two["deepspeed_config"]["effective"]
    assert effective["zero_optimization"]["stage"] == 1 and effective["gradient_clipping"] == 1.0
    assert one["deepspeed_config"] is None


def test_transformers_opens_the_weights_and_finds_our_validation_loss(baseline_run, token_files):
    """Every window in file order, by hand; fp32, so within 1e-4."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(baseline_run).eval()
    config = json.loads((baseline_run / "config.json").read_text())
    assert config["vocab_size"] == VOCABULARY == model.transformer.wte.weight.shape[0]
    assert config["eos_token_id"] == VOCABULARY - 1
    tokens = np.fromfile(token_files[1], dtype="<u2").astype(np.int64)
    windows = [torch.from_numpy(tokens[i : i + SEQUENCE + 1]) for i in range(0, len(tokens) - SEQUENCE, SEQUENCE)]
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(window[None, :-1]).logits[0], window[1:]).item()
            for window in windows
        ]
    recorded = read_metrics(baseline_run / "training_metrics.json")["summary"]["final_val_loss"]
    assert np.mean(losses) == pytest.approx(recorded, abs=1e-4)


@pytest.fixture
def program(ranks, tmp_path):
    """Run gpt2.py on one rank, in a process that has PyTorch already."""
    numbers = itertools.count()
    return lambda flags, cwd=None: ranks.run_program(flags, tmp_path / f"start_{next(numbers)}", cwd=cwd)


def validated(program, source: Path, directory: Path, *more: str, cwd: Path | None = None) -> tuple[str, dict]:
    """Return what --eval_only says of the weights in a folder, and the file that it writes."""
    flags = ["--precision", "fp32", "--device", "cpu", "--init_from", str(source), "--eval_only", *more]
    done = program([*flags, "--checkpoint_path", str(directory)], cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout, read_metrics(directory / "training_metrics.json")


@pytest.mark.slow
def test_eval_only_gives_exactly_the_loss_of_a_run_that_validated_on_a_part(program, token_files, tmp_path):
    """From another folder: the run's relative path leads nowhere there, or to other tokens."""
    flags = [*TINY_RUN, *SHORT_RUN, "--train_data_path", "train.bin", "--val_data_path", "val.bin"]
    flags += ["--max_val_steps", "1", "--global_batch_size", "8", "--max_train_steps", "3", "--sample_tokens", "0"]
    run, other = tmp_path / "run", tmp_path / "other"
    done = program([*flags, "--checkpoint_path", str(run)], token_files[0].parent)
    assert done.returncode == 0, done.stderr
    first = read_metrics(run / "training_metrics.json")
    said, again = validated(program, run, tmp_path / "a", "--val_data_path", str(token_files[1]), cwd=tmp_path)
    assert "--global_batch_size 8 --max_val_steps 1" in said and "not the run's data" not in said
    assert again["evaluations"][0]["num_sequences"] == first["evaluations"][-1]["num_sequences"] == 8
    assert again["summary"]["final_val_loss"] == first["summary"]["final_val_loss"]
    other.mkdir()
    write_token_files(other, 2000, 1000)  # under the recorded names
    said, _ = validated(program, run, tmp_path / "b", cwd=other)
    assert f"warning: {other}/val.bin is validated, which is not the run's data" in said
    assert "--val_data_path val.bin" not in said


def test_the_effective_config_repeats_the_run(program, baseline_run, tmp_path):
    config = ["--config", str(baseline_run / "effective_config.json"), "--checkpoint_path", str(tmp_path / "again")]
    done = program(config)
    assert done.returncode == 0, done.stderr
    first, again = (read_metrics(path / "training_metrics.json") for path in (baseline_run, tmp_path / "again"))
    assert [row["loss"] for row in again["steps"]] == [row["loss"] for row in first["steps"]]


def test_the_effective_config_of_other_data_is_refused_unless_they_are_typed(
    program, baseline_run, token_files, tmp_path
):
    config = json.loads((baseline_run / "effective_config.json").read_text())
    (path := tmp_path / "config.json").write_text(json.dumps(config | {"data_sha256": {"train": "0" * 64}}))
    flags = ["--config", str(path), "--checkpoint_path", str(tmp_path / "again")]
    done = program(flags)
    assert done.returncode == 2 and "was recorded with other data" in done.stderr and "Traceback" not in done.stderr
    assert "--train_data_path" in done.stderr and not (tmp_path / "again").exists()
    done = program([*flags, "--train_data_path", str(token_files[0])])
    assert done.returncode == 0, done.stderr


def test_a_finished_run_is_resumed_by_its_folder_alone_and_can_be_extended(program, token_files, tmp_path):
    run = tmp_path / "run"
    done = program(flags_of(token_files, run))
    assert done.returncode == 0 and "no --save_every: a crash before step 7 loses all steps" in done.stdout, done.stderr
    alone = ["--checkpoint_path", str(run), "--resume"]
    done = program(alone)
    assert done.returncode == 0 and "already complete, 7 steps" in done.stdout, done.stderr
    done = program([*alone, "--max_train_steps", "9", "--allow-setting-change"])
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(run / "training_metrics.json")
    assert [row["step"] for row in metrics["steps"]] == list(range(1, 10))
    assert metrics["segments"][1]["resumed_from"].endswith("step_000007")
    assert metrics["training_config"]["seq_len"] == SEQUENCE, "as recorded, not the default"


def test_a_held_folder_is_refused_unless_overwritten(program, baseline_run, token_files):
    before = (baseline_run / "training_metrics.json").read_bytes()
    done = program(flags_of(token_files, baseline_run))
    assert done.returncode == 2 and "--overwrite" in done.stderr
    assert (baseline_run / "training_metrics.json").read_bytes() == before


def test_a_run_that_diverges_stops_and_keeps_nothing_of_that_step(program, token_files, tmp_path):
    directory = tmp_path / "run"
    flags = flags_of(token_files, directory, "--learning_rate", "1e38", "--max_grad_norm", "0", "--warmup_steps", "0")
    done = program(flags)
    assert done.returncode == 1 and "step" in done.stderr and "Traceback" not in done.stderr
    metrics = read_metrics(directory / "training_metrics.json")
    assert metrics["status"] == "failed"
    assert len(metrics["steps"]) < 7 and all(np.isfinite(row["loss"]) for row in metrics["steps"])
    assert f"step {len(metrics['steps']) + 1}" in metrics["failure"]["reason"]
    assert "RUN_FAILED" in (directory / "RUN_FAILED.txt").read_text()
    assert not (directory / "model.safetensors").exists() and not (directory / "RUN_COMPLETE.txt").exists()


@pytest.mark.parametrize("flags", [["--vocab_size", "200"], ["--precision", "fp16"]], ids=" ".join)
def test_what_the_data_or_the_device_refuses_is_one_sentence_too(program, token_files, tmp_path, flags):
    """Rank 0 reads every token id. fp16 needs a GPU."""
    done = program(flags_of(token_files, tmp_path / "run", *flags))
    assert done.returncode == 2 and done.stderr.startswith("gpt2.py: error: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "run" / "training_metrics.json").exists()


def test_a_model_without_room_is_not_blamed_on_the_batch(program, token_files, tmp_path):
    """4 TB of embeddings. Where the memory is there and other processes hold it, building the model fails."""
    folder = tmp_path / "run"
    words = flags_of(token_files, folder, "--vocab_size", "31000000000")
    done = program(words)
    assert done.returncode == 2 and "--micro_batch_size" not in done.stderr, done.stderr
    assert (
        "cannot fit: weights, gradients and optimizer state alone take" in done.stderr and "--vocab_size" in done.stderr
    )
    said = str(model_does_not_fit(typed(words).settings, MemoryError("no room")))
    assert "the model's weights do not fit (992,0" in said and "--vocab_size 31000000000" in said


@pytest.mark.slow
def test_under_a_launcher_one_rank_speaks(token_files, tmp_path):
    """torchrun turns the rank's 2 into 1; the sentence must be there once, whatever rank ends first, and torchrun's own
    forty lines close with it."""
    flags = flags_of(token_files, tmp_path / "run", "--run_type", "ddp", "--seq_length", "128")
    done = run_program([*torchrun_command(2), *flags])
    assert done.returncode == 1
    assert done.stderr.count("gpt2.py: error: --seq_length 128") == 1
    assert "  traceback : --seq_length 128" in "\n".join(done.stderr.splitlines()[-3:]), done.stderr
    done = run_program([*deepspeed_command(2, free_port()), *flags])
    assert done.returncode == 2
    assert done.stderr.count("gpt2.py: error: --seq_length 128") == 1


def processes_of(directory: Path) -> list[psutil.Process]:
    """Processes whose command line names the run's folder, launchers and ranks alike."""
    processes = psutil.process_iter(["cmdline", "status"])
    named = [each for each in processes if str(directory) in " ".join(each.info["cmdline"] or ())]
    return [each for each in named if each.pid != os.getpid() and each.info["status"] != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for left processes in /proc, which this system lacks")
@pytest.mark.parametrize(
    ("launcher", "run_type", "sent", "code"),
    [  # the exit codes are those of docs/faults.md
        ("python", "baseline", signal.SIGINT, 130),
        ("torchrun", "ddp", signal.SIGTERM, 1),
        ("torchrun", "ddp", signal.SIGKILL, -signal.SIGKILL),
        ("deepspeed", "optimized", signal.SIGTERM, -signal.SIGTERM),  # it dies at once, its per-node launcher lives on
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_stopped_run_leaves_whole_files_and_no_process(launcher, run_type, sent, code, token_files, tmp_path):
    """Ctrl-C goes to the whole foreground group, as a terminal does it; the others to the launcher alone. The process
    without a launcher starts as in the background of a script, where Ctrl-C is ignored to begin with."""
    import subprocess

    ignored = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN) if launcher == "python" else None
    two_ranks = {"torchrun": torchrun_command(2), "deepspeed": deepspeed_command(2, free_port())}
    command = two_ranks.get(launcher, python_command())
    directory = tmp_path / "run"
    flags = flags_of(token_files, directory, "--run_type", run_type, "--max_train_steps", "100000", "--epochs", "9999")
    with (tmp_path / "said.txt").open("w") as said:
        process = subprocess.Popen(
            [*command, *flags], stdout=said, stderr=said, start_new_session=True, preexec_fn=ignored
        )
        metrics_file = directory / "training_metrics.json"
        deadline = time.monotonic() + 180
        while "step     1/" not in (tmp_path / "said.txt").read_text():  # a rank that still starts up ends at once
            if process.poll() is not None or time.monotonic() > deadline:
                for each in processes_of(directory):
                    each.kill()  # else it would train on beside the other tests
                pytest.fail((tmp_path / "said.txt").read_text()[-3000:])
            time.sleep(0.2)
        if sent is signal.SIGINT:
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)
        process.wait(timeout=45)
    assert process.returncode == code
    deadline = time.monotonic() + 30
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = processes_of(directory)
    for each in left:
        each.kill()
    assert left == [], (tmp_path / "said.txt").read_text()[-3000:]
    metrics = read_metrics(metrics_file)
    # the death of a launcher is a SIGTERM to its ranks: they save the step that they are in
    last = metrics["steps"][-1]["step"]
    assert f" step={last} checkpoint=" in (directory / "RUN_PREEMPTED.txt").read_text()
    assert (directory / "checkpoints" / f"step_{last:06d}" / "checkpoint.json").exists()
    assert metrics["status"] == "preempted" and not (directory / "RUN_FAILED.txt").exists()
    assert not list(directory.glob("*.tmp")) and not list(directory.glob(".*.tmp"))
    assert launcher != "python" or "Ctrl-C: the step is finished" in (tmp_path / "said.txt").read_text()
