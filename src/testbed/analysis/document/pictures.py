"""A document's pictures as SVG files; the same runs give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from testbed.analysis.charts.style import STYLE

DOCUMENT_STYLE: dict[Any, Any] = {
    **STYLE,
    "svg.hashsalt": "testbed",
    "svg.fonttype": "path",  # drawn letters: no text can be wider on a machine without the font
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def svg(draw: Callable[[], Figure]) -> bytes:
    with rc_context(DOCUMENT_STYLE):
        buffer = io.BytesIO()
        draw().savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
