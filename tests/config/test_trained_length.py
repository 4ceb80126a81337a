"""Weights of a run are judged on the length and the data that they were trained on, where nobody says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.programs import SEQUENCE, TINY_MODEL, data_flags, script, write_token_files
from support.settings import typed

from testbed.config.trained_run import TrainedRun, of_the_run, trained_with, untrained_positions
from testbed.data.token_file import open_token_file, scan_token_file
from testbed.inference.evaluated_model import _settle_lengths

CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 300, "n_positions": 64}


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder of a run as far as a start looks at it, trained on files that no default names."""
    train, val = write_token_files(tmp_path, 2000, 2000)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(bytes(8))
    write_record(folder, train, val)
    return folder


def write_record(folder: Path, train: Path | str, val: Path | str, **settings) -> None:
    """As a run that trained on two token files says it; relative paths are those of today's working directory."""
    config = {"seq_len": SEQUENCE, "dataset_sha256": {"train": sha256_of(train), "val": sha256_of(val)}}
    config["dataset_subset_sizes"] = {"train": 62, "val": 62}
    settings = {"train_data_path": str(train), "val_data_path": str(val), "seq_length": SEQUENCE, **settings}
    (folder / "training_metrics.json").write_text(json.dumps({"training_config": config, "settings": settings}))


def sha256_of(path: Path | str) -> str:
    return scan_token_file(open_token_file(path)).data_sha256


def said_of(settings) -> list[str]:
    """What the program says once it has read the data."""
    return of_the_run(settings, {name: sha256_of(settings.value(f"{name}_data_path")) for name in ("train", "val")})


def settings_of(*words: str):
    return typed(["--device", "cpu", *words]).settings


def test_eval_only_takes_over_length_and_data_and_what_is_typed_wins(run):
    settings = settings_of("--eval_only", "--init_from", str(run))
    assert (settings.data.seq_length, settings.data.val_data_path) == (SEQUENCE, str(run.parent / "val.bin"))
    (said,) = said_of(settings)
    assert said.startswith(f"as {run} was trained: --seq_length {SEQUENCE} --train_data_path {run.parent}/train.bin")
    settings = settings_of("--eval_only", "--init_from", str(run), "--seq_length", "64")
    assert settings.data.seq_length == 64
    taken, warning = said_of(settings)
    assert "--seq_length" not in taken and "--val_data_path" in taken
    assert "--seq_length 64 validates on 64 tokens" in warning and f"from {SEQUENCE + 1} on were never" in warning
    other = ("--val_data_path", str(run.parent / "train.bin"), "--seq_length", "16")
    settings = settings_of("--eval_only", "--init_from", str(run), *other)
    assert (settings.data.seq_length, settings.data.val_data_path) == (16, str(run.parent / "train.bin"))
    assert "never trained" not in " ".join(said_of(settings))


def test_training_on_from_weights_keeps_the_defaults(run, token_files):
    settings = settings_of("--init_from", str(run), *data_flags(token_files), "--seq_length", "64")
    assert settings.data.val_data_path == str(token_files[1]) and said_of(settings) == []
    scratch = settings_of("--eval_only", *TINY_MODEL, *data_flags(token_files), "--seq_length", "48")
    assert scratch.data.seq_length == 48 and said_of(scratch) == []


@pytest.fixture
def elsewhere(run, tmp_path, monkeypatch) -> Path:
    """A folder that is worked in, beside that of a run whose record names train.bin and val.bin, which lie there."""
    monkeypatch.chdir(tmp_path)
    write_record(run, "train.bin", "val.bin", global_batch_size=8, max_val_steps=2)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_another_file_under_the_recorded_name_is_not_called_the_runs_data(elsewhere):
    write_token_files(elsewhere, 2000, 1000)
    said = said_of(settings_of("--eval_only", "--init_from", "../run"))
    taken, warning = said
    assert "_data_path" not in taken and taken.startswith("as ../run was trained: --seq_length")
    assert f"warning: {elsewhere}/val.bin is validated, which is not the run's data" in warning
    settings = settings_of("--eval_only", "--init_from", "../run", "--val_data_path", "../val.bin")
    assert "not the run's data" not in " ".join(said_of(settings)), "the same bytes under another path are its data"


def test_data_without_a_hash_are_said(run):
    record = json.loads((run / "training_metrics.json").read_text())
    del record["training_config"]["dataset_sha256"]
    (run / "training_metrics.json").write_text(json.dumps(record))
    _, warning = said_of(settings_of("--eval_only", "--init_from", str(run)))
    assert "recorded no sha256" in warning and f"{run.parent}/val.bin is validated" in warning


