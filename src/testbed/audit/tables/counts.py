"""Read how many devices a label names: "8x H100", "4 GPUs", "1-GPU fp32"."""

from __future__ import annotations

import re

CHIP = (
    r"(?:nvidia|amd|tesla|geforce|rtx|dgx)?[\s-]*(?:gpus?|npus?|tpus?|cards?|devices?|accelerators?|chips?|gcds?|dies?"
)
DEVICES = re.compile(
    rf"(?<![\w.,])(\d{{1,5}})\s*[x*]?\s*-?\s*{CHIP}|[abhlv]\d{{2,3}}s?|gb?h?\d{{3}}s?|t4s?|mi\d{{3}}x?|rtx\s?\d{{4}}s?)\b",
    re.I,
)
BEHIND = re.compile(rf"\b{CHIP}|[abhlv]\d{{2,3}}\S*|gb?h?\d{{3}}\S*|t4|mi\d{{3}}x?)\s+x\s*(\d{{1,5}})\b", re.I)
ONE = re.compile(r"\b(single|one)[\s-]+(gpu|device|card|accelerator|chip)\b", re.I)
NODES = re.compile(r"(?<![\w.,])(\d{1,5})\s*[x*]?\s*-?\s*(nodes?|hosts?|machines?|servers?|instances?)\b", re.I)


def counts_in(text: str) -> list[int]:
    """Return the numbers of devices that a text names."""
    found = [int(match[1]) for pattern in (DEVICES, BEHIND) for match in pattern.finditer(text)]
    return found + [1] * bool(ONE.search(text))


def count_in(text: str) -> int | None:
    """Return the number of devices that a label names; None: none, several, or nodes of so many."""
    found = set(counts_in(text))
    return found.pop() if len(found) == 1 and not NODES.search(text) else None


def most_in(text: str) -> int | None:
    """Return as many devices as a text allows, its nodes taken as 16 each; None: it names no number."""
    devices, nodes = counts_in(text), [int(match[1]) for match in NODES.finditer(text)]
    if not devices and not nodes:
        return None
    return max([*devices, *(count * max(16, *devices, 0) for count in nodes)])
