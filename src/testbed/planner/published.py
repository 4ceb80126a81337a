"""Read published training runs: rows in the form of published_runs.json, into jobs and machines. No torch.

A row may leave anything unknown (null). What follows from the rest by arithmetic is computed, and what does not is
guessed as its kind of run has it. A row that cannot be true is an ImpossibleRow, and the rest of the file is read.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from testbed.errors import InputError
from testbed.io import read_json
from testbed.memory_model.devices import GIB, Device, Link, device_named, devices, network
from testbed.memory_model.job import DenseModel, Job, Layout, Machine
from testbed.planner.guesses import Unstated, likely
from testbed.planner.machines import MOST_DEVICES
from testbed.planner.spellings import NO, half_a_digit, heads_of, offload_in, precision_in, recompute_in, zero_stage_in
from testbed.planner.truth import ImpossibleRow, check

OWN_COPY = Path(__file__).parent / "published_runs.json"
NOT_FITTED = ("suspect_", "tokens_per_step_uncertain")  # flags, by their beginning
UNSTATED_PIECES = 2  # virtual stages of a pipeline rank where the row states none: a guess
DRIVER_LEAVES = 0.985  # of a nominal memory
TOKENS_OF_A_PASS = 8192  # of one micro batch where the row states none: a guess
MOST_LAYERS = 10_000  # above any model
MOST_WORDS = 8  # of a device's name that are looked at

# Programs that share their layers and kernels. pytorch: modules of PyTorch, as they come.
FRAMEWORKS = {
    "NVIDIA/Megatron-LM": "megatron",
    "NVIDIA-NeMo/Megatron-Bridge": "megatron",
    "MooreThreads/SimuMax": "megatron",
    "calculon-ai/calculon": "megatron",
    "karpathy/nanoGPT": "pytorch",
    "karpathy/build-nanogpt": "pytorch",
    "modal-labs/multinode-training-guide": "pytorch",
    "karpathy/llm.c": "llm.c",
    "KellerJordan/modded-nanogpt": "llm.c",
    "mosaicml/llm-foundry": "llm-foundry",
    "pytorch/torchtitan": "torchtitan",
    "testbed": "pytorch",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published run that can be true."""

    id: str
    job: Job
    machine: Machine
    device_is_known: bool  # in devices.json; else it was made from what the row states
    family: str  # of the strategy, as the row names it
    step_time_s: float | None  # measured
    memory: Mapping[str | None, float] = field(default_factory=dict)  # measured, GiB by memory_kind
    memory_kind: str | None = None
    block: str = ""
    sub_block: str = ""
    grade: str = "medium"
    flags: tuple[str, ...] = ()

    @property
    def is_fitted(self) -> bool:
        """Its time may teach the model something."""
        return self.step_time_s is not None and not any(flag.startswith(NOT_FITTED) for flag in self.flags)

    @property
    def is_scored(self) -> bool:
        """Its error counts: it is neither weak nor flagged."""
        return self.is_fitted and self.grade != "weak" and not self.flags

    @property
    def model_flops_per_device(self) -> float:
        """FLOPs of one step on one device, without recomputation."""
        return self.job.model.flops_per_token() * self.job.tokens_per_step / self.machine.devices


@cache
def own_rows() -> tuple[Row, ...]:
    """Return the rows of the project's own copy."""
    return tuple(one for one in rows_of(read_json(OWN_COPY)["rows"]) if isinstance(one, Row))


def rows_of(raw_rows: Any) -> Iterator[Row | ImpossibleRow]:
    """Read each row; one that cannot be read or be true comes back as the reason."""
    if not isinstance(raw_rows, list):
        raise InputError('the file of rows needs a list under "rows"')
    for number, raw in enumerate(raw_rows):
        name = str(raw.get("id")) if isinstance(raw, dict) and raw.get("id") is not None else f"row {number}"
        try:
            yield row_of(raw, name)
        except ImpossibleRow as error:
            yield ImpossibleRow(error.reason, name)
        except (InputError, ValueError, TypeError, KeyError, AttributeError, OverflowError, ZeroDivisionError) as error:
            yield ImpossibleRow(f"the row cannot be read: {error}", name)


