"""List the runs of src/gpt2.py that a machine could do: run types, meshes, micro batches, recomputation. No torch.

The program's own rules (config/) accept or refuse each; what is left out on top of that is said where it is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from testbed.config.compatibility import check_on_device
from testbed.config.flag_types import AUTO
from testbed.config.flags import parse_command_line
from testbed.config.mesh import batch_arithmetic, check_schedule, options_of_run_type, spread_over_ranks
from testbed.config.run_types import HOW_AXES_WORK, REFERENCE, STRATEGIES, run_types_with
from testbed.errors import InputError, counted
from testbed.memory_model.devices import Device
from testbed.memory_model.job import RECOMPUTE, DenseModel, Job, Machine, emulates_bf16, job_of
from testbed.model.shape import ModelShape

LONG = 16384  # tokens of a sequence from where on meshes with context ranks are tried, also where others have room
MOST_CONTEXT, MOST_TENSOR = 16, 8  # context and tensor ranks, where a node has fewer devices
MOST_TOKENS = {"cpu": 16384, "cuda": 131072}  # of a micro batch: a pass is full long before
# gpipe takes as long as 1f1b, and more memory, but runs with fewer micro batches than stages
MESH_SCHEDULES, OF_FEW = ("1f1b", "interleaved_1f1b", "zero_bubble"), "gpipe"
QUICK_SCHEDULES = ("1f1b", "zero_bubble")
MORE_ROUNDS, DEEP = (4, 8), 8  # stages per rank besides the usual two, and ranks of a pipeline from where on
WITHOUT_FLASH = ("pascal", "volta", "turing")  # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: sm80 to sm121
MESH_AXES = ("tensor_parallel_size", "pipeline_stages", "context_parallel_size")
HOW = tuple(itertools.chain(*HOW_AXES_WORK.values()))  # flags that say how an axis works
VARIED = {"zero_stage", "shard_size", "activation_checkpointing", *MESH_AXES, *HOW}
BF16_GAIN = 1.5  # from here on --precision auto takes bf16


def possible(
    shape: ModelShape,
    seq_length: int,
    global_batch: int,
    machine: Machine,
    given: Mapping[str, Any] | None = None,
    model: DenseModel | None = None,
    *,
    shares_sequences: bool = False,
    is_quick: bool = False,
) -> tuple[list[Job], dict[str, InputError]]:
    """Return every run that is worth an estimate, and for each run type without one the program's reason to refuse it.

    Args:
        global_batch: sequences of an optimizer step, the same for all.
        given: flags of src/gpt2.py that all of them have; one that would vary does not.
        model: what the same strategies train in place of the GPT-2 of that shape.
        shares_sequences: try context ranks however short and many the sequences are: they need less memory.
        is_quick: try fewer schedules, sizes of shards and micro batches, of which one is nearly as fast as the best.
    """
    given = dict(given or {})
    values = {**_defaults(), **asdict(shape), **given}
    values |= {"seq_length": seq_length, "global_batch_size": global_batch, "device": machine.device.kind}
    values["precision"] = precision_of(values["precision"], machine.device)
    shares_sequences |= always_shares_sequences(seq_length, global_batch, machine, given)
    jobs: list[Job] = []
    refused: dict[str, InputError] = {}
    asked, typed_names = given.get("run_type"), given.keys() - {"run_type"}
    # else they are for the run types that have them, but for what changes the mathematics of all
    is_native = given.get("mixed_precision") == "native"
    typed = frozenset(given if asked else {"mixed_precision"} if is_native else ())
    for run_type in [asked] if asked else run_types_with(equals_baseline=True):  # one that differs is asked for by name
        if (never := _why_not(run_type, machine, given)) is not None:
            refused |= {run_type: InputError(never)} if asked else {}
            continue
        of_type = {**values, "run_type": run_type}
        varied = _options(of_type, machine, given, shares_sequences, is_quick)
        found, reasons = _accepted(of_type, varied, typed, machine, model, is_quick)
        jobs += found
        if found:
            continue
        # what was typed may be refused alone: that says more than the first size that was tried with it
        if reasons := [*_accepted(of_type, [{}], typed, machine, model)[1], *reasons]:
            untyped = VARIED - typed_names
            told = min(reasons, key=lambda why: (_is_of(why, untyped), not _is_of(why, typed_names)))
            # a way out may be one of one mesh of many
            refused[run_type] = InputError(told.rule) if STRATEGIES[run_type].cuts_model else told
        elif asked:  # a mesh of one axis, or DeepSpeed on one device that offloads nothing
            on = counted(machine.devices, "device")
            does = f"as asked, --run_type {run_type} does on {on} what another run type does; leave it out"
            refused[run_type] = InputError(does)
    return list(dict.fromkeys(jobs)), refused


@cache
def _defaults() -> dict[str, Any]:
    return dict(parse_command_line([]).values)


def _accepted(
    values: Mapping[str, Any],
    varied: Iterable[Mapping[str, Any]],
    typed: frozenset[str],
    machine: Machine,
    model: DenseModel | None,
    is_quick: bool = False,
) -> tuple[list[Job], list[InputError]]:
    """Return the jobs of a run type with each of its settings, and why there are none with some."""
    found: list[Job] = []
    reasons = []
    for options in varied:
        try:
            batches = _batches({**values, **options}, typed, machine, is_quick)
            found += batches if model is None else [_of(model, job) for job in batches]
        except InputError as error:
            reasons.append(error)
    return found, reasons


def always_shares_sequences(seq_length: int, global_batch: int, machine: Machine, given: Mapping[str, Any]) -> bool:
    """Return whether context ranks are tried also where others have room: for long sequences, and for batches that do
    not give every device one."""
    return seq_length >= LONG or "context_parallel_method" in given or global_batch < machine.devices


def _is_of(why: InputError, names: Set[str]) -> bool:
    """Return whether a reason is about one of these flags."""
    return any(f"--{name}" in str(why) for name in names)


def _of(model: DenseModel, job: Job) -> Job:
    """Return a job of another model. InputError where its tensor ranks cannot share the model's heads."""
    if model.kv_heads % job.layout.tensor:
        raise InputError(
            f"--tensor_parallel_size {job.layout.tensor} does not divide the {model.kv_heads} heads of keys and "
            "values; every rank takes as many whole heads"
        )
    return replace(job, model=model)


