"""Draw broken files by hypothesis: what other programs, full disks, editors and people do to a file."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator

from hypothesis import strategies as st

ODD_VALUES = [
    *(None, True, False, 0, -1, 1, 0.0, -0.0, 0.5, -2.5, 1e-320, 1e300, 10**18, -(10**18), 10**400, 2**63),
    *(float("nan"), float("inf"), float("-inf"), "", "text", "2.1", "unknown", "\n", "a\nb", "\x00", "\ud800"),
    *("ü" * 40, "--run_type", "n_layer=x, n_head=" + "9" * 30, [], [None], [[]], [1, "a", None], {}, {"": None}),
    {"a\nb": 1},
    json.loads("[" * 150 + "]" * 150),
]  # fmt: skip
ODD_KEYS = ["", "status", "steps", "a\nb", "schema_version", "ü", "\ud800", "x" * 300, "training_config"]
ODD_WORDS = [
    *(b"", b"-", b"nan", b"inf", b"-1", b"0", b"1e400", b"9" * 5000, b"0.1.2", b"\xff", b'"', b"\n", b"null", b"[]")
]


def members(value: object) -> Iterator[tuple[object, object]]:
    """(container, key) of every value inside, so that each can be replaced."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in list(pairs):
        yield value, key
        yield from members(member)


def delete(container, key, draw) -> None:
    del container[key]


def replace(container, key, draw) -> None:
    container[key] = copy.deepcopy(draw(st.sampled_from(ODD_VALUES)))


def rename(container, key, draw) -> None:
    if isinstance(container, dict):
        container[draw(st.sampled_from(ODD_KEYS))] = container.pop(key)
    else:
        container.append(copy.deepcopy(container[key]))


def reshape(container, key, draw) -> None:
    """Another length or nesting: lists shorter, empty, doubled, reversed; anything else put into a list or object."""
    value = container[key]
    if isinstance(value, list):
        shapes = [[], value[:1], value + copy.deepcopy(value), value[::-1], {"rows": value}, [value]]
    else:
        shapes = [[value], {"value": value}, [value] * 3, str(value)]
    container[key] = draw(st.sampled_from(shapes))


