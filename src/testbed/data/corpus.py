"""Write and read a corpus: `documents.jsonl`, one {"text": ...} a line, and `manifest.json`, which says what it is.

Both appear under these names only when they are whole.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import platform
import re
import reprlib
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from testbed.data.streams import Source
from testbed.errors import Failure, InputError
from testbed.io import missing, open_regular, read_json, replacing, write_text

DOCUMENTS = "documents.jsonl"
MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_MANIFEST_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("name", "source", "sha256"), str),
    **dict.fromkeys(("revision", "text_field"), str | None),
    **dict.fromkeys(("documents", "bytes"), int),
    "limits": dict,
}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class CorpusError(Failure):
    """Files of a corpus are not what they were when they were written."""


@dataclass(frozen=True)
class Limits:
    """Limits on what is taken of a source: bytes of text as UTF-8, documents. None: all."""

    max_bytes: int | None
    max_docs: int | None

    def passed_by(self, documents: int, text_bytes: int, num_bytes: int) -> str | None:
        """Return the limit that one more document of `num_bytes` would pass. InputError where no document fits."""
        if documents == self.max_docs:
            return "max_docs"
        if self.max_bytes is None or text_bytes + num_bytes <= self.max_bytes:
            return None
        if documents == 0:
            raise InputError(
                f"--max_bytes {self.max_bytes} is below the first document's {num_bytes} bytes; pass --max_bytes "
                f"{num_bytes} or more"
            )
        return "max_bytes"


@dataclass(frozen=True)
class Corpus:
    """Documents to read, and their manifest where there is one."""

    documents: Path
    manifest: dict[str, Any] | None


def parse_size(text: str) -> int:
    """Return the bytes of "100MB" (10^6), "1.5GiB" (2^30) or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) * _UNITS[match[2].upper()] < 1:
        raise InputError(f"--max_bytes {text} is not a size above 0; write for example 100MB, 1.5GiB or 5000000")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size > sys.maxsize:
        raise InputError(f"--max_bytes {text} is larger than any disk; write for example 100MB, 1.5GiB or 5000000")
    return int(size)


def existing_corpus(source: Source, limits: Limits, directory: Path) -> dict[str, Any] | None:
    """Return the manifest in `directory` when it is whole and what is asked for; None when there is no corpus yet.

    Raises InputError when another source or other limits made it, CorpusError when its files are damaged. The way out
    of both is `--overwrite`: a corpus is never replaced unasked.
    """
    path = directory / MANIFEST
    if not path.exists():
        if (directory / DOCUMENTS).exists():
            raise CorpusError(f"{directory / DOCUMENTS} has no {MANIFEST}; pass --overwrite to download it again")
        return None
    manifest = load_manifest(path)
    asked = _identity(source, limits)
    if source.wanted_text_field is None:
        asked["text_field"] = manifest["text_field"]
    if source.revision is None:  # only the network knows the newest one; what is here is whole, and named in the output
        asked["revision"] = manifest["revision"]
    different = [name for name, value in asked.items() if manifest.get(name) != value]
    if different:
        found = ", ".join(f"{name} {manifest.get(name)!r}" for name in different)
        wanted = ", ".join(f"{name} {asked[name]!r}" for name in different)
        raise InputError(
            f"--dataset: {directory} was made with {found}, now {wanted} is asked for; pass --overwrite to replace it "
            "or another --output_dir to keep it"
        )
    _verify(directory / DOCUMENTS, manifest)
    return manifest


