"""Hold what was measured on one machine: calibration.json, and the rates that follow from it. No torch.

`scripts/plan.py --calibrate` writes the file. Every table says how many ranks ran at once: they share cores and memory.
Seconds are of one call on one rank, the slowest rank's where several take part.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from testbed.errors import InputError
from testbed.io import read_json, write_text
from testbed.planner.collectives import Traffic
from testbed.planner.devices import Device, Link
from testbed.planner.job import DenseModel, Job, Layout, Machine
from testbed.planner.rates import link_seconds

FORMAT = 1
HERE = Device(name="this machine", memory_bytes=8e9, peak_flops={"fp32": 1e11}, memory_bytes_per_s=1e10)
LOOPBACK = Link(name="loopback", latency_s=50e-6, bytes_per_s=2e9, source="an estimate")
NAME = "calibration.json"


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product: (m, k) times (k, n)."""

    m: int
    n: int
    k: int
    seconds: float
    precision: str = "fp32"
    ranks: int = 1  # that did the same at once


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Causal attention, forward and backward."""

    batch: int
    heads: int
    seq_length: int
    head_dim: int
    forward_s: float
    backward_s: float
    precision: str = "fp32"
    kernel: str = "flash"  # or "eager"
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Moving:
    """An elementwise kernel that reads and writes so many bytes."""

    num_bytes: float
    seconds: float
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Update:
    """AdamW on so many elements, with the norm for clipping."""

    elements: float
    seconds: float
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of `ranks` ranks; num_bytes: the whole message, before it is cut into shares."""

    kind: str  # all_reduce, all_gather, reduce_scatter, p2p
    link: str  # name of the Link that it crosses
    ranks: int
    num_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """An optimizer step of src/gpt2.py: the job, the link between its ranks, the median of the slowest rank."""

    job: Job
    link: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured on a machine. An empty table leaves that rate to the data sheet.

    Attributes:
        device: one rank's share of the machine: name, memory, peak, bandwidth.
        links: ways between two ranks; the first is the one within the machine, the others were slowed on purpose.
        backend: of the collectives: "nccl" or "gloo".
        launch_s: of the host for one kernel, from a step so small that nothing else counts.
        overlap: share of a collective that ran behind matrix products.
        made: date, program and version, for the reader.
    """

    device: Device = HERE
    links: Sequence[Link] = ()
    backend: str = "gloo"
    products: Sequence[Product] = ()
    attention: Sequence[AttentionTime] = ()
    moving: Sequence[Moving] = ()
    updates: Sequence[Update] = ()
    collectives: Sequence[Collective] = ()
    launch_s: float = 5e-6
    overlap: float = 0.5
    steps: Sequence[WholeStep] = ()
    made: Mapping[str, Any] = field(default_factory=dict)

    def machine(self, devices: int, link: str = "") -> Machine:
        """Return so many ranks of this machine, joined by the link of that name."""
        within = self.links[0] if self.links else LOOPBACK
        between = next((one for one in self.links if one.name == link), within)
        per_node = devices if between is within else 1
        return Machine(
            device=self.device, devices=devices, per_node=per_node, within_node=within, between_nodes=between
        )

    def write(self, path: Path) -> None:
        write_text(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n")


TABLES = {
    "products": Product,
    "attention": AttentionTime,
    "moving": Moving,
    "updates": Update,
    "collectives": Collective,
}
Entry = TypeVar("Entry")


def read_calibration(path: Path) -> Calibration:
    """Read calibration.json. InputError, one sentence, where it is no such file or of another format."""
    content = read_json(path, f"--calibration {path}")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise InputError(
            f"--calibration {path}: its format is {found}, not {FORMAT}; make it again with scripts/plan.py --calibrate"
        )
    try:
        tables: dict[str, Any] = {
            name: tuple(made(kind, entry) for entry in content.get(name, ())) for name, kind in TABLES.items()
        }
        steps = tuple(_whole_step(entry) for entry in content.get("steps", ()))
        numbers = {name: _positive(content[name], name) for name in ("launch_s", "overlap") if name in content}
        texts = {name: content[name] for name in ("backend", "made") if name in content}
        device = made(Device, {**asdict(HERE), **content.get("device", {})}, is_checked=False)
        links = tuple(made(Link, entry, is_checked=False) for entry in content.get("links", ()))
        return Calibration(**tables, **numbers, **texts, device=device, links=links, steps=steps)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise InputError(f"--calibration {path}: {error}; make it again with scripts/plan.py --calibrate") from None


def made(kind: type[Entry], entry: Mapping[str, Any], is_checked: bool = True) -> Entry:
    """Return a table's entry. Its numbers must be positive, if they are checked."""
    known = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in entry.items():
        if is_checked and not isinstance(value, str):
            _positive(value, name)
    return kind(**{name: value for name, value in entry.items() if name in known})


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}, which is no positive number")
    return float(value)


def _whole_step(entry: Mapping[str, Any]) -> WholeStep:
    job = dict(entry["job"])
    job["model"], job["layout"] = DenseModel(**job["model"]), Layout(**job["layout"])
    return WholeStep(job=Job(**job), link=str(entry["link"]), seconds=_positive(entry["seconds"], "seconds"))


