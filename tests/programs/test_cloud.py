"""The launchers of scripts/cloud: what can be known without an account."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import REPOSITORY, TINY_MODEL, script, write_token_files
from support.settings import typed

PROGRAM = REPOSITORY / "scripts" / "cloud" / "modal_run.py"
SKYPILOT = REPOSITORY / "scripts" / "cloud" / "skypilot.yaml"
needs_modal = pytest.mark.skipif(
    importlib.util.find_spec("modal") is None, reason="the package modal is not installed (pip install modal)"
)
needs_yaml = pytest.mark.skipif(
    importlib.util.find_spec("yaml") is None, reason="the package pyyaml is not installed (pip install pyyaml)"
)
# the fields of a task as SkyPilot documents them (docs.skypilot.co, "SkyPilot YAML"), as far as ours could use them
TASK = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run"}
RESOURCES = {"infra", "accelerators", "cpus", "memory", "use_spot", "disk_size", "network_tier", "autostop"}


@pytest.fixture(scope="module")
def launcher():
    return script("cloud/modal_run.py")


def command(launcher, run_type: str, world_size: int, batch_size: int | None = None, extra: str = "") -> list[str]:
    return launcher.training_command(run_type, world_size, Path("/r/run"), Path("/r/data"), 3, batch_size, extra)


def test_the_command_of_each_run_type_is_one_that_gpt2_takes(launcher, tmp_path):
    """Launcher and flags; the flags are parsed and checked by gpt2.py's own parser."""
    from testbed.config.run_types import STRATEGIES

    write_token_files(tmp_path, suffix="_small")
    for run_type in STRATEGIES:
        ranks = 2 if STRATEGIES[run_type].is_distributed else 1
        words = launcher.training_command(
            run_type, 2, tmp_path / "run", tmp_path, 3, 8, f"{' '.join(TINY_MODEL)} --seq_length 32"
        )
        assert words.count("src/gpt2.py") == 1
        flags = words[words.index("src/gpt2.py") + 1 :]
        settings = typed(flags, ranks).settings
        assert (settings.training.run_type, settings.training.epochs) == (run_type, 3)
        assert settings.batch.global_batch_size == 8
        started = words[: words.index("src/gpt2.py")]
        assert ("deepspeed.launcher.runner" in started) == (run_type == "optimized")
        assert ("--nproc-per-node=2" in started) == (ranks == 2 and run_type != "optimized")


def test_more_flags_are_words(launcher):
    words = command(launcher, "pipeline", 4, extra="--pipeline_schedule 1f1b --sample_prompt 'def f'")
    assert words[-4:] == ["--pipeline_schedule", "1f1b", "--sample_prompt", "def f"]
    assert words[words.index("--pipeline_stages") + 1] == "4"
    assert command(launcher, "pipeline", 4, extra="--pipeline_stages 2").count("--pipeline_stages") == 1
    assert "--global_batch_size" not in command(launcher, "ddp", 2)


@pytest.mark.parametrize(
    ("run_type", "gpu", "world_size", "said"),
    [
        ("ddp", "Z9", 1, "--gpu Z9 is none of T4"),
        ("ddp", "T4", 9, "one machine has 1 to 8 devices"),
        ("baseline", "T4", 2, "baseline is one device"),
        ("pipeline", "T4", 1, "give --world-size 2 or more"),
    ],
)
def test_what_cannot_work_is_refused_before_a_machine_is_rented(launcher, run_type, gpu, world_size, said):
    with pytest.raises(ValueError, match=said):
        launcher.check_request(run_type, gpu, world_size)
    launcher.check_request("ddp", "H100", 8)


def request(tmp_path: Path, name: str) -> dict:
    data = tmp_path / "data" / "stdlib"
    if not data.exists():
        data.mkdir(parents=True)
        write_token_files(data, suffix="_small")
    extra = f"{' '.join(TINY_MODEL)} --seq_length 32 --device cpu --precision fp32 --max_train_steps 2"
    return {
        "run_type": "baseline", "world_size": 1, "epochs": 1, "batch_size": 8, "dataset": "stdlib", "name": name,
        "extra": extra,
    }  # fmt: skip