def write_corpus(
    source: Source,
    limits: Limits,
    directory: Path,
    command_line: str,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> dict[str, Any]:
    """Stream an opened source's documents into `directory` and return the manifest.

    Documents without any text are left out; lone surrogates become U+FFFD. Reading ends before the document that would
    pass a limit. Earlier files of the corpus stay until the new ones are whole. A folder that would be left empty is
    removed.

    Args:
        command_line: for the manifest; it makes the corpus again.
        progress: called with the bytes of text that were added.

    Raises:
        InputError: nothing is left to write. And whatever the source raises.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(directory / DOCUMENTS) as partial:
            counts = _write_documents(source, limits, partial, progress)
            # The old manifest goes first: a crash in between leaves documents without one, never a wrong one.
            (directory / MANIFEST).unlink(missing_ok=True)
    except BaseException:
        with suppress(OSError):  # not empty: an earlier corpus
            directory.rmdir()
        raise
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": source.name,
        **_identity(source, limits),
        "text_field": source.text_field,
        **counts,
        "command_line": command_line,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),  # noqa: TID251 - a moment, for people
        "python": platform.python_version(),
        "datasets": _installed_version("datasets"),
    }
    _write_json(directory / MANIFEST, manifest)
    return manifest


def _write_documents(source: Source, limits: Limits, path: Path, progress: Callable[[int], object]) -> dict[str, Any]:
    """Write the documents of a source up to the limits. Return the manifest's fields that count them."""
    digest, documents, text_bytes, stopped_by = hashlib.sha256(), 0, 0, None
    with path.open("wb") as file:
        for text in itertools.chain.from_iterable(source.batches()):
            if not text.strip():
                continue
            encoded = _without_lone_surrogates(text).encode()
            stopped_by = limits.passed_by(documents, text_bytes, len(encoded))
            if stopped_by is not None:
                break
            line = json.dumps({"text": encoded.decode()}, ensure_ascii=False).encode() + b"\n"
            file.write(line)
            digest.update(line)
            documents += 1
            text_bytes += len(encoded)
            progress(len(encoded))
        num_bytes = file.tell()
    if documents == 0:
        raise InputError(f"--dataset: {source.source} holds no text; name another one")
    counts = {"documents": documents, "text_bytes": text_bytes, "bytes": num_bytes}
    return counts | {"sha256": digest.hexdigest(), "stopped_by": stopped_by}


def load_manifest(path: Path) -> dict[str, Any]:
    """Return a manifest's fields. Raises CorpusError when it is damaged."""
    way_out = "pass --overwrite to download_data.py to make it again"
    try:
        manifest = read_json(path)
    except ValueError as error:
        raise CorpusError(f"{error}; {way_out}") from error
    missing = [field for field in _MANIFEST_FIELDS if not isinstance(manifest, dict) or field not in manifest]
    if missing or manifest.get("format_version") != FORMAT_VERSION:
        raise CorpusError(f"{path} is not a manifest of format {FORMAT_VERSION} (missing: {missing}); {way_out}")
    for field, types in _MANIFEST_FIELDS.items():
        if not isinstance(manifest[field], types):
            raise CorpusError(f"{path} has {field} {reprlib.repr(manifest[field])}; {way_out}")
    return manifest


def find_corpus(where: Path | None, root: Path = Path("dataset")) -> Corpus:
    """Return the corpus that --input names (a folder, a manifest, a .jsonl); None: the newest one under `root`.

    Raises InputError when there is none, CorpusError when its files do not agree with its manifest.
    """
    if where is None:
        manifests = sorted(root.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime_ns)
        if not manifests:
            raise InputError(f"--input: there is no corpus under {root}/; run python download_data.py first")
        where = manifests[-1]
    elif not where.exists():
        raise InputError(f"--input {where} {missing(where)}; run python download_data.py first")
    if where.is_dir():
        where = where / MANIFEST
        if not where.exists():
            raise InputError(f"--input {where.parent} holds no {MANIFEST}; run python download_data.py first")
    if where.suffix == ".jsonl":
        manifest_path = where.with_name(MANIFEST) if where.name == DOCUMENTS else None
        if manifest_path is None or not manifest_path.exists():
            return Corpus(where, None)
        where = manifest_path
    elif where.suffix != ".json":
        raise InputError(
            f"--input {where} is not a folder, manifest or documents.jsonl; for other files run first: "
            f"python download_data.py --dataset {where}"
        )
    manifest = load_manifest(where)
    documents = where.with_name(DOCUMENTS)
    _verify(documents, manifest)
    return Corpus(documents, manifest)


def read_documents(path: Path) -> Iterator[str]:
    """Yield the documents of a .jsonl with a "text" in every line. Raises CorpusError with the line's number.

    Documents without text are skipped, lone surrogates (written as \\ud800) become U+FFFD.
    """
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise CorpusError(
                    f'{path} line {number} is not {{"text": ...}} ({type(error).__name__}: {error}); bring other files '
                    f"into this form with: python download_data.py --dataset {path}"
                ) from error
            if not isinstance(text, str):
                raise CorpusError(f"{path} line {number} has a text that is {type(text).__name__}, not a string")
            if text.strip():
                yield _without_lone_surrogates(text)


def _identity(source: Source, limits: Limits) -> dict[str, Any]:
    """Return what makes two downloads the same one."""
    return {
        "source": source.source,
        "config": source.config,
        "split": source.split,
        "revision": source.revision,
        "text_field": source.wanted_text_field,
        "limits": asdict(limits),
    }


def _verify(documents: Path, manifest: dict[str, Any]) -> None:
    command = str(manifest.get("command_line", "python download_data.py, and the flags that it was made with,"))
    way_out = f"make it again with: {command.removesuffix(' --overwrite')} --overwrite"
    if not documents.is_file():
        raise CorpusError(f"{documents} is missing though its manifest is there; {way_out}")
    num_bytes = documents.stat().st_size
    if num_bytes != manifest["bytes"]:
        raise CorpusError(f"{documents} has {num_bytes} bytes, its manifest says {manifest['bytes']}; {way_out}")
    if _hash_of(documents).hexdigest() != manifest["sha256"]:
        raise CorpusError(f"{documents} does not have the sha256 that its manifest says; {way_out}")


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hash_of(path: Path) -> Any:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def _without_lone_surrogates(text: str) -> str:
    """`text` itself unless it holds half a surrogate pair, which UTF-8 cannot; two halves become a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
