"""--resume of a folder that convert_checkpoint.py wrote: its step, weights and AdamW's state go on."""

from __future__ import annotations

import json

import pytest
import torch
from support.plain_loop import losses_of
from support.programs import TINY_MODEL, TINY_RUN, data_flags, run_here
from support.settings import checked_run, refusal, settings_of

from testbed.checkpoint.adamw_state import EMBEDDING, MOMENTS, AdamWState, Rates, expected, unpadded
from testbed.checkpoint.converted import described
from testbed.checkpoint.folders import read_description
from testbed.checkpoint.formats import Checkpoint, read_checkpoint, write_checkpoint
from testbed.errors import InputError
from testbed.inference.loading import unfinished
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.optim.optimizer import parameter_groups
from testbed.train.batches import TrainingBatches

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
    return described(read_description(folder / "checkpoints" / "step_000005"), settings)


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
    with pytest.raises(InputError, match=rf"holds another model \(.*; give --resume {folder} and no shape"):
        resumed(folder, settings_of(token_files, *TINY_MODEL, "--init_from", "scratch", "--num_layers", "3"))
    path = folder / "checkpoints" / "step_000005" / "tensors.json"
    path.write_text(path.read_text()[:-8])
    with pytest.raises(InputError, match=r"step_000005: it is damaged: tensors.json"):
        read_checkpoint(folder, "it")


def saved_by_nanogpt(model: GPT2, optimizer: torch.optim.Optimizer, shape: ModelShape) -> dict:
    """What nanoGPT's train.py saves of a model that it compiled: no rows for tokens that there are none of."""
    weights, state = unpadded(model.state_dict(), shape), optimizer.state_dict()
    named = {f"_orig_mod.transformer.{key}": each for key, each in weights.items()}
    of_embedding = {key: each[: shape.vocab_size] if each.dim() else each for key, each in state["state"][0].items()}
    return {
        "model": {**named, "_orig_mod.lm_head.weight": weights[EMBEDDING]},
        "optimizer": {**state, "state": {**state["state"], 0: of_embedding}},
        "model_args": {
            "n_layer": shape.num_layers,
            "n_head": shape.num_heads,
            "n_embd": shape.embedding_size,
            "block_size": shape.max_position_embeddings,
            "bias": True,
            "vocab_size": shape.vocab_size,
            "dropout": 0.0,
        },
        "iter_num": STOP,
        "best_val_loss": 1e9,
        "config": {},
    }


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


@pytest.mark.launches
@pytest.mark.slow
def test_training_goes_on_from_what_nanogpt_saved(ranks, token_files, tmp_path):
    """A loop as nanoGPT's saves what its train.py does and goes on; a run goes on from the file."""
    work = f"--global_batch_size 4 --micro_batch_size_per_gpu 4 --max_train_steps {STEPS} --sample_tokens 0"
    work += " --learning_rate 2e-3 --lr_schedule constant --warmup_steps 0 --weight_decay 0.1 --adam_beta2 0.95"
    flags = [*TINY_RUN[len(TINY_MODEL) :], *data_flags(token_files), *work.split()]
    checked = checked_run(token_files, *TINY_MODEL, *flags)
    batches = TrainingBatches(checked.train_file, checked.settings, 0, torch.device("cpu"))
    micros = [batches.of_step(step)[0] for step in range(STEPS)]
    batches.close()
    tokens = [torch.cat([micro.inputs, micro.targets[:, -1:]], 1) for micro in micros]
    torch.manual_seed(3)
    model = GPT2(checked.settings.shape)
    optimizer = torch.optim.AdamW(parameter_groups(model.parameters(), 0.1), lr=2e-3, betas=(0.9, 0.95))
    losses_of(model, optimizer, range(STOP), tokens.__getitem__)
    torch.save(saved_by_nanogpt(model, optimizer, checked.settings.shape), tmp_path / "ckpt.pt")
    uninterrupted = losses_of(model, optimizer, range(STOP, STEPS), tokens.__getitem__)
    done = run_here("scripts/convert_checkpoint.py", "--from", tmp_path / "ckpt.pt", "--to", tmp_path / "converted")
    assert done.returncode == 0, done.stderr
    words = [*flags, "--resume", str(tmp_path / "converted"), "--checkpoint_path", str(tmp_path / "further")]
    done = ranks.run_program(words, tmp_path / "ranks", 1)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "further") == pytest.approx(dict(enumerate(uninterrupted, STOP + 1)), abs=ENOUGH)
