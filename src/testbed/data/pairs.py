"""Read pairs of a prompt and its reference, and make the tokens that a model sees of one.

pairs.jsonl has one {"prompt": TEXT, "reference": TEXT} per line; several references are a list, of which the first is
learned and all are scored against. A model sees prompt, separator, reference, end-of-text, and learns the last two.
Training and evaluation both come here, so that a model is asked in the form in which it was taught. No torch.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.data.tokenizer import Tokenizer
from testbed.errors import InputError
from testbed.io import open_regular, parse_json

SEPARATOR = "\n"  # one token in GPT-2's BPE and in every byte-level one; published weights know it as the end of a line
_FORM = '{"prompt": TEXT, "reference": TEXT}, or a list of texts as the reference'


@dataclass(frozen=True)
class Pair:
    """A prompt, and one reference or more."""

    prompt: str
    references: tuple[str, ...]

    @property
    def text(self) -> str:
        """The text that is learned."""
        return self.prompt + SEPARATOR + self.references[0]

    @property
    def line(self) -> str:
        """The pair as a line of pairs.jsonl."""
        content = {"prompt": self.prompt, "reference": list(self.references)}
        return json.dumps(content, ensure_ascii=False) + "\n"


def read_pairs(path: Path, flag: str = "--pairs") -> Iterator[Pair]:
    """Yield the pairs of a .jsonl, one at a time; blank lines are skipped, other keys of a line are not read.

    Raises:
        InputError: one sentence that begins with `flag` and names the line: the file cannot be read, or a line is no
            pair of texts that are not blank.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    name = f"{flag} {path} line {number}"
                    yield _pair(parse_json(line, name), name)
    except OSError as error:
        raise InputError(
            f"{flag} {path} cannot be read ({error.strerror}); name a .jsonl with one {_FORM}, per line"
        ) from None


def _pair(content: Any, name: str) -> Pair:
    if not isinstance(content, dict):
        raise InputError(f"{name} is no {_FORM}")
    for key in ("prompt", "reference"):
        if key not in content:
            raise InputError(f'{name} has no "{key}"; it must be {_FORM}')
    given = content["reference"]
    references = given if isinstance(given, list) else [given]
    if not references:
        raise InputError(f"{name} has an empty list as its reference; give at least one")
    for what, text in (("prompt", content["prompt"]), *(("reference", text) for text in references)):
        if not isinstance(text, str):
            raise InputError(f"{name} has the {what} {reprlib.repr(text)}, which is not text; it must be {_FORM}")
        if not text.strip():
            raise InputError(f"{name} has a blank {what}; there is nothing to learn or to score there: leave it out")
    return Pair(content["prompt"], tuple(references))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return what a model is given to continue: prompt and separator, encoded apart, so that no token spans them."""
    return tokenizer.encode(prompt) + tokenizer.encode(SEPARATOR)


def encode_pair(tokenizer: Tokenizer, pair: Pair) -> tuple[list[int], int]:
    """Return the ids of prompt, separator and first reference, without end-of-text, and the place of the reference's
    first."""
    prompt = encode_prompt(tokenizer, pair.prompt)
    if not prompt:  # one that drops white space or what it does not know
        raise InputError(
            f"{tokenizer.name} makes no token of the prompt {reprlib.repr(pair.prompt)}; leave the pair out"
        )
    return prompt + tokenizer.encode(pair.references[0]), len(prompt)
