"""Make token files of documents or pairs: split, tokenize, stream to disk; choose the texts a BPE is trained on."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testbed.data.pairs import Pair, encode_pair
from testbed.data.shards import MANIFEST
from testbed.data.sidecar import sidecar_path
from testbed.data.token_file import TokenFileWriter, check_can_hold_the_same_data, check_holds_no_other_data
from testbed.data.tokenizer import Tokenizer
from testbed.errors import InputError

# Documents looked at to place the border between the splits; enough that the share is met within a percent.
_BORDER_SAMPLE = 10_000
# What the BPE is trained on at most, so that memory and time are bounded: about 10 s, in which `tokenizers` does not
# answer to Ctrl-C.
BPE_TRAINING_BYTES = 32 * 2**20
# A batch for one thread: large enough that handing it over costs nothing, small enough that all of them fit in memory.
_BATCH_CHARACTERS = 256 * 1024
Item = str | Pair
# (is for is_validation, UTF-8 bytes, token ids, of a pair where its targets begin)
Encoded = tuple[bool, int, np.ndarray, int | None]


@dataclass(frozen=True)
class DocumentSplit:
    """Choose the documents for validation: those whose text hashes below `border`; of pairs, whose prompt does.

    The hash decides, not the place: a text that occurs twice is on the same side both times, and a document stays on
    its side when the limits change. Each side ends at its limit of documents. No prompt is on both sides, whatever its
    references.
    """

    border: int
    max_train_docs: int
    max_val_docs: int

    def assign(self, documents: Iterable[Item]) -> Iterator[tuple[bool, Item]]:
        """Yield (is for is_validation, text or pair) in order, until both sides have their documents."""
        room = {False: self.max_train_docs, True: self.max_val_docs}
        for document in documents:
            text = document.prompt if isinstance(document, Pair) else document
            is_validation = _hash(text) < self.border
            if room[is_validation]:
                room[is_validation] -= 1
                yield is_validation, document
                if not any(room.values()):
                    return


def split_documents(
    documents: Iterable[str],
    val_fraction: float,
    max_train_docs: int,
    max_val_docs: int,
    too_few: str = "--input holds {} different documents, but training and validation need one each; add some "
    "(python download_data.py --dataset FILE.txt cuts a text at blank lines, else at line ends)",
) -> DocumentSplit:
    """Place the border so that `val_fraction` of the different texts, rounded up, is below it.

    Measured on the first 10,000 documents, so both sides get one at least as soon as two different texts are among
    them. Raises InputError, which says `too_few`, otherwise.

    Args:
        documents: what is hashed: texts, or the prompts of pairs.
    """
    hashes = sorted({_hash(text) for text in itertools.islice(documents, _BORDER_SAMPLE)})
    if len(hashes) < 2:
        raise InputError(too_few.format(len(hashes)))
    num_validation = min(max(1, math.ceil(val_fraction * len(hashes))), len(hashes) - 1)
    return DocumentSplit(hashes[num_validation], max_train_docs, max_val_docs)


@dataclass(frozen=True)
class Documents:
    """Documents, or pairs of a prompt and its reference, that are read more than once.

    Attributes:
        name: the files are train_NAME.bin and val_NAME.bin.
        facts: name, revision and sha256 of the text, for the sidecars; None where they are not known.
        read: gives all of them, from the first on.
    """

    name: str
    facts: dict[str, Any] | None
    read: Callable[[], Iterator[Any]]
    split: DocumentSplit

    def assigned(self) -> Iterator[tuple[bool, Any]]:
        """Read them again; the sides are as `DocumentSplit.assign` gives them."""
        return self.split.assign(self.read())


def _text(item: Item) -> str:
    return item.text if isinstance(item, Pair) else item


def training_texts(assigned: Iterable[tuple[bool, Item]]) -> Iterator[str]:
    """Yield what a BPE may be trained on: the training side's first 32 MiB, never validation text."""
    remaining = BPE_TRAINING_BYTES
    for is_validation, item in assigned:
        if not is_validation:
            yield _text(item)
            remaining -= len(_text(item).encode())
            if remaining <= 0:
                return


def encode_in_order(
    assigned: Iterable[tuple[bool, Item]], tokenizer: Tokenizer, num_workers: int
) -> Generator[Encoded, None, None]:
    """Yield every document or pair as tokens, in order, `num_workers` batches at a time.

    Threads, not processes: tiktoken leaves the interpreter lock while it encodes into an array, so nothing is copied
    between processes and none is left behind when this one dies.
    """

    def encode(batch: list[tuple[bool, Item]]) -> list[Encoded]:
        return [(side, len(_text(item).encode()), *_encode(tokenizer, item)) for side, item in batch]

    executor = ThreadPoolExecutor(num_workers)
    waiting: deque[Future[list[Encoded]]] = deque()
    try:
        for batch in _batches(assigned):
            waiting.append(executor.submit(encode, batch))
            if len(waiting) > 2 * num_workers:  # bounded: memory does not grow with the corpus
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _encode(tokenizer: Tokenizer, item: Item) -> tuple[np.ndarray, int | None]:
    if isinstance(item, Pair):
        token_ids, first_target = encode_pair(tokenizer, item)
        return np.array(token_ids), first_target
    return tokenizer.encode_to_array(item), None


