"""Blocks of a Markdown page that a program makes from a file: the text between two comments that name the block."""

from __future__ import annotations

import re
from collections.abc import Mapping

from testbed.errors import InputError

_START = "<!-- made by: scripts/maintain/update_docs.py {name} -->\n"
_END = "\n<!-- end of {name} -->"


def names_of_blocks(page: str) -> list[str]:
    """Return the names of the page's blocks, in their order."""
    return re.findall(re.escape(_START).replace(r"\{name\}", "(.+?)"), page)


def filled(page: str, texts: Mapping[str, str]) -> str:
    """Return the page with its blocks replaced. InputError when it lacks a place for one."""
    for name, text in texts.items():
        start, end = _START.format(name=name), _END.format(name=name)
        pattern = re.compile(re.escape(start) + "(?:.*?)" + re.escape(end), re.DOTALL)
        page, count = pattern.subn((start + text + end).replace("\\", r"\\"), page)
        if count != 1:
            raise InputError(f"the page has {count} places for {name!r} instead of one")
    return page
