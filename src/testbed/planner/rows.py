"""Read rows: runs of any program in the planner's own words, with or without what was measured. No torch.

The form is strict. A key that is not known, a word that the formulas do not have and a number that cannot be are errors
of that row, with the reason, and never of the file. null is unknown, and gets what most runs have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from testbed.errors import InputError
from testbed.io import read_json
from testbed.memory_model.devices import GIB, PRECISIONS, SAME_UNITS, device_named, network
from testbed.memory_model.job import DenseModel, Job, Layout, Machine, framework_of
from testbed.memory_model.memory import fits, memory_of

OWN_COPY = Path(__file__).parent / "published_runs.json"
NOT_FITTED = ("suspect_", "tokens_per_step_uncertain")  # flags, by their beginning
TOKENS_OF_A_PASS = 8192  # of one micro batch where the row states none: a guess
# what may stand in the keys that are words
WORDS = {
    "precision": (*PRECISIONS, *SAME_UNITS),
    "recompute": ("none", "full", "selective", "selective_attention", "selective_op"),
    "attention": ("flash", "eager"),
    "offload": ("none", "optimizer", "parameters", "activations"),
}
# keys that are a Job's
OF_THE_JOB = (
    *("precision", "recompute_share", "compiled", "attention", "dropout", "offload_layers", "bucket_elements"),
    *("overlap", "tensor_overlap"),
)
MEMORY = ("peak_allocated_gib", "peak_reserved_gib", "steady_allocated_gib")  # that a row may state

Count = Annotated[int, Meta(ge=1, le=2**40)]
Amount = Annotated[float, Meta(gt=0, le=1e15)]


class RowModel(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A dense transformer. What is null follows from the others: 4 x hidden, as many kv_heads as heads, ..."""

    hidden: Count
    layers: Annotated[int, Meta(ge=1, le=10_000)]
    seq_length: Count
    heads: Count | None = None
    kv_heads: Count | None = None
    ffn: Count | None = None
    vocab: Count | None = None
    gated: bool | None = None  # three matrices in the MLP, no biases, RMSNorm, rotary positions: as in Llama
    tied: bool | None = None


