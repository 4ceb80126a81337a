"""Documents out of files that the `datasets` library streams: finding the text, cutting and joining rows."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.errors import Failure, first_line

if TYPE_CHECKING:
    from datasets import IterableDataset

# One row at a time costs 60 microseconds in `datasets` 5.2, a batch of rows 4 per row.
_ROWS_PER_BATCH = 256
_TEXT_FIELDS = ("text", "content", "document", "article", "story", "body")
_CUT_AFTER_CHARACTERS = 8 * 1024
_CUT_AT_LATEST_CHARACTERS = 256 * 1024


class SourceError(Failure):
    """Documents could not be had, through no fault in what the user typed: no network, a damaged file, no access."""


@dataclass(frozen=True)
class Stream:
    """Rows of files that one builder of `datasets` reads."""

    load: Callable[[], IterableDataset]
    regroup: Callable[[Iterator[list[str]]], Iterator[list[str]]] | None = None  # rows -> documents, where they differ


class DatasetsSource(abc.ABC):
    """A `Source` (see sources.py) read by `datasets`; `_streams` connects and lists what is read, in order."""

    def __init__(
        self, name: str, source: str, config: str | None = None, split: str | None = None, text_field: str | None = None
    ) -> None:
        self.name, self.source, self.config, self.split = name, source, config, split
        self.wanted_text_field = text_field
        self.text_field: str | None = None  # None as well where two streams have it under different names
        self._text_fields: list[str] = []
        self.revision: str | None = None
        self.notes: list[str] = []
        self._opened: list[Stream] = []
        self._position: dict[str, Any] | None = None

    @abc.abstractmethod
    def _streams(self) -> list[Stream]:
        """Connect, and list what is to be read."""

    def open(self) -> None:
        import datasets

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs every error that it also raises
        # 20 tries, 5 s apart, is the library's own idea of giving up: minutes of silence when the network is gone.
        datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 3
        self._opened = self._streams()

    def batches(self, position: dict[str, Any] | None = None) -> Iterator[list[str]]:
        start = 0 if position is None else position["stream"]
        self._text_fields = [] if position is None else position.get("text_fields", [])
        for index, stream in enumerate(self._opened[start:], start):
            rows = self._rows(index, stream, position["state"] if position is not None and index == start else None)
            yield from rows if stream.regroup is None else stream.regroup(rows)

    def position(self) -> dict[str, Any] | None:
        return self._position

    def _rows(self, index: int, stream: Stream, state: dict[str, Any] | None) -> Iterator[list[str]]:
        try:
            dataset = stream.load()
            field = self._text_field_of(dataset)
            dataset = dataset.select_columns([field])
            if state is not None:
                dataset.load_state_dict(state)
            for batch in dataset.iter(_ROWS_PER_BATCH):
                # A regrouped stream holds rows back: its place in the file is not its place in the documents.
                place = {"stream": index, "state": dataset.state_dict(), "text_fields": self._text_fields}
                self._position = None if stream.regroup else place
                texts = [text for text in batch[field] if text is not None]
                for text in texts:
                    if not isinstance(text, str):
                        raise ValueError(f"--text_field {field} of {self.source} holds {type(text).__name__}, not text")
                yield texts
        except SourceError:
            raise
        except Exception as error:  # pyarrow, the HTTP client and the file system below raise what they like
            if isinstance(error, ValueError) and str(error).startswith("--"):
                raise
            raise SourceError(f"{self.source} cannot be read: {first_line(error)}") from error

    def _text_field_of(self, dataset: IterableDataset) -> str:
        features = dataset.features
        if features is not None:
            columns = list(features)
            texts = [
                name for name, kind in features.items() if getattr(kind, "dtype", "") in ("string", "large_string")
            ]
        else:
            row: dict[str, Any] = next(iter(dataset), {})
            columns = list(row)
            texts = [name for name, value in row.items() if isinstance(value, str)]
        field = find_text_field(columns, texts, self.wanted_text_field, self.source)
        self._text_fields = sorted({*self._text_fields, field})
        self.text_field = field if len(self._text_fields) == 1 else None
        return field


def find_text_field(columns: list[str], texts: list[str], wanted: str | None, source: str) -> str:
    """The column to read: the wanted one, one with an obvious name, or the only one that holds text (`texts`)."""
    listed = ", ".join(columns)
    if wanted is not None:
        if wanted not in columns:
            raise ValueError(f"--text_field {wanted} is no column of {source}; its columns are: {listed}")
        return wanted
    for name in _TEXT_FIELDS:
        for column in texts:
            if column.lower() == name:
                return column
    if len(texts) == 1:
        return texts[0]
    raise ValueError(f"--text_field must say which column of {source} holds the text; its columns are: {listed}")


def cut_lines(batches: Iterator[list[str]]) -> Iterator[list[str]]:
    """Lines of one long text -> documents of about 8 Ki characters, cut after blank lines; together they are the text.

    Text without blank lines is cut after the line that reaches 256 Ki characters.
    """
    document: list[str] = []
    length = 0
    after_blank = False
    for lines in batches:
        for line in lines:
            blank = not line.strip()
            if (length >= _CUT_AFTER_CHARACTERS and after_blank and not blank) or length >= _CUT_AT_LATEST_CHARACTERS:
                yield ["".join(document)]
                document, length = [], 0
            document.append(line)
            length += len(line)
            after_blank = blank
    if document:
        yield ["".join(document)]


def join_articles(batches: Iterator[list[str]]) -> Iterator[list[str]]:
    """WikiText's rows are lines; an article begins at a heading of the first level, ` = Title = `."""
    article: list[str] = []
    for rows in batches:
        for row in rows:
            if article and re.fullmatch(r" = [^=].*[^=] = \n", row):
                yield ["".join(article)]
                article = []
            article.append(row)
    if article:
        yield ["".join(article)]
