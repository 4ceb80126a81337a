"""Read the sidecar of a token file: `train_small.json` says what the ids in `train_small.bin` mean. No torch.

Version 1 is of text. Version 2 is of pairs and names the file of their targets (see token_file.py).
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.errors import InputError
from testbed.io import read_json

FORMAT_VERSION, FORMAT_VERSION_WITH_TARGETS = 1, 2
TARGETS_SUFFIX = ".targets.bin"
GPT2_VOCAB_SIZE = 50257
GPT2_END_OF_TEXT_ID = 50256
HOW_TO_MAKE = "python download_data.py && python preprocess_small.py"
HOW_TO_MAKE_PAIRS = "python preprocess_small.py --pairs FILE.jsonl"


def how_to_make(path: Path) -> str:
    """Return the command that makes a token file: nanoGPT's for its data/NAME/train.bin, which has no sidecar, and the
    one of pairs, if its name or its targets say so."""
    if path.parts[-3:-2] == ("data",) and path.name in ("train.bin", "val.bin") and not sidecar_path(path).exists():
        return f"python {path.parent / 'prepare.py'}, which nanoGPT has"
    is_of_pairs = path.name.startswith(("train_pairs.", "val_pairs.")) or targets_path(path).exists()
    return HOW_TO_MAKE_PAIRS if is_of_pairs else HOW_TO_MAKE


def sidecar_path(path: Path) -> Path:
    """`train_small.bin` -> `train_small.json`."""
    return path.with_suffix(".json")


def targets_path(path: Path) -> Path:
    """`train_pairs.bin` -> `train_pairs.targets.bin`."""
    return path.with_suffix(TARGETS_SUFFIX)


def gpt2_fields() -> dict[str, Any]:
    """Return the fields that hold for a .bin without a sidecar."""
    unknown = ("tokenizer_file", "num_documents", "sha256", "targets_file", "targets_sha256")
    known = {"dtype": "uint16", "vocab_size": GPT2_VOCAB_SIZE, "tokenizer": "gpt2"}
    return {**known, "end_of_text_id": GPT2_END_OF_TEXT_ID, **dict.fromkeys(unknown)}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64


def _is_plain_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", "..") and Path(value).name == value and "\0" not in value


def _or_null(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "dtype": (lambda value: value in ("uint16", "uint32"), "uint16 or uint32"),
    "vocab_size": (lambda value: _is_count(value) and 0 < value <= 1 << 32, "a whole number above 0, at most 2^32"),
    "tokenizer": (lambda value: value is None or isinstance(value, str), "a name or null"),
    "tokenizer_file": (_or_null(_is_plain_name), "a file name without folders, or null"),
    "end_of_text_id": (_is_count, "a whole number"),
    "num_tokens": (_is_count, "a whole number"),
    "num_documents": (_or_null(_is_count), "a whole number or null"),
    "sha256": (_or_null(_is_sha256), "64 hexadecimal digits or null"),
}
RULES_OF_PAIRS = RULES | {
    "num_documents": (_is_count, "a whole number"),
    "targets_file": (_is_plain_name, "a file name without folders"),
    "targets_sha256": (_is_sha256, "64 hexadecimal digits"),
    "num_target_tokens": (_is_count, "a whole number"),
}


def read_sidecar(path: Path, flag: str) -> dict[str, Any]:
    """Return the sidecar's fields, types checked; those about targets are None in version 1.

    Raises:
        InputError: one sentence that begins with `flag` and names the first field that is wrong.
    """
    way_out = f"make it again with: {how_to_make(path)}"
    try:
        fields = read_json(path, f"{flag}: the sidecar {path}")
    except ValueError as error:
        raise InputError(f"{error}; {way_out}") from None
    if not isinstance(fields, dict):
        raise InputError(f"{flag}: the sidecar {path} holds no JSON object; {way_out}")
    version = fields.get("format_version")
    if type(version) is not int or version not in (FORMAT_VERSION, FORMAT_VERSION_WITH_TARGETS):
        raise InputError(
            f"{flag}: the sidecar {path} has format_version {reprlib.repr(version)}, "
            f"this program reads {FORMAT_VERSION} and {FORMAT_VERSION_WITH_TARGETS}; {way_out}"
        )

    rules = RULES if version == FORMAT_VERSION else RULES_OF_PAIRS
    for name, (holds, rule) in rules.items():
        if name not in fields or not holds(fields[name]):
            found = reprlib.repr(fields[name]) if name in fields else "missing"
            raise InputError(f"{flag}: the sidecar {path} has {name} {found}, must be {rule}; {way_out}")
    if fields["end_of_text_id"] >= fields["vocab_size"]:
        raise InputError(
            f"{flag}: the sidecar {path} has end_of_text_id {fields['end_of_text_id']}, "
            f"must be below its vocab_size {fields['vocab_size']}; {way_out}"
        )
    if version == FORMAT_VERSION:
        fields |= dict.fromkeys(("targets_file", "targets_sha256"))
    return fields
