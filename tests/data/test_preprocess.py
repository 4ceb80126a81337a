"""Token files give the documents back, each on one side, whatever the tokenizer and the number of workers."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tokenizers
from support.data_fixtures import ROOT, gpt2_cache, offline_environment, random_unicode, run_program

from testbed.data.preprocess import (
    BPE_TRAINING_BYTES,
    encode_in_order,
    split_documents,
    training_texts,
    write_token_files,
)
from testbed.data.sources import StandardLibrary
from testbed.data.token_file import check_token_file, open_token_file
from testbed.data.tokenizer_file import load_tokenizer, load_tokenizer_file, train_bpe
from testbed.errors import InputError


@pytest.fixture(scope="module")
def documents():
    return [text for batch in StandardLibrary().batches() for text in batch if text.strip()][:120]


def write_documents(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def documents_of(path, tokenizer):
    token_file = open_token_file(path)
    ends = np.flatnonzero(token_file.tokens[:] == token_file.end_of_text_id)
    assert ends[-1] == len(token_file.tokens) - 1
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(token_file.tokens[a:b]) for a, b in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("name", ["bpe:1024", "gpt2"])
def test_token_files_give_every_document_back_once_and_in_order(preprocess, tmp_path, documents, name, monkeypatch):
    texts = [*documents, *(random_unicode(seed, 400) for seed in range(30)), documents[3], "a<|endoftext|>b"]
    write_documents(tmp_path / "documents.jsonl", texts)
    cache = {}
    if name == "gpt2":
        (tmp_path / "cache").mkdir()
        cache = {"TIKTOKEN_CACHE_DIR": str(gpt2_cache(tmp_path / "cache"))}
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", cache["TIKTOKEN_CACHE_DIR"])
    arguments = ("--input", "documents.jsonl", "--num_workers", 3, "--tokenizer", name)
    result = preprocess(*arguments, **cache)
    assert result.returncode == 0, result.stderr
    sides = []
    for file_name in ("train_small.bin", "val_small.bin"):
        token_file = open_token_file(tmp_path / file_name)
        check_token_file(token_file, token_file.vocab_size)
        assert token_file.tokenizer == name
        tokenizer = load_tokenizer(token_file.tokenizer, token_file.tokenizer_file)
        sides.append(documents_of(tmp_path / file_name, tokenizer))
        assert token_file.num_documents == len(sides[-1])
    train, val = sides
    assert sorted(train + val) == sorted(texts)
    assert not set(train) & set(val)  # the text that occurs twice is twice on one side
    assert [text for text in texts if text in set(val)] == val  # in the corpus's order
    assert len(val) == pytest.approx(0.1 * len(texts), abs=2)
    assert f"tokenizer: {name}" in result.stdout and "bytes per token" in result.stdout


def test_workers_and_repetition_do_not_change_a_byte(preprocess, tmp_path, documents):
    write_documents(tmp_path / "documents.jsonl", documents)
    contents = []
    for workers in (1, 4):
        arguments = ("--input", "documents.jsonl", "--tokenizer", "bpe:600", "--num_workers", workers)
        assert preprocess(*arguments).returncode == 0
        contents.append({path.name: path.read_bytes() for path in tmp_path.glob("*_small.*")})
    assert contents[0] == contents[1] and len(contents[0]) == 4


@pytest.mark.launches
def test_a_foreign_tokenizer_json_gives_its_own_ids(preprocess, tmp_path, documents):
    """With a normalizer they are others than GPT-2's rules give."""
    train_bpe(iter(documents), 600, tmp_path / "theirs.json")
    content = json.loads((tmp_path / "theirs.json").read_text()) | {"normalizer": {"type": "Lowercase"}}
    (tmp_path / "theirs.json").write_text(json.dumps(content))
    write_documents(tmp_path / "documents.jsonl", documents)
    result = preprocess("--input", "documents.jsonl", "--tokenizer", "theirs.json")
    assert result.returncode == 0 and "tokenizer: json:600 (from theirs.json)" in result.stdout, result.stderr
    library = tokenizers.Tokenizer.from_file("theirs.json")
    library.encode_special_tokens = True
    file = open_token_file(tmp_path / "val_small.bin")
    starts, ends = file.documents
    ids = [file.tokens[start : end - 1].tolist() for start, end in zip(starts, ends, strict=True)]
    assert file.tokenizer_file == tmp_path / "tokenizer_600.json" and len(ids) > 5
    assert all(library.encode(library.decode(each)).ids == each for each in ids)
    assert load_tokenizer(file.tokenizer, file.tokenizer_file).decode(ids[0]) in {text.lower() for text in documents}


