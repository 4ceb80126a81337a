"""Turn text into token ids and back: GPT-2's published BPE, or a byte-level BPE trained on the corpus.

Both are a `tiktoken.Encoding` behind one interface, so that encoding is equally fast. Both work on bytes: any text that
can be written as UTF-8 comes back unchanged. A lone surrogate (half a UTF-16 pair, possible in a Python str) cannot be
written as UTF-8; the corpus reader replaces it by U+FFFD, and `encode` refuses it.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from testbed.data.reachable import status_of
from testbed.errors import InputError
from testbed.io import read_regular, write_text

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
DEFAULT_BPE = "bpe:8192"
# 256 bytes and end-of-text: with fewer ids some text could not be written.
SMALLEST_BPE_VOCABULARY = 257
LARGEST_BPE_VOCABULARY = 1 << 20
# GPT-2's pattern in the form tiktoken uses: possessive, same matches as the published one, several times faster.
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

_GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
# What tiktoken downloads for "gpt2". A cached file's name is the sha1 of its address.
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}

# `\s+(?!\S)` needs stack for every character of a run of white space: 1,000,000 blanks before a letter abort tiktoken
# 0.14. Cut such a run before its last character: the head is then "white space at the end of the text" and the tail
# begins where the pattern would have begun a match anyway, so the ids are those of the uncut text. Python counts
# \x1c-\x1f as white space, the pattern's engine does not.
_LONG_BLANK_RUN = 100_000
_BLANK = r"[^\S\x1c-\x1f]"
_BLANK_RUN = re.compile(rf"(?<!{_BLANK}){_BLANK}+")


class Tokenizer:
    """One tokenizer. `name` is "gpt2" or "bpe:N"; N = `vocab_size` counts the end-of-text token, the last id."""

    def __init__(self, name: str, encoding: tiktoken.Encoding, end_of_text_id: int) -> None:
        self.name = name
        self.vocab_size = encoding.n_vocab
        self.end_of_text_id = end_of_text_id
        self._encoding = encoding

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; "<|endoftext|>" inside it is plain text, not the token."""
        return self.encode_to_array(text).tolist()

    def encode_to_array(self, text: str) -> np.ndarray:
        """Return `encode` as a uint32 array: without a Python list between it is 30 % faster, and other threads run."""
        parts = [self._encoding.encode_to_numpy(part, disallowed_special=()) for part in _parts(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def byte_lengths(self) -> np.ndarray:
        """Return the bytes of text that each id stands for, (vocab_size,) int64; 0 for end-of-text."""
        lengths = [len(self._encoding.decode_single_token_bytes(token)) for token in range(self.vocab_size)]
        lengths[self.end_of_text_id] = 0
        return np.array(lengths, dtype=np.int64)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ids; ids cut inside a character give U+FFFD. InputError: the tokenizer lacks an id."""
        return self.decode_bytes(token_ids).decode("utf-8", errors="replace")

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """Return `decode` before it is text: a token may end, or begin, inside a character."""
        ids = [int(token_id) for token_id in token_ids]
        try:
            return self._encoding.decode_bytes(ids)
        except (KeyError, OverflowError) as error:
            wrong = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
            raise InputError(
                f"token id {wrong} is not one of the {self.vocab_size} tokens of {self.name}; "
                "the ids were made with another tokenizer"
            ) from error


def _parts(text: str) -> list[str]:
    """`text` cut where the ids of the parts, put together, are the ids of the whole (see `_LONG_BLANK_RUN`)."""
    # A long run fills one of these pieces. Looking at their first characters is free, the pattern costs a fifth of the
    # encoding.
    stride = _LONG_BLANK_RUN // 2
    if not any(text[start : start + stride].isspace() for start in range(0, len(text), stride)):
        return [text]
    cuts = [
        match.end() - 1
        for match in _BLANK_RUN.finditer(text)
        if match.end() - match.start() >= _LONG_BLANK_RUN and match.end() < len(text)
    ]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _gpt2_cache_directory() -> Path | None:
    """Return the folder in which tiktoken looks for files; None: caching is switched off by an empty variable."""
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if variable in os.environ:
            return Path(os.environ[variable]) if os.environ[variable] else None
    return Path(tempfile.gettempdir()) / "data-gym-cache"


def gpt2_cache_name(file_name: str) -> str:
    """Return the name under which tiktoken's cache keeps `vocab.bpe` or `encoder.json`."""
    return hashlib.sha1((_GPT2_URL + file_name).encode()).hexdigest()


def gpt2_files_at_hand() -> bool:
    """Return whether both of GPT-2's files lie whole in tiktoken's cache, which downloads a damaged one again."""
    directory = _gpt2_cache_directory()
    if directory is None:
        return False
    for file_name, sha256 in GPT2_FILES.items():
        path = directory / gpt2_cache_name(file_name)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            return False
    return True


def gpt2_reachable(timeout_s: float = 5.0) -> bool:
    """Return whether the host of GPT-2's files answers within `timeout_s`."""
    return status_of(_GPT2_URL + "vocab.bpe", timeout_s) == 200


def load_gpt2_tokenizer(
    name: str = "--tokenizer gpt2", instead: str = f"use --tokenizer {DEFAULT_BPE}, which is trained here"
) -> Tokenizer:
    """Load GPT-2's tokenizer.

    Args:
        name, instead: what needs it, and what else would do, in the sentence that says that it is not available.

    Raises:
        OSError: its files are neither in tiktoken's cache nor reachable within 5 s.
    """
    import tiktoken

    # tiktoken downloads without a timeout, so the network is tried before.
    if not gpt2_files_at_hand() and not gpt2_reachable():
        names = " and ".join(f"{name} as {gpt2_cache_name(name)}" for name in GPT2_FILES)
        raise OSError(
            f"{name} needs GPT-2's vocab.bpe and encoder.json, which are not in tiktoken's cache, and "
            f"{_GPT2_URL} cannot be reached; copy them from a machine with a network into a folder that "
            f"TIKTOKEN_CACHE_DIR names ({names}), or {instead}"
        )
    encoding = tiktoken.get_encoding("gpt2")
    return Tokenizer("gpt2", encoding, encoding.eot_token)


def bpe_vocab_size(name: str, flag: str = "--tokenizer") -> int:
    """Return N of "bpe:N". Raises InputError for anything else."""
    match = re.fullmatch(r"bpe:(\d{1,18})", name)
    if match is None:
        raise InputError(f"{flag} {name} is none of auto, gpt2 and bpe:N; for example {flag} {DEFAULT_BPE}")
    vocab_size = int(match[1])
    if vocab_size < SMALLEST_BPE_VOCABULARY:
        raise InputError(
            f"{flag} {name} is too small: 256 bytes and end-of-text need N of at least {SMALLEST_BPE_VOCABULARY}; "
            f"for example {flag} {DEFAULT_BPE}"
        )
    if vocab_size > LARGEST_BPE_VOCABULARY:  # room for all of it is taken before the first text is read
        raise InputError(
            f"{flag} {name} is too large: N can be {LARGEST_BPE_VOCABULARY} at most; for example {flag} {DEFAULT_BPE}"
        )
    return vocab_size


def bpe_file_name(vocab_size: int, stem: str = "bpe") -> str:
    """Return the name of a trained BPE's file, which lies next to the token files."""
    return f"{stem}_{vocab_size}.json"


def resolve_tokenizer(name: str) -> tuple[str, str]:
    """Return the tokenizer that --tokenizer stands for, and the reason. Raises InputError for an unknown name."""
    if name == "auto":
        if gpt2_files_at_hand():
            return "gpt2", "its files are in tiktoken's cache"
        if gpt2_reachable():
            return "gpt2", "its files can be downloaded"
        return DEFAULT_BPE, "GPT-2's files are not in tiktoken's cache and their host cannot be reached"
    if name != "gpt2":
        bpe_vocab_size(name)
    return name, "--tokenizer asks for it"


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
    return load_bpe(path)


def load_bpe(path: Path, text: str | None = None) -> Tokenizer:
    """Load a tokenizer that `train_bpe` saved. Raises InputError when the file is missing or not such a file.

    Args:
        text: what the file held when it was read before; then it is not read again.
    """
    import tiktoken

    way_out = "make it again with: python preprocess_small.py"
    try:
        content = json.loads(read_regular(path).decode("utf-8") if text is None else text)
        vocabulary: dict[str, int] = content["model"]["vocab"]
        (added,) = (token for token in content["added_tokens"] if token["content"] == END_OF_TEXT)
        end_of_text = operator.index(added["id"])
        byte_of = _byte_of_character()
        ranks = {
            bytes(byte_of[character] for character in token): rank
            for token, rank in vocabulary.items()
            if rank != end_of_text
        }
        is_numbered = len(ranks) == end_of_text and sorted(ranks.values()) == list(range(end_of_text))
    except OSError as error:
        raise InputError(f"the tokenizer file {path} cannot be read ({error.strerror}); {way_out}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(f"the tokenizer file {path} holds no byte-level BPE; {way_out}") from error
    # tiktoken merges the pair whose product has the lowest rank. `tokenizers` merges in the order of its list; both
    # agree because a product's id is its place in that list.
    if not is_numbered:
        raise InputError(f"the tokenizer file {path} does not number its tokens 0..{end_of_text - 1}; {way_out}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or b"" in ranks:  # tiktoken aborts at the first text that needs it
        fault = f"the byte {missing[0]}" if missing else "only tokens of some text"
        raise InputError(f"the tokenizer file {path} lacks {fault}; {way_out}")
    name = f"bpe:{end_of_text + 1}"
    encoding = tiktoken.Encoding(
        name, pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: end_of_text}
    )
    return Tokenizer(name, encoding, end_of_text)


def load_tokenizer(name: str, tokenizer_file: Path | None, text: str | None = None) -> Tokenizer:
    """Load the tokenizer that a token file's sidecar names. `text` as in `load_bpe`.

    Raises OSError when GPT-2's files are not available, ValueError when the tokenizer file is missing or another one.
    """
    if name == "gpt2":
        return load_gpt2_tokenizer()
    vocab_size = bpe_vocab_size(name, "tokenizer")
    if tokenizer_file is None:
        raise InputError(f"tokenizer {name} needs its file, {bpe_file_name(vocab_size)} next to the token files")
    tokenizer = load_bpe(tokenizer_file, text)
    if tokenizer.vocab_size != vocab_size:
        raise InputError(
            f"the tokenizer file {tokenizer_file} holds {tokenizer.name}, but the token file was made with {name}; "
            "make both again with: python preprocess_small.py"
        )
    return tokenizer


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE files show each byte as one printable character; this is GPT-2's table, read backwards."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
