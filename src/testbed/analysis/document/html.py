"""A document as one HTML page that loads nothing: pictures lie inside it, it has no script, and a content security
policy forbids the rest."""

from __future__ import annotations

import base64
import re
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from testbed.analysis.document.model import Document, Link, Picture, RunLinks, Table, plain
from testbed.analysis.document.pictures import svg
from testbed.analysis.document.words import ranges
from testbed.errors import printable

TEMPLATE = "page.html.jinja"
# Each kind of verdict: its sign and the class that colours it.
SIGNS = {
    "faster": ("▲", "faster"),
    "slower": ("▼", "slower"),
    "no detectable difference": ("=", "same"),
    "learns worse": ("!", "worse"),
    "no claim": ("?", "none"),
    "not compared": ("≠", "none"),
}


def page(document: Document) -> str:
    """Return the page. Everything that a file or a person wrote is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.tests |= {
        name: lambda value, kind=kind: isinstance(value, kind)
        for name, kind in {"link": Link, "runs": RunLinks, "table": Table, "picture": Picture}.items()
    }
    environment.filters |= {"plain": plain, "flags_whole": _flags_whole}
    environment.globals |= {"drawn": _drawn, "ranges": ranges, "signs": SIGNS}
    template = resources.files("testbed.analysis.document").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return printable(environment.from_string(template).render(document=document), kept="\n\t")


def _flags_whole(text: str) -> Markup:
    """Return escaped text in which no line ends within a flag, as browsers would at its hyphens."""
    return Markup(re.sub(r"(?<!\w)--\w[\w-]{0,40}", r'<span class="flag">\g<0></span>', str(escape(text))))


def _drawn(picture: Picture) -> str:
    """Return an address that holds the whole picture."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg(picture.draw)).decode("ascii")
