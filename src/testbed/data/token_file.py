"""Write, open and check token files: a flat stream of token ids, and the sidecar that says what the ids mean.

`train_small.bin` has no header: little-endian uint16 ids (uint32 when the vocabulary has more than 65,536 tokens), an
end-of-text id after every document. `train_small.json` next to it is the sidecar. A .bin without a sidecar is read as
GPT-2 uint16, which is what nanoGPT and its descendants write; behind the header of llm.c where it has that. With
nanoGPT's meta.pkl beside it, its ids are characters (characters.py). A pattern such as `dir/*.bin` names many of them
(shards.py).

In a file of pairs (format version 2) every document is a prompt and its reference, and `train_pairs.targets.bin` has a
byte per token: 1 for what is to be learned, 0 for what is only read. A program that knows no targets would learn the
prompts too; it knows no version 2 either, and says so.

Numpy and the standard library only, so that every program can look at a token file without loading torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from testbed.data.characters import META, characters_of_meta
from testbed.data.disk_array import DiskArray, FileChanged
from testbed.data.shards import (
    MANIFEST,
    ShardedArray,
    have_room_for_files,
    is_pattern,
    paths_of_shards,
    scan_shards,
)
from testbed.data.sidecar import (
    FORMAT_VERSION,
    FORMAT_VERSION_WITH_TARGETS,
    HOW_TO_MAKE_PAIRS,
    TARGETS_SUFFIX,
    gpt2_fields,
    how_to_make,
    read_sidecar,
    sidecar_path,
    targets_path,
)
from testbed.errors import InputError, one_line
from testbed.io import holds_text, missing, not_a_file, open_regular, replacing

NUMPY_MAGIC = b"\x93NUMPY"
LLMC_MAGIC, LLAMA_MAGIC, LLMC_HEADER_BYTES = (20240520, 1), 20240801, 1024  # and its version; see `_header_of_llmc`
CLOCK_TICK_S = 0.05  # the clock that stamps files ticks every 1 to 10 ms
MOST_READINGS = 3  # of a file that is touched meanwhile
_PAIRS_AGAIN = f"make both again with: {HOW_TO_MAKE_PAIRS}"


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the item type of a token file: uint16 while every id fits in it, little-endian on every machine."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass(eq=False)
class TokenFile:
    """An opened token file. Without a sidecar the counts and the hash are unknown, hence None.

    Attributes:
        data_sha256: of all that a run learns from, as TokenScan has it; None until all of it was read.
    """

    path: Path
    tokens: DiskArray  # (num_tokens,) read-only
    vocab_size: int
    tokenizer: str | None
    tokenizer_file: Path | None
    end_of_text_id: int | None  # None: no token ends a document
    num_documents: int | None
    sha256: str | None
    targets: DiskArray | None = None  # (num_tokens,) uint8, 1 where a token is to be learned; None: all are
    targets_sha256: str | None = None
    data_sha256: str | None = None

    @property
    def listing(self) -> list[str]:
        """Return the names of its shards, in order; nothing of a single file, which each node may call as it likes."""
        return [file.path.name for file in self.tokens.shards] if isinstance(self.tokens, ShardedArray) else []

    @functools.cached_property
    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where each document begins and ends, end-of-text included. Reads the whole file, once."""
        found = [start + np.flatnonzero(chunk == self.end_of_text_id) for start, chunk in self.tokens.chunks()]
        ends = np.concatenate(found) + 1
        return np.append(0, ends)[:-1], ends

    def check_unchanged(self) -> bool:
        """Look at the size and the times of the last change, about a microsecond; where only times are others
        (`touch`, a copy of the same bytes, a new name), read all of it and go on if it holds what it held.

        Returns:
            Whether it was so: what was read since the last look may have been something else and is to be read again.

        Raises:
            FileChanged: one sentence: the data are others than `data_sha256` says, or it is still being written.
        """
        arrays = [self.tokens] if self.targets is None else [self.tokens, self.targets]
        touched = [array for array in arrays if array.is_touched]
        if not touched:
            return False
        for _ in range(MOST_READINGS):
            times = [array.look() for array in arrays]
            time.sleep(CLOCK_TICK_S)  # or a write after the reading could leave the same times
            if _data_sha256_again(self, touched[0]) != self.data_sha256:
                raise touched[0].changed("it was written to, and its data are others")
            if times == [array.look() for array in arrays]:
                for array, seen in zip(arrays, times, strict=True):
                    array.accept(seen)
                return True
        raise touched[0].changed("somebody goes on writing to it")