def row_of(raw: Mapping[str, Any], name: str) -> Row:
    """Read one row. ImpossibleRow with the reason where it cannot be true."""
    if not isinstance(raw, Mapping):
        raise ImpossibleRow("the row is not an object")
    part: dict[str, Mapping[str, Any]] = {key: _object(raw.get(key)) for key in PARTS}
    model = _model(part["model"])
    layout = _layout(part["strategy"], part["hardware"], model.layers)
    if part["extra"].get("overlap_param_gather") is not None and not layout.zero_stage:
        layout = replace(layout, zero_stage=1, shard=layout.data)  # only a sharded optimizer gathers weights
    micro_batch, accumulation = _batch(part["batch"], layout, model)
    device, is_known = _device(part["hardware"])
    unstated = Unstated(
        memory=_number(part["hardware"], "gpu_memory_gb_nominal") is None,
        device=not is_known,
        heads=part["model"].get("heads") is None,
        micro_batch=part["batch"].get("micro_batch") is None,
        global_batch=part["batch"].get("global_batch") is None,
        precision=not precision_in(part["precision"])[1],
        recompute=not recompute_in(raw.get("activation_checkpointing"))[2],
        zero_stage=zero_stage_in(part["strategy"]) is None,
    )
    job = _job(raw, part, model, layout, micro_batch, accumulation)
    check(raw, job, device, unstated)
    job = likely(job, device, unstated)
    machine = _machine(part["hardware"], device, layout)
    measured = part["measured"]
    memory_kind = measured.get("memory_kind") or raw.get("memory_kind")
    memory = {
        memory_kind: _number(measured, "peak_memory_gib"),
        "allocated_between_steps": _number(measured, "steady_memory_gib"),
    }
    return Row(
        id=name,
        job=job,
        machine=machine,
        device_is_known=is_known,
        family=str(part["strategy"].get("family") or "unknown"),
        step_time_s=_number(measured, "step_time_s") if raw.get("kind") != "memory_only" else None,
        memory={kind: gib for kind, gib in memory.items() if gib is not None},
        memory_kind=memory_kind,
        block=str(raw.get("block") or ""),
        sub_block=str(raw.get("sub_block") or ""),
        grade=str(raw.get("grade") or "medium"),
        flags=tuple(str(flag) for flag in raw.get("flags") or ()),
    )


PARTS = ("hardware", "model", "batch", "strategy", "precision", "extra", "measured", "source")


def _object(value: Any) -> Mapping[str, Any]:
    """Return an object as it is, and a bare word as its class, as in "precision": "bf16"."""
    if isinstance(value, Mapping):
        return value
    return {"class": value} if isinstance(value, str) else {}


def _number(found: Mapping[str, Any], key: str) -> float | None:
    """Return a positive finite number, or None for null. ImpossibleRow for anything else."""
    value = found.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ImpossibleRow(f"{key} is {value!r}, which is no positive number")
    return float(value)


def _count(found: Mapping[str, Any], key: str, default: int | None = 1) -> int | None:
    value = _number(found, key)
    if value is None:
        return default
    if value != int(value):
        raise ImpossibleRow(f"{key} is {value:g}, which is no whole number")
    return int(value)


def _needed(found: Mapping[str, Any], key: str, fallback: int | None = None) -> int:
    value = _count(found, key, fallback)
    if value is None:
        raise ImpossibleRow(f"the row states no {key}, without which nothing can be predicted")
    return value


def _flag(found: Mapping[str, Any], key: str, default: bool) -> bool:
    value = found.get(key)
    return default if value is None else str(value).lower() not in NO