@pytest.mark.launches
@pytest.mark.slow
def test_what_the_rented_machine_does_runs_here(launcher, tmp_path):
    """The body of the remote function, in this process: the run's files are in the results folder."""
    said = launcher.train_here(request(tmp_path, "modal/run"), str(REPOSITORY), str(tmp_path))
    assert said["status"] == "complete" and said["final_val_loss"] > 0
    assert (tmp_path / "modal" / "run" / "RUN_COMPLETE.txt").is_file()
    again = launcher.train_here(request(tmp_path, "modal/run"), str(REPOSITORY), str(tmp_path))
    assert again == said  # a retry of a run that is complete does nothing


def test_the_corpus_is_made_where_there_is_none(launcher, tmp_path):
    """The words of the two programs, with their own parsers."""
    import download_data
    import preprocess_small

    words = launcher.corpus_command(tmp_path, "stdlib")
    assert words[1] == "download_data.py"
    assert download_data.parse_arguments(words[2:]).output_dir == tmp_path / "dataset"
    (tmp_path / "dataset" / "stdlib").mkdir(parents=True)
    (tmp_path / "dataset" / "stdlib" / "manifest.json").write_text("{}")
    words = launcher.tokens_command(tmp_path)
    assert words[1] == "preprocess_small.py"
    parsed = preprocess_small.parse_arguments(words[2:])
    assert (parsed.input, parsed.output_dir) == (tmp_path / "dataset" / "stdlib" / "manifest.json", tmp_path)


@needs_modal
def test_the_app_builds_and_its_function_runs_here(launcher, tmp_path):
    import modal

    assert isinstance(launcher.app, modal.App) and isinstance(launcher.Machine, modal.Cls)
    assert callable(launcher.main) and launcher.main.info.function_name == "main"
    launcher.Machine.with_options(gpu=launcher.gpu_request("H100", 4))
    said = launcher.Machine().train.local(request(tmp_path, "local"), str(REPOSITORY), str(tmp_path))
    assert said["status"] == "complete"


@pytest.mark.launches
@needs_yaml
def test_the_commands_of_the_task_start_a_run(tmp_path):
    """Its `run`, by bash, with a torchrun that says how it was called: the words are gpt2.py's own."""
    import yaml

    from testbed.config.flags import parse_command_line

    task = yaml.safe_load(SKYPILOT.read_text())
    assert set(task) <= TASK and set(task["resources"]) <= RESOURCES
    assert all(isinstance(value, str) for value in task["envs"].values()), "a number would be no environment variable"
    home = tmp_path / "home"
    (home / "testbed" / "bin").mkdir(parents=True)
    (home / "testbed" / "bin" / "activate").write_text(f'PATH="{tmp_path}:$PATH"\n')
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(
        f'#!/bin/bash\nexec {sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"\n'
    )
    torchrun.chmod(0o755)
    assert task["num_nodes"] == 1, "the working folders of several machines are not one, and the run would be refused"
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    variables = {**os.environ, **task["envs"], **sky, "SKYPILOT_NUM_GPUS_PER_NODE": "4", "HOME": str(home)}
    variables |= {"GPT2_EXTRA_ARGS": "--seq_length 64", "RUN_DIR": "/shared/run"}
    assert subprocess.run(["bash", "-n", "-c", task["setup"]], capture_output=True).returncode == 0
    done = subprocess.run(["bash", "-c", task["run"]], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    words = json.loads(done.stdout)
    launch, flags = words[: words.index("src/gpt2.py")], words[words.index("src/gpt2.py") + 1 :]
    assert launch[launch.index("--master-addr") + 1] == "10.0.0.1" and launch[launch.index("--node-rank") + 1] == "1"
    assert parse_command_line(flags).values["run_type"] == "ddp"
    assert flags[-2:] == ["--seq_length", "64"]
    assert parse_command_line(flags).values["checkpoint_path"] == "/shared/run"