@dataclass(frozen=True)
class TokenScan:
    """The result of one pass over all ids."""

    max_token_id: int
    sha256: str  # of the .bin
    data_sha256: str  # of all that a run learns from: the .bin, followed by the targets where it has some
    targets_sha256: str | None = None


class _HashedFile:
    """A file that is written once, and the hash of what was written. It gets its name when `stack` ends well."""

    def __init__(self, path: Path, stack: contextlib.ExitStack):
        self._file = stack.enter_context(stack.enter_context(replacing(path)).open("wb"))
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


@dataclass(eq=False)
class TokenFileWriter:
    """Write a token file document by document, with the end-of-text id after each.

    A context manager: leaving it normally puts the .bin and its sidecar in place, leaving it with an exception removes
    what was written and leaves earlier files as they were. `tokenizer_file` is a name relative to the .bin's folder.
    With `has_targets` the file is one of pairs.
    """

    path: Path
    vocab_size: int
    tokenizer: str
    end_of_text_id: int
    tokenizer_file: str | None = None
    source: dict[str, Any] | None = None
    has_targets: bool = False
    num_tokens: int = field(default=0, init=False)
    num_target_tokens: int = field(default=0, init=False)
    num_documents: int = field(default=0, init=False)
    max_token_id: int = field(default=0, init=False)

    def __enter__(self) -> TokenFileWriter:
        with contextlib.ExitStack() as stack:
            # The last one gets its name first. Counts and hashes in the sidecar expose any mix that a crash can leave.
            self._new_sidecar = stack.enter_context(replacing(sidecar_path(self.path)))
            self._tokens = _HashedFile(self.path, stack)
            self._targets = _HashedFile(targets_path(self.path), stack) if self.has_targets else None
            stack.push(self._write_sidecar)
            self._stack = stack.pop_all()
        return self

    def append_document(self, token_ids: np.ndarray | Sequence[int], first_target: int | None = None) -> None:
        """Append one document's ids (without end-of-text) and the end-of-text id. Ids must be below `vocab_size`.

        Args:
            first_target: in a file of pairs the place of the reference's first token, at least 1: this one and all
                after it are targets, end-of-text included.
        """
        document = np.empty(len(token_ids) + 1, dtype=np.int64)
        document[:-1] = token_ids
        document[-1] = self.end_of_text_id
        largest = int(document.max())
        if largest >= self.vocab_size or int(document.min()) < 0:
            # Checked before the cast: uint16 would wrap the id around to another, valid one.
            raise InputError(
                f"document {self.num_documents} holds a token id outside 0..{self.vocab_size - 1} "
                f"(largest {largest}); it was not made with tokenizer {self.tokenizer}"
            )
        self._tokens.write(document.astype(token_dtype(self.vocab_size)).tobytes())
        assert (self._targets is None) == (first_target is None), "a file of pairs has targets in every document"
        if self._targets is not None and first_target is not None:
            assert 0 < first_target < len(document), "a target has a token before it, from which it is predicted"
            self._targets.write((np.arange(len(document)) >= first_target).astype(np.uint8).tobytes())
            self.num_target_tokens += len(document) - first_target
        self.num_tokens += len(document)
        self.num_documents += 1
        self.max_token_id = max(self.max_token_id, largest)

    def sidecar(self) -> dict[str, Any]:
        """Return the sidecar's fields for what has been written so far."""
        fields = {
            "format_version": FORMAT_VERSION_WITH_TARGETS if self.has_targets else FORMAT_VERSION,
            "dtype": token_dtype(self.vocab_size).name,
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
            "tokenizer_file": self.tokenizer_file,
            "end_of_text_id": self.end_of_text_id,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "max_token_id": self.max_token_id,
            "sha256": self._tokens.sha256,
            "source": self.source,
        }
        if self._targets is not None:
            fields |= {
                "targets_file": targets_path(self.path).name,
                "targets_sha256": self._targets.sha256,
                "num_target_tokens": self.num_target_tokens,
            }
        return fields

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _write_sidecar(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._new_sidecar.write_text(json.dumps(self.sidecar(), indent=2) + "\n", encoding="utf-8")


def check_can_hold_the_same_data(made: TokenFileWriter) -> None:
    """Check, before a document is tokenized, that the file that `made` would replace is not surely of other data: of
    another tokenizer or another text. What only its tokens tell, `check_holds_no_other_data` finds.

    Raises:
        InputError: it holds other data.
    """
    old, new = _sidecar_of_held(made.path), made.sidecar()
    if not old or made.path.stat().st_size != old["num_tokens"] * token_dtype(old["vocab_size"]).itemsize:
        return
    sources = [_sha256_of_text(sidecar) for sidecar in (old, new)]
    if old["tokenizer"] not in (None, new["tokenizer"]) or (None not in sources and sources[0] != sources[1]):
        raise _other_data(made.path, old, f"what would replace it ({_origin(new)})")


def check_holds_no_other_data(made: TokenFileWriter) -> None:
    """Check that the file that `made` is about to replace is missing, empty, or holds the same tokens and targets, now
    or when its sidecar was written: data cannot be had back, and runs record their SHA-256.

    Raises:
        InputError: it holds other data.
    """
    path, new = made.path, made.sidecar()
    if not path.exists() or path.stat().st_size == 0:
        return
    old = _sidecar_of_held(path)
    hashes = [new["sha256"], new.get("targets_sha256")]
    if hashes == [old.get("sha256"), old.get("targets_sha256")]:
        return
    with open_regular(path) as file:
        if not made.has_targets and hashlib.file_digest(file, "sha256").hexdigest() == new["sha256"]:
            return
    raise _other_data(path, old, f"what would replace it ({_described(new)})")


def _other_data(path: Path, old: dict[str, Any], new: str) -> InputError:
    held = f" ({_described(old)})" if old else ""
    return InputError(
        f"{path} holds other data{held} than {new}; pass --overwrite to replace it, or another --output_dir to keep it"
    )


def _sidecar_of_held(path: Path) -> dict[str, Any]:
    """Return the sidecar of a file that holds something; empty without a readable one."""
    try:
        return read_sidecar(sidecar_path(path), "") if path.exists() and path.stat().st_size else {}
    except InputError:
        return {}


def _sha256_of_text(sidecar: dict[str, Any]) -> Any:
    return sidecar["source"].get("sha256") if isinstance(sidecar.get("source"), dict) else None


def _described(sidecar: dict[str, Any]) -> str:
    return f"{sidecar['num_tokens']:,} tokens of {_origin(sidecar)}"


def _origin(sidecar: dict[str, Any]) -> str:
    source = sidecar.get("source")
    name = f" from {one_line(str(source['name']), 100)}" if isinstance(source, dict) and "name" in source else ""
    return f"{sidecar['tokenizer']}{name}"


def _size_of(path: Path, flag: str) -> int:
    """Return the bytes of a file. InputError: it is missing, no file, unreadable, empty, or holds text."""
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        raise InputError(f"{flag} {path} {missing(path)}; make it with: {how_to_make(path)}") from None
    except OSError as error:  # a circle of links, a folder that may not be entered, a name that is too long
        raise InputError(f"{flag} {path} cannot be read ({error.strerror}); name another file") from None
    if not path.is_file():
        example = f", for example {path / 'train_small.bin'}" if path.is_dir() else ""
        raise InputError(f"{flag} {path} {not_a_file(path)}; name a .bin{example}")
    again = f"make it again with: {how_to_make(path)}"
    if not os.access(path, os.R_OK):
        raise InputError(f"{flag} {path} cannot be read; change its permissions or {again}")
    if num_bytes == 0:
        raise InputError(f"{flag} {path} is empty; {again}")
    with open_regular(path) as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:  # its header would be trained on
            raise InputError(
                f"{flag} {path} is an array of NumPy, and a token file holds the ids alone: write them with "
                "numpy.load(FILE).astype('<u2').tofile('NAME.bin')"
            )
    sidecar_file = sidecar_path(path)
    if (sidecar_file == path or not os.path.lexists(sidecar_file)) and holds_text(path):
        raise InputError(f"{flag} {path} is not a token file: it holds text; make one with: {how_to_make(path)}")
    return num_bytes


def open_token_file(path: Path | str, flag: str = "--train_data_path") -> TokenFile:
    """Open a token file; costs nothing but a look at its size and sidecar (see `check_token_file`).

    Raises InputError, one sentence that begins with `flag`, when the file is missing, no file, unreadable, empty, cut
    off inside a token, or disagrees with its sidecar.
    """
    path = Path(path)
    if is_pattern(path):
        return _open_shards(path, flag)
    num_bytes, sidecar_file = _size_of(path, flag), sidecar_path(path)
    has_sidecar = os.path.lexists(sidecar_file)  # a folder or a broken link in its place is no "no sidecar"
    if not has_sidecar and os.path.lexists(targets_path(path)):  # else the prompts would be learned too
        raise InputError(
            f"{flag} {path} is a file of pairs, for {targets_path(path).name} lies next to it, but its sidecar "
            f"{sidecar_file.name} is missing; {_PAIRS_AGAIN}"
        )
    if not has_sidecar and path.name.endswith(TARGETS_SUFFIX):
        raise InputError(f"{flag} {path} says which tokens of a file are learned; name the .bin next to it")
    header_bytes = 0 if has_sidecar else _header_of_llmc(path, num_bytes, flag)
    if has_sidecar:
        fields = read_sidecar(sidecar_file, flag)
    elif header_bytes == 0 and os.path.lexists(path.parent / META):
        fields = _fields_of_meta(path.parent / META, flag)
    else:
        fields = gpt2_fields()
    dtype = np.dtype(fields["dtype"]).newbyteorder("<")
    num_bytes -= header_bytes
    if num_bytes % dtype.itemsize:
        raise InputError(
            f"{flag} {path} has {num_bytes} bytes, not a multiple of the {dtype.itemsize} bytes of a token: "
            f"it was cut off; make it again with: {how_to_make(path)}"
        )
    num_tokens = num_bytes // dtype.itemsize
    if has_sidecar and num_tokens != fields["num_tokens"]:
        raise InputError(
            f"{flag} {path} holds {num_tokens} tokens but its sidecar {sidecar_file.name} says {fields['num_tokens']}: "
            f"one of them is not the original; make both again with: {how_to_make(path)}"
        )
    targets_file = fields["targets_file"]
    return TokenFile(
        path=path,
        tokens=DiskArray(path, dtype, num_tokens, header_bytes),
        vocab_size=fields["vocab_size"],
        tokenizer=fields["tokenizer"],
        tokenizer_file=None if fields["tokenizer_file"] is None else path.parent / fields["tokenizer_file"],
        end_of_text_id=fields["end_of_text_id"],
        num_documents=fields["num_documents"],
        sha256=fields["sha256"],
        targets=None if targets_file is None else _open_targets(path.parent / targets_file, num_tokens, flag),
        targets_sha256=fields["targets_sha256"],
    )


def _fields_of_meta(path: Path, flag: str) -> dict[str, Any]:
    """Return the fields that hold for a .bin of nanoGPT's characters. InputError: its meta.pkl cannot be used."""
    try:
        number = len(characters_of_meta(path))
    except InputError as error:
        raise InputError(f"{flag}: {error}") from None
    own = {"vocab_size": number, "tokenizer": f"char:{number}", "tokenizer_file": META, "end_of_text_id": None}
    return gpt2_fields() | own


def _data_sha256_again(token_file: TokenFile, touched: DiskArray) -> str:
    """Return the hash of a file that was touched. FileChanged: it is no longer what it was."""
    try:
        return scan_token_file(token_file).data_sha256
    except FileChanged:
        raise
    except InputError as error:  # of a shard
        raise touched.changed(str(error)) from None


def _header_of_llmc(path: Path, num_bytes: int, flag: str) -> int:
    """Return the bytes of the header that llm.c and modded-nanogpt write, 256 int32 (llm.c, dev/data/data_common.py):
    0 where there is none. InputError: it counts other tokens than the file holds."""
    if num_bytes < LLMC_HEADER_BYTES:
        return 0
    with open_regular(path) as file:
        magic, version, counted = np.frombuffer(file.read(12), "<i4").tolist()
    if magic == LLAMA_MAGIC:
        raise InputError(f"{flag} {path} is of llm.c's Llama 3 tokens; this program trains GPT-2: give GPT-2's")
    if magic != LLMC_MAGIC[0]:
        return 0
    if version != LLMC_MAGIC[1]:
        raise InputError(
            f"{flag} {path} has llm.c's header of version {version}, and {LLMC_MAGIC[1]} is read; convert it"
        )
    held = (num_bytes - LLMC_HEADER_BYTES) // 2
    if held != counted:
        raise InputError(
            f"{flag} {path} has a header of llm.c that counts {counted} tokens and holds {held}: it was cut off; copy "
            "it again"
        )
    return LLMC_HEADER_BYTES


def _open_shards(pattern: Path, flag: str) -> TokenFile:
    """Open all files of a pattern as one. InputError: one of them is none of text, or of another vocabulary."""
    paths = paths_of_shards(pattern, flag)
    have_room_for_files(len(paths))
    files = [open_token_file(path, flag) for path in paths]
    first = files[0]
    for file in files:
        if file.targets is not None:
            raise InputError(
                f"{flag} {pattern}: {file.path.name} is a file of pairs, which are read one by one; name it"
            )
        for name in ("vocab_size", "tokenizer", "end_of_text_id", "tokenizer_file"):
            ours, theirs = getattr(first, name), getattr(file, name)
            if ours != theirs:
                raise InputError(
                    f"{flag} {pattern}: {first.path.name} has {name} {ours} and {file.path.name} has {theirs}; name "
                    "files of one tokenizer"
                )
    counts = [file.num_documents for file in files if file.num_documents is not None]
    return dataclasses.replace(
        first,
        path=pattern,
        tokens=ShardedArray(pattern, [file.tokens for file in files], [file.sha256 for file in files]),
        num_documents=sum(counts) if len(counts) == len(files) else None,
        sha256=None,
    )


def _open_targets(path: Path, num_tokens: int, flag: str) -> DiskArray:
    """Open the targets of a token file. InputError: they are missing, unreadable or not one per token."""
    try:
        num_bytes = path.stat().st_size
        if not path.is_file() or num_bytes != num_tokens:
            raise InputError(
                f"{flag}: the targets {path} have {num_bytes} bytes, not one for each of {num_tokens} tokens; "
                f"{_PAIRS_AGAIN}"
            )
        return DiskArray(path, np.uint8, num_tokens)
    except OSError as error:
        raise InputError(f"{flag}: the targets {path} cannot be read ({error.strerror}); {_PAIRS_AGAIN}") from None


def scan_token_file(token_file: TokenFile) -> TokenScan:
    """Return the largest id and the hashes, found in one pass; of shards their manifest keeps them."""
    if isinstance(token_file.tokens, ShardedArray):
        largest, sha256 = scan_shards(token_file.tokens)
        return TokenScan(largest, sha256, sha256)
    digest = hashlib.sha256()
    max_token_id = 0
    for _, chunk in token_file.tokens.chunks():
        digest.update(chunk.data)
        max_token_id = max(max_token_id, int(chunk.max()))
    sha256, targets_digest = digest.hexdigest(), hashlib.sha256()
    if token_file.targets is None:
        return TokenScan(max_token_id, sha256, sha256)
    for _, chunk in token_file.targets.chunks():
        digest.update(chunk.data)
        targets_digest.update(chunk.data)
    return TokenScan(max_token_id, sha256, digest.hexdigest(), targets_digest.hexdigest())


def check_token_file(
    token_file: TokenFile, vocab_size: int, flag: str = "--train_data_path", config: str | None = None
) -> TokenScan:
    """Read every id once and return the scan.

    Args:
        config: the file that `vocab_size` is from; None: the command line or the data.

    Raises InputError when an id does not fit in `vocab_size` or the contents are not those the sidecar was written for.
    """
    scan, made_with = scan_token_file(token_file), how_to_make(token_file.path)
    if scan.max_token_id >= vocab_size:
        places = (start + np.flatnonzero(chunk >= vocab_size) for start, chunk in token_file.tokens.chunks())
        first = next((int(found[0]) for found in places if len(found)), None)
        if first is None:  # of shards, which are not read again
            manifest = token_file.path.with_name(MANIFEST)
            raise InputError(f"{manifest} names an id that no shard holds; delete it, and it is made again")
        file, position = token_file.tokens.place_of(first)
        fits = f"--vocab_size {max(token_file.vocab_size, scan.max_token_id + 1)}"
        way_out = f"pass {fits} or make the file again with: {made_with}"
        if config is not None:  # another vocabulary would be another run, which is not what a recorded one is read for
            way_out = (
                f"so it is not the data of the run that --config {config} describes; name that run's file with {flag}, "
                f"or pass {fits} to train another model on this one"
            )
        raise InputError(
            f"{flag} {file} holds token id {int(token_file.tokens[first])} at position {position}, but "
            f"--vocab_size {vocab_size} allows ids up to {vocab_size - 1}; {way_out}"
        )
    if token_file.sha256 is not None and scan.sha256 != token_file.sha256:
        raise InputError(
            f"{flag} {token_file.path} has sha256 {scan.sha256[:12]}… but its sidecar says {token_file.sha256[:12]}…: "
            f"the tokens changed after they were written; make both again with: {made_with}"
        )
    if token_file.targets is not None:
        _check_targets(token_file, scan, flag)
    token_file.data_sha256 = scan.data_sha256
    return scan


def _check_targets(token_file: TokenFile, scan: TokenScan, flag: str) -> None:
    """ValueError: the targets are not those that were written, or a pair teaches nothing: a whole global batch of such
    pairs would have no loss."""
    fault = None
    starts, ends = token_file.documents
    assert token_file.targets is not None
    targets = token_file.targets[:]
    if scan.targets_sha256 != token_file.targets_sha256:
        fault = "changed after they were written"
    elif targets.max() > 1:
        fault = f"hold the byte {targets.max()}, must be 0 or 1"
    elif len(starts) != token_file.num_documents or not len(ends) or ends[-1] != len(token_file.tokens):
        fault = f"belong to {token_file.num_documents} pairs, but the .bin holds {len(starts)} and must end with one"
    elif targets[starts].any():
        fault = "begin with the first token of a pair, which nothing predicts"
    elif not np.add.reduceat(targets, starts, dtype=np.int64).all():
        fault = "leave a pair without any"
    if fault is not None:
        raise InputError(f"{flag}: the targets {token_file.targets.path} {fault}; {_PAIRS_AGAIN}")
