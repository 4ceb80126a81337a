"""--resume takes the flags that are not typed from the run's record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.programs import TINY_RUN, data_flags
from support.settings import launch, settings_of, typed

from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.distributed.launch import Launch, command_of_start
from testbed.errors import InputError

RECIPE = ("--learning_rate", "0.003", "--dropout", "0.1", "--save_every", "5", "--global_batch_size", "8")


@pytest.fixture
def recorded(token_files, tmp_path):
    """Return a function that leaves the record of a run."""

    def record(*flags: str, folder: Path = tmp_path / "run", world_size: int = 1) -> Path:
        settings = settings_of(token_files, "--checkpoint_path", str(folder), *flags, world_size=world_size)
        folder.mkdir(exist_ok=True)
        config = settings.as_config() | {"data_sha256": {"train": "0" * 64, "val": "1" * 64}, "of_another_version": 1}
        (folder / "effective_config.json").write_text(json.dumps(config))
        return folder

    return record


def resumed(folder: Path, *flags: str, world_size: int = 1):
    return typed(["--checkpoint_path", str(folder), "--resume", *flags], world_size)


def refusal(folder: Path, *flags: str) -> str:
    with pytest.raises(InputError) as caught:
        resumed(folder, *flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_resume_alone_is_the_recorded_run(recorded, token_files):
    folder = recorded(*RECIPE, "--run_type", "ddp", world_size=2)
    checked = resumed(folder, world_size=2)
    words = [*TINY_RUN, *data_flags(token_files), "--checkpoint_path", str(folder), "--run_type", "ddp", *RECIPE]
    assert checked.settings.as_dict() == typed(words, 2).settings.as_dict()
    assert str(folder / "effective_config.json") in checked.notes[0]


def test_what_is_typed_wins_and_another_run_type_drops_what_only_the_first_has(recorded):
    folder = recorded(*RECIPE, "--run_type", "optimized", "--zero_stage", "2", world_size=2)
    checked = resumed(folder, "--run_type", "ddp", "--learning_rate", "0.5", world_size=2)
    settings, asked = checked.settings, checked.asked
    assert not asked.typed & asked.configured and "dropout" in asked.configured
    assert (settings.training.run_type, settings.deepspeed.zero_stage) == ("ddp", None)
    assert (settings.optimizer.learning_rate, settings.model.dropout) == (0.5, 0.1)


def test_where_to_stop_and_what_measured_are_of_one_start(recorded):
    settings = resumed(recorded("--stop_at_step", "12", "--profile", "--max_train_steps", "16")).settings
    assert (settings.training.stop_at_step, settings.measuring.profile) == (None, False)
    assert settings.last_step == 16


def test_a_run_that_was_moved_or_is_named_by_a_checkpoint(recorded, tmp_path):
    folder = recorded(*RECIPE)
    moved = tmp_path / "moved"
    shutil.move(folder, moved)
    assert resumed(moved).settings.checkpointing.checkpoint_path == str(moved)
    step = moved / "checkpoints" / "step_000005"
    step.mkdir(parents=True)
    begun = typed(["--resume", str(step), "--checkpoint_path", str(tmp_path / "new")]).settings
    assert (begun.model.dropout, begun.checkpointing.checkpoint_path) == (0.1, str(tmp_path / "new"))


def test_a_run_that_has_not_begun_takes_the_defaults(token_files, tmp_path):
    words = [*TINY_RUN, *data_flags(token_files), "--checkpoint_path", str(tmp_path / "new")]
    assert typed([*words, "--resume"]).settings.as_dict() == typed(words).settings.as_dict()


def test_a_refusal_says_that_the_flag_was_recorded(recorded, tmp_path, monkeypatch):
    folder = recorded(*RECIPE)
    config = json.loads((folder / "effective_config.json").read_text())
    (folder / "effective_config.json").write_text(json.dumps(config | {"train_data_path": "gone.bin"}))
    said = refusal(folder)
    assert "--train_data_path gone.bin" in said and f"from {folder / 'effective_config.json'}" in said
    (folder / "effective_config.json").write_text(json.dumps(config | {"dropout": "much"}))
    assert "effective_config.json: dropout cannot be 'much'" in refusal(folder)


def test_ranks_that_see_another_record_are_told_apart(recorded, tmp_path):
    one, two = recorded(*RECIPE), recorded("--dropout", "0.2", folder=tmp_path / "two")
    words = parse_command_line(["--checkpoint_path", str(one), "--resume"])
    assert check_run(words, launch()).flags_sha256 == check_run(words, launch()).flags_sha256
    assert check_run(words, launch()).flags_sha256 != resumed(two).flags_sha256


@pytest.mark.parametrize(
    ("variables", "place", "start"),
    [
        ({}, Launch(0, 0, 1, 1), "python"),
        ({"TORCHELASTIC_RUN_ID": "x"}, Launch(0, 0, 2, 2), "torchrun --nproc-per-node 2"),
        ({"CROSS_RANK": "0"}, Launch(0, 0, 4, 4), "deepspeed --num_gpus 4"),
        (
            {"RANK": "0", "MASTER_ADDR": "n1"},
            Launch(0, 0, 8, 4),
            "torchrun --nproc-per-node 4 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint n1:29500",
        ),
    ],
)
def test_the_recorded_command_can_be_pasted(variables, place, start):
    words = ["src/gpt2.py", "--local_rank=0", "--checkpoint_path", "a b"]
    assert command_of_start(place, words, variables) == f"{start} src/gpt2.py --checkpoint_path 'a b'"
