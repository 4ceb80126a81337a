"""Turn text into token ids and back: GPT-2's published BPE, or a byte-level BPE trained on the corpus.

Both are a `tiktoken.Encoding`, so that encoding is equally fast. Both work on bytes: any text that can be written as
UTF-8 comes back unchanged. A lone surrogate (half a UTF-16 pair, possible in a Python str) cannot be written as UTF-8;
the corpus reader replaces it by U+FFFD, and `encode` refuses it. tokenizer_file.py reads the files of other tokenizers.
"""

from __future__ import annotations

import abc
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from testbed.data.reachable import status_of
from testbed.errors import InputError

if TYPE_CHECKING:
    import tiktoken

DEFAULT_BPE = "bpe:8192"
# 256 bytes and end-of-text: with fewer ids some text could not be written.
SMALLEST_BPE_VOCABULARY = 257
LARGEST_BPE_VOCABULARY = 1 << 20
# GPT-2's pattern in the form tiktoken uses: possessive, same matches as the published one, several times faster.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

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


class Tokenizer(abc.ABC):
    """One tokenizer.

    Attributes:
        name: "gpt2"; "bpe:N", a byte-level BPE by GPT-2's rules; "json:N", any other tokenizer.json; or "char:N", the
            characters of nanoGPT's data (characters.py). N is `vocab_size`.
        vocab_size: the largest id + 1. In the first two, end-of-text is the last id.
        end_of_text_id: None where no token ends a text.
        is_bytewise: a token stands for the same bytes wherever it is, so ids can be decoded one at a time.
    """

    is_bytewise = True

    def __init__(self, name: str, vocab_size: int, end_of_text_id: int | None) -> None:
        self.name, self.vocab_size, self.end_of_text_id = name, vocab_size, end_of_text_id

    @abc.abstractmethod
    def encode_to_array(self, text: str) -> np.ndarray:
        """Return `encode` as a uint32 array."""

    @abc.abstractmethod
    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """Return `decode` before it is text: a token may end, or begin, inside a character."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; "<|endoftext|>" inside it is plain text, not the token."""
        return self.encode_to_array(text).tolist()

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ids; ids cut inside a character give U+FFFD. InputError: the tokenizer lacks an id."""
        return self.decode_bytes(token_ids).decode("utf-8", errors="replace")

    def byte_lengths(self) -> np.ndarray:
        """Return the bytes of text that each id stands for, (vocab_size,) int64; 0 for end-of-text. Only where
        `is_bytewise`."""
        assert self.is_bytewise
        lengths = [len(self.decode_bytes([token])) for token in range(self.vocab_size)]
        if self.end_of_text_id is not None:
            lengths[self.end_of_text_id] = 0
        return np.array(lengths, dtype=np.int64)

    def has(self, token_id: int) -> bool:
        """Return whether an id is a token: ids may have gaps, and a model's vocabulary may be larger."""
        return 0 <= token_id < self.vocab_size

    def unknown_id(self, token_id: int) -> InputError:
        """Return the error for an id that is not a token."""
        return InputError(
            f"token id {token_id} is not one of the {self.vocab_size} tokens of {self.name}; "
            "the ids were made with another tokenizer"
        )


class TiktokenTokenizer(Tokenizer):
    """GPT-2's rules, with its merges or others. "gpt2" or "bpe:N"."""

    def __init__(self, name: str, encoding: tiktoken.Encoding, end_of_text_id: int) -> None:
        super().__init__(name, encoding.n_vocab, end_of_text_id)
        self._encoding = encoding

    def encode_to_array(self, text: str) -> np.ndarray:
        # without a Python list between it is 30 % faster, and other threads run
        parts = [self._encoding.encode_to_numpy(part, disallowed_special=()) for part in _parts(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        ids = [int(token_id) for token_id in token_ids]
        try:
            return self._encoding.decode_bytes(ids)
        except (KeyError, OverflowError) as error:
            raise self.unknown_id(next(each for each in ids if not self.has(each))) from error


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


def gpt2_reachable() -> bool:
    """Return whether the host of GPT-2's files answers."""
    return status_of(_GPT2_URL + "vocab.bpe") == 200


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
    return TiktokenTokenizer("gpt2", encoding, encoding.eot_token)


def bpe_vocab_size(name: str) -> int:
    """Return N of "bpe:N". Raises InputError for anything else."""
    match = re.fullmatch(r"bpe:(\d{1,18})", name)
    if match is None:
        raise InputError(f"--tokenizer {name} is none of auto, gpt2 and bpe:N; for example --tokenizer {DEFAULT_BPE}")
    vocab_size = int(match[1])
    if vocab_size < SMALLEST_BPE_VOCABULARY:
        raise InputError(
            f"--tokenizer {name} is too small: 256 bytes and end-of-text need N of at least {SMALLEST_BPE_VOCABULARY}; "
            f"for example --tokenizer {DEFAULT_BPE}"
        )
    if vocab_size > LARGEST_BPE_VOCABULARY:  # room for all of it is taken before the first text is read
        raise InputError(
            f"--tokenizer {name} is too large: N can be {LARGEST_BPE_VOCABULARY} at most; for example --tokenizer "
            f"{DEFAULT_BPE}"
        )
    return vocab_size


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
