"""Other trainers as runs of ours: the same losses from the same weights and batches, and files that compare."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.programs import REPOSITORY, TINY_RUN, data_flags, run_here, script
from support.settings import checked_run, typed

from testbed.errors import Failure
from testbed.experiments import peers
from testbed.metrics.file import read_metrics
from testbed.model.gpt2 import GPT2
from testbed.strategies.baseline import Baseline
from testbed.train.batches import TrainingBatches

STEPS = 3
FLAGS = f"--max_train_steps {STEPS} --device cpu --precision fp32 --micro_batch_size_per_gpu 2 --compile off".split()
FLAGS += ["--vocab_size", "384"]  # no row fills the vocabulary up, so that all trainers compute the same
# a clone of nanoGPT as it is used here: the names of its weights and what it is called with
NANOGPT = """
from dataclasses import dataclass
from torch import nn
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        sizes = (config.n_layer, config.n_head, config.n_embd, config.vocab_size, config.block_size)
        shape = ModelShape(*sizes, gelu="exact")
        self.transformer = GPT2(shape, config.dropout)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, inputs, targets):
        return None, self.transformer(inputs, targets) / targets.numel()
"""


def open_run(token_files, *flags: str) -> SimpleNamespace:
    """What a peer takes of a TrainingRun, with our own strategy in it."""
    checked = checked_run(token_files, *FLAGS, *flags)
    torch.manual_seed(checked.settings.training.seed)
    device = torch.device("cpu")
    strategy = Baseline(checked.settings, GPT2(checked.settings.shape), device)
    notes: list[str] = []
    return SimpleNamespace(
        checked=checked,
        settings=checked.settings,
        device=device,
        strategy=strategy,
        checkpoints=SimpleNamespace(strategy=strategy),
        report=SimpleNamespace(recorder=SimpleNamespace(note_other_mathematics=notes.append)),
        notes=notes,
    )


def trained(run: SimpleNamespace) -> tuple[list[float], list[float]]:
    """Return the loss and the gradient norm of each step."""
    batches = TrainingBatches(run.checked.train_file, run.settings, 0, run.device)
    results = [run.strategy.train_step(batches.of_step(step), 1e-3) for step in range(STEPS)]
    batches.close()
    losses = [float(result.loss_sum) / result.num_target_tokens for result in results]
    return losses, [float(result.grad_norm) for result in results]


@pytest.mark.parametrize(
    ("name", "gelu"), [("transformers-loop", "tanh"), ("transformers-loop", "exact"), ("nanogpt", "exact")]
)
def test_a_peer_has_our_weights_batches_and_mathematics(token_files, tmp_path, name, gelu):
    (tmp_path / "model.py").write_text(NANOGPT)
    ours, theirs = (open_run(token_files, "--gelu", gelu) for _ in range(2))
    peers.use_nanogpt(theirs, tmp_path) if name == "nanogpt" else peers.use_transformers(theirs)
    before = ours.strategy.full_state_dict()
    loaded = theirs.strategy.full_state_dict()
    assert before.keys() == loaded.keys()
    assert all(torch.equal(before[key], loaded[key]) for key in before)
    losses, norms = trained(theirs)
    expected_losses, expected_norms = trained(ours)
    assert losses == pytest.approx(expected_losses, abs=2e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert theirs.notes == [], "the mathematics is equal: no row fills the vocabulary up"
    if name == "transformers-loop":  # so small a model's losses do not tell the two forms apart
        assert theirs.strategy.model.config.activation_function == {"tanh": "gelu_new", "exact": "gelu"}[gelu]
    assert theirs.checkpoints.strategy is theirs.strategy, "a checkpoint of ours would hold weights that nobody trained"
    with pytest.raises(Failure, match="saves no checkpoints"):
        theirs.strategy.save_checkpoint(tmp_path)


def test_unequal_mathematics_of_nanogpt_is_noted(token_files, tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT)
    run = open_run(token_files, "--vocab_size", "400")
    peers.use_nanogpt(run, tmp_path)
    gelu = "exact GELU in place of the tanh form (give --gelu exact for equal work)"
    assert run.notes == [f"nanoGPT: {gelu}, and the rows that fill the vocabulary up are in its softmax"]


def test_evaluation_weighs_micro_batches_by_their_tokens(token_files):
    ours, theirs = open_run(token_files), open_run(token_files)
    peers.use_transformers(theirs)
    batches = TrainingBatches(ours.checked.train_file, ours.settings, 0, ours.device).of_step(0)
    a, b = (run.strategy.evaluate(batches) for run in (ours, theirs))
    assert a.num_target_tokens == b.num_target_tokens
    assert float(b.loss_sum) == pytest.approx(float(a.loss_sum), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["llm.c"], "'llm.c' is not a peer; give transformers"),
        (["nanogpt=nowhere"], "nanogpt=nowhere names no clone of nanoGPT"),
        (["transformers-loop", "--optimizer", "muon"], "--optimizer muon is of src/gpt2.py alone"),
        (["transformers-loop", "--save_every", "2"], "--save_every 2 is of src/gpt2.py alone"),
        (["transformers-loop", "--label_smoothing", "0.1"], "--label_smoothing 0.1 is of src/gpt2.py alone"),
        (["transformers", "--eval_every", "2"], "--eval_every 2: transformers' Trainer is validated at the end"),
        (["transformers-loop", "--train_data_path", "nowhere.bin"], "--train_data_path nowhere.bin does not exist"),
    ],
)
def test_what_another_trainer_cannot_do_is_refused(token_files, words, sentence):
    done = run_here("scripts/more/train_peer.py", *words[:1], *TINY_RUN, *data_flags(token_files), *words[1:])
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


def test_no_other_trainer_is_compared_on_pairs(pair_files):
    """They would learn the prompts too, and that is other work."""
    with pytest.raises(ValueError, match="references alone are learned"):
        script("more/train_peer.py").check_work("transformers", checked_run(pair_files))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--peers", "a,a"], "--peers a,a must name at least one trainer, and each once"),
        (["--", "--checkpoint_path", "x"], "--checkpoint_path is set by this program itself"),
        (["--", "--optimiser", "x"], "--optimiser"),
    ],
)
def test_what_is_typed_wrong_is_refused_before_anything_runs(tmp_path, words, sentence):
    done = run_here("scripts/more/compare_peers.py", "--out_dir", tmp_path / "out", *words)
    assert done.returncode == 2 and sentence in done.stderr and not (tmp_path / "out").exists()


def test_all_trainers_get_the_same_flags(token_files, tmp_path):
    words = ["--dry_run", "--out_dir", tmp_path, "--peers", "transformers,nanogpt=clone"]
    done = run_here("scripts/more/compare_peers.py", *words, "--", *TINY_RUN, *data_flags(token_files), *FLAGS)
    ours, trainer, nanogpt = (line.split() for line in done.stdout.splitlines())
    assert ours[1] == "src/gpt2.py" and trainer[1:3] == ["scripts/more/train_peer.py", "transformers"]
    assert nanogpt[2] == "nanogpt=clone" and nanogpt[-1].endswith("/nanogpt/run_1")
    assert ours[2:-1] == trainer[3:-1] == nanogpt[3:-1]
    typed(ours[2:])


@pytest.mark.launches
@pytest.mark.slow
def test_runs_of_two_trainers_agree_step_by_step_and_are_compared(token_files, tmp_path):
    words = ["--out_dir", tmp_path, "--repeats", "1", "--threads", "1", "--peers", "transformers,nanogpt=nowhere"]
    command = [sys.executable, REPOSITORY / "scripts" / "more" / "compare_peers.py", *words, "--"]
    command += [*TINY_RUN, *data_flags(token_files), *FLAGS, "--timing_warmup_steps", "1"]
    # other tests of this process join groups, and accelerate would take what they leave in the environment for a launch
    launch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    plain = {name: value for name, value in os.environ.items() if name not in launch}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=REPOSITORY, env=plain
    )
    assert done.returncode == 1 and "could not measure nanogpt=nowhere: " in done.stderr, done.stdout + done.stderr
    assert "names no clone of nanoGPT" in done.stderr and "Not enough repeats for a claim" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr and "NOT EQUAL WORK" not in done.stdout
    assert "They differ in: trainer" in done.stdout, done.stdout
    ours, theirs = (read_metrics(path / "run_1" / "training_metrics.json") for path in folders(tmp_path))
    for name, tolerance in (("loss", 2e-5), ("grad_norm", 1e-3), ("lr", 0)):
        values = [[row[name] for row in metrics["steps"]] for metrics in (ours, theirs)]
        assert values[1] == pytest.approx(values[0], abs=tolerance), name
    assert theirs["evaluations"][-1]["val_loss"] == pytest.approx(ours["evaluations"][-1]["val_loss"], abs=2e-5)
    assert "train_peer.py transformers" in theirs["command_line"]


def folders(place: Path) -> tuple[Path, Path]:
    return place / "ours", place / "transformers"
