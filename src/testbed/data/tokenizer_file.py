"""Train, save and read the file of a tokenizer: a tokenizer.json of the `tokenizers` library.

A byte-level BPE with exactly GPT-2's rules becomes a `TiktokenTokenizer`, which is several times faster and gives the
library's ids. Every other file (a normalizer, another pattern, a prefix space, more added tokens, WordPiece,
Unigram) is used through the library itself. What neither can do is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from testbed.data.characters import CharacterTokenizer, characters_of_json, tokenizer_json
from testbed.data.tokenizer import (
    GPT2_PATTERN,
    LARGEST_BPE_VOCABULARY,
    TiktokenTokenizer,
    Tokenizer,
    load_gpt2_tokenizer,
)
from testbed.errors import InputError, one_line
from testbed.io import write_text

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
# What may end a document in files of others, the first that the file has.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MAKE_AGAIN = "make it again with: python preprocess_small.py"


def train_bpe(texts: Iterator[str], vocab_size: int, path: Path) -> Tokenizer:
    """Train a byte-level BPE with GPT-2's pattern on `texts`, save it at `path`, return it ready to encode.

    Ids 0..255 are the bytes, then merges in the order they were learned, and N-1 is end-of-text, as in GPT-2. The same
    texts give the same file. The file is in the `tokenizers` format, so transformers' PreTrainedTokenizerFast opens it.
    Raises InputError when the texts hold fewer than N-1 different tokens: ids that no text can produce would be rows of
    the embedding that are never trained, and could not be decoded when a model picks one.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # sorted: it is a set, and ids follow its order
        special_tokens=[],
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learned = bpe.get_vocab_size()
    if learned != vocab_size - 1:
        raise InputError(
            f"--tokenizer bpe:{vocab_size} finds only {learned} different tokens in the training documents; "
            f"use --tokenizer bpe:{learned + 1} or smaller, or more text"
        )
    bpe.add_special_tokens([END_OF_TEXT])
    write_text(path, bpe.to_str())
    return load_tokenizer_file(path)


def load_tokenizer(name: str, tokenizer_file: Path | None, text: str | None = None) -> Tokenizer:
    """Load the tokenizer that a token file's sidecar names. `text` as in `load_tokenizer_file`.

    Raises OSError when GPT-2's files are not available, InputError when the tokenizer file is missing or another one.
    """
    if name == "gpt2":
        return load_gpt2_tokenizer()
    if re.fullmatch(r"(bpe|json|char):\d{1,18}", name) is None:
        raise InputError(f"the tokenizer {one_line(name, 100)} is none of gpt2, bpe:N, json:N and char:N")
    if tokenizer_file is None:
        raise InputError(f"tokenizer {name} needs its file, {tokenizer_file_name(name)} next to the token files")
    tokenizer = load_tokenizer_file(tokenizer_file, text)
    if tokenizer.name != name:
        raise InputError(
            f"the tokenizer file {tokenizer_file} holds {tokenizer.name}, but the token file was made with {name}; "
            "make both again with: python preprocess_small.py"
        )
    return tokenizer


def tokenizer_file_name(name: str, of_pairs: bool = False) -> str:
    """Return the name of the file of "bpe:N" or "json:N", which lies next to the token files."""
    kind, _, size = name.partition(":")
    return f"{'bpe' if kind == 'bpe' else 'tokenizer'}{'_pairs' if of_pairs else ''}_{size}.json"