def scale(container, key, draw) -> None:
    """The same kind of number, of another size: what a schema cannot see."""
    value = container[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return replace(container, key, draw)
    factor = draw(st.sampled_from([0, -1, 2, 1000, 10**9, 10**30, 1e-9, 1e21]))
    container[key] = value * factor if isinstance(factor, int) or abs(value) < 1e300 else value
    return None


def nullify(container, key, draw) -> None:
    """The whole branch becomes null, or all of the values in it."""
    if draw(st.booleans()):
        container[key] = None
        return
    for inner, name in list(members(container[key])):
        if not isinstance(inner[name], dict | list):
            inner[name] = None


# Most of the others are refused; another size of a number passes every schema and must be read.
MUTATIONS: list[Callable] = [delete, replace, rename, reshape, nullify, *[scale] * 4]


def truncate(text: bytes, draw) -> bytes:
    return text[: draw(st.integers(0, len(text)))]


def garble(text: bytes, draw) -> bytes:
    at = draw(st.integers(0, max(0, len(text) - 1)))
    return text[:at] + draw(st.binary(min_size=1, max_size=8)) + text[at + draw(st.integers(0, 8)) :]


def flip_a_bit(text: bytes, draw) -> bytes:
    at, bit = draw(st.integers(0, max(0, len(text) - 1))), draw(st.integers(0, 7))
    return text[:at] + bytes([text[at] ^ (1 << bit)]) + text[at + 1 :] if text else b"\x01"


def zero_a_block(text: bytes, draw) -> bytes:
    """Write what a file system leaves of a file when the power fails."""
    at, length = draw(st.integers(0, max(0, len(text) - 1))), draw(st.sampled_from([1, 16, 512, 4096]))
    return text[:at] + bytes(len(text[at : at + length])) + text[at + length :]


def write_twice(text: bytes, draw) -> bytes:
    return text + text


def repeat_a_key(text: bytes, draw) -> bytes:
    """JSON may name a key twice; Python takes the second."""
    at = draw(st.sampled_from([index for index, byte in enumerate(text) if byte == ord("{")] or [0]))
    key = draw(st.sampled_from([b"steps", b"epochs", b"hardware", b"step", b"train_loss_per_epoch"]))
    value = draw(st.sampled_from([b"null", b"[]", b"{}", b"7", b'"x"']))
    return text[: at + 1] + b'"' + key + b'": ' + value + b", " + text[at + 1 :]


def nest(text: bytes, draw) -> bytes:
    depth = draw(st.sampled_from([2, 50, 900, 100_000]))
    opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"steps":', b"}")]))
    return opening * depth + text + closing * depth


def write_odd_number(text: bytes, draw) -> bytes:
    """Numbers that Python's json takes and JSON has not, or that no float can hold."""
    digits = draw(st.sampled_from([b"NaN", b"-Infinity", b"9" * 5000, b"1e999", b"-1e-999", b"0x10", b"01"]))
    at = draw(st.sampled_from([index for index, byte in enumerate(text) if byte == ord(":")] or [0]))
    end = min((index for mark in (b",", b"}", b"]") if (index := text.find(mark, at)) > 0), default=len(text))
    return text[: at + 1] + b" " + digits + text[end:]


def other_encoding(text: bytes, draw) -> bytes:
    codec = draw(st.sampled_from(["utf-16", "utf-8-sig", "latin-1"]))
    return (text.decode("utf-8", "replace") + "ü").encode(codec, "replace")


TEXT_MUTATIONS: list[Callable] = [truncate, garble, repeat_a_key, nest, write_odd_number, other_encoding]
BYTE_MUTATIONS: list[Callable] = [truncate, garble, flip_a_bit, zero_a_block, write_twice]


@st.composite
def broken_value(draw, valid: object) -> object:
    """A JSON value with up to three of its members changed."""
    value = copy.deepcopy(valid)
    for mutate in draw(st.lists(st.sampled_from(MUTATIONS), max_size=3)):
        places = list(members(value))
        if places:
            # A quarter of the draws hit the branches near the root, of which there are few among hundreds of leaves.
            values = value.values() if isinstance(value, dict) else value
            near = [place for place in places if place[0] is value or any(place[0] is each for each in values)]
            container, key = draw(st.sampled_from(near if near and draw(st.integers(0, 3)) == 0 else places))
            mutate(container, key, draw)
    return value


@st.composite
def broken_json(draw, valid: object) -> bytes:
    """A JSON file with up to three of its values changed, and perhaps the text itself broken."""
    text = json.dumps(draw(broken_value(valid))).encode("utf-8")
    if draw(st.integers(0, 3)) == 0:
        text = draw(st.sampled_from(TEXT_MUTATIONS))(text, draw)
    return text


@st.composite
def broken_words(draw, text: bytes) -> bytes:
    """Up to three numbers or words of `text` replaced, and perhaps the bytes themselves broken."""
    for _ in range(draw(st.integers(1, 3))):
        words = list(re.finditer(rb"[\w.-]+", text))
        word = draw(st.sampled_from(words)) if words else None
        if word:
            text = text[: word.start()] + draw(st.sampled_from(ODD_WORDS)) + text[word.end() :]
    return draw(st.sampled_from(TEXT_MUTATIONS))(text, draw) if draw(st.integers(0, 3)) == 0 else text


@st.composite
def broken_bytes(draw, content: bytes) -> bytes:
    """A binary file cut short, with wrong bytes, with a hole, or written twice."""
    for mutate in draw(st.lists(st.sampled_from(BYTE_MUTATIONS), min_size=1, max_size=2)):
        content = mutate(content, draw)
    return content


def broken_safetensors(content: bytes) -> st.SearchStrategy[bytes]:
    """The bytes, or the header's JSON under a length that fits it again, or the length."""
    length = int.from_bytes(content[:8], "little")
    header, tensors = json.loads(content[8 : 8 + length]), content[8 + length :]
    lengths = st.sampled_from([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
    return st.one_of(
        broken_bytes(content),
        broken_json(header).map(lambda text: len(text).to_bytes(8, "little") + text + tensors),
        lengths.map(lambda number: number.to_bytes(8, "little") + content[8:]),
    )
