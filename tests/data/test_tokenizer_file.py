"""Any tokenizer.json: the ids and the text of the `tokenizers` library, or one sentence."""

from __future__ import annotations

import functools
import json
import sysconfig
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from support.data_fixtures import random_unicode
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from testbed.data.tokenizer import TiktokenTokenizer
from testbed.data.tokenizer_file import LibraryTokenizer, load_tokenizer, load_tokenizer_file, train_bpe
from testbed.errors import InputError
from testbed.inference.sample import text_of

STDLIB = Path(sysconfig.get_path("stdlib"))
TEXTS = [(STDLIB / name).read_text(encoding="utf-8") for name in ("argparse.py", "typing.py", "inspect.py")]
ODD = [
    "", " ", "\n\n\t x", "Hello World's  DON'T", "nai\u0308ve caf\u00e9 \ufb01ne \u1e9e\u0130", "1234567 3.14 \u0663",
    "a<|endoftext|>b <mask> </s>", "\u3042\u65e5\u672c\U0001f642\u200d\u2642\ufe0f", "\x00\x1c\x85\u2028 \ufeff",
    "don't can't I'LL", "\u0e20\u0e32\u0e29\u0e32 \u05e9\u05dc\u05d5\u05dd", "  leading", "trailing   ",
    "_a__b_ \u2581",
    *(random_unicode(seed, 200) for seed in range(40)), TEXTS[0][:20_000],
]  # fmt: skip
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def plain() -> str:
    """A byte-level BPE by GPT-2's rules."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(["<|endoftext|>"])
    return made.to_str()


def byte_level(**parts) -> tokenizers.Tokenizer:
    """The same with other parts."""
    made = tokenizers.Tokenizer.from_str(plain())
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def with_added_tokens() -> tokenizers.Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken("<mask>", lstrip=True), AddedToken("def", single_word=True)])
    made.add_special_tokens(["<special>"])
    return made


def trained(model, trainer, **parts) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    made.train_from_iterator(TEXTS, trainer)
    return made


def word_piece() -> tokenizers.Tokenizer:
    special = ["[UNK]", "[SEP]", "[CLS]"]
    return trained(
        models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(vocab_size=900, special_tokens=special),
        normalizer=normalizers.BertNormalizer(), pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )  # fmt: skip


def unigram() -> tokenizers.Tokenizer:
    special = ["<unk>", "</s>"]
    return trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=900, special_tokens=special, unk_token="<unk>"),
        normalizer=normalizers.NFKC(), pre_tokenizer=pre_tokenizers.Metaspace(), decoder=decoders.Metaspace(),
    )  # fmt: skip


def llama2() -> tokenizers.Tokenizer:
    """A BPE of characters that falls back to bytes, as SentencePiece's are converted."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = trained(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        trainers.BpeTrainer(vocab_size=900, special_tokens=special[:3], show_progress=False),
        pre_tokenizer=pre_tokenizers.Metaspace(),  # of the training only, for its speed
        normalizer=normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        decoder=decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
    content = json.loads(made.to_str())
    vocabulary, content["pre_tokenizer"] = content["model"]["vocab"], None
    for token in special[3:]:
        vocabulary[token] = len(vocabulary)
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def split(pattern: str):
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte])


def cut_short() -> tokenizers.Tokenizer:
    made = byte_level()
    made.enable_truncation(5)
    made.enable_padding(length=9)
    return made