def load_tokenizer_file(path: Path, text: str | None = None) -> Tokenizer:
    """Load a tokenizer.json, or nanoGPT's meta.pkl.

    Args:
        text: what the file held when it was read before; then it is not read again.

    Raises:
        InputError: the file cannot be read, holds no tokenizer, or one that is not implemented here.
    """
    try:
        text = tokenizer_json(path).decode("utf-8") if text is None else text
    except (OSError, UnicodeDecodeError) as error:
        fault = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"the tokenizer file {path} cannot be read ({fault}); {_MAKE_AGAIN}") from error
    if (characters := characters_of_json(_parsed(text))) is not None:
        return CharacterTokenizer(characters, path)
    library = _read(path, text)
    content = json.loads(library.to_str())  # as the library understood it, with every field
    ranks = _ranks_by_gpt2_rules(library, content)
    if ranks is None:
        return LibraryTokenizer(library, content, path)

    import tiktoken

    name, end_of_text = f"bpe:{len(ranks) + 1}", {END_OF_TEXT: len(ranks)}
    encoding = tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=end_of_text)
    return TiktokenTokenizer(name, encoding, len(ranks))


class LibraryTokenizer(Tokenizer):
    """Any tokenizer.json, by the `tokenizers` library: "json:N".

    A document's ids are those of its text: neither truncation nor padding of the file apply. Special tokens inside a
    text are plain text, added tokens that are not special are tokens.
    """

    def __init__(self, library: tokenizers.Tokenizer, content: dict[str, Any], path: Path) -> None:
        """Args: content: `library` as JSON. InputError: it does what is not implemented here."""
        refused = f"the tokenizer file {path}"
        if content["model"].get("dropout"):
            raise InputError(f"{refused} has a dropout in its model: a text has other ids each time; set it to null")
        if library.num_special_tokens_to_add(False):
            raise InputError(
                f"{refused} has the post_processor {content['post_processor']['type']}, which puts tokens around every "
                "text, and training puts end-of-text after a document only; set it to null"
            )
        vocabulary = library.get_vocab(with_added_tokens=True)
        end = next((token for token in _ENDS if token in vocabulary), None)
        if end is None:
            raise InputError(f"{refused} has no token that ends a document; add one of {', '.join(_ENDS)}")
        vocab_size = max(vocabulary.values()) + 1
        super().__init__(f"json:{vocab_size}", vocab_size, vocabulary[end])
        self.is_bytewise = (content["decoder"] or {}).get("type") == "ByteLevel"
        if self.is_bytewise:
            byte_of = _byte_of_character()
            lost = [byte for character, byte in byte_of.items() if character not in vocabulary]
            if lost:
                raise InputError(f"{refused} lacks the byte {min(lost)}, so some text would be lost; {_MAKE_AGAIN}")
            self._bytes = {token_id: _bytes_of(token, byte_of) for token, token_id in vocabulary.items()}
        library.no_truncation()
        library.no_padding()
        library.add_special_tokens([end])
        library.encode_special_tokens = True
        self._library, self._path = library, path
        self._known = frozenset(vocabulary.values())

    def encode_to_array(self, text: str) -> np.ndarray:
        try:
            ids = self._library.encode(text, add_special_tokens=False).ids
        except TypeError:
            text.encode()  # a lone surrogate: UnicodeEncodeError
            raise
        except BaseException as error:
            raise self._fails_at("a text", error) from None
        return np.array(ids, dtype=np.uint32)

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        ids = [int(token_id) for token_id in token_ids]
        for token_id in ids:
            if not self.has(token_id):
                raise self.unknown_id(token_id)
        if self.is_bytewise:
            return b"".join(self._bytes[token_id] for token_id in ids)
        try:
            return self._library.decode(ids, skip_special_tokens=False).encode()
        except BaseException as error:
            raise self._fails_at("ids", error) from None

    def _fails_at(self, what: str, error: BaseException) -> BaseException:
        """Return what to raise for what encoding or decoding raised."""
        if not _is_of_library(error):
            return error
        return InputError(f"the tokenizer file {self._path} fails at {what}: {one_line(str(error), 200)}")

    def has(self, token_id: int) -> bool:
        return token_id in self._known

    def byte_lengths(self) -> np.ndarray:
        assert self.is_bytewise
        lengths = np.zeros(self.vocab_size, dtype=np.int64)  # an id that is not a token has none
        for token_id, content in self._bytes.items():
            lengths[token_id] = len(content)
        lengths[self.end_of_text_id] = 0
        return lengths


