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
# instructions of pickles of protocol 2 and later
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE")
_CONTAINERS = {"EMPTY_DICT": dict, "EMPTY_LIST": list}
_FILLERS = {"SETITEM": 2, "APPEND": 1, "SETITEMS": 0, "APPENDS": 0}  # with so many values; 0: those since the mark


class CharacterTokenizer(Tokenizer):
    """One token for each character, none that ends a text: "char:N"."""

    def __init__(self, ids: dict[str, int], path: Path) -> None:
        """Args: ids: of the characters, 0 to N - 1. path: what they were read from, for a sentence about it."""
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
        if unknown := [token_id for token_id in ids if not self.has(token_id)]:
            raise self.unknown_id(unknown[0])
        return b"".join(self._bytes[token_id] for token_id in ids)


def tokenizer_json(path: Path) -> bytes:
    """Return the text of a tokenizer's file; of a meta.pkl what a tokenizer.json of its characters would hold.

    OSError: it cannot be read. InputError: it is a meta.pkl without a table of characters.
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
    """Return the ids of the characters in a meta.pkl. InputError, one sentence that begins with the path: it cannot be
    read, or holds something else."""
    try:
        pickled = read_regular(path, MOST_BYTES)
    except OSError as error:
        raise InputError(
            f"{path}, which says what the tokens are, cannot be read ({error.strerror}); {_WAY_OUT}"
        ) from None
    with holding_together(path):
        content = _plain(pickled)
        ids = content.get("stoi") if isinstance(content, dict) else None
        if not isinstance(ids, dict) or not _are_characters(ids):
            raise InputError(f"its stoi is {reprlib.repr(ids)}, not the ids of single characters from 0 on; {_WAY_OUT}")
        return ids


def _are_characters(vocabulary: dict[Any, Any]) -> bool:
    """Return whether single characters that UTF-8 can write have the ids from 0 on, each once."""
    are_single = (isinstance(each, str) and len(each) == 1 and not "\ud800" <= each <= "\udfff" for each in vocabulary)
    are_ids = all(type(number) is int for number in vocabulary.values())  # a list would have no hash
    is_whole = are_ids and {*vocabulary.values()} == {*range(len(vocabulary))}
    return is_whole and all(are_single) and 1 < len(vocabulary) <= MOST_CHARACTERS


def _document(ids: dict[str, int]) -> dict[str, Any]:
    """Return a tokenizer.json by which the `tokenizers` library gives the same ids and the same text."""
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": ids, "unk_token": ""}
    none = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    return {
        "version": "1.0",
        **none,
        "added_tokens": [],
        "pre_tokenizer": split,
        "decoder": {"type": "Fuse"},
        "model": model,
    }


def _plain(content: bytes) -> Any:
    """Return what a pickle of plain values holds. InputError: it has an instruction that makes something else."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for instruction, value, _ in pickletools.genops(content):
        name = instruction.name
        if name in _VALUES:
            stack.append(value)
        elif name in _CONTAINERS:
            stack.append(_CONTAINERS[name]())
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _FILLERS:
            start = len(stack) - taken if (taken := _FILLERS[name]) else marks.pop()
            filled, values = stack[start - 1], stack[start:]
            del stack[start:]
            filled.extend(values) if isinstance(filled, list) else filled.update(zip(*[iter(values)] * 2, strict=True))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if value is None else value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo.get(value))
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise InputError(f"it is a pickle that does more than hold characters ({name}); {_WAY_OUT}")
    raise InputError(f"it ends in the middle; {_WAY_OUT}")
