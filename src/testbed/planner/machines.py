"""The machine of a plan: named devices and a network, or what this computer has. No torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil

from testbed.distributed.launch import usable_cores
from testbed.errors import InputError
from testbed.memory_model.devices import Device, device_named, network
from testbed.memory_model.job import Machine
from testbed.planner.calibration import BETWEEN, LOOPBACK, WITHIN, Calibration

# FLOPs per cycle of a core: two units, each multiplies and adds a register of fp32
PER_CYCLE = {"avx512f": 64, "avx2": 32, "asimd": 16}
LEAST_PER_CYCLE = 8
MOST_DEVICES = 2**20  # above any machine
CORE_BYTES_PER_S = 10e9  # an estimate; a calibration measures it
ASSUMED_HERTZ = 2.5e9  # where the system does not say
PROCESS_BYTES = 400 * 2**20  # of Python with PyTorch and DeepSpeed, a guess
SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


def machine_here(gpus: int | None, per_node: int | None, link: str | None) -> Machine:
    """Return this computer's GPUs, or else its cores, one for each rank.

    Raises:
        InputError: as `machine_of`.
    """
    found = _gpus_here()
    if found:
        name, memory_mib = found[0]
        device = replace(device_named(name), memory_bytes=memory_mib * 2**20)
        return machine_of(device, gpus or len(found), per_node or len(found), link)
    cores = usable_cores()
    per_node = per_node or max(cores, gpus or 1)
    return machine_of(cpu_core(min(per_node, gpus or cores)), gpus or cores, per_node, link)


def as_measured(machine: Machine, calibration: Calibration | None) -> Machine:
    """Return a machine with what a calibration measured of it in place of guesses.

    On a GPU that is the link between nodes, and what a process holds before its model. Its data sheet stays, which MFU
    is a share of.
    """
    if calibration is None:
        return machine
    held = max(calibration.memory.values(), default=machine.device.context_bytes)
    device, links = replace(machine.device, context_bytes=held), {link.name: link for link in calibration.links}
    within, between = machine.within_node, links.get(BETWEEN, machine.between_nodes)
    if device.kind == "cpu":
        names, within = ("peak_flops", "memory_bytes_per_s", "source"), links.get(WITHIN, within)
        device = replace(device, **{name: getattr(calibration.device, name) for name in names})
    return replace(machine, device=device, within_node=within, between_nodes=between)


def cpu_core(ranks: int) -> Device:
    """Return one of `ranks` equal shares of this computer's cores and memory as a device; its speed is a guess."""
    visible = usable_cores()
    cores = max(1, visible // ranks)
    of_core = min(1.0, visible / ranks)  # more ranks than cores take turns
    frequency = psutil.cpu_freq()
    hertz = (frequency.max or frequency.current) * 1e6 if frequency else 0.0
    peak = of_core * cores * (hertz or ASSUMED_HERTZ) * _flops_per_cycle()
    return Device(
        name=(f"{cores} core{'s' * (cores > 1)}" if of_core == 1 else f"{of_core:.2g} core")
        + f" of {platform.machine()}",
        memory_bytes=psutil.virtual_memory().total / ranks,
        peak_flops={"fp32": peak},
        memory_bytes_per_s=of_core * cores * CORE_BYTES_PER_S,
        kind="cpu",
        context_bytes=PROCESS_BYTES,
        source="a guess from clock and instructions; --calibrate measures it",
        architecture="cpu",
        per_node=ranks,
        within_node=LOOPBACK,
        between_nodes=network("1gbit"),
    )


def machine_of(device: Device, gpus: int | None, per_node: int | None, link: str | None) -> Machine:
    """Return devices of a kind in whole nodes, with the links of such nodes where no network is named.

    Args:
        gpus: devices in all (default: one node).

    Raises:
        InputError: the network has no speed, or the devices are not whole nodes.
    """
    nodes_of = per_node or device.per_node
    devices = gpus or nodes_of
    if devices > MOST_DEVICES:
        raise InputError(f"--gpus {devices}: a plan has at most {MOST_DEVICES:,} devices")
    check_whole_nodes(devices, nodes_of, f"--gpus {devices} of {device.name}")
    within, between = device.within_node or LOOPBACK, device.between_nodes or network("100gbit")
    return Machine(
        device=device,
        devices=devices,
        per_node=nodes_of,
        within_node=within,
        between_nodes=between if link is None else network(link),
    )


def check_whole_nodes(devices: int, per_node: int, typed: str) -> None:
    """Refuse devices that fill no whole number of nodes. InputError begins with what was typed, and names the numbers
    next to it that do."""
    if devices > per_node and devices % per_node:
        below = devices // per_node * per_node
        raise InputError(
            f"{typed} is not a whole number of nodes of {per_node}; give {below} or {below + per_node}, or "
            "another --gpus_per_node"
        )


def _gpus_here() -> list[tuple[str, float]]:
    """Return name and MiB of each GPU that a run would see; none where NVIDIA's driver is missing."""
    if shutil.which(SMI[0]) is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    said = subprocess.run(SMI, capture_output=True, text=True, check=False, timeout=30)
    rows = [line.rpartition(",") for line in said.stdout.splitlines()] if said.returncode == 0 else []
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [(name.strip(), float(memory)) for name, _, memory in rows][: len(visible) or None]


def _flops_per_cycle() -> int:
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return LEAST_PER_CYCLE
    return next((flops for name, flops in PER_CYCLE.items() if name in words), LEAST_PER_CYCLE)
