"""--resume of a folder that convert_checkpoint.py wrote: its step, weights and AdamW's state go on."""

from __future__ import annotations

import json

import pytest
import torch
from support.programs import TINY_MODEL, TINY_RUN, data_flags, run_here
from support.settings import refusal, settings_of

from testbed.checkpoint.adamw_state import MOMENTS, AdamWState, Rates, expected
from testbed.checkpoint.decide import of_converted
from testbed.checkpoint.folders import read_description
from testbed.checkpoint.formats import Checkpoint, write_checkpoint
from testbed.errors import InputError
from testbed.inference.loading import unfinished
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

ENOUGH = 1e-5
STOP, STEPS = 6, 12


@pytest.fixture
def folder(tmp_path, token_files):
    """A converted folder for the data of the tests, of a model that was updated five times."""
    vocabulary = settings_of(token_files).model.vocab_size
    shape = ModelShape(2, 2, 32, vocabulary, 64)
    moments = {name: {key: torch.zeros(each.shape) for key, each in expected(shape).items()} for name in MOMENTS}
    state = AdamWState(moments, 5, Rates(adam_beta1=0.8))
    write_checkpoint(tmp_path / "converted", Checkpoint(GPT2(shape).state_dict(), shape, optimizer=state))
    return tmp_path / "converted"


def resumed(folder, settings):
    return of_converted(read_description(folder / "checkpoints" / "step_000005"), settings)


def test_its_shape_is_that_of_the_run(folder, token_files, capsys):
    settings = settings_of(token_files, "--resume", str(folder))
    assert (settings.model.init_from, settings.model.embedding_size) == (str(folder), 32)
    assert unfinished(folder) is None, "scripts/sample.py reads the folder's weights"
    named = settings_of(token_files, "--resume", str(folder / "checkpoints" / "step_000005"))
    assert named.model == settings.model
    checkpoint = resumed(folder, settings)
    assert (checkpoint.step, checkpoint.world_size) == (5, 0)
    said = capsys.readouterr().out
    assert "was made with --adam_beta1 0.8" in said
    assert "its last step had a learning rate of" in said and "the default (--learning_rate)" in said
    resumed(folder, settings_of(token_files, "--resume", str(folder), "--learning_rate", "1e-3"))
    assert "learning rate" not in capsys.readouterr().out, "it was typed"
    assert "does not fit the weights" in refusal(token_files, "--resume", str(folder), "--embedding_size", "64")


def test_what_cannot_go_on_is_refused(folder, token_files):
    with pytest.raises(InputError, match=r"AdamW's state, and this start has --optimizer muon"):
        resumed(folder, settings_of(token_files, "--resume", str(folder), "--optimizer", "muon"))
    with pytest.raises(InputError, match=r"holds another model: give --num_layers 2, --num_heads 2"):
        resumed(folder, settings_of(token_files, *TINY_MODEL, "--init_from", "scratch", "--num_layers", "3"))
    for flags in (["--resume", "auto"], ["--resume", str(folder)]):
        said = refusal(token_files, *flags, "--checkpoint_path", str(folder))
        assert said.startswith(f"--checkpoint_path {folder}, which this run writes, holds the weights"), said


def losses(folder) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in json.loads((folder / "training_metrics.json").read_text())["steps"]}


@pytest.mark.launches
@pytest.mark.slow
def test_training_goes_on_as_if_it_had_not_been_converted(ranks, token_files, tmp_path):
    work = f"--global_batch_size 4 --max_train_steps {STEPS} --sample_tokens 0".split()
    data = [*data_flags(token_files), *work]

    def train(words: list[str], name: str, number: int) -> None:
        done = ranks.run_program(
            [*words, "--checkpoint_path", str(tmp_path / name)], tmp_path / f"{name}_ranks", number
        )
        assert done.returncode == 0, done.stderr

    train([*TINY_RUN, *data, "--save_every", str(STOP)], "whole", 1)
    saved = tmp_path / "whole" / "checkpoints" / f"step_{STOP:06d}"
    for source, to in ((saved, tmp_path / "ckpt.pt"), (tmp_path / "ckpt.pt", tmp_path / "converted")):
        assert run_here("scripts/convert_checkpoint.py", "--from", source, "--to", to).returncode == 0
    words = [*TINY_RUN[len(TINY_MODEL) :], *data, "--resume", str(tmp_path / "converted")]  # not its shape
    uninterrupted = losses(tmp_path / "whole")
    for name, number in {"baseline": 1, "fsdp": 2, "optimized": 2}.items():
        train([*words, "--run_type", name], name, number)
        after = losses(tmp_path / name)
        assert after.keys() == set(range(STOP + 1, STEPS + 1))
        assert max(abs(after[step] - uninterrupted[step]) for step in after) < ENOUGH
        assert not list((tmp_path / name / "checkpoints").glob(".*"))