def _read(path: Path, text: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer.

    Raises:
        InputError: it holds none.
    """
    import tokenizers

    content = _parsed(text)
    if _has_gpt2_rules(content):
        text = json.dumps(content)  # what was looked at: of a name that stands twice, another reader takes the first
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise InputError(
            f"the tokenizer file {path} holds no tokenizer ({one_line(str(error), 200)}); {_MAKE_AGAIN}"
        ) from None
    largest = max(library.get_vocab().values(), default=-1)
    if largest >= LARGEST_BPE_VOCABULARY:  # the library takes a minute to write it as JSON
        raise InputError(
            f"the tokenizer file {path} has the id {largest}, and {LARGEST_BPE_VOCABULARY - 1} is the largest"
        )
    return library


def _parsed(text: str) -> Any:
    """Return what a JSON text holds; None where it is none, of which the library says what is wrong."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_of_library(error: BaseException) -> bool:
    """Return whether the library raised it: an Exception of no other class, or Rust's panic, which has no import."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def _has_gpt2_rules(content: Any) -> bool:
    """Return whether a tokenizer.json is a byte-level BPE with GPT-2's pattern, and has no rule that is not GPT-2's."""
    parts = ("model", "pre_tokenizer", "decoder", "post_processor")
    if not isinstance(content, dict) or not all(isinstance(content.get(part) or {}, dict) for part in parts):
        return False
    model, pre_tokenizer, decoder, post_processor = (content.get(part) or {} for part in parts)
    return (
        model.get("type") == "BPE"
        and model.get("dropout") is None
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and not model.get("ignore_merges")
        and (pre_tokenizer.get("type"), pre_tokenizer.get("add_prefix_space")) == ("ByteLevel", False)
        and pre_tokenizer.get("use_regex", True)
        and decoder.get("type", "ByteLevel") == "ByteLevel"  # without one, text is still text
        and post_processor.get("type", "ByteLevel") == "ByteLevel"
        and all(content.get(part) is None for part in ("normalizer", "truncation", "padding"))
    )


def _ranks_by_gpt2_rules(library: tokenizers.Tokenizer, content: dict[str, Any]) -> dict[bytes, int] | None:
    """Return the bytes and rank of each token but end-of-text, where tiktoken gives the library's ids; else None.

    tiktoken merges the pair whose product has the lowest rank. The library merges the first pair of its list. Both
    agree where each product's id is above those of the products before it, and each token's own text becomes this one
    token: then no pair has a token as its product but the one in the list.
    """
    added = [(token["content"], token["special"]) for token in content["added_tokens"]]
    if not _has_gpt2_rules(content) or added != [(END_OF_TEXT, True)]:
        return None
    model = content["model"]
    vocabulary: dict[str, int] = {token: rank for token, rank in model["vocab"].items() if token != END_OF_TEXT}
    size, products = len(vocabulary), [vocabulary.get("".join(pair), -1) for pair in model["merges"]]
    byte_of = _byte_of_character()
    if (
        content["added_tokens"][0]["id"] != size
        or sorted(vocabulary.values()) != list(range(size))
        or any(later <= earlier for earlier, later in zip([-1, *products], products, strict=False))
        or not byte_of.keys() <= vocabulary.keys()
        or not all(byte_of.keys() >= set(token) for token in vocabulary)
        or not all(len(library.model.tokenize(token)) == 1 for token in vocabulary)
    ):
        return None
    return {_bytes_of(token, byte_of): rank for token, rank in vocabulary.items()}


def _bytes_of(token: str, byte_of: dict[str, int]) -> bytes:
    """Return what the decoder ByteLevel makes of a token: an added one may hold characters that stand for no byte."""
    try:
        return bytes(byte_of[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE files show each byte as one printable character; this is GPT-2's table, read backwards."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