class MeasuredRates:
    """Rates of a calibrated machine, as `ranks` of it run at once; a data sheet's where a table is empty."""

    def __init__(self, calibration: Calibration, ranks: int, fallback: Any) -> None:
        self.calibration = calibration
        self.fallback = fallback
        self.window = calibration.overlap
        self.products = _at(calibration.products, ranks)
        self.attention = _at(calibration.attention, ranks)
        self.moving = _at(calibration.moving, ranks)
        self.updates = _at(calibration.updates, ranks)

    def product_seconds(self, m: float, n: float, k: float, job: Job) -> tuple[float, float]:
        entries = _of_precision(self.products, job.precision)
        if not entries:
            seconds: tuple[float, float] = self.fallback.product_seconds(m, n, k, job)
            return seconds
        flops = _interpolated([((e.m, e.n, e.k), e.m * e.n * e.k / e.seconds) for e in entries], (m, n, k))
        return m * n * k / flops, 0.0

    def attention_seconds(self, flops: float, square_bytes: float, job: Job) -> float:
        """Share out the measured time of both passes by FLOPs: 3.5 times forward's, of the eager kernel 6 times."""
        entries = [one for one in _of_precision(self.attention, job.precision) if one.kernel == job.attention]
        if not entries:
            return float(self.fallback.attention_seconds(flops, square_bytes, job))
        both = 6.0 if job.attention == "eager" else 3.5
        rates = [
            (
                (e.seq_length, e.head_dim, e.batch * e.heads),
                2 * e.batch * e.heads * e.head_dim * e.seq_length**2 * both / (e.forward_s + e.backward_s),
            )
            for e in entries
        ]
        model = job.model
        size = (model.seq_length, model.head_dim, job.micro_batch * model.heads / job.layout.tensor)
        return flops / _interpolated(rates, size)

    def moving_seconds(self, moved: float, job: Job) -> float:
        if not self.moving:
            return float(self.fallback.moving_seconds(moved, job))
        width = 4 if job.precision == "fp32" else 2
        tensor = width * job.micro_batch * job.model.seq_length * job.model.hidden
        return moved / _interpolated([((e.num_bytes,), e.num_bytes / e.seconds) for e in self.moving], (2 * tensor,))

    def optimizer_seconds(self, elements: float, job: Job) -> float:
        if not self.updates:
            return float(self.fallback.optimizer_seconds(elements, job))
        return elements / _interpolated([((e.elements,), e.elements / e.seconds) for e in self.updates], (elements,))

    def launch_seconds(self, kernels: float, job: Job) -> float:
        return kernels * self.calibration.launch_s

    def traffic_seconds(self, traffic: Traffic, machine: Machine) -> float:
        """Return what the link was measured to take, scaled by the bytes moved where other numbers of ranks were."""
        link = machine.between_nodes if traffic.crosses_nodes(machine) else machine.within_node
        backend = self.calibration.backend
        entries = [one for one in self.calibration.collectives if (one.kind, one.link) == (traffic.kind, link.name)]
        if not entries:
            return link_seconds(traffic, machine, backend)
        nearest = min({one.ranks for one in entries}, key=lambda ranks: abs(math.log(ranks / traffic.ranks)))
        size = traffic.size / traffic.messages
        rates = [((one.num_bytes,), one.num_bytes / one.seconds) for one in entries if one.ranks == nearest]
        measured = dataclasses.replace(traffic, ranks=nearest)
        scale = traffic.moved(backend) / measured.moved(backend)
        return traffic.messages * scale * _seconds_of_message(rates, size)


def _seconds_of_message(rates: Sequence[tuple[tuple[float, ...], float]], size: float) -> float:
    """Interpolate seconds in the logarithm of the size; beyond the largest at its rate, below the smallest its time."""
    known = sorted((at[0], at[0] / rate) for at, rate in rates)
    if size >= known[-1][0]:
        return size * known[-1][1] / known[-1][0]
    if size <= known[0][0]:
        return known[0][1]
    above = next(number for number, (bytes_, _) in enumerate(known) if bytes_ >= size)
    (low, low_s), (high, high_s) = known[above - 1], known[above]
    share = math.log(size / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(low_s) + share * math.log(high_s))


def _at(entries: Sequence[Any], ranks: int) -> list[Any]:
    """Return the entries measured with that many ranks at once, or with the nearest number."""
    if not entries:
        return []
    nearest = min({one.ranks for one in entries}, key=lambda number: (abs(math.log(number / ranks)), number))
    return [one for one in entries if one.ranks == nearest]


def _of_precision(entries: Sequence[Any], precision: str) -> list[Any]:
    return [one for one in entries if one.precision == precision]


def _interpolated(known: Sequence[tuple[tuple[float, ...], float]], size: tuple[float, ...]) -> float:
    """Return the value at a size: the mean of logarithms, weighed by 1 / distance^4 of the sizes' logarithms."""
    weights = values = 0.0
    for at, value in known:
        distance = sum(math.log(one / max(other, 1e-9)) ** 2 for one, other in zip(at, size, strict=True))
        weight = (distance + 1e-6) ** -2
        weights += weight
        values += weight * math.log(value)
    return math.exp(values / weights)
