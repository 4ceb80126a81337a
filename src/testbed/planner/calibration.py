"""Hold what was measured on one machine: calibration.json. No torch.

`scripts/plan.py --calibrate` writes the file. Every row says how many ranks ran at once: they share cores and memory.
Seconds are of one call on one rank, the slowest rank's where several take part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from testbed.config.device_name import cpu_name, torch_version
from testbed.distributed.launch import usable_cores
from testbed.errors import InputError
from testbed.io import read_json, write_text
from testbed.memory_model.devices import Device, Link
from testbed.memory_model.job import Job, Machine
from testbed.typed_json import check, check_finite

FORMAT = 2
LOOPBACK = Link(name="loopback, an estimate", latency_s=50e-6, bytes_per_s=2e9)
WITHIN, BETWEEN = "within a node", "between nodes"  # names of links
NAME = "calibration.json"
CALIBRATION = Path("checkpoint") / NAME  # where scripts/plan.py --calibrate writes it
Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(gt=0, lt=1e30)]
NotNegative = Annotated[float, Meta(ge=0, lt=1e30)]


# name of an operation -> what its `size` is
OPERATIONS = {
    # a linear layer's three matrix products, (m, k) times (k, n): they lie differently
    **dict.fromkeys(("forward", "input_gradient", "weight_gradient"), "m, n, k"),
    # causal attention
    **dict.fromkeys(("attention_forward", "attention_backward"), "heads of all sequences, length, width of a head"),
    # elementwise kernels, both passes; add: of a residual; cross_entropy: of logits
    **dict.fromkeys(("layer_norm", "gelu", "add", "cross_entropy"), "bytes"),
    "copy": "bytes",
    "update": "elements",  # AdamW, with the norm for clipping
    "small_step": "layers",  # of a model that is so small that all of both passes is the host's work
}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "p2p")  # bytes of the whole message, before it is cut


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call of OPERATIONS or COLLECTIVES, whose size is as it says there.

    `ranks`: that did the same at once; `link`: name of the Link that a collective crosses.
    """

    operation: str
    size: tuple[Amount, ...]
    seconds: Amount
    ranks: Count = 1
    link: str = ""


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """An optimizer step of src/gpt2.py: the job, the link between its ranks, the median of the slowest rank.

    Attributes:
        low, high: quartiles of the steps.
        sent_bytes: of all ranks in a step, by the counters of the network interfaces; 0: not known.
    """

    job: Job
    link: str
    seconds: Amount
    low: NotNegative = 0.0
    high: NotNegative = 0.0
    steps: int = 0
    sent_bytes: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of one machine.

    Attributes:
        device: one rank's share of the machine: name, memory, peak, bandwidth.
        links: ways between two ranks, the first within the machine; BETWEEN where nodes were measured together.
        backend: of the collectives: "nccl" or "gloo".
        overlap: share of a collective that ran behind matrix products.
        memory: bytes that a rank holds before its model, by what is loaded: "plain", "deepspeed".
        machine_facts: of the machine, see MUST_MATCH; and its host, for the reader.
        made: date, program and version, for the reader.
    """

    device: Device
    links: tuple[Link, ...] = ()
    backend: str = "gloo"
    timings: tuple[Timing, ...] = ()
    overlap: Amount = 0.5
    memory: Mapping[str, NotNegative] = field(default_factory=dict)
    machine_facts: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[WholeStep, ...] = ()
    made: Mapping[str, Any] = field(default_factory=dict)

    def machine(self, devices: int) -> Machine:
        """Return so many ranks of this machine."""
        link = self.links[0] if self.links else LOOPBACK
        return Machine(device=self.device, devices=devices, per_node=devices, within_node=link, between_nodes=link)

    def write(self, path: Path) -> None:
        write_text(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n")


def read_calibration(path: Path) -> Calibration:
    """Read calibration.json. InputError, one sentence, where it is another kind of file or of another format."""
    content = read_json(path, f"--calibration {path}")
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise InputError(
            f"--calibration {path}: its format is {found}, not {FORMAT}; make it again with scripts/plan.py --calibrate"
        )
    try:
        return from_json(content)
    except InputError as error:
        raise InputError(f"--calibration {path}: {error}; make it again with scripts/plan.py --calibrate") from None


def from_json(content: Mapping[str, Any]) -> Calibration:
    """Return a calibration from its JSON. InputError begins with the place of the first fault."""
    check_finite(content)
    found: Calibration = check(content, Calibration, may_hold_more=True)
    return found


def facts_here() -> dict[str, Any]:
    """Return the facts of MUST_MATCH that can be had without PyTorch: all but the device's name."""
    return {"cpu": cpu_name(), "cores": usable_cores(), "torch": torch_version()}


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
