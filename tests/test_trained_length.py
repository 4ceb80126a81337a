"""Weights of a run are judged on the length and the data that they were trained on, where nobody says otherwise."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import REPOSITORY, SEQUENCE, TINY_MODEL, data_flags, write_token_files

from testbed.announce import lengths_of_validation
from testbed.flags import parse_command_line
from testbed.inference.subject import _settle_lengths
from testbed.launch import Launch
from testbed.settings import check_run
from testbed.starting_shape import trained_with, untrained_positions

CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 300, "n_positions": 64}


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder of a run as far as a start looks at it, trained on files that no default names."""
    train, val = write_token_files(tmp_path, 2000, 2000)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(bytes(8))
    settings = {"train_data_path": str(train), "val_data_path": str(val), "seq_length": SEQUENCE}
    record = {"training_config": {"seq_len": SEQUENCE}, "settings": settings}
    (folder / "training_metrics.json").write_text(json.dumps(record))
    return folder


def settings_of(*words: str):
    return check_run(parse_command_line(["--device", "cpu", *words]), Launch(0, 0, 1, 1)).settings


def test_eval_only_takes_over_length_and_data(run):
    settings = settings_of("--eval_only", "--init_from", str(run))
    assert settings.seq_length == SEQUENCE
    assert settings.val_data_path == str(run.parent / "val.bin")
    (said,) = lengths_of_validation(settings)
    assert said.startswith(f"as {run} was trained: --seq_length {SEQUENCE} --train_data_path {run.parent}/train.bin")


def test_what_is_typed_wins_and_is_warned_of(run):
    settings = settings_of("--eval_only", "--init_from", str(run), "--seq_length", "64")
    assert settings.seq_length == 64
    taken, warning = lengths_of_validation(settings)
    assert "--seq_length" not in taken
    assert "--seq_length 64 validates on 64 tokens" in warning and f"from {SEQUENCE + 1} on were never" in warning
    other = ("--val_data_path", str(run.parent / "train.bin"), "--seq_length", "16")
    settings = settings_of("--eval_only", "--init_from", str(run), *other)
    assert settings.val_data_path == str(run.parent / "train.bin") and settings.seq_length == 16
    assert "warning" not in " ".join(lengths_of_validation(settings))


def test_training_on_from_weights_keeps_the_defaults(run, token_files):
    settings = settings_of("--init_from", str(run), *data_flags(token_files), "--seq_length", "64")
    assert settings.val_data_path == str(token_files[1]) and lengths_of_validation(settings) == []
    scratch = settings_of("--eval_only", *TINY_MODEL, *data_flags(token_files), "--seq_length", "48")
    assert scratch.seq_length == 48 and lengths_of_validation(scratch) == []


def test_the_run_of_its_best_weights_is_the_folder_above(run):
    (run / "best").mkdir()
    assert trained_with(run / "best") == trained_with(run) != {}


@pytest.mark.parametrize(
    "record", [[], {}, {"training_config": {"seq_len": True}}, {"training_config": {"seq_len": "8"}, "settings": 1}]
)
def test_a_record_that_says_nothing_gives_nothing(record, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training_metrics.json").write_text(json.dumps(record))
    assert trained_with(tmp_path / "run") == {} == trained_with(tmp_path / "nowhere" / "else")
    older = {"training_config": {"seq_len": 8}, "settings": {"val_data_path": 3}}
    (tmp_path / "run" / "training_metrics.json").write_text(json.dumps(older))
    assert trained_with(tmp_path / "run") == {"seq_length": 8}


def test_the_warning_begins_after_the_last_trained_position():
    assert untrained_positions("x has", 32, 32) == [] == untrained_positions("x has", 99, None)
    assert "positions from 33 on" in untrained_positions("x has", 33, 32)[0]


def test_a_text_ends_where_training_did():
    spec = importlib.util.spec_from_file_location("sample", REPOSITORY / "scripts" / "sample.py")
    sample = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sample)
    assert sample.tokens_to_make(None, 10, 1024, 128) == 118
    assert sample.tokens_to_make(None, 10, 1024, None) == 200 == sample.tokens_to_make(None, 10, 1024, 1024)
    assert sample.tokens_to_make(500, 10, 1024, 128) == 500, "who asks for more gets it, and a warning"
    assert sample.tokens_to_make(None, 130, 1024, 128) == 200
    lengths = SimpleNamespace(quick=False, prompt_tokens=None, new_tokens=None, bleu_max_new_tokens=None)
    _settle_lengths(lengths, 1024, 64)
    assert (lengths.bleu_max_new_tokens, lengths.prompt_tokens, lengths.new_tokens) == (32, 64, 64)