def test_other_data_are_replaced_only_when_that_is_asked_for(preprocess, tmp_path, documents):
    write_documents(tmp_path / "mine.jsonl", documents[:60])
    write_documents(tmp_path / "other.jsonl", documents[60:])
    mine = ("--input", "mine.jsonl", "--tokenizer", "bpe:600")

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    assert preprocess(*mine).returncode == 0
    made = files()
    assert preprocess(*mine).returncode == 0 and files() == made  # the same data again
    for other in (("--input", "other.jsonl", "--tokenizer", "bpe:600"), (*mine[:3], "bpe:500")):
        result = preprocess(*other)
        said = result.stderr.strip().splitlines()[-1]
        assert result.returncode == 2 and files() == made
        assert said.startswith("preprocess_small.py: error: train_small.bin holds other data (") and "bpe:600" in said
        assert said.endswith("; pass --overwrite to replace it, or another --output_dir to keep it")
    (tmp_path / "train_small.bin").write_bytes(made["train_small.bin"][:1000])  # cut off: the same data mend it
    assert preprocess(*mine).returncode == 0 and files() == made
    (tmp_path / "train_small.json").unlink()  # nanoGPT's files have none
    assert preprocess(*other).returncode == 2 and preprocess(*mine).returncode == 0 and files() == made
    assert preprocess(*other, "--overwrite").returncode == 0 and files()["train_small.bin"] != made["train_small.bin"]


@pytest.mark.launches
def test_stdlib_to_exactly_forty_and_ten_documents_without_a_network(tmp_path):
    assert run_program("download_data.py", cwd=tmp_path).returncode == 0
    result = run_program("preprocess_small.py", "--max_train_docs", 40, "--max_val_docs", 10, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "tokenizer: bpe:8192 (GPT-2's files are not in tiktoken's cache" in result.stdout
    train, val = (json.loads((tmp_path / f"{side}_small.json").read_text()) for side in ("train", "val"))
    assert (train["num_documents"], val["num_documents"]) == (40, 10)
    assert train["source"]["name"] == "stdlib" and train["tokenizer_file"] == "bpe_8192.json"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "hf") == [
        "bpe_8192.json",
        "dataset",
        "train_small.bin",
        "train_small.json",
        "val_small.bin",
        "val_small.json",
    ]


def test_no_validation_text_reaches_the_bpe():
    texts = [f"text {i}" for i in range(500)]
    split = split_documents(texts, 0.2, 300, 50)
    val = {text for validation, text in split.assign(texts) if validation}
    trained_on = list(training_texts(split.assign(texts)))
    assert len(val) == 50 and len(trained_on) == 300
    assert not val & set(trained_on)


def test_bpe_training_text_is_bounded():
    taken = list(training_texts((False, "x" * 2**20) for _ in range(200)))
    assert len(taken) == BPE_TRAINING_BYTES // 2**20