def precision_of(asked: str, device: Device) -> str:
    """Return the precision that --precision auto takes on a device."""
    peaks = device.peak_flops
    if asked != "auto":
        return asked
    return "bf16" if peaks.get("bf16", 0) >= BF16_GAIN * peaks.get("fp32", 1) else "fp32"


def _options(
    values: Mapping[str, Any], machine: Machine, given: Mapping[str, Any], shares_sequences: bool, is_quick: bool
) -> Iterator[dict[str, Any]]:
    """Yield the settings of a run type that it is worth to try, as flags.

    Left out: on one device all but the plain program, and ZeRO with --offload or in native bf16; tensor ranks across
    nodes, but for MOST_TENSOR over small ones; --shard_size that crosses nodes unless it is all; offloading, unless it
    is asked for.
    """
    run_type, devices, per_node = values["run_type"], machine.devices, min(machine.joined, machine.devices)
    does_more = given.get("offload") or given.get("mixed_precision") == "native"  # than the plain program
    if devices == 1 and run_type != REFERENCE and not does_more:
        return
    sizes = _divisors(devices)[1:]
    within = _divisors(per_node if per_node > 1 else devices)[1:]
    entry, varied = STRATEGIES[run_type], {
        "zero_stage": (0, 1, 2, 3),
        "shard_size": [*(size for size in within if size < devices and devices % size == 0), devices],
        "pipeline_stages": [size for size in sizes if size <= values["num_layers"] + 2],
        "pipeline_schedule": ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"),
        "tensor_parallel_size": [size for size in sizes if size in within or per_node < MOST_TENSOR >= size],
    }  # fmt: skip
    if entry.keeps == "axes":
        contexts = varied["tensor_parallel_size"]
        if per_node < MOST_CONTEXT:  # of small nodes, several share a sequence
            contexts = [size for size in sizes if size <= MOST_CONTEXT]
        varied["context_parallel_size"] = contexts if shares_sequences else []
        has_ring = _has_ring(given, machine.device)
        for mesh in _products(varied, values, devices, given, is_quick):
            gathers = mesh["context_parallel_size"] > 1 and not has_ring
            yield {"context_parallel_method": "allgather", **mesh} if gathers else mesh
        return
    varied = {name: sizes for name, sizes in varied.items() if name in entry.options}
    varied["activation_checkpointing"] = tuple(RECOMPUTE)
    varied |= {name: (given[name],) for name in varied if given.get(name) is not None}
    for choice in itertools.product(*varied.values()):
        yield dict(zip(varied, choice, strict=True))


