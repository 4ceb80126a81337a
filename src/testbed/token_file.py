"""Token files: a flat stream of token ids on disk, and the sidecar that says what the ids mean.

`train_small.bin` has no header: little-endian uint16 ids (uint32 when the vocabulary has more than 65,536 tokens), an
end-of-text id after every document. `train_small.json` beside it is the sidecar. A .bin without a sidecar is read as
GPT-2 uint16, which is what nanoGPT and its descendants write.

Numpy and the standard library only, so that every program can look at a token file without loading torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from testbed.atomic_file import put_in_place
from testbed.json_file import read_json

FORMAT_VERSION = 1
GPT2_VOCAB_SIZE = 50257
GPT2_END_OF_TEXT_ID = 50256
_HOW_TO_MAKE = "python download_data.py && python preprocess_small.py"
_SCAN_TOKENS = 1 << 23  # 16 MiB of uint16 at a time: large enough for full disk speed, small enough for any machine


def token_dtype(vocab_size: int) -> np.dtype:
    """Item type of a token file: uint16 while every id fits in it, little-endian on every machine."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def sidecar_path(path: Path) -> Path:
    """`train_small.bin` -> `train_small.json`."""
    return path.with_suffix(".json")


@dataclass(frozen=True)
class TokenFile:
    """An opened token file. Without a sidecar the counts and the hash are unknown, hence None."""

    path: Path
    tokens: np.memmap  # (num_tokens,) read-only
    vocab_size: int
    tokenizer: str | None
    tokenizer_file: Path | None
    end_of_text_id: int
    num_documents: int | None
    sha256: str | None
    has_sidecar: bool


@dataclass(frozen=True)
class TokenScan:
    """What one pass over all ids found."""

    max_token_id: int
    sha256: str