def test_a_recorded_path_that_leads_nowhere_gives_way_to_the_default(elsewhere):
    (elsewhere.parent / "val.bin").rename(elsewhere / "val_small.bin")
    (elsewhere.parent / "val.json").rename(elsewhere / "val_small.json")
    settings = settings_of("--eval_only", "--init_from", "../run")
    assert settings.data.val_data_path == settings.data.train_data_path == "val_small.bin"
    assert len(said_of(settings)) == 1, "it is the run's data"


def test_a_refusal_says_that_nobody_typed_the_path(elsewhere):
    with pytest.raises(ValueError, match=r"^--val_data_path val_small\.bin does not exist") as refused:
        settings_of("--eval_only", "--init_from", "../run")
    assert str(refused.value).endswith("(--eval_only takes what is not typed from the record of --init_from)")


def test_the_validation_file_alone_is_data_enough(elsewhere):
    words = ["--device", "cpu", "--eval_only", "--init_from", "../run", "--val_data_path", "../val.bin"]
    checked = typed(words)
    assert checked.settings.data.train_data_path == "../val.bin" and checked.train_file is checked.val_file
    with pytest.raises(ValueError, match=r"--train_data_path gone\.bin does not exist"):
        settings_of(*words, "--train_data_path", "gone.bin")
    with pytest.raises(ValueError, match=r"--train_data_path train_small\.bin does not exist"):  # who trains needs it
        settings_of("--init_from", "../run", "--val_data_path", "../val.bin")


def test_eval_only_validates_as_many_windows_as_the_run(run):
    files = run.parent / "train.bin", run.parent / "val.bin"
    write_record(run, *files, global_batch_size=8, max_val_steps=2)
    settings = settings_of("--eval_only", "--init_from", str(run))
    assert (settings.batch.global_batch_size, settings.training.max_val_steps) == (8, 2)
    (said,) = said_of(settings)
    assert said.endswith("--global_batch_size 8 --max_val_steps 2")
    for words in (["--global_batch_size", "4"], ["--grad_accum_steps", "1"], ["--enforce_global_batch_size", "32"]):
        settings = settings_of("--eval_only", "--init_from", str(run), *words)
        assert settings.batch.global_batch_size != 8 and settings.training.max_val_steps == 2
        taken, warning = said_of(settings)
        assert "--global_batch_size" not in taken and "the run on the first 16: another loss" in warning
    write_record(run, *files, global_batch_size=8, max_val_steps=99)  # both are the whole file
    assert len(said_of(settings_of("--eval_only", "--init_from", str(run), "--global_batch_size", "16"))) == 1
    write_record(run, *files, global_batch_size=8, max_val_steps=0)  # it did not validate, but this start is to
    assert settings_of("--eval_only", "--init_from", str(run)).training.max_val_steps is None
    trains = settings_of("--init_from", str(run), *data_flags(files), "--seq_length", "32")
    assert trains.batch.global_batch_size == 32, "who trains on begins a run of its own"


@pytest.mark.parametrize(
    "record", [[], {}, {"training_config": {"seq_len": True}}, {"training_config": {"seq_len": "8"}, "settings": 1}]
)
def test_a_record_that_says_nothing_gives_nothing(record, run, tmp_path):
    (run / "best").mkdir()
    assert trained_with(run / "best") == trained_with(run) != TrainedRun(), "best/ is of the run above it"
    (run / "training_metrics.json").write_text(json.dumps(record))
    assert trained_with(run) == TrainedRun() == trained_with(tmp_path / "nowhere" / "else")
    older = {"training_config": {"seq_len": 8}, "settings": {"val_data_path": 3, "max_val_steps": "4"}}
    (run / "training_metrics.json").write_text(json.dumps(older))
    assert trained_with(run) == TrainedRun({"seq_length": 8})


def test_a_text_ends_where_training_did():
    assert untrained_positions("x has", 32, 32) == [] == untrained_positions("x has", 99, None)
    assert "positions from 33 on" in untrained_positions("x has", 33, 32)[0]
    sample = script("sample.py")
    assert sample.tokens_to_make(None, 10, 1024, 128) == 118
    assert sample.tokens_to_make(None, 10, 1024, None) == 200 == sample.tokens_to_make(None, 10, 1024, 1024)
    assert sample.tokens_to_make(500, 10, 1024, 128) == 500, "who asks for more gets it, and a warning"
    assert sample.tokens_to_make(None, 130, 1024, 128) == 200
    lengths = SimpleNamespace(quick=False, prompt_tokens=None, new_tokens=None, bleu_max_new_tokens=None)
    _settle_lengths(lengths, 1024, 64)
    assert (lengths.bleu_max_new_tokens, lengths.prompt_tokens, lengths.new_tokens) == (32, 64, 64)
