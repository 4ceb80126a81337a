"""AdamW's state out of a run's checkpoint into nanoGPT's ckpt.pt and back: the same bits, and training goes on."""

from __future__ import annotations

import json

import pytest
import torch
from support.plain_loop import losses_of
from support.programs import run_here

from testbed.checkpoint.formats import read_checkpoint, write_checkpoint
from testbed.checkpoint.manifest import write_manifest
from testbed.errors import InputError
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.optim.optimizer import parameter_groups
from testbed.strategies import state_files

SHAPE = ModelShape(num_layers=2, num_heads=2, embedding_size=16, vocab_size=300, max_position_embeddings=24)
PROGRAM = "scripts/convert_checkpoint.py"
SETTINGS = {
    "num_layers": 2,
    "num_heads": 2,
    "embedding_size": 16,
    "vocab_size": 300,
    "max_position_embeddings": 24,
    "optimizer": "adamw",
    "learning_rate": 2e-3,
    "adam_beta1": 0.8,
    "adam_beta2": 0.97,
    "adam_eps": 1e-7,
    "weight_decay": 0.2,
}


class Run:
    """A model after five steps of training, and the folder of a run that saved it."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.model, self.folder = GPT2(SHAPE), folder
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model.parameters(), 0.2), lr=2e-3, betas=(0.8, 0.97), eps=1e-7
        )
        losses_of(self.model, self.optimizer, range(5))
        self.checkpoint = folder / "checkpoints" / "step_000005"
        self.save(SETTINGS)

    def save(self, settings: dict) -> None:
        self.checkpoint.mkdir(parents=True, exist_ok=True)
        state_files.save(state_files.state_of(self.model, self.optimizer), self.checkpoint, None)
        described = {"step": 5, "elapsed_s": 1.0, "useful_wall_s": 1.0, "world_size": 1, "run_type": "baseline"}
        described |= {"mesh": {}, "settings": settings}
        (self.checkpoint / "checkpoint.json").write_text(json.dumps(described))
        (self.checkpoint / "training_metrics.json").write_text('{"training_config": {"tokenizer": "bpe:300"}}')
        (self.checkpoint / "manifest.json").unlink(missing_ok=True)
        write_manifest(self.checkpoint)


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path / "run")


def in_nanogpt(content: dict) -> tuple[GPT2, torch.optim.Optimizer]:
    """As train.py resumes: weights into a model, the optimizer made as configure_optimizers makes it."""
    model = GPT2(SHAPE)
    weights = {key.removeprefix("transformer."): each for key, each in content["model"].items()}
    assert weights.pop("lm_head.weight").shape == (300, 16)
    weights["wte.weight"] = torch.cat([weights["wte.weight"], torch.zeros(84, 16)])
    model.load_state_dict(weights)
    for group in content["optimizer"]["state"].values():  # nanoGPT has no padding; the model of this test has
        for key in ("exp_avg", "exp_avg_sq"):
            if group[key].shape == (300, 16):
                group[key] = torch.cat([group[key], torch.zeros(84, 16)])
    named = dict(model.named_parameters())
    groups = [
        {"params": [each for each in named.values() if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in named.values() if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    optimizer.load_state_dict(content["optimizer"])
    return model, optimizer


def test_nanogpt_goes_on_where_the_run_was(tmp_path, run):
    """From the checkpoint, whose weights and state belong together, and not from what the run exported later."""
    run.folder.joinpath("config.json").write_text("{}")
    done = run_here(PROGRAM, "--from", run.folder, "--to", tmp_path / "ckpt.pt")
    assert done.returncode == 0 and "are those of step 5" in done.stdout, done.stderr
    content = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert content["iter_num"] == 5
    group = content["optimizer"]["param_groups"][0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (2e-3, (0.8, 0.97), 1e-7, 0.2)
    assert content["optimizer"]["param_groups"][1]["weight_decay"] == 0
    uninterrupted = losses_of(run.model, run.optimizer, range(5, 9))
    assert losses_of(*in_nanogpt(content), range(5, 9)) == pytest.approx(uninterrupted, abs=1e-5)
    content["optimizer"]["state"] = {}
    anew = losses_of(*in_nanogpt(content), range(5, 9))
    assert anew != pytest.approx(uninterrupted, abs=1e-5), "the comparison would not see a lost state"


def test_the_state_of_nanogpt_is_kept_beside_the_weights_and_goes_back(tmp_path, run):
    write_checkpoint(tmp_path / "a.pt", read_checkpoint(run.checkpoint, "it"))
    model, optimizer = in_nanogpt(torch.load(tmp_path / "a.pt", weights_only=True))
    losses_of(model, optimizer, range(5, 7))
    state, named = optimizer.state_dict(), dict(model.named_parameters())
    state["state"][0] = {key: each[:300] if each.dim() else each for key, each in state["state"][0].items()}
    content = {**torch.load(tmp_path / "a.pt", weights_only=True), "optimizer": state}
    torch.save(content, tmp_path / "theirs.pt")
    assert run_here(PROGRAM, "--from", tmp_path / "theirs.pt", "--to", tmp_path / "folder").returncode == 0
    saved = tmp_path / "folder" / "checkpoints" / "step_000007"
    kept = read_checkpoint(saved, "it").optimizer
    assert kept.step == 7 and kept.moments.keys() == {"exp_avg", "exp_avg_sq"}
    for moment, tensors in kept.moments.items():
        for key, tensor in tensors.items():
            assert torch.equal(tensor, optimizer.state[named[key]][moment]), key
    write_checkpoint(tmp_path / "back.pt", read_checkpoint(tmp_path / "folder", "it"))
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["iter_num"] == 7 and back["optimizer"]["param_groups"][0]["betas"] == (0.8, 0.97)
    for number, of_parameter in state["state"].items():
        for key, each in of_parameter.items():
            assert torch.equal(each, back["optimizer"]["state"][number][key]), (number, key)
    content["optimizer"] = {"state": {}}  # and no state of what was there before
    torch.save(content, tmp_path / "theirs.pt")
    words = ["--from", tmp_path / "theirs.pt", "--to", tmp_path / "folder", "--overwrite"]
    assert run_here(PROGRAM, *words).returncode == 0 and not (tmp_path / "folder" / "checkpoints").exists()


def test_another_state_is_left_out_and_named(tmp_path, run):
    write_checkpoint(tmp_path / "a.pt", read_checkpoint(run.checkpoint, "it"))

    def changed(change) -> str:
        content = torch.load(tmp_path / "a.pt", weights_only=True)
        change(content["optimizer"])
        torch.save(content, tmp_path / "b.pt")
        found = read_checkpoint(tmp_path / "b.pt", "it")
        assert found.optimizer is None
        return found.notes[-1]

    assert "two groups" in changed(lambda optimizer: optimizer["param_groups"].pop())
    assert "are not those of this model" in changed(lambda optimizer: optimizer["param_groups"][0]["params"].reverse())
    assert "wte.weight is missing, in exp_avg" in changed(lambda optimizer: optimizer["state"].pop(0))
    assert "number of steps" in changed(lambda optimizer: optimizer["state"][3].update(step=torch.tensor(4.0)))
    for step in (torch.tensor(4.5), torch.zeros(2), "5"):
        assert "number of steps" in changed(
            lambda optimizer, step=step: [each.update(step=step) for each in optimizer["state"].values()]
        )
    for odd in (torch.zeros(2), [torch.zeros(2)] * 10, "01"):
        assert "this model" in changed(lambda optimizer, odd=odd: optimizer["param_groups"][0].update(params=odd))
        assert "two groups" in changed(lambda optimizer, odd=odd: optimizer.update(state=odd))
    assert "NaN" in changed(lambda optimizer: optimizer["state"][3]["exp_avg"].fill_(float("nan")))
    assert "negative" in changed(lambda optimizer: optimizer["state"][3]["exp_avg_sq"].fill_(-1.0))
    assert "no such numbers" in changed(lambda optimizer: optimizer["param_groups"][0].update(lr="high"))
    with pytest.raises(InputError, match="exp_avg is no plain tensor"):
        changed(lambda optimizer: optimizer["state"][3].update(exp_avg=torch.zeros(1).expand(16, 16)))


def test_a_checkpoint_that_cannot_be_converted_is_refused_in_one_sentence(run):
    def said() -> str:
        with pytest.raises(InputError, match=r"^it: ") as caught:
            read_checkpoint(run.folder, "it")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    run.save({**SETTINGS, "embedding_size": 32})
    assert "the model that checkpoint.json names needs" in said()
    run.save({**SETTINGS, "vocab_size": 200})
    assert "wte.weight" in said()
    run.save({**SETTINGS, "num_heads": None})
    assert "does not say the sizes" in said()
    run.save({**SETTINGS, "adam_beta1": "no"})
    assert "no such numbers" in said()
    run.save({**SETTINGS, "optimizer": "muon"})
    found = read_checkpoint(run.folder, "it")
    assert found.optimizer is None and "is not AdamW" in found.notes[0]
    run.checkpoint.joinpath("tensors.json").write_text("{}")
    assert "damaged: tensors.json has 2 bytes" in said()
