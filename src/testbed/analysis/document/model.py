"""A document: what is said, in which order, and what leads where. It knows nothing of runs, and nothing of its form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from testbed.analysis.document.words import UNKNOWN, Number, ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Link:
    """A configuration by name; it leads to the configuration's sources."""

    number: int
    name: str
    colour: str


@dataclass(frozen=True)
class RunLinks:
    """Runs by number; each leads to its source."""

    numbers: tuple[int, ...]


Item = TypeVar("Item")
Text = str | Number | tuple[str | Number, ...]  # a sentence may hold numbers
Cell = Text | Link | RunLinks


@dataclass(frozen=True)
class Table:
    """Rows under named columns; `text_columns` are aligned to the left, the others to the right. None: all are text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    text_columns: Sequence[int] | None = None
    note: str = ""

    def is_text(self, column: int) -> bool:
        return self.text_columns is None or column in self.text_columns


def table_of(
    items: Sequence[Item],
    columns: Mapping[str, Callable[[Item], Cell]],
    title: str = "",
    note: str = "",
    text: Collection[str] = ("configuration",),
) -> Table:
    """Return a table with a row for each item. A column that knows nothing of any item is left out.

    Args:
        columns: name -> the cell of an item.
        text: the names of the columns that are aligned to the left.
    """
    cells = {name: [cell(item) for item in items] for name, cell in columns.items()}
    kept = [name for name, column in cells.items() if any(str(cell) not in ("", UNKNOWN) for cell in column)]
    rows = list(zip(*(cells[name] for name in kept), strict=True))
    return Table(kept, rows, title, [number for number, name in enumerate(kept) if name in text], note)


@dataclass(frozen=True)
class Picture:
    """A picture with its title, its meaning and the configurations that it is made of."""

    name: str
    title: str
    caption: str
    links: tuple[Link, ...]
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Statement:
    """A sentence after a label, which holds its own punctuation: "Best: "."""

    label: str
    text: str

    @property
    def topic(self) -> str:
        return self.label.rstrip(": ")

    @property
    def sentence(self) -> str:
        return self.label + self.text


Statements = tuple[Statement, ...]
Block = str | Statements | Table | Picture


@dataclass(frozen=True)
class Verdict:
    """A claim and the numbers behind it; `kind` is one of the words of `SIGNS`."""

    kind: str
    claim: str
    numbers: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.claim} ({self.numbers})." if self.numbers else f"{self.claim}."


@dataclass(frozen=True)
class Caution:
    """What keeps a number from being quoted as it stands; `runs` are numbers of the sources."""

    title: str
    text: str
    runs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """One run: all that is needed to find it, and to run it again."""

    number: int
    figures: tuple[tuple[str, str], ...]  # name, value
    file: str  # relative to the document
    address: str  # the same as a link
    command: str


@dataclass(frozen=True)
class Section:
    title: str = ""
    blocks: Sequence[Block] = ()
    anchor: str = ""


@dataclass(frozen=True)
class Document:
    """Everything that is said. What is empty is left out of every form; `notes` are groups of lines at the end."""

    title: str = ""
    lead: str = ""
    headlines: Statements = ()
    verdicts: Sequence[Verdict] = ()
    cautions: Sequence[Caution] = ()
    sections: Sequence[Section] = ()
    notes: Sequence[Sequence[Text]] = ()
    sources: Sequence[tuple[Link, Sequence[Source]]] = field(default=())

    @property
    def pictures(self) -> list[Picture]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]


def plain(cell: Cell) -> str:
    """Return a cell or a sentence as it reads."""
    if isinstance(cell, tuple):
        return "".join(map(str, cell))
    if isinstance(cell, RunLinks):
        return ranges(cell.numbers)
    return cell.name if isinstance(cell, Link) else str(cell)
