"""Devices and links as their makers describe them: peaks, memory, bandwidth, from devices.json with a source each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or the cores that one rank has."""

    name: str
    memory_bytes: float
    peak_flops: Mapping[str, float]  # dense, per second, by precision
    memory_bytes_per_s: float
    kind: str = "cuda"  # or "cpu"
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way between two devices, per device and direction.

    A message of S bytes takes latency_s + S / bytes_per_s, with half the rate at `half_size` bytes.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    half_size: float = 0.0
    source: str = ""
