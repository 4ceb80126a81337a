"""Find the source of documents: the Python standard library, the Hugging Face Hub, local files.

`find_source` says without a network what a --dataset means; `open` connects; `batches` streams the documents. Files are
read by the `datasets` library, streaming, so memory does not grow with the corpus.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import os
import platform
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testbed.data.hub import SHORTHANDS, HubDataset, TinyShakespeare
from testbed.data.streams import DatasetsSource, Source, SourceError, Stream, cut_lines
from testbed.errors import InputError
from testbed.io import missing

_BUILDERS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}
_SUFFIXES = ", ".join(_BUILDERS)
# A longer text file is a book or a whole corpus: one document of it could not be split and had to fit in memory. So
# is a shorter one that is all there is.
_WHOLE_FILE_BYTES = 64 * 1024


def find_source(
    dataset: str, config: str | None = None, split: str | None = None, text_field: str | None = None
) -> Source:
    """Return the source that --dataset means: stdlib, a shorthand, a path that exists, or a Hub id, in this order.

    Raises InputError for a path that does not exist and for flags that mean nothing for this source.
    """
    try:
        path = Path(dataset).expanduser()
        is_there = path.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~name, and nobody of that name has a home
        raise InputError(f"--dataset {dataset} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if dataset in SHORTHANDS or (dataset not in ("stdlib", "shakespeare") and not is_there):
        if dataset not in SHORTHANDS and (path.suffix in _BUILDERS or dataset[:1] in "./~" or dataset.count("/") > 1):
            raise InputError(
                f"--dataset {dataset} {missing(path)}; name a file ({_SUFFIXES}) or a folder of such files"
            )
        return HubDataset(dataset, config, split, text_field)
    for flag, value in (("--config", config), ("--split", split)):
        if value is not None:
            raise InputError(f"{flag} {value} means nothing for --dataset {dataset}; leave it out")
    if dataset in ("stdlib", "shakespeare"):
        if text_field is not None:
            raise InputError(f"--text_field {text_field} means nothing for --dataset {dataset}; leave it out")
        return StandardLibrary() if dataset == "stdlib" else TinyShakespeare()
    return _find_local_files(path, text_field)


class StandardLibrary(Source):
    """One document for each module of the running Python's own library, without tests and generated tables.

    Ordered by a hash of the module's relative path, so that the first documents are a fair sample of the whole.
    """

    # encodings: character maps; pydoc_data: one string literal of 700 kB
    _SKIPPED_FOLDERS = frozenset(
        {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
    )

    def __init__(self) -> None:
        super().__init__("stdlib", "stdlib")
        self.revision = f"{platform.python_implementation()} {platform.python_version()}"
        self._folder = Path(sysconfig.get_path("stdlib"))

    def open(self) -> None:
        if not self._modules():
            raise SourceError(
                f"--dataset stdlib: this Python carries no source files of its library; use --dataset PATH with local "
                f"files ({_SUFFIXES})"
            )

    def batches(self) -> Iterator[list[str]]:
        for path in self._modules():
            try:
                with tokenize.open(path) as file:  # honours the module's coding cookie
                    yield [file.read()]
            except (SyntaxError, UnicodeDecodeError, FileNotFoundError):
                continue  # a sample in a broken encoding, a link into nowhere

    def _modules(self) -> list[Path]:
        modules = {}
        for folder, subfolders, files in os.walk(self._folder):
            subfolders[:] = [name for name in subfolders if name not in self._SKIPPED_FOLDERS]  # not walked into
            for name in files:
                if name.endswith(".py") and not name.startswith("_sysconfigdata"):  # the build machine's paths, no text
                    path = Path(folder, name)
                    modules[path.relative_to(self._folder).as_posix()] = path
        return [modules[name] for name in sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest())]


class LocalFiles(DatasetsSource):
    """.txt, .jsonl and .parquet files: one, or a folder of them in the order of their names."""

    def __init__(self, root: Path, files: list[Path], text_field: str | None) -> None:
        stem = root.stem if root.is_file() else root.name
        super().__init__(re.sub(r"[^\w.-]+", "-", stem).strip(".-") or "corpus", str(root), text_field=text_field)
        self._files = files
        # Names, sizes and times stand for the contents: a hash of those would read every file twice.
        seen = [
            (path.relative_to(root.parent).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files
        ]
        self.revision = "files " + hashlib.sha256(repr(seen).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def _streams(self) -> list[Stream]:
        def kind(path: Path) -> tuple[str, str]:
            if path.suffix == ".txt" and (path.stat().st_size > _WHOLE_FILE_BYTES or len(self._files) == 1):
                return "long text", str(path)  # a stream of its own: its cuts must not reach into the next file
            return _BUILDERS[path.suffix], ""

        return [_stream_of(builder, list(files)) for (builder, _), files in itertools.groupby(self._files, kind)]


def _stream_of(builder: str, files: list[Path]) -> Stream:
    import datasets

    def load() -> datasets.IterableDataset:
        options: dict[str, Any] = {}
        if builder == "text":
            options = {"sample_by": "document", "encoding_errors": "replace"}
        elif builder == "long text":
            options = {"sample_by": "line", "keep_linebreaks": True, "encoding_errors": "replace"}
        return datasets.load_dataset(
            "text" if builder == "long text" else builder,
            data_files=[glob.escape(str(path)) for path in files],  # the library would read [1] in a name as a pattern
            split="train",
            streaming=True,
            **options,
        )

    if builder != "long text":
        return Stream(load)
    return Stream(load, functools.partial(cut_lines, num_bytes=sum(Path(path).stat().st_size for path in files)))


def _find_local_files(path: Path, text_field: str | None) -> LocalFiles:
    path = path.resolve()
    if path.is_file():
        found = [path]
    else:
        found = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    files = [file for file in found if file.suffix in _BUILDERS]
    if not files:
        raise InputError(f"--dataset {path} is or holds none of {_SUFFIXES}; convert it to one of them")
    empty = [file for file in files if file.stat().st_size == 0]  # the library cannot say which columns they have
    files = [file for file in files if file not in empty]
    if not files:
        raise InputError(f"--dataset {path} holds no text; name another one")
    if text_field is not None and all(file.suffix == ".txt" for file in files):
        raise InputError(f"--text_field {text_field} means nothing for .txt files; leave it out")
    local = LocalFiles(path, files, text_field)
    if others := len(found) - len(files) - len(empty):
        local.notes.append(f"{others} files that are none of {_SUFFIXES} are left out")
    return local
