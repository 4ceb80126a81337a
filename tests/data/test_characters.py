"""nanoGPT's data of characters: meta.pkl is read without unpickling, and its text comes back."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import tokenizers
from support.characters import ids_of, write_characters, write_meta
from support.programs import TINY_RUN, data_flags, python_command, run_program

from testbed.data.characters import META, tokenizer_json
from testbed.data.token_file import check_token_file, open_token_file
from testbed.data.tokenizer_file import load_tokenizer, load_tokenizer_file
from testbed.errors import InputError

TEXT = "First Citizen:\nBefore we proceed, é世🙂 \r\n\t" * 30


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_ids_stand_for_the_characters_of_meta(tmp_path, protocol):
    path = write_characters(tmp_path, TEXT, protocol=protocol)
    file, number = open_token_file(path), len(set(TEXT))
    assert (file.tokenizer, file.vocab_size, file.end_of_text_id) == (f"char:{number}", number, None)
    assert check_token_file(file, file.vocab_size).max_token_id < number
    tokenizer = load_tokenizer(file.tokenizer, file.tokenizer_file)
    assert tokenizer.decode(file.tokens[:]) == TEXT[: len(file.tokens)]
    assert tokenizer.encode(TEXT)[: len(file.tokens)] == file.tokens[:].tolist()
    assert tokenizer.byte_lengths()[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())


def test_the_library_reads_what_a_run_keeps(tmp_path):
    write_characters(tmp_path, TEXT)
    kept = tokenizer_json(tmp_path / META)
    (tmp_path / "tokenizer.json").write_bytes(kept)
    ours = load_tokenizer_file(tmp_path / "tokenizer.json")
    library = tokenizers.Tokenizer.from_str(kept.decode())
    assert library.encode(TEXT).ids == ours.encode(TEXT)
    assert library.decode(library.encode(TEXT).ids) == TEXT
    assert ours.name == load_tokenizer_file(tmp_path / META).name


def test_a_character_that_the_model_lacks_is_named(tmp_path):
    write_characters(tmp_path, TEXT)
    with pytest.raises(InputError, match="'Q' is none of the"):
        load_tokenizer_file(tmp_path / META).encode("Queen")
    with pytest.raises(UnicodeEncodeError):
        load_tokenizer_file(tmp_path / META).encode("\ud800")


def test_a_header_of_llmc_says_more_than_meta(tmp_path):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 4
    (tmp_path / "train.bin").write_bytes(header.tobytes() + np.arange(4, dtype="<u2").tobytes())
    write_meta(tmp_path, vocab_size=2, itos=["a", "b"], stoi={"a": 0, "b": 1})
    assert open_token_file(tmp_path / "train.bin").tokenizer == "gpt2"


class Calls:
    def __reduce__(self):
        return os.mkdir, ("it_ran",)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"vocab_size": Calls()}, "does more than hold characters"),
        ({"vocab_size": 50257}, "its stoi is None"),
        ({"vocab_size": 2, "stoi": {"a": 0, "bc": 1}, "itos": ["a", "bc"]}, "single characters"),
        ({"vocab_size": 2, "stoi": {"a": 0, "b": 2}, "itos": ["a", "b"]}, "from 0 on"),
    ],
)
def test_what_is_no_table_of_characters_is_refused(tmp_path, monkeypatch, content, fault):
    monkeypatch.chdir(tmp_path)
    write_characters(tmp_path, TEXT)
    write_meta(tmp_path, **content)
    with pytest.raises(InputError, match=fault) as refusal:
        open_token_file(tmp_path / "train.bin")
    assert str(refusal.value).startswith("--train_data_path: ") and META in str(refusal.value)
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.launches
@pytest.mark.slow
def test_a_run_on_characters_is_trained_further_on_the_same_alone(tmp_path):
    data, run, other = tmp_path / "data", tmp_path / "run", tmp_path / "other"
    data.mkdir()
    other.mkdir()
    write_characters(data, TEXT)
    write_characters(other, TEXT, {character: number for number, character in enumerate(sorted(set(TEXT))[::-1])})

    def train(folder, checkpoint, *words):
        flags = [*TINY_RUN, "--global_batch_size", "4", "--max_train_steps", "2", "--sample_prompt", "First", *words]
        paths = data_flags((folder / "train.bin", folder / "val.bin"))
        return run_program([*python_command(), *flags, *paths, "--checkpoint_path", str(checkpoint)])

    done = train(data, run)
    assert done.returncode == 0, done.stderr
    assert "sample: First" in done.stdout
    assert (run / "tokenizer.json").read_bytes() == tokenizer_json(data / META)
    assert load_tokenizer_file(run / "tokenizer.json").name == f"char:{len(ids_of(TEXT))}"
    init = train(data, tmp_path / "further", "--init_from", str(run))
    assert init.returncode == 0, init.stderr
    refused = train(other, tmp_path / "refused", "--init_from", str(run))
    assert refused.returncode == 2 and "give data whose meta.pkl has the characters" in refused.stderr
