"""Devices and links as their makers describe them: peaks, memory, bandwidth, from devices.json with a source each."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from testbed.errors import InputError

GIB = 2**30
PRECISIONS = ("fp4", "fp8", "bf16", "fp16", "tf32", "fp32")  # from narrow to wide
SAME_UNITS = {"nvfp4": "fp4", "mxfp4": "fp4", "mxfp8": "fp8", "float8": "fp8", "float16": "fp16", "bfloat16": "bf16"}
SUGGESTIONS = 3
Rate = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way between two devices, per device and direction.

    A message of S bytes takes latency_s + S / bytes_per_s.
    """

    name: str
    latency_s: float
    bytes_per_s: Rate
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or the cores that one rank has."""

    name: str
    memory_bytes: Rate
    peak_flops: Annotated[Mapping[str, Rate], Meta(min_length=1)]  # dense, per second, by precision
    memory_bytes_per_s: Rate
    kind: str = "cuda"  # or "cpu"
    source: str = ""
    architecture: str = ""  # of its maker: kinds of one architecture resemble each other
    context_bytes: float = 1.0e9  # that a process takes before its model: CUDA's context, its kernels, NCCL's buffers
    per_node: int = 8  # devices of one host, as it is sold
    link_domain: int = 0  # devices that `within_node` joins where they are more: NVL72 joins 18 hosts
    peer_bytes_per_s: float = 0.0  # between two devices of a node, where no switch joins them; 0: a switch does
    within_node: Link | None = None
    between_nodes: Link | None = None  # the usual network of such nodes

    def peak_of(self, precision: str) -> float:
        """Return FLOP/s of the units that multiply in `precision`, else in the next wider one that it has."""
        wanted = SAME_UNITS.get(precision, precision)
        order = PRECISIONS[PRECISIONS.index(wanted) :] if wanted in PRECISIONS else PRECISIONS[2:]
        if wanted == "bf16":  # units of fp16 have too few bits of exponent for it
            order = tuple(name for name in order if name != "fp16")
        return next((self.peak_flops[name] for name in order if name in self.peak_flops), self.fastest)

    @property
    def fastest(self) -> float:
        """FLOP/s of its fastest units."""
        return max(self.peak_flops.values())


@cache
def _tables() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "devices.json").read_text(encoding="utf-8")))


@cache
def devices() -> dict[str, Device]:
    """Return the devices of devices.json by name."""
    found = {}
    for entry in _tables()["devices"]:
        nodes = network(f"{entry['between_nodes_gbit_per_s']}gbit")
        found[entry["name"]] = Device(
            name=entry["name"],
            memory_bytes=entry["memory_gib"] * GIB,
            peak_flops={name: 1e12 * peak for name, peak in entry["peak_tflops"].items()},
            memory_bytes_per_s=1e9 * entry["memory_gb_per_s"],
            source=entry["source"],
            architecture=entry["architecture"],
            per_node=entry["per_node"],
            link_domain=entry.get("link_domain", 0),
            peer_bytes_per_s=1e9 * entry.get("peer_gb_per_s", 0.0),
            within_node=_within(entry),
            between_nodes=nodes,
        )
    return found


def device_named(name: str) -> Device:
    """Return the device of that name or alias, however it is spelled. InputError names those that are near."""
    known = _names()
    plain = _plain(name)
    if plain in known:
        return devices()[known[plain]]
    near = difflib.get_close_matches(plain, known, n=SUGGESTIONS, cutoff=0.4)
    names = sorted({known[one] for one in near}) or sorted(devices())
    raise InputError(f"--gpu {name}: no such device is in devices.json; near it: {', '.join(names)}")


def network(text: str) -> Link:
    """Return a network by its speed per device, such as 400gbit. InputError where it is not a positive number."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(g|m)bit(?:/s)?", text.strip().lower())
    gbit = float(match[1]) / (1 if match[2] == "g" else 1000) if match else 0.0
    if not 0 < gbit < math.inf:
        raise InputError(f"--network {text}: a network needs a speed above 0, such as 400gbit or 100mbit")
    latency = min((entry for entry in _tables()["networks"]), key=lambda entry: abs(entry["gbit_per_s"] - gbit))
    return Link(name=text, latency_s=1e-6 * latency["latency_us"], bytes_per_s=gbit * 1e9 / 8, source=latency["source"])


def _within(entry: Mapping[str, Any]) -> Link:
    """Return the link inside a node: a switched fabric, or PCIe where it is slow."""
    speed = 1e9 * entry["within_node_gb_per_s"]
    return Link(name="within a node", latency_s=8e-6 if speed > 60e9 else 12e-6, bytes_per_s=speed)


@cache
def _names() -> dict[str, str]:
    """Return the device's name by each plain spelling."""
    entries = _tables()["devices"]
    found = {_plain(alias): entry["name"] for entry in entries for alias in entry["aliases"]}
    return found | {_plain(entry["name"]): entry["name"] for entry in entries}


def _plain(name: str) -> str:
    """Return a name without what spellings differ in: the maker, hyphens, "GB" after the memory, form factors."""
    plain = re.sub(r"nvidia|amd|tesla|geforce|instinct|[^a-z0-9]", "", name.lower())
    return re.sub(r"(?<=\d)gb$", "", plain)