def _has_ring(given: Mapping[str, Any], device: Device) -> bool:
    """Return whether context ranks can pass keys and values round: the ring calls PyTorch's flash kernel."""
    is_flash = given.get("attention") in (None, "auto", "flash") and device.architecture not in WITHOUT_FLASH
    return is_flash and (device.kind == "cpu" or precision_of(given.get("precision") or "auto", device) != "fp32")


def _products(
    varied: Mapping[str, Sequence[Any]],
    values: Mapping[str, Any],
    devices: int,
    given: Mapping[str, Any],
    is_quick: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the settings of meshes of several axes: what no other run type is. The residual stream of tensor ranks is
    cut, and what is left of the devices is all shards, all copies, or shards within a node. Context ranks are of one
    node, or of a few small ones.
    """
    sizes: dict[str, Sequence[Any]] = {name: (1, *varied[name]) for name in MESH_AXES}
    sizes |= {"activation_checkpointing": tuple(RECOMPUTE)}
    sizes |= {name: (given[name],) for name in sizes if given.get(name) is not None}
    asked = {name: given[name] for name in HOW if given.get(name) is not None}
    names = (
        (asked["pipeline_schedule"],)
        if "pipeline_schedule" in asked
        else (*(QUICK_SCHEDULES if is_quick else MESH_SCHEDULES), OF_FEW)
    )
    schedules: list[tuple[str, int]] = [(name, 0) for name in names]
    schedules += [
        ("interleaved_1f1b", rounds) for rounds in MORE_ROUNDS if "interleaved_1f1b" in names and not is_quick
    ]
    micro = given.get("micro_batch_size_per_gpu")
    passes = values["global_batch_size"] // (micro if isinstance(micro, int) else 1)  # on all data ranks
    for choice in itertools.product(*sizes.values(), schedules):
        *sized, (schedule, rounds) = choice
        found = dict(zip(sizes, sized, strict=True))
        tensor, stages, context, _ = sized
        data, left = divmod(devices, tensor * stages * context)
        if left or (stages == 1 and (schedule, rounds) != schedules[0]):
            continue
        if rounds and (stages < DEEP or stages * rounds > values["num_layers"] + 2):
            continue
        if stages > 1 and len(names) > 1 and (passes // data < stages) != (schedule == OF_FEW):
            continue
        if stages > 1:
            found |= {"pipeline_schedule": schedule} | ({"stages_per_rank": rounds} if rounds else {})
        of_copies = varied["shard_size"][-2:] if is_quick else varied["shard_size"]
        shares = (size for size in {1, data, *of_copies} if size <= data and data % size == 0)
        shards = [given["shard_size"]] if given.get("shard_size") else sorted({1, *(context * size for size in shares)})
        for shard in shards:
            if context == 1 and sum(size > 1 for size in (tensor, stages, shard)) < 2:
                continue  # the one axis has a run type of its own
            cut = {"sequence_parallel": "on"} if tensor > 1 else {}
            yield {**found, "shard_size": shard, **cut, **asked}


def _why_not(run_type: str, machine: Machine, given: Mapping[str, Any]) -> str | None:
    """Return why a run type makes no sense on a number of devices; None if it does."""
    devices, lead = machine.devices, f"--run_type {run_type}"
    entry = STRATEGIES[run_type]
    if entry.devices == "one" and devices > 1:
        return f"{lead} runs on one device"
    if entry.devices == "all" and machine.device.kind == "cpu":
        return f"{lead} splits a batch over CUDA devices; use ddp"
    if entry.devices == "all" and not 1 < devices <= machine.per_node:
        return f"{lead} is one process with all devices of one node"
    if devices == 1 and entry.devices != "one" and "offload" not in entry.options:
        sizes = {name: size for name in (*MESH_AXES, "shard_size") if (size := given.get(name) or 1) > 1}
        if not sizes.keys() <= entry.options.keys():
            return None  # on any number of devices; the program's rules say so
        typed = [*sizes.values()]
        # a mesh of stages or tensor ranks alone is another run type's
        others = 2 if entry.keeps == "axes" and len(typed) < 2 and not given.get("context_parallel_size") else 1
        least = max(2 * others, math.prod(typed) * others)
        return f"{lead} spreads a step over devices; it needs --gpus {least} or more"
    return None


def _check_kernels(values: Mapping[str, Any], device: Device) -> None:
    """Check that a device has the kernels that flags ask for. InputError names the flag and the way out."""
    attention, context = values["attention"], values["context_parallel_size"] or 1
    is_ring = context > 1 and values["context_parallel_method"] != "allgather"
    emulates, flash = emulates_bf16(values["precision"], device), device.architecture not in WITHOUT_FLASH
    is_fp8, is_native = values["matmul"] == "fp8", values["mixed_precision"] == "native"
    lacks_bf16 = emulates_bf16("bf16", device)
    no_flash = "has no flash kernel, as PyTorch has it from compute capability 8.0 on"
    for flag, is_missing, why, way in (
        ("--matmul fp8", is_fp8 and "fp8" not in device.peak_flops, "multiplies nothing in 8 bits", ""),
        ("--mixed_precision native", is_native and lacks_bf16 and not emulates, "has no bf16", ""),
        ("--compile on", values["compile"] and emulates, "has no bf16, and PyTorch compiles none for it", "fp16"),
        ("--attention efficient", attention == "efficient" and emulates, "has no bf16, and no kernel for it", "fp16"),
        ("--attention cudnn", attention == "cudnn" and device.architecture == "cdna", "has no cuDNN", ""),
        (f"--attention {attention}", attention in ("flash", "cudnn") and not flash, no_flash, ""),
        (f"--context_parallel_size {context}", is_ring and not flash, f"{no_flash}, and the ring needs it", ""),
    ):  # fmt: skip
        if is_missing:
            way = f", or give --precision {way}" if way else ""
            raise InputError(f"{flag}: {device.name} {why}; leave {flag.split()[0]} out{way}")


def _batches(values: dict[str, Any], typed: frozenset[str], machine: Machine, is_quick: bool) -> Iterator[Job]:
    """Yield a job for each micro batch that divides a rank's share of the batch, quickly for powers of two.

    Raises:
        InputError: the program refuses the mesh, the batch, or every micro batch.
    """
    entry, batch = STRATEGIES[values["run_type"]], values["global_batch_size"]
    values = {**values, **options_of_run_type(values, typed)}
    _check_kernels(values, machine.device)
    # the mesh and the pair of flags are possible at all
    settled, mesh = spread_over_ranks(values, machine.devices if entry.is_distributed else 1)
    check_on_device(settled)
    lanes = machine.devices if entry.devices == "all" else mesh.data
    if batch % lanes:
        raise InputError(
            f"--run_type {values['run_type']} gives each of {lanes} devices the same share of a batch, and "
            f"--global_batch_size {batch} does not divide",
            f"; the nearest that does: {lanes * max(1, round(batch / lanes))}",
        )
    asked, most = values["micro_batch_size_per_gpu"], MOST_TOKENS[machine.device.kind] // values["seq_length"]
    shape = ModelShape(**{name: values[name] for name in ModelShape.__annotations__})
    sizes = _divisors(batch // lanes, max(1, most)) if asked in (None, AUTO) else [asked]
    for micro_batch in sizes:
        if is_quick and micro_batch & (micro_batch - 1) and micro_batch != sizes[-1]:
            continue
        found = {**settled, "grad_accum_steps": values["grad_accum_steps"], "micro_batch_size_per_gpu": micro_batch}
        try:
            found |= batch_arithmetic(found, mesh.data)
            check_schedule(found, mesh)
        except InputError:
            continue  # a schedule that needs more micro batches: a smaller one has them
        yield job_of(found, mesh, shape, machine)


def _divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number, up to `most`: there is no need to try a huge batch's others."""
    return [size for size in range(1, min(number, most or number) + 1) if number % size == 0]
