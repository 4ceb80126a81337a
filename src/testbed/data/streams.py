"""Stream documents with the `datasets` library: find the text, cut and join rows."""

from __future__ import annotations

import abc
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.errors import Failure, InputError, first_line

if TYPE_CHECKING:
    from datasets import IterableDataset

# One row at a time costs 60 microseconds in `datasets` 5.2, a batch of rows 4 per row.
_ROWS_PER_BATCH = 256
_TEXT_FIELDS = ("text", "content", "document", "article", "story", "body")
_CUT_AFTER_CHARACTERS = 8 * 1024
_CUT_AT_LATEST_CHARACTERS = 256 * 1024
# Of a short text, so that validation gets a part too.
_FEWEST_DOCUMENTS = 8
_FEWEST_WITHOUT_BLANK_LINES = 4


class SourceError(Failure):
    """The source is unavailable, through no fault in what was typed: no network, a damaged file, no access."""


@dataclass(frozen=True)
class Stream:
    """Rows of files that one builder of `datasets` reads."""

    load: Callable[[], IterableDataset]
    regroup: Callable[[Iterator[list[str]]], Iterator[list[str]]] | None = None  # rows -> documents, where they differ


class Source(abc.ABC):
    """Documents from one place.

    Attributes:
        name: folder under dataset/.
        source: where from, for the manifest.
        wanted_text_field: as typed.
        text_field: the column that was read, once reading has begun; None: files have different ones.
        revision: None until `open` where only the network knows it.
        notes: sentences for the user; `open` may add some.
    """

    def __init__(
        self, name: str, source: str, config: str | None = None, split: str | None = None, text_field: str | None = None
    ) -> None:
        self.name, self.source, self.config, self.split = name, source, config, split
        self.wanted_text_field = text_field
        self.text_field: str | None = None
        self.revision: str | None = None
        self.notes: list[str] = []

    @abc.abstractmethod
    def open(self) -> None:
        """Connect. Raises InputError for what was typed wrongly, SourceError for what is not available."""

    @abc.abstractmethod
    def batches(self) -> Iterator[list[str]]:
        """Yield documents in order, some at a time. Raises as `open` does."""


class DatasetsSource(Source):
    """A source read by the `datasets` library; `_streams` connects and lists what is read, in order."""

    _opened: Sequence[Stream] = ()

    @abc.abstractmethod
    def _streams(self) -> list[Stream]:
        """Connect, and return what is to be read."""

    def open(self) -> None:
        import datasets

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs every error that it also raises
        # 20 tries, 5 s apart, is the library's own idea of giving up: minutes of silence when the network is gone.
        datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 3
        self._opened = self._streams()

    def batches(self) -> Iterator[list[str]]:
        self._text_fields: set[str] = set()
        for stream in self._opened:
            rows = self._rows(stream)
            yield from rows if stream.regroup is None else stream.regroup(rows)

    def _rows(self, stream: Stream) -> Iterator[list[str]]:
        try:
            dataset = stream.load()
            field = self._text_field_of(dataset)
            for batch in dataset.select_columns([field]).iter(_ROWS_PER_BATCH):
                texts = [text for text in batch[field] if text is not None]
                for text in texts:
                    if not isinstance(text, str):
                        raise InputError(f"--text_field {field} of {self.source} holds {type(text).__name__}, not text")
                yield texts
        except SourceError:
            raise
        except Exception as error:  # pyarrow, the HTTP client and the file system below raise what they like
            if isinstance(error, InputError):
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
        self._text_fields.add(field)
        self.text_field = field if len(self._text_fields) == 1 else None
        return field


def find_text_field(columns: list[str], texts: list[str], wanted: str | None, source: str) -> str:
    """Return the column to read: the wanted one, one with an obvious name, or the only one that holds text."""
    listed = ", ".join(columns)
    if wanted is not None:
        if wanted not in columns:
            raise InputError(f"--text_field {wanted} is not a column of {source}; its columns are: {listed}")
        return wanted
    for name in _TEXT_FIELDS:
        for column in texts:
            if column.lower() == name:
                return column
    if len(texts) == 1:
        return texts[0]
    raise InputError(f"--text_field must say which column of {source} holds the text; its columns are: {listed}")


def cut_lines(batches: Iterator[list[str]], num_bytes: int = sys.maxsize) -> Iterator[list[str]]:
    """Cut the lines of one text into documents after blank lines.

    A document has about 8 Ki characters, or an eighth of a shorter text. Where no blank line comes, it ends after the
    line that reaches 256 Ki characters, or a quarter of the text.

    Args:
        num_bytes: length of the text.
    """
    cut_after = min(_CUT_AFTER_CHARACTERS, num_bytes // _FEWEST_DOCUMENTS)
    at_latest = min(_CUT_AT_LATEST_CHARACTERS, num_bytes // _FEWEST_WITHOUT_BLANK_LINES)
    document: list[str] = []
    length = 0
    after_blank = False
    for line in itertools.chain.from_iterable(batches):
        blank = not line.strip()
        if document and ((length >= cut_after and after_blank and not blank) or length >= at_latest):
            yield ["".join(document)]
            document, length = [], 0
        document.append(line)
        length += len(line)
        after_blank = blank
    if document:
        yield ["".join(document)]


def join_articles(batches: Iterator[list[str]]) -> Iterator[list[str]]:
    """Join WikiText's lines to articles. An article begins at a heading of the first level, ` = Title = `."""
    article: list[str] = []
    for row in itertools.chain.from_iterable(batches):
        if article and re.fullmatch(r" = [^=].*[^=] = \n", row):
            yield ["".join(article)]
            article = []
        article.append(row)
    if article:
        yield ["".join(article)]
