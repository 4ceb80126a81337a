"""Read nanoGPT's data of characters: `meta.pkl` beside train.bin says which character each id stands for. No torch.

A pickle can call anything. This one is not unpickled: its instructions are listed, those that make dictionaries, lists,
text and whole numbers are followed, and any other ends the reading. What is found becomes a tokenizer.json that the
`tokenizers` library opens too, so that a run's folder has all that sampling needs.
"""

from __future__ import annotations

import json
import pickletools
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from testbed.data.tokenizer import Tokenizer
from testbed.errors import InputError
from testbed.io import holding_together, read_regular

META = "meta.pkl"
MOST_BYTES = 8 << 20  # 65,536 characters, which is all that uint16 has room for, take less than three MiB
MOST_CHARACTERS = 1 << 16
_WAY_OUT = "make it with nanoGPT's prepare.py, or write a sidecar .json beside the .bin"
_VALUES = ("BININT", "BININT1", "BININT2", "INT", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "UNICODE")
_NOTHING = ("PROTO", "FRAME")


class CharacterTokenizer(Tokenizer):
    """One token for each character, none that ends a text: "char:N"."""

    def __init__(self, ids: dict[str, int], path: Path) -> None:
        """
        Args:
            ids: of the characters, 0 to N - 1.
            path: what they were read from, for a sentence about it.
        """
        super().__init__(f"char:{len(ids)}", len(ids), None)
        self._ids, self._path = ids, path
        self._bytes = [character.encode() for character in sorted(ids, key=ids.__getitem__)]

    def encode_to_array(self, text: str) -> np.ndarray:
        try:
            return np.array([self._ids[character] for character in text], dtype=np.uint32)
        except KeyError as error:
            text.encode()  # a lone surrogate: UnicodeEncodeError
            raise InputError(
                f"{error.args[0]!r} is none of the {self.vocab_size} characters that the model knows ({self._path}); "
                "leave it out of the text"
            ) from None

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        ids = [int(token_id) for token_id in token_ids]
        for token_id in ids:
            if not self.has(token_id):
                raise self.unknown_id(token_id)
        return b"".join(self._bytes[token_id] for token_id in ids)


def tokenizer_json(path: Path) -> bytes:
    """Return the text of a tokenizer's file; of a meta.pkl what a tokenizer.json of its characters would hold.

    Raises:
        OSError: it cannot be read.
        InputError: it is a meta.pkl without a table of characters.
    """
    if path.suffix != ".pkl":
        return read_regular(path)
    return json.dumps(_document(characters_of_meta(path)), ensure_ascii=False, indent=1).encode() + b"\n"


def characters_of_json(content: Any) -> dict[str, int] | None:
    """Return the ids of the characters in what a tokenizer.json holds; None: it is of another tokenizer."""
    model = content.get("model") if isinstance(content, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    is_ours = isinstance(vocabulary, dict) and _are_characters(vocabulary) and content == _document(vocabulary)
    return vocabulary if is_ours else None


def characters_of_meta(path: Path) -> dict[str, int]:
    """Return the ids of the characters in a meta.pkl.

    Raises:
        OSError: it cannot be read.
        InputError: one sentence that begins with the path: it holds something else.
    """
    with holding_together(path):
        content = _plain(read_regular(path, MOST_BYTES))
        parts = [content.get(name) if isinstance(content, dict) else None for name in ("vocab_size", "stoi", "itos")]
        size, ids, characters = parts
        if not isinstance(ids, dict) or not _are_characters(ids):
            raise InputError(f"its stoi is {reprlib.repr(ids)}, not the ids of single characters from 0 on; {_WAY_OUT}")
        characters = dict(enumerate(characters)) if isinstance(characters, list) else characters
        if characters != {number: character for character, number in ids.items()}:
            raise InputError(f"its itos does not turn around its stoi; {_WAY_OUT}")
        if type(size) is not int or size != len(ids):
            raise InputError(f"its vocab_size is {reprlib.repr(size)}, and its stoi has {len(ids)}; {_WAY_OUT}")
        return ids


def _are_characters(vocabulary: dict[Any, Any]) -> bool:
    """Return whether single characters that UTF-8 can write have the ids from 0 on, each once."""
    are_single = all(
        isinstance(each, str) and len(each) == 1 and not "\ud800" <= each <= "\udfff" for each in vocabulary
    )
    are_ids = all(type(number) is int for number in vocabulary.values())
    return (
        are_single
        and are_ids
        and 1 < len(vocabulary) <= MOST_CHARACTERS
        and sorted(vocabulary.values()) == list(range(len(vocabulary)))
    )


def _document(ids: dict[str, int]) -> dict[str, Any]:
    """Return a tokenizer.json by which the `tokenizers` library gives the same ids and the same text."""
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding")),
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": ""},
    }


def _plain(content: bytes) -> Any:
    """Return what a pickle of plain values holds. InputError: it has an instruction that makes something else."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        place = marks.pop()
        values = stack[place:]
        del stack[place:]
        return values

    def fill(values: list[Any]) -> None:
        if isinstance(stack[-1], list):
            stack[-1].extend(values)
        else:
            stack[-1].update(zip(values[::2], values[1::2], strict=True))

    for instruction, value, _ in pickletools.genops(content):
        match instruction.name:
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "DICT":
                pairs = since_mark()
                stack.append(dict(zip(pairs[::2], pairs[1::2], strict=True)))
            case "LIST":
                stack.append(since_mark())
            case "SETITEMS" | "APPENDS":
                fill(since_mark())
            case "SETITEM":
                marks.append(len(stack) - 2)
                fill(since_mark())
            case "APPEND":
                fill([stack.pop()])
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[int(value or 0)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[int(value or 0)])
            case name if name in _VALUES:
                stack.append(value)
            case name if name not in _NOTHING:
                raise InputError(f"it is a pickle that does more than hold characters ({name}); {_WAY_OUT}")
    raise InputError(f"it ends in the middle; {_WAY_OUT}")