class ShardWriter:
    """Writes documents to token files of about `shard_tokens` tokens each, `train_small_000000.bin` and so on. All of
    them get their names when it is left normally, none when it is left with an exception."""

    def __init__(self, path: Path, make: Callable[[Path], TokenFileWriter], shard_tokens: int):
        self.path, self._make, self._shard_tokens = path, make, shard_tokens
        self.shards: list[TokenFileWriter] = []

    def __enter__(self) -> ShardWriter:
        self._stack = contextlib.ExitStack()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def append_document(self, token_ids: np.ndarray, first_target: int | None = None) -> None:
        """Append a document to the last shard, or to a new one where that is full."""
        if not self.shards or self.shards[-1].num_tokens >= self._shard_tokens:
            name = f"{self.path.stem}_{len(self.shards):06d}{self.path.suffix}"
            self.shards.append(self._stack.enter_context(self._make(self.path.with_name(name))))
        self.shards[-1].append_document(token_ids, first_target)

    def stale(self) -> list[Path]:
        """Return shards of an earlier command that this one does not replace: a pattern would read them too."""
        written = {shard.path for shard in self.shards}
        earlier = self.path.parent.glob(f"{self.path.stem}_{'[0-9]' * 6}{self.path.suffix}")
        return sorted(set(earlier) - written)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    def sidecar(self) -> dict[str, Any]:
        """Return the fields of all shards together: counts are sums."""
        fields = [shard.sidecar() for shard in self.shards]
        counts = {name: sum(each[name] for each in fields) for name in ("num_tokens", "num_documents")}
        return {**fields[0], **counts, "num_shards": len(fields)}


def write_token_files(
    encoded: Iterable[Encoded],
    train_path: Path,
    val_path: Path,
    tokenizer: Tokenizer,
    tokenizer_file: str | None,
    source: dict[str, Any] | None,
    progress: Callable[[int], object] = lambda num_bytes: None,
    has_targets: bool = False,
    overwrite: bool = False,
    shard_tokens: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stream both token files to disk and return their sidecars.

    Args:
        progress: called with the bytes of each document.
        has_targets: the documents are pairs.
        overwrite: replace files that hold other data.
        shard_tokens: write the training side to shards of about so many tokens.

    Raises:
        InputError: one side would have no document; or a file holds other data, and all files stay as they were.
    """

    end = tokenizer.end_of_text_id
    assert end is not None, "preprocess_small.py refuses a tokenizer that ends no text"

    def writer(path: Path) -> TokenFileWriter:
        return TokenFileWriter(path, tokenizer.vocab_size, tokenizer.name, end, tokenizer_file, source, has_targets)

    sharded = None if shard_tokens is None else ShardWriter(train_path, writer, shard_tokens)
    with writer(val_path) as val, sharded or writer(train_path) as train:
        if not overwrite:
            for made in (*([train] if isinstance(train, TokenFileWriter) else []), val):
                check_can_hold_the_same_data(made)
        for is_validation, num_bytes, token_ids, first_target in encoded:
            (val if is_validation else train).append_document(token_ids, first_target)
            progress(num_bytes)
        if train.num_documents == 0 or val.num_documents == 0:
            raise InputError("--input has documents for one of training and validation only; add documents")
        if not overwrite:
            for made in (*([train] if isinstance(train, TokenFileWriter) else train.shards), val):
                check_holds_no_other_data(made)
        if isinstance(train, ShardWriter) and (stale := train.stale()):
            if not overwrite:
                raise InputError(
                    f"{stale[0]} is a shard of an earlier command, which the pattern would read too; pass --overwrite "
                    "to remove it, or another --output_dir to keep it"
                )
            for path in stale:
                path.unlink()
                sidecar_path(path).unlink(missing_ok=True)
        if isinstance(train, ShardWriter) and overwrite:
            train_path.with_name(MANIFEST).unlink(missing_ok=True)  # of the shards that are replaced
    return train.sidecar(), val.sidecar()


def _batches(assigned: Iterable[tuple[bool, Item]]) -> Iterator[list[tuple[bool, Item]]]:
    batch: list[tuple[bool, Item]] = []
    characters = 0
    for is_validation, item in assigned:
        batch.append((is_validation, item))
        characters += len(_text(item))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
