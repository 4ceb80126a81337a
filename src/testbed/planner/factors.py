"""Name the factors that a job's parts are multiplied by, and how far each may go from 1. No torch.

A part's seconds from its rates are off by what no data sheet tells: how good a program's kernels are, how a kind of
device throttles. So each part has a factor of all runs, of the device's architecture, of the program, ...; each is a
random effect: normal in its logarithm, around 0, with the standard deviation below (Laird and Ware 1982,
doi:10.2307/2529876). What was not seen keeps factor 1, and adds its deviation to the interval.

The deviations are round numbers, chosen once: a tenth for how much like kinds differ, a third where a data sheet says
little. They are not fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from testbed.memory_model.job import Job, Machine

TOTAL = "total"  # the whole step, as a part

# part -> what its factors belong to -> standard deviation of the logarithm
DEVIATIONS: Mapping[str, Mapping[str, float]] = {
    TOTAL: {
        "all": 0.2,
        "architecture": 0.1,
        "device": 0.05,
        "framework": 0.1,
        "stack": 0.1,
        "stack, architecture": 0.1,
        "stack, device": 0.05,
        "stack, device, precision": 0.05,
        "framework, strategy": 0.05,
        "stack, architecture, strategy": 0.05,
        "recompute": 0.05,
        "compiled": 0.05,
        "setting": 0.05,
    },
    "products": {
        "all": 0.1,
        "architecture": 0.1,
        "precision": 0.1,
        "architecture, precision": 0.15,
        "stack, architecture": 0.1,
    },
    "operands": {"all": 0.4, "stack, architecture": 0.3},
    "attention": {"all": 0.3, "architecture": 0.2, "stack": 0.3, "stack, architecture": 0.3, "kernel": 0.3},
    "elementwise": {"all": 0.3, "framework": 0.3, "stack, architecture": 0.3},
    "quantization": {"all": 0.4, "precision": 0.3, "stack": 0.3},
    "head": {"all": 0.2, "stack": 0.2},
    "optimizer": {"all": 0.4, "stack": 0.3},
    "tensor links": {"all": 0.4, "architecture": 0.2, "stack": 0.3},
    "data links": {"all": 1.0, "stack, device": 1.0},
    "pipeline links": {"all": 0.5},
    "context links": {"all": 0.7},
    "offload": {"all": 0.8},
    "stragglers": {"all": 0.5, "stack, device": 0.3},
    "host": {"all": 0.4, "stack": 0.3},
}


@dataclass(frozen=True)
class Factor:
    """One factor: of a part, for one kind, such as ("attention", "stack", "karpathy/nanoGPT")."""

    part: str
    kind: str
    value: str
    deviation: float


def strategy_of(job: Job) -> str:
    """Return the axes that a job is cut along: data, sharded, tensor, pipeline, context."""
    layout = job.layout
    data = "sharded" if layout.zero_stage == 3 else "data"
    axes = ((layout.data, data), (layout.tensor, "tensor"), (layout.pipeline, "pipeline"), (layout.context, "context"))
    return " x ".join(name for ranks, name in axes if ranks > 1) or "single"


def factors_of(job: Job, machine: Machine, framework: str | None) -> list[Factor]:
    """Return all factors of a job, whether fitted or not."""
    device, model = machine.device, job.model
    values = {
        "all": "all",
        "architecture": device.architecture or device.name,
        "device": device.name,
        "framework": framework or job.stack,
        "stack": job.stack,
        "precision": job.precision,
        "kernel": job.attention,
        "recompute": job.recompute,
        "compiled": str(job.compiled),
        "strategy": strategy_of(job),
        "setting": f"{job.stack}, {device.name}, {job.precision}, {model.layers} x {model.hidden}",
    }
    return [
        Factor(part, kind, ", ".join(values[name] for name in kind.split(", ")), deviation)
        for part, kinds in DEVIATIONS.items()
        for kind, deviation in kinds.items()
    ]