class TokenFileWriter:
    """Writes a token file document by document and adds the end-of-text id after each.

    A context manager: leaving it normally puts the .bin and its sidecar in place, leaving it with an exception removes
    what was written and leaves earlier files as they were. `tokenizer_file` is a name relative to the .bin's folder.
    """

    def __init__(
        self,
        path: Path,
        vocab_size: int,
        tokenizer: str,
        end_of_text_id: int,
        tokenizer_file: str | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.end_of_text_id = end_of_text_id
        self.tokenizer_file = tokenizer_file
        self.source = None if source is None else dict(source)
        self.num_tokens = 0
        self.num_documents = 0
        self.max_token_id = 0
        self._dtype = token_dtype(vocab_size)
        self._hash = hashlib.sha256()
        # The process id keeps two runs into one folder from writing into each other's file; the suffix stays, so that
        # what a killed run leaves is ignored by git like every .bin.
        self._temporary = self.path.with_name(f".{os.getpid()}.{self.path.name}")

    def __enter__(self) -> TokenFileWriter:
        self._file = self._temporary.open("wb")
        return self

    def append_document(self, token_ids: np.ndarray | Sequence[int]) -> None:
        """Append one document's ids (without end-of-text) and the end-of-text id. Ids must be below `vocab_size`."""
        document = np.empty(len(token_ids) + 1, dtype=np.int64)
        document[:-1] = token_ids
        document[-1] = self.end_of_text_id
        largest = int(document.max())
        if largest >= self.vocab_size or int(document.min()) < 0:
            # Checked before the cast: uint16 would wrap the id around to another, valid one.
            raise ValueError(
                f"document {self.num_documents} holds a token id outside 0..{self.vocab_size - 1} "
                f"(largest {largest}); it was not made with tokenizer {self.tokenizer}"
            )
        data = document.astype(self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.num_tokens += len(document)
        self.num_documents += 1
        self.max_token_id = max(self.max_token_id, largest)

    def sidecar(self) -> dict[str, Any]:
        """The sidecar's fields for what has been written so far."""
        return {
            "format_version": FORMAT_VERSION,
            "dtype": self._dtype.name,
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
            "tokenizer_file": self.tokenizer_file,
            "end_of_text_id": self.end_of_text_id,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "max_token_id": self.max_token_id,
            "sha256": self._hash.hexdigest(),
            "source": self.source,
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        final_sidecar = sidecar_path(self.path)
        temporary_sidecar = final_sidecar.with_name(f".{final_sidecar.name}.{os.getpid()}.tmp")
        try:
            if kind is None:
                temporary_sidecar.write_text(json.dumps(self.sidecar(), indent=2) + "\n", encoding="utf-8")
                # The counts and the hash in the sidecar expose the one mix a crash between these two lines can leave.
                put_in_place(self._temporary, self.path)
                put_in_place(temporary_sidecar, final_sidecar)
        finally:
            self._temporary.unlink(missing_ok=True)
            temporary_sidecar.unlink(missing_ok=True)


def open_token_file(path: Path | str, flag: str = "--train_data_path") -> TokenFile:
    """Map a token file into memory; costs nothing but a look at its size and sidecar (see `check_token_file`).

    Raises ValueError, one sentence that begins with `flag`, when the file is missing, no file, unreadable, empty, cut
    off inside a token, or disagrees with its sidecar.
    """
    path = Path(path)
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{flag} {path} does not exist; make it with: {_HOW_TO_MAKE}") from None
    except OSError as error:  # a circle of links, a folder that may not be entered, a name that is too long
        raise ValueError(f"{flag} {path} cannot be read ({error.strerror}); name another file") from None
    if not path.is_file():
        raise ValueError(
            f"{flag} {path} is not a file; name the .bin inside it, for example {path / 'train_small.bin'}"
        )
    if not os.access(path, os.R_OK):
        raise ValueError(f"{flag} {path} cannot be read; change its permissions or make it again with: {_HOW_TO_MAKE}")
    if num_bytes == 0:
        raise ValueError(f"{flag} {path} is empty; make it again with: {_HOW_TO_MAKE}")

    sidecar_file = sidecar_path(path)
    has_sidecar = os.path.lexists(sidecar_file)  # a folder or a broken link in its place is no "no sidecar"
    fields = _read_sidecar(sidecar_file, flag) if has_sidecar else _gpt2_fields()
    dtype = np.dtype(fields["dtype"]).newbyteorder("<")
    if num_bytes % dtype.itemsize:
        raise ValueError(
            f"{flag} {path} has {num_bytes} bytes, not a multiple of the {dtype.itemsize} bytes of a token: "
            f"it was cut off; make it again with: {_HOW_TO_MAKE}"
        )
    num_tokens = num_bytes // dtype.itemsize
    if has_sidecar and num_tokens != fields["num_tokens"]:
        raise ValueError(
            f"{flag} {path} holds {num_tokens} tokens but its sidecar {sidecar_file.name} says {fields['num_tokens']}: "
            f"one of them is not the original; make both again with: {_HOW_TO_MAKE}"
        )
    return TokenFile(
        path=path,
        tokens=np.memmap(path, dtype=dtype, mode="r"),
        vocab_size=fields["vocab_size"],
        tokenizer=fields["tokenizer"],
        tokenizer_file=None if fields["tokenizer_file"] is None else path.parent / fields["tokenizer_file"],
        end_of_text_id=fields["end_of_text_id"],
        num_documents=fields["num_documents"],
        sha256=fields["sha256"],
        has_sidecar=has_sidecar,
    )


def scan_token_file(token_file: TokenFile, progress: Callable[[int], None] | None = None) -> TokenScan:
    """Largest id and sha256 in one pass; `progress` is called with the bytes of each chunk."""
    digest = hashlib.sha256()
    max_token_id = 0
    for start in range(0, len(token_file.tokens), _SCAN_TOKENS):
        chunk = np.asarray(token_file.tokens[start : start + _SCAN_TOKENS])
        digest.update(chunk)
        max_token_id = max(max_token_id, int(chunk.max()))
        if progress is not None:
            progress(chunk.nbytes)
    return TokenScan(max_token_id=max_token_id, sha256=digest.hexdigest())


def check_token_file(
    token_file: TokenFile,
    vocab_size: int,
    flag: str = "--train_data_path",
    progress: Callable[[int], None] | None = None,
) -> TokenScan:
    """Read every id once and return the scan.

    Raises ValueError when an id does not fit in `vocab_size` or the contents are not those the sidecar was written for.
    """
    scan = scan_token_file(token_file, progress)
    if scan.max_token_id >= vocab_size:
        position = _first_position_at_least(token_file.tokens, vocab_size)
        raise ValueError(
            f"{flag} {token_file.path} holds token id {int(token_file.tokens[position])} at position {position}, but "
            f"--vocab_size {vocab_size} allows ids up to {vocab_size - 1}; pass --vocab_size "
            f"{max(token_file.vocab_size, scan.max_token_id + 1)} or make the file again with: {_HOW_TO_MAKE}"
        )
    if token_file.sha256 is not None and scan.sha256 != token_file.sha256:
        raise ValueError(
            f"{flag} {token_file.path} has sha256 {scan.sha256[:12]}… but its sidecar says {token_file.sha256[:12]}…: "
            f"the tokens changed after they were written; make both again with: {_HOW_TO_MAKE}"
        )
    return scan


def _first_position_at_least(tokens: np.memmap, limit: int) -> int:
    for start in range(0, len(tokens), _SCAN_TOKENS):
        found = np.flatnonzero(tokens[start : start + _SCAN_TOKENS] >= limit)
        if len(found):
            return start + int(found[0])
    raise AssertionError("only called when the scan saw such an id")


def _gpt2_fields() -> dict[str, Any]:
    return {
        "dtype": "uint16",
        "vocab_size": GPT2_VOCAB_SIZE,
        "tokenizer": "gpt2",
        "tokenizer_file": None,
        "end_of_text_id": GPT2_END_OF_TEXT_ID,
        "num_documents": None,
        "sha256": None,
    }


def _read_sidecar(path: Path, flag: str) -> dict[str, Any]:
    """The sidecar's fields, types checked; ValueError names the first one that is wrong."""
    way_out = f"make it again with: {_HOW_TO_MAKE}"
    try:
        fields = read_json(path, f"{flag}: the sidecar {path}")
    except ValueError as error:
        raise ValueError(f"{error}; {way_out}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{flag}: the sidecar {path} holds no JSON object; {way_out}")
    if fields.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{flag}: the sidecar {path} has format_version {reprlib.repr(fields.get('format_version'))}, "
            f"this program reads {FORMAT_VERSION}; {way_out}"
        )

    def is_count(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    def is_sha256(value: object) -> bool:
        return isinstance(value, str) and len(value) == 64

    def is_plain_name(value: object) -> bool:
        if not isinstance(value, str):
            return value is None
        return value not in ("", "..") and Path(value).name == value and "\0" not in value

    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "dtype": (lambda value: value in ("uint16", "uint32"), "uint16 or uint32"),
        "vocab_size": (lambda value: is_count(value) and 0 < value <= 1 << 32, "a whole number above 0, at most 2^32"),
        "tokenizer": (lambda value: value is None or isinstance(value, str), "a name or null"),
        "tokenizer_file": (is_plain_name, "a file name without folders, or null"),
        "end_of_text_id": (is_count, "a whole number"),
        "num_tokens": (is_count, "a whole number"),
        "num_documents": (lambda value: value is None or is_count(value), "a whole number or null"),
        "sha256": (lambda value: value is None or is_sha256(value), "64 hexadecimal digits or null"),
    }
    for name, (holds, rule) in rules.items():
        if name not in fields or not holds(fields[name]):
            found = reprlib.repr(fields[name]) if name in fields else "missing"
            raise ValueError(f"{flag}: the sidecar {path} has {name} {found}, must be {rule}; {way_out}")
    if fields["end_of_text_id"] >= fields["vocab_size"]:
        raise ValueError(
            f"{flag}: the sidecar {path} has end_of_text_id {fields['end_of_text_id']}, "
            f"must be below its vocab_size {fields['vocab_size']}; {way_out}"
        )
    return fields