def _model(found: Mapping[str, Any]) -> DenseModel:
    hidden = _needed(found, "hidden")
    stated_kv = _count(found, "kv_heads", None)
    guess = heads_of(hidden)
    heads = _needed(found, "heads", max(1, guess // (stated_kv or 1)) * (stated_kv or 1))
    kv_heads = stated_kv or heads
    if heads % kv_heads:
        raise ImpossibleRow(f"{heads} heads cannot share {kv_heads} heads of keys and values")
    if found.get("head_dim") is None and found.get("heads") is not None and hidden % heads:
        raise ImpossibleRow(f"{heads} heads cannot share a width of {hidden}")
    layers = _needed(found, "layers")
    if layers > MOST_LAYERS:
        raise ImpossibleRow(f"{layers} layers are more than any model has")
    mlp = str(found.get("mlp") or "gelu").lower()
    is_gated = "glu" in mlp  # as in Llama, whose layers have no biases either
    return DenseModel(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_needed(found, "head_dim", max(1, hidden // heads)),
        ffn=_needed(found, "ffn", 4 * hidden),
        vocab=_needed(found, "vocab", 50304),
        seq_length=_needed(found, "seq_len", _count(found, "seq_length", None)),
        tied=_flag(found, "tied", not is_gated),
        mlp="swiglu" if is_gated else mlp,
        positions=str(found.get("positions") or ("rope" if is_gated else "learned")).lower(),
        bias=_flag(found, "bias", not is_gated),
        norm=str(found.get("norm") or ("rmsnorm" if is_gated else "layernorm")).lower(),
    )


def _layout(found: Mapping[str, Any], hardware: Mapping[str, Any], layers: int) -> Layout:
    tensor, pipeline, context = (_needed(found, key, 1) for key in ("tp", "pp", "cp"))
    others = tensor * pipeline * context
    gpus, data = _count(hardware, "gpus", None), _count(found, "dp", None)
    if gpus is not None and gpus % others:
        raise ImpossibleRow(f"{gpus} GPUs do not divide by tp {tensor} x pp {pipeline} x cp {context}")
    data = data or (gpus // others if gpus else 1)
    if gpus is not None and data * others != gpus:
        raise ImpossibleRow(
            f"dp {data} x tp {tensor} x pp {pipeline} x cp {context} is {data * others}, not {gpus} GPUs"
        )
    if data * others > MOST_DEVICES:
        raise ImpossibleRow(f"{data * others} GPUs are more than any machine has")
    nodes = _count(hardware, "nodes", None)
    if nodes and nodes > data * others:
        raise ImpossibleRow(f"{nodes} nodes are more than the {data * others} GPUs in them")
    stage = zero_stage_in(found) or 0
    sharding = str(found.get("fsdp") or "").upper()
    over = re.search(r"OVER (\d{1,7})", sharding)
    in_node = min(data, int(over[1]) if over else 8)  # as HYBRID_SHARD has it where nothing else is stated
    shard = max(1, in_node) if "HYBRID" in sharding else data * context
    return Layout(
        data=data,
        zero_stage=stage,
        shard=shard if stage else 1,
        tensor=tensor,
        sequence_parallel=bool(found.get("sp")),
        pipeline=pipeline,
        virtual_stages=_needed(found, "vp", UNSTATED_PIECES if UNSTATED_PIECES * pipeline <= layers else 1)
        if pipeline > 1
        else 1,
        context=context,
    )


def _batch(found: Mapping[str, Any], layout: Layout, model: DenseModel) -> tuple[float, float]:
    """Return micro batch and accumulation; one that is not stated follows from the others, or is guessed."""
    micro, accumulation = _number(found, "micro_batch"), _number(found, "grad_accumulation")
    whole = _number(found, "global_batch")
    is_rounded = accumulation is not None and accumulation != int(accumulation)
    near = max(5e-3, half_a_digit(accumulation)) if accumulation is not None and is_rounded else 1e-9
    if micro is not None and micro != int(micro):
        raise ImpossibleRow(f"micro_batch is {micro:g}, which is no whole number of sequences")
    if micro and accumulation and whole and not math.isclose(micro * accumulation * layout.data, whole, rel_tol=near):
        product = f"micro batch {micro:g} x accumulation {accumulation:g} x {layout.data} data ranks"
        raise ImpossibleRow(f"{product} is {micro * accumulation * layout.data:g}, not the global batch {whole:g}")
    if whole is not None and whole < layout.data:
        raise ImpossibleRow(f"a global batch of {whole:g} leaves some of {layout.data} data ranks without a sequence")
    if whole is not None and whole == int(whole) and whole % layout.data and not is_rounded:
        raise ImpossibleRow(f"a global batch of {whole:g} does not divide among {layout.data} data ranks")
    most = 1.0 if layout.pipeline > 1 else max(1.0, TOKENS_OF_A_PASS // model.seq_length)
    if whole is None:
        return micro or most, accumulation or 1.0
    share = whole / layout.data
    if micro is None and accumulation is None:
        micro = share / math.ceil(share / most)
    micro = micro or share / (accumulation or 1.0)
    return micro, accumulation or share / micro


def _device(found: Mapping[str, Any]) -> tuple[Device, bool]:
    """Return the row's device, and whether devices.json has its kind."""
    name, family = str(found.get("gpu") or ""), str(found.get("gpu_family") or "")
    memory = _number(found, "gpu_memory_gb_nominal")
    words = [word for word in re.split(r"[-_ /]+", name[:200]) if word][:MOST_WORDS]
    beginnings = [" ".join(words[:number]) for number in range(len(words), 0, -1)]
    spellings = [name[:200], f"{family[:200]}-{memory:g}" if memory else "", *beginnings]
    found_devices = []
    for spelling in [*spellings, family[:200]]:
        with contextlib.suppress(InputError):
            found_devices.append(device_named(spelling))
    if found_devices:
        right = [one for one in found_devices if not memory or abs(memory * GIB / one.memory_bytes - 1) < 0.15]
        other_size = replace(found_devices[0], memory_bytes=DRIVER_LEAVES * (memory or 0.0) * GIB)
        return right[0] if right else other_size, True
    return _guessed(name, DRIVER_LEAVES * (memory or 80.0) * GIB, devices().values()), False


def _guessed(name: str, memory_bytes: float, known: Iterable[Device]) -> Device:
    """Return a device that no data sheet describes: as the one with the nearest memory."""
    alike = min(known, key=lambda device: (abs(math.log(memory_bytes / device.memory_bytes)), device.name))
    return replace(alike, name=name or "unknown", architecture="", memory_bytes=memory_bytes)


def as_unknown(row: Row) -> Row:
    """Return a row as it would be read if devices.json had not its kind of device."""
    was = row.machine.device
    others = [device for device in devices().values() if device.name != was.name]
    guessed = _guessed(f"unlisted {was.name}", was.memory_bytes, others)
    return replace(row, machine=replace(row.machine, device=guessed), device_is_known=False)


def _machine(found: Mapping[str, Any], device: Device, layout: Layout) -> Machine:
    nodes = _count(found, "nodes", None)
    per_node = device.per_node
    if nodes and per_node <= 16 and layout.devices % nodes == 0:
        per_node = max(1, layout.devices // nodes)
    stated = found.get("interconnect")
    stated = stated if isinstance(stated, Mapping) else {}
    within, between = device.within_node, device.between_nodes
    gbit = _number(stated, "per_gpu_gbit_s")
    of_node = _number(stated, "node_to_node_gbit_s")
    if of_node and not gbit:
        gbit = of_node / min(8, per_node)
    if gbit:
        between = network(f"{gbit:.3f}gbit" if gbit > 1e-3 else f"{max(gbit, 1e-9):.9f}gbit")
    if "pcie" in str(stated.get("kind") or "").lower() and within and within.bytes_per_s > 60e9:
        within = Link(name="PCIe", latency_s=12e-6, bytes_per_s=25e9)
    assert within and between
    return Machine(device=device, devices=layout.devices, per_node=per_node, within_node=within, between_nodes=between)


def _job(
    raw: Mapping[str, Any],
    part: Mapping[str, Any],
    model: DenseModel,
    layout: Layout,
    micro_batch: float,
    accumulation: float,
) -> Job:
    strategy, extra = part["strategy"], part["extra"]
    detail = str(part["precision"].get("detail") or "").lower()
    precision, _ = precision_in(part["precision"])
    recompute, share, _ = recompute_in(raw.get("activation_checkpointing"))
    has_activations_away = _number(extra, "activation_cpu_offload_layers")
    schedule = str(strategy.get("schedule") or "").lower()
    is_behind = [extra.get(key) for key in ("overlap_grad_reduce", "overlap_param_gather")]
    return Job(
        model=model,
        layout=layout,
        micro_batch=micro_batch,
        accumulation=accumulation,
        stack=str(part["source"].get("repo") or "unknown"),
        precision=precision,
        has_16_bit_weights=precision not in ("fp32", "tf32") and not re.search("autocast|default|amp", detail),
        recompute=recompute,
        recompute_share=share,
        compiled=_flag(raw, "compile", False),
        attention="eager" if "eager" in str(raw.get("attention") or "").lower() else "flash",
        schedule=_schedule(schedule, layout),
        offload="activations" if has_activations_away else offload_in(strategy, extra),
        dropout=float(extra.get("dropout") or 0.0),
        offload_layers=_count(extra, "activation_cpu_offload_layers", None),
        bucket_elements=_number(extra, "deepspeed_bucket_elements") or Job.bucket_elements,
        overlap=False not in is_behind,
        tensor_overlap=bool(extra.get("tp_comm_overlap") or extra.get("async_tp")),
    )


def _schedule(text: str, layout: Layout) -> str | None:
    if layout.pipeline == 1:
        return None
    if "gpipe" in text:
        return "gpipe"
    if "zero" in text or text.startswith("zb"):
        return "zero_bubble"
    return "interleaved_1f1b" if layout.virtual_stages > 1 or "interleaved" in text else "1f1b"
