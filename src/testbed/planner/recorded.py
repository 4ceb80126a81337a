"""Predict a run that was made, from what its files record. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.config.flags import parse_command_line
from testbed.config.mesh import options_of_run_type, spread_over_ranks
from testbed.config.run_types import STRATEGIES
from testbed.errors import InputError
from testbed.io import holding_together
from testbed.memory_model.devices import Device, device_named
from testbed.memory_model.job import Job, Machine, job_of
from testbed.memory_model.memory import memory_of
from testbed.model.shape import ModelShape
from testbed.planner.calibration import NAME as CALIBRATION
from testbed.planner.calibration import read_calibration
from testbed.planner.candidates import precision_of
from testbed.planner.machines import machine_of
from testbed.planner.measured_rates import Calibrated
from testbed.planner.plan import PlannedRun
from testbed.planner.step_time import published_constants, step_time

FOLDERS_ABOVE = 3  # out_dir/cell/run_1/training_metrics.json
SHAPE = ("num_layers", "num_heads", "embedding_size", "vocab_size", "max_position_embeddings")
BATCH = ("micro_batch_size_per_gpu", "grad_accum_steps", "global_batch_size")


def prediction_for(record: Mapping[str, Any], path: Path) -> PlannedRun | None:
    """Return what would have been predicted of a run: with a calibration.json in its folder or above it, or from data
    sheets where its GPU is a known one. None where nothing is known of its machine.

    Args:
        record: of training_metrics.json.
        path: of that file.

    Raises:
        InputError: a calibration there cannot be read.
    """
    job = job_of_record(record)
    if job is None:
        return None
    files = (folder / CALIBRATION for folder in list(Path(path).absolute().parents)[:FOLDERS_ABOVE])
    file = next((file for file in files if file.is_file()), None)
    machine, constants = _machine_of_record(record["hardware"]), published_constants()
    if file is not None:
        calibration = read_calibration(file)
        machine = calibration.machine(job.layout.devices)
        with holding_together(file):
            constants = Calibrated(calibration)
    elif not machine.device.name:
        return None
    time = step_time(job, machine, constants)
    return PlannedRun(job=job, machine=machine, memory=memory_of(job), time=time)


def job_of_record(record: Mapping[str, Any]) -> Job | None:
    """Return the run as a job; None where its file is of a version that does not say enough, or has other rules."""
    try:
        config, hardware = record["training_config"], record["hardware"]
        values = {**parse_command_line([]).values, **record["settings"], **{name: int(config[name]) for name in BATCH}}
        values |= {"compile": bool(config.get("compile")), "device": hardware.get("device_type")}
        sizes: dict[str, Any] = {name: int(values[name]) for name in SHAPE}
        machine = _machine_of_record(hardware)
        values["precision"] = precision_of(values["precision"], machine.device)
        values |= options_of_run_type(values, frozenset())
        ranks = machine.devices if STRATEGIES[values["run_type"]].is_distributed else 1
        settled, mesh = spread_over_ranks(values, ranks)
    except (InputError, AttributeError, KeyError, TypeError):
        return None
    return job_of(settled, mesh, ModelShape(**sizes), machine)


def _machine_of_record(hardware: Mapping[str, Any]) -> Machine:
    """Return the devices that a run had, with the links of such nodes. A CPU, and a GPU of no data sheet, is one of its
    kind without a name and with no figures of its own."""
    kind = "cpu" if hardware.get("device_type") == "cpu" else "cuda"
    device = Device(name="", memory_bytes=0.0, peak_flops={"fp32": 1.0}, memory_bytes_per_s=1.0, kind=kind)
    with contextlib.suppress(InputError):
        device = device_named(str(hardware.get("gpu_name")))
    devices, nodes = hardware["num_devices"], hardware.get("num_nodes") or 1
    return machine_of(device, devices, devices if devices % nodes else devices // nodes, None)
