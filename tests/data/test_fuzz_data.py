"""Break every file of data. Each is read, or refused in one sentence, and left as it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from support.characters import write_characters
from support.corpus_cases import ALL, Documents, download
from support.fuzz import OS_ERRORS, REFUSED, Reader, break_in_every_way
from support.mutations import broken_bytes, broken_words
from support.programs import SEQUENCE, write_pair_files, write_token_files

from testbed.data.corpus import CorpusError, existing_corpus, find_corpus, read_documents
from testbed.data.pairs import read_pairs
from testbed.data.token_file import TokenFileWriter, check_token_file, open_token_file, sidecar_path
from testbed.data.tokenizer_file import load_tokenizer, train_bpe
from testbed.data.windows import Windows
from testbed.errors import InputError

TEXT = "Any text at all: naïve, 汉字, 🙂, \x00\x7f\xff and " + " ".join(f"word{number}" for number in range(60))


def tiny_tokens(folder: Path) -> None:
    write_token_files(folder, train_tokens=2000, val_tokens=400)


def tokens_without_sidecar(folder: Path) -> None:
    np.arange(500, dtype="<u2").tofile(folder / "train.bin")


def wide_tokens(folder: Path) -> None:
    """uint32 ids and a sidecar that has no hash, so that other contents are not refused for that."""
    with TokenFileWriter(folder / "train.bin", 70_000, "bpe:70000", 69_999) as writer:
        writer.append_document(np.arange(63) * 1000)
    sidecar = sidecar_path(folder / "train.bin")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "sha256": None}))


def read_tokens(folder: Path) -> None:
    for name in ("train.bin", "val.bin"):
        if os.path.lexists(folder / name):
            file = open_token_file(folder / name, "--train_data_path")
            check_token_file(file, file.vocab_size)


def characters(folder: Path) -> None:
    ids = {character: number for number, character in enumerate("\n abcé世🙂")}
    write_characters(folder, "abc é世🙂\n" * 20, ids, protocol=4)


def read_characters(folder: Path) -> None:
    file = open_token_file(folder / "train.bin", "--train_data_path")
    if file.tokenizer != "gpt2":  # as without a meta.pkl
        tokenizer = load_tokenizer(file.tokenizer, file.tokenizer_file)
        assert tokenizer.vocab_size == file.vocab_size == len(tokenizer.byte_lengths())
    check_token_file(file, 8)


def tiny_pairs(folder: Path) -> None:
    write_pair_files(folder, train_pairs=20, val_pairs=2)


def read_pair_tokens(folder: Path) -> None:
    file = open_token_file(folder / "train_pairs.bin", "--train_data_path")
    check_token_file(file, file.vocab_size)
    windows = Windows(file, SEQUENCE)
    _, is_target = windows.read(range(len(windows)), len(windows))
    assert is_target.sum() == windows.num_target_tokens()


def pairs_of_texts(folder: Path) -> None:
    lines = [{"prompt": "one", "reference": "two \ud83d\ude42"}, {"prompt": "a", "reference": ["b", "c"], "more": [1]}]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_all_pairs(folder: Path) -> None:
    for pair in read_pairs(folder / "pairs.jsonl"):
        "".join([pair.prompt, *pair.references]).encode()


def odd_ids(dtype: str, length: int, limits: list[int]) -> Any:
    """Ids of the vocabulary, up to three of them at its end or at the end of the type."""
    places = st.lists(st.tuples(st.integers(0, length - 1), st.sampled_from(limits)), max_size=3)

    def content(odd: list[tuple[int, int]]) -> bytes:
        ids = np.arange(length, dtype=np.int64)
        for place, number in odd:
            ids[place] = number
        return ids.astype(dtype).tobytes()

    return places.map(content)


def trained_bpe(folder: Path) -> None:
    train_bpe(iter([TEXT]), 300, folder / "bpe_300.json")


def use_bpe(folder: Path) -> None:
    tokenizer = load_tokenizer("bpe:300", folder / "bpe_300.json")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def corpus(folder: Path) -> None:
    download(Documents(), folder)


def use_corpus(folder: Path) -> None:
    find_corpus(folder)
    existing_corpus(Documents(), ALL, folder)


def documents(folder: Path) -> None:
    lines = [{"text": "one"}, {"text": "two \ud83d\ude42", "more": [1]}, {"text": ""}, {"text": "three"}]
    (folder / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_all_documents(folder: Path) -> None:
    for text in read_documents(find_corpus(folder / "mine.jsonl").documents):
        text.encode()


def both(content: bytes) -> Any:
    return st.one_of(broken_words(content), broken_bytes(content))


READERS = {
    "sidecar of a token file": Reader(tiny_tokens, "train.json", read_tokens),
    "token file": Reader(tiny_tokens, "train.bin", read_tokens, broken=broken_bytes, outcomes=(REFUSED,)),
    "token file without a sidecar": Reader(
        tokens_without_sidecar,
        "train.bin",
        read_tokens,
        broken=lambda content: st.one_of(broken_bytes(content), odd_ids("<u2", 60, [50_256, 50_257, 65_535])),
        in_pieces=True,
    ),
    "token file of 32-bit ids": Reader(
        wide_tokens,
        "train.bin",
        read_tokens,
        broken=lambda content: odd_ids("<u4", 64, [69_999, 70_000, 2**31, 2**32 - 1]),
        in_pieces=True,
    ),
    "meta.pkl of nanoGPT": Reader(characters, "meta.pkl", read_characters, broken=broken_bytes),
    "sidecar of pairs": Reader(tiny_pairs, "train_pairs.json", read_pair_tokens, is_named=False),
    "targets of pairs": Reader(
        tiny_pairs, "train_pairs.targets.bin", read_pair_tokens, broken=broken_bytes, outcomes=(REFUSED,)
    ),
    "pairs": Reader(pairs_of_texts, "pairs.jsonl", read_all_pairs, broken=both, in_pieces=True),
    "tokenizer": Reader(trained_bpe, "bpe_300.json", use_bpe),
    "manifest of a corpus": Reader(
        corpus, "manifest.json", use_corpus, errors=(CorpusError, InputError), os_errors=OS_ERRORS, is_named=False
    ),
    "documents": Reader(
        documents,
        "mine.jsonl",
        read_all_documents,
        broken=both,
        errors=(CorpusError, InputError),
        os_errors=OS_ERRORS,
        in_pieces=True,
    ),
}


@pytest.mark.parametrize(
    # a tokenizer.json with other rules than GPT-2's is tried in a process of its own
    "name",
    [pytest.param(name, marks=pytest.mark.launches) if name == "tokenizer" else name for name in READERS],
)
def test_no_file_breaks_its_reader(tmp_path, name):
    break_in_every_way(name, READERS[name], tmp_path / "files")
