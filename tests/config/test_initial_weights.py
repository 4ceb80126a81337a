"""Trained weights decide the model, its tokenizer and what is said of the learning rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.programs import data_flags
from support.settings import typed

from testbed.data.token_file import TokenFileWriter
from testbed.errors import InputError

NANO = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 300, "n_positions": 1024}


@pytest.fixture
def weights(tmp_path) -> Path:
    """A folder as far as a start looks at it before torch."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(NANO))
    (folder / "model.safetensors").write_bytes(bytes(8))
    return folder


def start(token_files, weights, *flags: str):
    return typed(
        ["--device", "cpu", "--seq_length", "32", *data_flags(token_files), "--init_from", str(weights), *flags]
    )


def test_weights_decide_the_size(token_files, weights):
    assert start(token_files, weights).settings.model.size == "nano"
    same = ("--model", "gpt2", "--num_layers", "4", "--num_heads", "4", "--embedding_size", "128")
    assert start(token_files, weights, *same).settings.model.size == "nano"
    for model in ("gpt2", "gpt2-xl"):
        with pytest.raises(InputError, match=rf"^--model {model} does not fit the weights of .* \(nano\); leave"):
            start(token_files, weights, "--model", model)
    (weights / "config.json").write_text(json.dumps(NANO | {"n_layer": 3}))
    assert start(token_files, weights, "--model", "nano", "--num_layers", "3").settings.shape.num_layers == 3
    with pytest.raises(InputError, match=r"^--model nano does not fit .* \(n_layer=3, n_head=4, n_embd=128\)"):
        start(token_files, weights, "--model", "nano")


def test_runs_of_before_recorded_the_default_size(token_files, weights, tmp_path):
    now = start(token_files, weights).settings
    (tmp_path / "effective_config.json").write_text(json.dumps(now.as_config() | {"model": "gpt2"}))
    assert typed(["--config", str(tmp_path / "effective_config.json")]).settings.model.size == "nano"


def test_the_peak_from_scratch_is_said_unless_one_was_given(token_files, weights):
    (note,) = start(token_files, weights).notes
    assert "peak learning rate is 0.004, the default for training from scratch" in note
    assert "--learning_rate 0.0004" in note
    assert start(token_files, weights, "--learning_rate", "0.004").notes == ()
    assert start(token_files, weights, "--eval_only").notes == ()
    assert typed(["--model", "nano", "--seq_length", "32", *data_flags(token_files)]).notes == ()


def test_other_tokens_lead_to_the_weights_own_tokenizer(weights, tmp_path):
    """`--tokenizer bpe:300` would train another BPE of that size."""
    files = tmp_path / "train.bin", tmp_path / "val.bin"
    for path in files:
        with TokenFileWriter(path, 400, "bpe:400", 399) as writer:
            writer.append_document([*range(390)] * 40)
    unknown = (
        f"; tokenize the text with their tokenizer's file, which {weights} lacks: preprocess_small.py --tokenizer FILE"
    )
    own = f"; tokenize the text with preprocess_small.py --tokenizer {weights}/tokenizer.json"
    for name in ("bpe:300", None):
        (weights / "config.json").write_text(json.dumps(NANO | {"tokenizer": name}))
        for ending in (unknown, own):
            with pytest.raises(InputError) as caught:
                start(files, weights)
            assert str(caught.value).endswith(ending)
            (weights / "tokenizer.json").write_text("{}")
        (weights / "tokenizer.json").unlink()
