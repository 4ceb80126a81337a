"""Read questions with several endings: {"ctx": TEXT, "endings": [TEXT, ...], "label": N} in each line, as HellaSwag has
them. No torch."""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.data.tokenizer import Tokenizer
from testbed.errors import InputError
from testbed.io import open_regular, parse_json

LONGEST_LINE = 1 << 20  # bytes
_FORM = '{"ctx": TEXT, "endings": [TEXT, ...], "label": N}'


@dataclass(frozen=True)
class Ending:
    """Ids of context and ending, of which the last `scored` are the ending's."""

    token_ids: tuple[int, ...]
    scored: int
    characters: int


@dataclass(frozen=True)
class Question:
    endings: tuple[Ending, ...]
    label: int


def read_questions(path: Path, tokenizer: Tokenizer, longest: int, flag: str = "--multiple_choice") -> list[Question]:
    """Return the questions of a file, tokenized. A context that leaves no room for an ending loses its beginning.

    Args:
        flag: which names the file.
        longest: tokens that the model reads at once, which it should have been trained with.

    Raises:
        InputError: one sentence that begins with the flag and names the line: the file cannot be read, or a line is
            none of the form.
    """
    found = []
    try:
        with open_regular(Path(path)) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=1):
                name = f"{flag} {path} line {number}"
                if len(line) == LONGEST_LINE:
                    raise InputError(f"{name} has {LONGEST_LINE:,} bytes or more; it must be {_FORM}")
                if line.strip():
                    found.append(_question(parse_json(line, name), name, tokenizer, longest))
    except OSError as error:
        fault = f"{flag} {path} cannot be read ({error.strerror})"
        raise InputError(f"{fault}; name a .jsonl with one {_FORM} per line") from None
    if not found:
        raise InputError(f"{flag} {path} holds no questions; there is nothing to score")
    return found


def _question(content: Any, name: str, tokenizer: Tokenizer, longest: int) -> Question:
    if not isinstance(content, dict):
        raise InputError(f"{name} is no {_FORM}")
    context, endings, label = (content.get(key) for key in ("ctx", "endings", "label"))
    if not isinstance(context, str) or not context.strip():
        raise InputError(f'{name} has no text as "ctx"; it must be {_FORM}')
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(each, str) and each for each in endings):
        raise InputError(f'{name} has no two texts or more as "endings"; it must be {_FORM}')
    if isinstance(label, str) and re.fullmatch(r"[0-9]{1,5}", label):  # the hub's copy has it as text
        label = int(label)
    if type(label) is not int or not 0 <= label < len(endings):
        raise InputError(f'{name} has the "label" {reprlib.repr(label)}, which is the place of none of its endings')
    try:
        before, *ids = [tokenizer.encode(text) for text in (context, *(f" {ending}" for ending in endings))]
    except InputError as error:  # a character that the tokenizer lacks
        raise InputError(f"{name}: {error}") from None
    found = []
    for ending, own in zip(endings, ids, strict=True):
        if not own or not before:
            raise InputError(f"{name}: {tokenizer.name} makes no token of the context or of an ending; leave it out")
        token_ids = (before + own)[-(longest + 1) :]
        found.append(Ending(tuple(token_ids), min(len(own), len(token_ids) - 1), len(ending)))
    return Question(tuple(found), label)