@pytest.mark.parametrize("count", [2, 3, 5, 11, 1000])
def test_both_sides_get_a_document_and_validation_its_share(count):
    texts = [f"text {i}" for i in range(count)]
    sides = [validation for validation, _ in split_documents(texts, 0.1, 10**6, 10**6).assign(texts)]
    assert sum(sides) == -(-count // 10) and len(sides) == count  # rounded up


def test_a_document_keeps_its_side_when_the_limits_change():
    texts = [f"text {i}" for i in range(300)]
    wide = {text: side for side, text in split_documents(texts, 0.1, 10**6, 10**6).assign(texts)}
    narrow = [(text, side) for side, text in split_documents(texts, 0.1, 40, 7).assign(texts)]
    assert [side for _, side in narrow].count(True) == 7 and [side for _, side in narrow].count(False) == 40
    assert all(wide[text] == side for text, side in narrow)


def test_reading_ends_when_both_sides_are_full():
    texts = [f"text {i}" for i in range(1000)]
    read = []
    split = split_documents(texts, 0.5, 5, 5)
    assert len(list(split.assign(read.append(text) or text for text in texts))) == 10
    assert len(read) < 50


class CountingTokenizer:
    def encode_to_array(self, text):
        return np.zeros(len(text), np.uint32)


def test_threads_encode_as_tiktokens_own_batch_encoder_does(documents, tmp_path):
    train_bpe(iter(documents), 400, tmp_path / "bpe_400.json")
    tokenizer = load_tokenizer_file(tmp_path / "bpe_400.json")
    encoded = encode_in_order(((False, text) for text in documents), tokenizer, num_workers=2)
    ids = [document.tolist() for _, _, document, _ in encoded]
    assert ids == tokenizer._encoding.encode_ordinary_batch(documents, num_threads=2)


def test_only_a_bounded_number_of_documents_is_in_flight():
    """Memory does not grow with the corpus: reading runs ahead of writing by a few batches, not by the whole."""
    read = 0

    def corpus():
        nonlocal read
        for _ in range(400):
            read += 1
            yield False, "x" * 300_000  # a batch of its own

    ahead = 0
    for written, _ in enumerate(encode_in_order(corpus(), CountingTokenizer(), num_workers=2), start=1):
        ahead = max(ahead, read - written)
    assert written == 400 and ahead <= 2 * 2 + 1


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        ((), "run python download_data.py first", 2),
        (("--input", "missing"), "--input missing does not exist", 2),
        (("--input", "."), "holds no manifest.json", 2),
        (("--input", "a.txt"), "python download_data.py --dataset a.txt", 2),
        (("--input", "one.jsonl"), "holds 1 different documents", 2),
        (("--input", "broken.jsonl"), "line 2", 1),
        (("--input", "two.jsonl", "--tokenizer", "bpe:99"), "bpe:99 is too small", 2),
        (("--input", "two.jsonl", "--tokenizer", "bpe:8192"), "finds only", 2),
        (("--input", "two.jsonl", "--tokenizer", "gpt2"), "TIKTOKEN_CACHE_DIR", 1),
        (("--input", "two.jsonl", "--max_val_docs", 0), "--max_val_docs: '0' is not a positive whole number", 2),
        (("--input", "two.jsonl", "--val_fraction", 1), "--val_fraction 1.0 must lie between", 2),
        (
            ("--input", "two.jsonl", "--tokenizer", "bpe:260", "--output_dir", "a.txt"),
            "--output_dir a.txt is a file, not a folder",
            2,
        ),
    ],
)
def test_what_cannot_work_is_one_sentence_and_leaves_no_file(preprocess, tmp_path, arguments, sentence, code):
    (tmp_path / "a.txt").write_text("x")
    write_documents(tmp_path / "one.jsonl", ["same", "same"])
    write_documents(tmp_path / "two.jsonl", ["some text", "other text"])
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text"')
    before = sorted(tmp_path.iterdir())
    result = preprocess(*arguments)
    said = [line for line in result.stderr.splitlines() if line.startswith("preprocess_small.py: ")]
    assert (result.returncode, len(said)) == (code, 1), result.stderr
    assert sentence in said[0] and "Traceback" not in result.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.launches
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_earlier_files_as_they_were(tmp_path, documents, ending):
    write_documents(tmp_path / "documents.jsonl", documents)
    (tmp_path / "cache").mkdir()
    cache = {"TIKTOKEN_CACHE_DIR": str(gpt2_cache(tmp_path / "cache"))}
    arguments = ("--input", "documents.jsonl", "--tokenizer", "gpt2")
    assert run_program("preprocess_small.py", *arguments, cwd=tmp_path, **cache).returncode == 0
    write_documents(tmp_path / "documents.jsonl", [f"{i} {text}" for i in range(15) for text in documents])
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*_*")}
    process = subprocess.Popen(
        [sys.executable, ROOT / "preprocess_small.py", *arguments],
        cwd=tmp_path,
        env=offline_environment(tmp_path) | cache,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(path.stat().st_size for path in tmp_path.glob(".train_small.bin.*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(ending)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + ending and "interrupted" in errors and "Traceback" not in errors
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*_*")} == before
    assert list(tmp_path.glob(".*")) == []


class Untouched:
    """Documents that nobody may tokenize."""

    def __iter__(self):
        raise AssertionError("documents were tokenized before the files were looked at")


def test_files_of_another_tokenizer_or_text_are_kept_before_a_document_is_tokenized(tmp_path):
    class Letters:
        vocab_size, name, end_of_text_id = 300, "bpe:300", 299

    class Others(Letters):
        name = "bpe:299"

    encoded = [(side, 3, np.array([1, 2, 3]), None) for side in (False, True)]
    paths, source = (tmp_path / "train.bin", tmp_path / "val.bin"), {"name": "a", "revision": None, "sha256": "0" * 64}
    write_token_files(encoded, *paths, Letters(), None, source)
    write_token_files(encoded, *paths, Letters(), None, source)  # the same again
    made = [path.read_bytes() for path in paths]
    for tokenizer, text in ((Others(), source), (Letters(), source | {"sha256": "1" * 64})):
        with pytest.raises(InputError, match=r"holds other data .* than what would replace it .*; pass --overwrite"):
            write_token_files(Untouched(), *paths, tokenizer, None, text)
    assert [path.read_bytes() for path in paths] == made
    with pytest.raises(InputError, match="holds other data"):  # only the tokens tell
        write_token_files([*encoded, encoded[0]], *paths, Letters(), None, source)


def test_shards_hold_the_tokens_of_one_file_and_leave_no_older_ones(preprocess, tmp_path, documents):
    write_documents(tmp_path / "documents.jsonl", documents)
    arguments = ("--input", "documents.jsonl", "--tokenizer", "bpe:1024")
    assert preprocess(*arguments).returncode == 0
    whole = open_token_file(tmp_path / "train_small.bin")
    made = preprocess(*arguments, "--shard_tokens", "20k")
    assert made.returncode == 0, made.stderr
    shards = sorted(tmp_path.glob("train_small_0*.bin"))
    assert len(shards) > 3 and f"train_small_*.bin, {len(shards)} shards: {len(whole.tokens):,} tokens" in made.stdout
    joined = open_token_file(tmp_path / "train_small_*.bin")
    check_token_file(joined, 1024)
    assert (joined.tokens[:] == whole.tokens[:]).all() and joined.num_documents == whole.num_documents
    assert all(len(open_token_file(path).tokens) >= 20_000 for path in shards[:-1])
    fewer = preprocess(*arguments, "--shard_tokens", "60k")
    assert (
        fewer.returncode == 2
        and "holds other data" in fewer.stderr
        and sorted(tmp_path.glob("train_small_0*.bin")) == shards
    )
    assert preprocess(*arguments, "--shard_tokens", "60k", "--overwrite").returncode == 0
    again = open_token_file(tmp_path / "train_small_*.bin")
    check_token_file(again, 1024)
    assert (again.tokens[:] == whole.tokens[:]).all() and len(again.listing) < len(shards)
    pairs = preprocess("--pairs", "documents.jsonl", "--shard_tokens", "1k")
    assert pairs.returncode == 2 and "--shard_tokens is for documents" in pairs.stderr