def renumbered() -> tokenizers.Tokenizer:
    """Merges whose products' ids are not in their order."""
    content = json.loads(plain())
    vocabulary = content["model"]["vocab"]
    products = [token for token in vocabulary if vocabulary[token] >= 256]
    for token, rank in zip(products, reversed(range(256, 256 + len(products))), strict=True):
        vocabulary[token] = rank
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def with_a_gap() -> tokenizers.Tokenizer:
    content = json.loads(plain())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.__getitem__)] = 1500
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def unreachable() -> tokenizers.Tokenizer:
    """A token that the library's merges never make, and tiktoken's rule would: "th" after "he"."""
    made = tokenizers.Tokenizer(
        models.BPE(
            {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
            | {"he": 256, "th": 257, "the": 258},
            [("h", "e"), ("t", "h"), ("th", "e")],
        )
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made


OTHERS = {
    "NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "lower case": lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])),
    "prefix space": lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no pattern": lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "GPT-4's pattern": lambda: byte_level(pre_tokenizer=split(GPT4)),
    "digits apart": lambda: byte_level(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    ),
    "added tokens": with_added_tokens,
    "truncation": cut_short,
    "renumbered": renumbered,
    "a gap in the ids": with_a_gap,
    "unreachable token": unreachable,
    "WordPiece": word_piece,
    "Unigram": unigram,
    "byte fallback": llama2,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_ids_and_text_are_the_librarys(kind, tmp_path):
    path = tmp_path / "tokenizer.json"
    OTHERS[kind]().save(str(path))
    theirs = tokenizers.Tokenizer.from_file(str(path))
    ours = load_tokenizer_file(path)
    assert isinstance(ours, LibraryTokenizer) and ours.name == f"json:{ours.vocab_size}"
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True  # as ours: a document cannot hold an end-of-text
    for text in ODD:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False), text
        assert "".join(text_of(ids, ours)) == ours.decode(ids), text
        cut = ids[1::2]  # begins and ends anywhere
        assert ours.decode(cut) == theirs.decode(cut, skip_special_tokens=False), text
        if ours.is_bytewise:
            assert ours.byte_lengths()[ids].sum() == sum(len(ours.decode_bytes([token])) for token in ids)
    end = {"WordPiece": "[SEP]", "Unigram": "</s>", "byte fallback": "</s>"}.get(kind, "<|endoftext|>")
    assert ours.end_of_text_id == theirs.token_to_id(end)
    assert load_tokenizer(ours.name, path).encode(ODD[3]) == ours.encode(ODD[3])
    with pytest.raises(InputError, match=f"token id {ours.vocab_size} is not one of"):
        ours.decode([ours.vocab_size])
    with pytest.raises(UnicodeEncodeError):
        ours.encode("half \ud800")


def test_gpt2s_rules_are_recognized_in_each_form(tmp_path):
    """They are encoded by tiktoken, several times faster: our file, one with merges as text, one with a post-processor
    that moves offsets only."""
    path = tmp_path / "bpe_900.json"
    train_bpe(iter(TEXTS), 900, path)
    content = json.loads(path.read_text())
    older = content | {"model": content["model"] | {"merges": [" ".join(pair) for pair in content["model"]["merges"]]}}
    offsets = content | {"post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}}
    theirs = content | {"model": content["model"] | {"continuing_subword_prefix": "", "unk_token": "<|endoftext|>"}}
    for form in (content, older, offsets, theirs):
        path.write_text(json.dumps(form))
        ours, library = load_tokenizer_file(path), tokenizers.Tokenizer.from_file(str(path))
        assert isinstance(ours, TiktokenTokenizer) and ours.name == "bpe:900"
        library.encode_special_tokens = True
        for text in ODD:
            assert ours.encode(text) == library.encode(text).ids


def changed(**fields) -> str:
    return json.dumps(json.loads(plain()) | fields)


def without_a_byte() -> str:
    content = json.loads(plain())
    vocabulary = content["model"]["vocab"]
    vocabulary["another"] = vocabulary.pop("\u0100")  # the byte 0
    return json.dumps(content)


def in_model(**fields) -> str:
    content = json.loads(plain())
    content["model"] |= fields
    return json.dumps(content)


def with_pattern(pattern: str) -> str:
    return changed(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    )


REFUSED = {
    "no JSON": (lambda: "x", "holds no tokenizer"),
    "a list": (lambda: "[]", "holds no tokenizer"),
    "deep": (lambda: '{"model":' + "[" * 100_000, "holds no tokenizer"),
    "another version": (lambda: changed(version="9"), "holds no tokenizer"),
    "a pattern that is none": (lambda: with_pattern("(a"), "holds no tokenizer"),
    "dropout": (lambda: in_model(dropout=0.1), "has a dropout in its model"),
    "no end of text": (lambda: changed(added_tokens=[]), "has no token that ends a document"),
    "a lost byte": (without_a_byte, "lacks the byte 0"),
    "tokens around a text": (
        lambda: changed(post_processor=json.loads(processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 900)]).__getstate__())),
        "has the post_processor TemplateProcessing, which puts tokens around every text",
    ),
    "a huge id": (
        lambda: in_model(vocab=json.loads(plain())["model"]["vocab"] | {"zzz": 4_000_000_000}),
        "has the id 4000000000, and 1048575 is the largest",
    ),
}  # fmt: skip


def check_refused(content, said, folder):
    """One sentence refuses the file; it names the file and says this."""
    path = folder / "tokenizer.json"
    path.write_text(content())
    with pytest.raises(InputError, match=r"^the tokenizer file ") as caught:
        load_tokenizer_file(path)
    sentence = str(caught.value)
    assert said in sentence and str(path) in sentence and "\n" not in sentence and len(sentence) < 800, sentence


def test_a_padding_that_no_memory_holds_does_not_apply(tmp_path):
    path = tmp_path / "tokenizer.json"
    padding = json.loads(cut_short().to_str())["padding"] | {"strategy": {"Fixed": 10**12}}
    path.write_text(changed(padding=padding))
    assert load_tokenizer_file(path).encode("Hello") == tokenizers.Tokenizer.from_str(plain()).encode("Hello").ids


def test_a_name_that_stands_twice_is_read_as_the_library_reads_it(tmp_path):
    """Python takes the last of two, so that a file could look like GPT-2's and be another."""
    path = tmp_path / "tokenizer.json"
    twice = plain().replace('"normalizer":null', '"normalizer":{"type":"NFC"},"normalizer":null', 1)
    assert twice != plain()
    path.write_text(twice)
    assert load_tokenizer_file(path).decode(load_tokenizer_file(path).encode("e\u0301")) == "e\u0301"


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(what, tmp_path):
    check_refused(*REFUSED[what], tmp_path)


def test_another_tokenizer_of_a_name_is_refused(tmp_path):
    """A BPE of one size and other rules would give other ids in silence."""
    path = tmp_path / "bpe_900.json"
    train_bpe(iter(TEXTS), 900, path)
    content = json.loads(path.read_text()) | {"normalizer": {"type": "NFC"}}
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="holds json:900, but the token file was made with bpe:900"):
        load_tokenizer("bpe:900", path)
    assert unicodedata.normalize("NFC", "e\u0301") == load_tokenizer_file(path).decode(
        load_tokenizer_file(path).encode("e\u0301")
    )
