"""Hold what was measured on one machine: calibration.json. No torch.

`scripts/plan.py --calibrate` writes the file. Every table says how many ranks ran at once: they share cores and memory.
Seconds are of one call on one rank, the slowest rank's where several take part.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from testbed.errors import InputError
from testbed.io import read_json, write_text
from testbed.memory_model.devices import Device, Link
from testbed.memory_model.job import DenseModel, Job, Layout, Machine

FORMAT = 1
HERE = Device(name="this machine", memory_bytes=8e9, peak_flops={"fp32": 1e11}, memory_bytes_per_s=1e10)
LOOPBACK = Link(name="loopback", latency_s=50e-6, bytes_per_s=2e9, source="an estimate")
NAME = "calibration.json"
CALIBRATION = Path("checkpoint") / NAME  # where scripts/plan.py --calibrate writes it


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product: (m, k) times (k, n). `role`: which of a linear layer's three it is, they lie differently."""

    m: int
    n: int
    k: int
    seconds: float
    role: str = "forward"  # input_gradient, weight_gradient
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
    """An elementwise kernel, forward and backward, on a tensor of so many bytes."""

    num_bytes: float
    seconds: float
    kind: str = "copy"  # layer_norm, gelu, add (of a residual), cross_entropy (of logits); copy: forward alone
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class SmallStep:
    """Forward and backward of a model of so many layers that is so small that all of it is the host's work."""

    layers: int
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
    """An optimizer step of src/gpt2.py: the job, the link between its ranks, the median of the slowest rank.

    Attributes:
        low, high: quartiles of the steps.
        sent_bytes: of all ranks in a step, by the counters of the network interfaces; 0: not known.
    """

    job: Job
    link: str
    seconds: float
    low: float = 0.0
    high: float = 0.0
    steps: int = 0
    sent_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of one machine. Without one of TABLES nothing can be predicted from it.

    Attributes:
        device: one rank's share of the machine: name, memory, peak, bandwidth.
        links: ways between two ranks; the first is the one within the machine, the others were slowed on purpose.
        backend: of the collectives: "nccl" or "gloo".
        overlap: share of a collective that ran behind matrix products.
        memory: bytes that a rank holds before its model, by what is loaded: "plain", "deepspeed".
        machine_facts: of the machine, see MUST_MATCH; and its host, for the reader.
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
    small_steps: Sequence[SmallStep] = ()
    overlap: float = 0.5
    memory: Mapping[str, float] = field(default_factory=dict)
    machine_facts: Mapping[str, Any] = field(default_factory=dict)
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
    "small_steps": SmallStep,
}
Entry = TypeVar("Entry")


def read_calibration(path: Path) -> Calibration:
    """Read calibration.json. InputError, one sentence, where it is another kind of file or of another format."""
    content = read_json(path, f"--calibration {path}")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise InputError(
            f"--calibration {path}: its format is {found}, not {FORMAT}; make it again with scripts/plan.py --calibrate"
        )
    try:
        return from_json(content)
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"--calibration {path}: {error}; make it again with scripts/plan.py --calibrate") from None


def from_json(content: Mapping[str, Any]) -> Calibration:
    """Return a calibration from its JSON.

    Raises:
        TypeError, KeyError, ValueError, AttributeError: it is none.
    """
    check_types(Calibration, content)
    tables: dict[str, Any] = {
        name: tuple(made(kind, entry) for entry in content.get(name, ())) for name, kind in TABLES.items()
    }
    steps = tuple(_whole_step(entry) for entry in content.get("steps", ()))
    numbers: dict[str, Any] = {name: _positive(content[name], name) for name in ("overlap",) if name in content}
    texts: dict[str, Any] = {
        name: content[name] for name in ("backend", "made", "memory", "machine_facts") if name in content
    }
    device = made(Device, {**asdict(HERE), **content.get("device", {})}, is_checked=False)
    links = tuple(made(Link, entry, is_checked=False) for entry in content.get("links", ()))
    of_device = (device.memory_bytes, device.memory_bytes_per_s, *device.peak_flops.values())
    for rate in (*of_device, *(link.bytes_per_s for link in links)):
        _positive(rate, "a memory or a rate")
    if not device.peak_flops:
        raise InputError("its device has no peak_flops")
    return Calibration(**tables, **numbers, **texts, device=device, links=links, steps=steps)


def made(kind: type[Entry], entry: Mapping[str, Any], is_checked: bool = True) -> Entry:
    """Return a table's entry. Its numbers must be positive, if they are checked."""
    check_types(kind, entry)
    known = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in entry.items():
        if is_checked and not isinstance(value, str):
            _positive(value, name)
    return kind(**{name: value for name, value in entry.items() if name in known})


def check_types(kind: type, entry: Any) -> None:
    """Check the values of an object that is to become a dataclass by the types of its fields.

    Raises:
        InputError: names the first value that is of another type, or a number that is not finite.
    """
    if not isinstance(entry, Mapping):
        raise InputError(f"{reprlib.repr(entry)} is not an object")
    for one in dataclasses.fields(kind):
        value, wanted = entry.get(one.name), str(one.type).removesuffix(" | None")
        if value is None and (one.name not in entry or str(one.type) != wanted):
            continue
        if wanted in IS_OF and not IS_OF[wanted](value):
            raise InputError(f"{one.name} is {reprlib.repr(value)}, which is no {wanted}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _are_not_negative(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_number(each) and each >= 0 for each in value.values())


LARGEST = 1e30  # above any size, rate or time
IS_OF: Mapping[str, Callable[[Any], bool]] = {  # name of a field's type -> whether a value of JSON is of it
    "int": lambda value: type(value) is int and abs(value) < LARGEST,
    "float": _is_number,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "Mapping[str, float]": _are_not_negative,
    "Mapping[str, Any]": lambda value: isinstance(value, Mapping),
}


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{name} is {value!r}, which is not a positive number")
    return float(value)


def _whole_step(entry: Mapping[str, Any]) -> WholeStep:
    job = dict(entry["job"])
    check_types(WholeStep, {**entry, "job": None})
    for kind, content in ((Job, job), (DenseModel, job["model"]), (Layout, job["layout"])):
        check_types(kind, content)
    job["model"], job["layout"] = DenseModel(**job["model"]), Layout(**job["layout"])
    numbers = {name: entry[name] for name in ("low", "high", "steps", "sent_bytes") if name in entry}
    seconds = _positive(entry["seconds"], "seconds")
    return WholeStep(job=Job(**job), link=str(entry["link"]), seconds=seconds, **numbers)


# Facts that must be the same where a calibration is used: times of another machine or PyTorch say nothing about it.
MUST_MATCH = {"device": "device", "cpu": "CPU", "cores": "number of usable cores", "torch": "version of PyTorch"}


def check_machine(calibration: Calibration, here: Mapping[str, Any], path: Path) -> None:
    """Check that a calibration was made on this machine.

    Args:
        here: facts of MUST_MATCH as they are now; one that is left out is not compared.

    Raises:
        InputError: names the first fact that differs.
    """
    for name, words in MUST_MATCH.items():
        was = calibration.machine_facts.get(name)
        if name in here and was != here[name]:
            raise InputError(
                f"--calibration {path} was made on another {words} ({was!r}, here {here[name]!r}), so its times say "
                "nothing about this machine; make it again with scripts/plan.py --calibrate"
            )
