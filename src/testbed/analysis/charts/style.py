"""Style that all pictures share: colours, type, a title above, notes and warnings below, numbers as text."""

import bisect
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import get_hinting_flag
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine

from testbed.analysis.runs.comparability import marks_of, note_on_cores, warnings
from testbed.analysis.runs.load import Run
from testbed.errors import printable
from testbed.io import replacing

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#6A51A3", "#8C6D31")  # Okabe-Ito + 2
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))  # equal work gives equal curves: both must show
STYLE: dict[Any, Any] = {  # matplotlib types the keys as a union of all their names
    "font.family": "DejaVu Sans",  # ships with matplotlib, so the pictures look alike on every machine
    "font.size": 10,
    "text.parse_math": False,  # a name may hold dollars, and is not a formula
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#333333",
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "figure.facecolor": "white",
}
_STRATEGIES = (*COLOURS, "#222222", "#999999")  # from the eleventh on a hatch tells them apart
WIDTH_INCHES = 10.0
DPI = 150
LABEL_CHARACTERS = 36
GLUE = "\u00a0"  # a space at which no line breaks
LABEL_LINE_INCHES = 0.16  # of a label of `rows_on`
FOOTER_POINTS = 8.5
FOOTER_MARGIN = 0.012  # of the width, on each side
FOOTER_LINE_INCHES = 0.175
WARNING_COLOUR = "#B00020"
MOST_FIELDS = 2  # whose values a picture's warning lists; the printed warnings list all


def figure_with_footer(
    runs: Sequence[Run],
    title: str,
    panel_inches: list[float],
    notes: list[str],
    columns: int = 1,
    *,
    are_single: bool = True,
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with stacked panels, or `columns` in a row with one y axis; title above, notes below.

    The warnings on `runs` go below, that they compute on unequally many cores, and for single ones, which stand for
    nothing else, that one run has no interval.
    """
    caveats = ["One run: no interval.", "One run each: no interval, so a small difference may be noise."]
    if any(run.num_repeats > 1 for run in runs):
        caveats = [
            "Shown is the repeat of median throughput alone: what the repeats have between them is not here."
        ] * 2
    notes = [*notes, *(caveats[len(runs) > 1 :][:1] if are_single else [])]
    notes = [*notes, *filter(None, [note_on_cores(runs)])]
    footer = [(line, "#666666") for note in notes for line in _footer_lines(note, "normal")]
    loud = warnings(runs, most_fields=MOST_FIELDS) if runs else []
    footer += [(line, WARNING_COLOUR) for note in loud for line in _footer_lines(note, "bold")]
    footer_inches = FOOTER_LINE_INCHES * len(footer) + 0.12
    title_inches = 0.5
    height = title_inches + sum(panel_inches) + 0.75 * len(panel_inches) + footer_inches
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    bottom = footer_inches / height
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0.008, bottom, 0.984, 1 - bottom - title_inches / height), hspace=0.06)
    figure.text(0.012, 1 - 0.16 / height, title, fontsize=15, fontweight="bold", color="#111111", va="top")
    for line, (text, colour) in enumerate(footer):
        y = (footer_inches - 0.04 - FOOTER_LINE_INCHES * line) / height
        weight = "bold" if colour == WARNING_COLOUR else "normal"
        figure.text(FOOTER_MARGIN, y, text, fontsize=FOOTER_POINTS, color=colour, weight=weight, va="top")
    rows = len(panel_inches)
    axes = figure.subplots(rows, columns, squeeze=False, sharey="row", height_ratios=panel_inches)
    return figure, list(axes.ravel())


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure to a PNG file that appears whole. OSError names the file."""
    with replacing(path) as temporary, rc_context(STYLE):
        figure.savefig(temporary, format="png", dpi=DPI)


def _footer_lines(note: str, weight: str) -> list[str]:
    """Return a note in lines that fit the figure as drawn: digits and capitals are wider than small letters."""
    widest = DPI * WIDTH_INCHES * (1 - 2 * FOOTER_MARGIN)
    lines: list[str] = []
    for word in printable(" ".join(note.split())).split(" "):
        if lines and _drawn_pixels(f"{lines[-1]} {word}", weight) <= widest:
            lines[-1] += f" {word}"
            continue
        while _drawn_pixels(word, weight) > widest:  # a path, say: cut where the line ends
            starts = [word[:end] for end in range(1, len(word))]
            cut = max(1, bisect.bisect_right(starts, widest, key=lambda start: _drawn_pixels(start, weight)))
            lines.append(word[:cut])
            word = word[cut:]
        lines.append(word)
    return lines


def _drawn_pixels(text: str, weight: str) -> float:
    """Return the width of a footer's text as Agg draws it; its outline says the same a thousand times slower."""
    font = get_font(findfont(FontProperties(family=STYLE["font.family"], weight=weight)))
    font.set_size(FOOTER_POINTS, DPI)
    font.set_text(text, 0, flags=get_hinting_flag())
    return font.get_width_height()[0] / 64  # 26.6 fixed point


def wrapped(label: str, width: int) -> str:
    """Return `label` in lines of `width` characters: broken after commas and before parentheses, where that is not
    enough after commas inside them, and at any space last."""
    whole = re.sub(r"(?<!\)) \([^(),]*\)", _glued, label)  # "CPU (1 thread)" is one word
    outside = re.sub(r"\((?:[^()]|\([^()]*\))*\)", _glued, whole)
    lines: list[str] = []
    for text in (*(re.sub(r"(?<!,) (?!\()", GLUE, text) for text in (outside, whole)), whole, label):
        lines = textwrap.wrap(text, width, break_long_words=False)
        if all(len(line) <= width for line in lines):
            break
    return "\n".join(lines).replace(GLUE, " ")


def _glued(found: re.Match[str]) -> str:
    return found[0].replace(" ", GLUE)


def row_inches(labels: Sequence[str], least: float) -> float:
    """Return the height of a row in which each of these labels, as `wrapped` breaks it, stays clear of the next."""
    return max(least, LABEL_LINE_INCHES * (max(label.count("\n") for label in labels) + 1) + 0.06)


def rows_on(axis: Axes, labels: Sequence[str]) -> None:
    """Name the rows 0, 1, ... of a horizontal chart, the first one on top."""
    axis.set_yticks(range(len(labels)), [printable(label, kept="\n") for label in labels], fontsize=9)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(labels) - 0.5, -0.5)


def colour(number: int) -> str:
    """Return a colour for the number-th of several: three shades of eight, then again from the first."""
    of_eight = COLOURS[number % len(COLOURS)]
    towards, share = ((0.0, 0.0), (0.0, 0.45), (1.0, 0.35))[number // len(COLOURS) % 3]
    red, green, blue = (part + (towards - part) * share for part in to_rgb(of_eight))
    return to_hex((red, green, blue))


def ink_on(colour: str) -> str:
    """Return the colour of letters on a bar of this colour."""
    red, green, blue = to_rgb(colour)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.57 else "#222222"


def colour_of(runs: Sequence[Run], run: Run) -> str:
    return colour(runs.index(run))


def strategy_colour(look: int) -> str:
    """Return the colour of a strategy, the same in all pictures of a report; `look` as `runs.entries` numbers it."""
    return _STRATEGIES[look % len(_STRATEGIES)]


def strategy_hatch(look: int) -> str | None:
    return "//" if look >= len(_STRATEGIES) else None


def not_shown(runs: Sequence[Run], shown: Sequence[Run]) -> list[str]:
    missing = [mark + run.full_label for run, mark in marks_of(runs).items() if run not in shown]
    return [f"Not shown (not in the file): {'; '.join(missing)}."] if missing else []