class RowLayout(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Ranks along each axis; null is 1, and `data` is what the others leave of the devices."""

    data: Count | None = None
    shard: Count | None = None  # data ranks that share one copy of what is sharded; null: all of them
    tensor: Count | None = None
    sequence_parallel: bool | None = None
    pipeline: Count | None = None
    virtual_stages: Count | None = None
    context: Count | None = None
    zero_stage: Annotated[int, Meta(ge=0, le=3)] | None = None  # 3: FSDP too


class Measured(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the run took. Memory per device, of the fullest."""

    step_time_s: Amount | None = None
    peak_allocated_gib: Amount | None = None
    peak_reserved_gib: Amount | None = None
    steady_allocated_gib: Amount | None = None  # between two steps


class RowForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One row of a file. Batches in sequences, the network in Gbit/s per device and direction."""

    id: str
    device: str
    devices: Annotated[int, Meta(ge=1, le=2**20)]
    model: RowModel
    layout: RowLayout = msgspec.field(default_factory=RowLayout)
    program: str | None = None
    devices_per_node: Count | None = None
    network_gbit: Amount | None = None
    micro_batch: Count | None = None
    global_batch: Count | None = None
    precision: str | None = None
    recompute: str | bool | None = None
    compiled: bool | None = None
    offload: str | bool | None = None
    measured: Measured | None = None
    # what few rows tell
    autocast: bool | None = None  # fp32 weights under autocast, not weights in 16 bits
    attention: str | None = None  # flash or eager
    dropout: Annotated[float, Meta(ge=0, lt=1)] | None = None
    recompute_share: Annotated[float, Meta(gt=0, le=1)] | None = None  # of the layers
    offload_layers: Count | None = None  # whose activations are offloaded
    overlap: bool | None = None  # of the data ranks' collectives with the passes
    tensor_overlap: bool | None = None
    bucket_elements: Amount | None = None
    # for the score
    block: str = ""
    sub_block: str = ""
    grade: str = "medium"
    flags: tuple[str, ...] = ()
    source: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run that can be true, as the formulas see it."""

    form: RowForm
    job: Job
    machine: Machine

    @property
    def id(self) -> str:
        return self.form.id

    @property
    def step_time_s(self) -> float | None:
        """Measured seconds of a step."""
        return self.form.measured.step_time_s if self.form.measured else None

    @property
    def is_fitted(self) -> bool:
        """Its time may teach the model something."""
        return self.step_time_s is not None and not any(flag.startswith(NOT_FITTED) for flag in self.form.flags)

    @property
    def is_weak(self) -> bool:
        return self.form.grade == "weak" or bool(self.form.flags)

    @property
    def is_scored(self) -> bool:
        """Its error counts: it is neither weak nor flagged."""
        return self.is_fitted and not self.is_weak

    @property
    def model_flops_per_device(self) -> float:
        """FLOPs of one step on one device, without recomputation."""
        return self.job.model.flops_per_token() * self.job.tokens_per_step / self.machine.devices


@cache
def own_rows() -> tuple[Row, ...]:
    """Return the rows of the project's own copy."""
    return tuple(row for _, row in read_rows(OWN_COPY, "--score") if isinstance(row, Row))


def read_rows(path: Path, flag: str) -> list[tuple[str, Row | str]]:
    """Read a file `{"rows": [...]}`. InputError names the flag where it is another kind of file."""
    content = read_json(path, f"{flag} {path}")
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise InputError(f'{flag} {path}: a file of rows has them in a list under "rows"; docs/planner.md has the form')
    return list(rows_of(content["rows"]))


def rows_of(raw_rows: list[Any]) -> Iterator[tuple[str, Row | str]]:
    """Yield each row with its id; in place of one that cannot be read or be true the reason."""
    names: set[str] = set()
    for number, raw in enumerate(raw_rows):
        name = raw["id"] if isinstance(raw, dict) and isinstance(raw.get("id"), str) else f"row {number}"
        if name in names:
            yield f"row {number}", f"id '{name}' is an earlier row's too"
            continue
        names.add(name)
        try:
            yield name, row_of(msgspec.convert({"id": name, **raw} if isinstance(raw, dict) else raw, RowForm))
        except (InputError, ArithmeticError, msgspec.ValidationError) as error:
            yield name, str(error)


def row_of(form: RowForm) -> Row:
    """Return the run that a row describes. InputError with the reason where it cannot be true."""
    device, layout, width = device_named(form.device), _layout(form), form.model.hidden
    for key, words in WORDS.items():
        if isinstance(word := getattr(form, key), str) and word not in words:
            raise InputError(f"{key} is {word!r}, and can be {', '.join(words)} or null")
    sizes = {name: size for name, size in msgspec.structs.asdict(form.model).items() if size is not None}
    model = DenseModel(**{"heads": max(1, width // (128 if width >= 2048 else 64)), **sizes})
    _check_sizes(form, model, layout)
    micro_batch, accumulation = _batch(form, layout, model)
    stated = {name: word for name in OF_THE_JOB if (word := getattr(form, name)) is not None}
    job = Job(
        model=model,
        layout=layout,
        micro_batch=micro_batch,
        accumulation=accumulation,
        stack=form.program or "unknown",
        has_16_bit_weights=form.precision not in ("fp32", "tf32") and not form.autocast,
        recompute=_recompute(form),
        schedule="interleaved_1f1b" if layout.virtual_stages > 1 else "1f1b" if layout.pipeline > 1 else None,
        offload=_word(form.offload, "optimizer"),
        **stated,
    )
    between = network(f"{form.network_gbit:.9f}gbit") if form.network_gbit else device.between_nodes
    assert device.within_node and between  # each device of devices.json has them
    machine = Machine(
        device=device,
        devices=layout.devices,
        per_node=min(form.devices_per_node or device.per_node, 2**20),
        within_node=device.within_node,
        between_nodes=between,
    )
    row = Row(form=form, job=_likely(job, machine, form), machine=machine)
    _check_measured(row)
    return row


def _refuse(*faults: tuple[object, str]) -> None:
    """Raise InputError with the reason of the first fault that there is."""
    for is_there, reason in faults:
        if is_there:
            raise InputError(reason)


def _layout(form: RowForm) -> Layout:
    stated = form.layout
    tensor, pipeline, context = stated.tensor or 1, stated.pipeline or 1, stated.context or 1
    data = stated.data or max(1, form.devices // (tensor * pipeline * context))
    stage = stated.zero_stage if stated.zero_stage is not None else 3 if (stated.shard or 1) > 1 else 0
    return Layout(
        data=data,
        zero_stage=stage,
        shard=(stated.shard or data * context) if stage else 1,
        tensor=tensor,
        sequence_parallel=bool(stated.sequence_parallel) and tensor > 1,
        pipeline=pipeline,
        virtual_stages=(stated.virtual_stages or 1) if pipeline > 1 else 1,
        context=context,
    )


def _check_sizes(form: RowForm, model: DenseModel, layout: Layout) -> None:
    data, tensor, pipeline, context = layout.data, layout.tensor, layout.pipeline, layout.context
    product = f"data {data} x tensor {tensor} x pipeline {pipeline} x context {context} is {layout.devices}"
    stages, ranks, heads = f"{pipeline} x {layout.virtual_stages}", data * context, model.heads
    _refuse(
        (heads % model.kv_heads, f"{heads} heads cannot share {model.kv_heads} heads of keys and values"),
        (form.model.heads and model.hidden % heads, f"{heads} heads cannot share a width of {model.hidden}"),
        (layout.devices != form.devices, f"{product}, not {form.devices} devices"),
        (ranks % layout.shard, f"shards of {layout.shard} ranks do not divide {ranks} data and context ranks"),
        (
            pipeline * layout.virtual_stages > model.layers + 2,
            f"{stages} pipeline stages are more than the {model.layers} layers, embedding and head",
        ),
        (heads % tensor, f"{tensor} tensor ranks cannot share {heads} heads"),
        (
            model.seq_length % context,
            f"{context} context ranks cannot share sequences of {model.seq_length} tokens",
        ),
    )


def _batch(form: RowForm, layout: Layout, model: DenseModel) -> tuple[float, float]:
    """Return micro batch and accumulation; one that is not stated follows from the others, or is guessed."""
    most = 1 if layout.pipeline > 1 else max(1, TOKENS_OF_A_PASS // model.seq_length)
    if form.global_batch is None:
        return form.micro_batch or most, layout.pipeline
    share, rest = divmod(form.global_batch, layout.data)
    micro = form.micro_batch or max(size for size in range(1, min(most, share) + 1) or (1,) if share % size == 0)
    of_ranks = f"micro batch {micro} x {layout.data} data ranks"
    _refuse(
        (rest, f"a global batch of {form.global_batch} does not divide among {layout.data} data ranks"),
        (share % micro, f"{of_ranks} does not divide the global batch {form.global_batch}"),
    )
    return micro, share // micro


def _recompute(form: RowForm) -> str:
    kind = _word(form.recompute, "full")
    if kind == "selective":  # Megatron's, or what PyTorch's programs call so
        return "selective_attention" if framework_of(form.program or "") == "megatron" else "selective_op"
    return kind


def _word(stated: str | bool | None, yes: str) -> str:
    return stated if isinstance(stated, str) else yes if stated else "none"


def _likely(job: Job, machine: Machine, form: RowForm) -> Job:
    """Return the job with what the row leaves out so that it fits: since a run ran, it did what it takes to fit."""
    guesses = [job]
    if form.micro_batch is None and job.micro_batch > 1:
        guesses.append(replace(job, micro_batch=1, accumulation=job.micro_batch * job.accumulation))
    if form.recompute is None:
        guesses += [replace(guess, recompute="full") for guess in guesses]
    ranks = job.layout.data * job.layout.context
    if form.layout.zero_stage is None and form.layout.shard is None and ranks > 1:
        sharded = replace(job.layout, zero_stage=3, shard=ranks)
        guesses += [replace(guess, layout=sharded) for guess in guesses]
    return next((guess for guess in guesses if fits(memory_of(guess), machine.device)), job)


def _check_measured(row: Row) -> None:
    """Refuse weights that the device cannot hold, and times that no device reaches."""
    job, layout, device = row.job, row.job.layout, row.machine.device
    shards = layout.shard if layout.zero_stage == 3 else 1
    weights = job.product_bytes * job.model.parameters / (layout.tensor * layout.pipeline * shards)
    has, peak = device.memory_bytes, device.peak_of(job.precision)
    reached = row.model_flops_per_device / (row.step_time_s or math.inf)
    measured = ((key, getattr(row.form.measured, key, None) or 0.0) for key in MEMORY)
    _refuse(
        (
            weights > has and job.offload != "parameters",
            f"the weights alone take {weights / GIB:.1f} GiB on each device, which has {has / GIB:.1f}",
        ),
        (
            reached > peak,
            f"step_time_s means {reached / 1e12:.0f} TFLOP/s on each device, above its peak of {peak / 1e12:.0f} in "
            f"{job.precision}",
        ),
        *((gib * GIB > 1.02 * has, f"{key} of {gib:g} is more than the device has") for key, gib in measured),
        (not math.isfinite(row.model_flops_per_device), "its sizes give no number of FLOPs"),
    )
