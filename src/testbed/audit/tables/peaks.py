"""Find the devices that a table names, and between which bounds their peak lies."""

from __future__ import annotations

import re
from collections.abc import Sequence

from testbed.audit.tables.fits import Grid
from testbed.model.flops import PEAK_FLOPS_PER_S
from testbed.planner.devices import Device, devices

PER_DEVICE = re.compile(r"(?i)(/|per)[ _]?(gpu|device|chip|card|accelerator)")
PRECISE = re.compile(r"(?i)bf16|bfloat|fp16|float16|half|mixed|\bamp\b|fp8|mxfp|nvfp|float8")
WIDE = re.compile(r"(?i)fp32|tf32|float32|full precision|single precision")
OF_FOUR_BITS = re.compile(r"(?i)fp4\b|mxfp4|nvfp4|float4")
DEVICE_HEADING = re.compile(r"(?i)gpu|device|accelerator|hardware|chip|card|platform|system|instance|machine")
COUNTED = re.compile(r"(?i)\b(gpus?|devices?|accelerators?|chips?|cards?|nodes?|x)\b")
PACKAGES = ("mi250",)  # that count as one device or as two


def devices_named(grid: Grid, row: int) -> list[Device]:
    """Return the devices that a row names, or else the text above its table."""
    own = " ".join(f"{column.heading} {column.texts[row]}" for column in grid.columns if column.is_setting)
    headings = " ".join(column.heading for column in grid.columns if not column.is_setting)
    for words in (own, headings, grid.above):
        found = devices_in(words)
        if found or (words is own and _names_another_device(grid, row)):
            return found
    return []


def _names_another_device(grid: Grid, row: int) -> bool:
    """Return whether a row has the name of a device that is not known, so that what stands above is of others."""
    named = [column.texts[row] for column in grid.columns if DEVICE_HEADING.search(column.heading)]
    return any(re.search("[a-z]", COUNTED.sub("", text), re.I) for text in named)


def devices_in(words: str) -> list[Device]:
    """Return the devices of the data sheets that a text may name: all of a chip, where it does not say which board."""
    plain = re.sub(r"[^a-z0-9]+", " ", words.lower())
    return [device for device in devices().values() if re.search(_pattern(device.name), plain)]


def peak_of(device_name: str) -> float | None:
    """Return dense bfloat16 FLOP/s of a device as its driver names it; None: unknown, or boards of several peaks."""
    if peak := PEAK_FLOPS_PER_S.get((device_name, "bf16")):
        return peak
    peaks = {device.peak_flops.get("bf16") for device in devices_in(device_name)}
    return peaks.pop() if len(peaks) == 1 else None


def highest_peak(named: Sequence[Device], words: str) -> float:
    """Return FLOP/s of the fastest units of the fastest device; 4 bits only where the table speaks of them."""
    widths = ["fp8", "bf16", "fp16", "tf32", "fp32", *(["fp4"] if OF_FOUR_BITS.search(words) else [])]
    return max(
        device.peak_flops.get(width, 0.0) * (2 if device.name.startswith(PACKAGES) else 1)
        for device in named for width in widths
    )  # fmt: skip


def lowest_peak(named: Sequence[Device], words: str) -> float:
    """Return the least FLOP/s that an MFU may refer to, by the arithmetic that the table names."""
    if WIDE.search(words):
        return min(min(device.peak_flops.values()) for device in named)
    if PRECISE.search(words):
        return min(device.peak_of("bf16") for device in named)
    return min(device.peak_of("tf32") for device in named)


def _pattern(name: str) -> str:
    """Return how a text names a device or a variant of it: A100 for A100-SXM4-80GB. A Ti or a Super is another."""
    chip = re.split(r"[-_ ]", name.lower())[0]
    if chip.startswith("rtx"):
        of_ada = " ada" if "ada" in name else ""
        return rf"rtx ?{chip.removeprefix('rtx')}{of_ada}(?![0-9])(?! ?(ti|super|d|laptop|mobile)\b)"
    return rf"(?<![a-z0-9]){re.escape(chip)}(?![0-9])"
