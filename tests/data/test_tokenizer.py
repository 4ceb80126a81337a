"""GPT-2's published ids, a BPE of our own, and any text back unchanged."""

import json
import sysconfig
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from support.data_fixtures import gpt2_cache, random_unicode

from testbed.data import tokenizer as tokenizer_module
from testbed.data.tokenizer import gpt2_cache_name, gpt2_files_at_hand, load_gpt2_tokenizer, resolve_tokenizer
from testbed.data.tokenizer_file import load_tokenizer, load_tokenizer_file, train_bpe

STDLIB = Path(sysconfig.get_path("stdlib"))
TEXTS = [(STDLIB / name).read_text(encoding="utf-8") for name in ("argparse.py", "ast.py", "typing.py", "inspect.py")]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_cache(tmp_path_factory.mktemp("cache"))))
        return load_gpt2_tokenizer()


@pytest.fixture(scope="module")
def plain_gpt2(tmp_path_factory):
    """The library's own encoding, without our cutting of long texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_cache(tmp_path_factory.mktemp("cache"))))
        return tiktoken.get_encoding("gpt2")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe(iter(TEXTS), 1000, tmp_path_factory.mktemp("bpe") / "bpe_1000.json")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizer_module, "status_of", lambda url: None)
    return tmp_path


def test_gpt2_ids_are_the_published_ones(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.end_of_text_id, gpt2.name) == (50257, 50256, "gpt2")
    assert gpt2.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"


@pytest.mark.parametrize("which", ["gpt2", "bpe"])
def test_any_unicode_comes_back_unchanged(which, request):
    tokenizer = request.getfixturevalue(which)
    for seed in range(300):
        text = random_unicode(seed, length=1 + seed)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text, f"seed {seed}"
        assert all(0 <= token_id < tokenizer.end_of_text_id for token_id in ids)
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


@pytest.mark.parametrize("which", ["gpt2", "bpe"])
def test_end_of_text_inside_a_document_is_plain_text(which, request):
    tokenizer = request.getfixturevalue(which)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_of_text_id not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_our_ids_are_those_of_the_library_that_trained_the_merges(bpe, tmp_path):
    """tiktoken merges by the rank of the product, `tokenizers` by the list of merges: two implementations, same ids."""
    train_bpe(iter(TEXTS), 1000, tmp_path / "bpe.json")
    other = tokenizers.Tokenizer.from_file(str(tmp_path / "bpe.json"))
    for text in [*TEXTS, *(path.read_text(encoding="utf-8") for path in sorted((STDLIB / "json").glob("*.py")))]:
        assert bpe.encode(text) == other.encode(text, add_special_tokens=False).ids
    for seed in range(200):
        text = random_unicode(seed, 200)
        assert bpe.encode(text) == other.encode(text, add_special_tokens=False).ids, f"seed {seed}"
    assert other.token_to_id("<|endoftext|>") == bpe.end_of_text_id == 999


def test_the_bpe_learns_and_counts_end_of_text(bpe):
    assert (bpe.vocab_size, bpe.end_of_text_id, bpe.name) == (1000, 999, "bpe:1000")
    assert len(TEXTS[0].encode()) / len(bpe.encode(TEXTS[0])) > 2.5  # bytes per token; 1 without merges
    assert bpe.encode("a") == [bpe.encode("ba")[-1]] or len(bpe.encode("ba")) == 1


def test_the_same_texts_give_the_same_file(tmp_path):
    for name in ("a.json", "b.json"):
        train_bpe(iter(TEXTS), 500, tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_a_corpus_too_small_for_n_is_refused_with_the_n_that_works(tmp_path):
    with pytest.raises(ValueError, match=r"finds only (\d+) different tokens .* use --tokenizer bpe:(\d+)") as caught:
        train_bpe(iter(["hello world"]), 8192, tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []
    works = int(str(caught.value).split("bpe:")[2].split()[0])
    assert train_bpe(iter(["hello world"]), works, tmp_path / "a.json").vocab_size == works


@pytest.mark.parametrize("character", ["a", " ", "\n", "=", "1", "\u3000", "日", "😀"])
def test_a_million_equal_characters_come_back(gpt2, character):
    """Blanks before a letter abort tiktoken 0.14, whose stack is too small."""
    for text in (character * 1_000_000, character * 1_000_000 + "x"):
        assert gpt2.decode(gpt2.encode(text)) == text


@pytest.mark.parametrize("after", ["", "x", "\n", "\x1c", "=", " \tx", "\x1cx"])
@pytest.mark.parametrize("blank", [" ", "\n", " \t", "\u2003", "\x1c", " \x1c"])
@pytest.mark.parametrize("before", ["", "x", "="])
def test_long_blank_runs_have_the_ids_of_the_uncut_text(gpt2, plain_gpt2, before, blank, after, monkeypatch):
    """Cutting from 1,000 blanks on, because the library can take the 1,500 uncut to compare with."""
    monkeypatch.setattr(tokenizer_module, "_LONG_BLANK_RUN", 1000)
    text = (before + blank * 1500 + after) * 2
    assert gpt2.encode(text) == plain_gpt2.encode_ordinary(text)


def test_an_unknown_id_is_a_sentence(gpt2, bpe):
    for tokenizer in (gpt2, bpe):
        for wrong in (tokenizer.vocab_size, -1, 2**40):
            with pytest.raises(ValueError, match=f"token id {wrong} is not one of the {tokenizer.vocab_size} tokens"):
                tokenizer.decode([1, wrong])


def test_gpt2_offline_names_every_way_out(offline):
    with pytest.raises(OSError, match="--tokenizer bpe:8192") as caught:
        load_gpt2_tokenizer()
    message = str(caught.value)
    assert "TIKTOKEN_CACHE_DIR" in message and "6d1cbeee0f20b3d9449abfede4726ed8212e3aee" in message
    assert "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6" in message and "\n" not in message


def test_a_damaged_cache_does_not_count(offline):
    gpt2_cache(offline)
    assert gpt2_files_at_hand()
    path = offline / gpt2_cache_name("vocab.bpe")
    path.write_bytes(path.read_bytes()[:-1])
    assert not gpt2_files_at_hand()


def test_auto_takes_gpt2_where_it_can(offline, monkeypatch):
    assert resolve_tokenizer("auto")[0] == "bpe:8192"
    monkeypatch.setattr(tokenizer_module, "status_of", lambda url: 403)  # a firewall's answer is not a file
    assert resolve_tokenizer("auto")[0] == "bpe:8192"
    monkeypatch.setattr(tokenizer_module, "status_of", lambda url: 200)
    assert resolve_tokenizer("auto") == ("gpt2", "its files can be downloaded")
    gpt2_cache(offline)
    assert resolve_tokenizer("auto") == ("gpt2", "its files are in tiktoken's cache")
    assert resolve_tokenizer("bpe:512")[0] == "bpe:512"


@pytest.mark.parametrize("name", ["bpe", "bpe:", "bpe:256", "bpe:-1", "bpe:8k", "GPT2", ""])
def test_a_wrong_name_is_refused(name):
    with pytest.raises(ValueError, match="--tokenizer"):
        resolve_tokenizer(name)


def test_the_sidecars_tokenizer_is_loaded_and_checked(bpe, gpt2, tmp_path, offline):
    path = tmp_path / "bpe_500.json"
    trained = train_bpe(iter(TEXTS), 500, path)
    loaded = load_tokenizer("bpe:500", path)
    assert loaded.encode(TEXTS[0]) == trained.encode(TEXTS[0])
    with pytest.raises(ValueError, match="holds bpe:500, but the token file was made with bpe:600"):
        load_tokenizer("bpe:600", path)
    with pytest.raises(ValueError, match="needs its file"):
        load_tokenizer("bpe:500", None)
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer_file(tmp_path / "missing.json")
    content = json.loads(path.read_text())
    content["model"]["vocab"].popitem()
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"holds no tokenizer \(Token .* out of vocabulary"):
        load_tokenizer_file(path)
    gpt2_cache(offline)
    assert load_tokenizer("gpt2", None).encode("Hello world") == [15496, 995]
