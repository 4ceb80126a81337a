"""Check what two sides are to do, and let each record its steps in processes of its own. No torch."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from testbed.config.check import check_run
from testbed.config.flag import Kind
from testbed.config.flags import parse_command_line
from testbed.config.settings import RunSettings
from testbed.config.table import FLAGS
from testbed.distributed.launch import Launch
from testbed.distributed.processes import Stop, run
from testbed.errors import Failure, InputError
from testbed.experiments.divergence.sides import Side, read_file, read_folder
from testbed.experiments.made_up_tokens import write_made_up_tokens
from testbed.io import SOURCE
from testbed.sweep.runner import reason_of_failure

WORKER = "testbed.experiments.divergence.worker"
TRANSFORMERS = "transformers"
VOCABULARY = 300  # not a multiple of 128: rows that fill the vocabulary up take part
MADE_UP = (
    "--num_layers 2 --num_heads 2 --embedding_size 32 --max_position_embeddings 64 --seq_length 32 --device cpu "
    "--global_batch_size 16 --micro_batch_size_per_gpu 2 --learning_rate 0.01 --warmup_steps 2 --max_grad_norm 0.25"
).split()
# a run that only trains
SHORTEST = 3  # the warm-up of MADE_UP fits into it
QUIET = "--max_val_steps 0 --sample_tokens 0 --save_at_end off --threads_per_rank 1".split()


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for. Each pair is of sides A and B."""

    sides: tuple[list[str], list[str]]
    ranks: tuple[int, int]
    common: tuple[str, ...]
    steps: int
    folder: Path


@dataclasses.dataclass(frozen=True)
class Start:
    """A run to record."""

    name: str
    trainer: str
    flags: list[str]
    ranks: int
    settings: RunSettings


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to record, of sides A and B: a run, or a side from a file. `again`: B in another split, if there is one."""

    request: Request
    sides: tuple[Start | Side, Start | Side]
    again: Start | None


def check(request: Request) -> Plan:
    """Check that both sides do the same work, before anything is started. Raises InputError."""
    a, b = (_side(request, number) for number in (0, 1))
    facts = [facts_of(side) if isinstance(side, Start) else side.facts for side in (a, b)]
    for name in sorted(facts[0]["work"].keys() | facts[1]["work"].keys()):
        mine, other = (each["work"].get(name) for each in facts)
        if mine != other:
            raise InputError(
                f"--{name} is {mine} of side A and {other} of side B, so they do not do the same work; give both the "
                "same, after --"
            )
    return Plan(request, (a, b), _another_split(request, b) if isinstance(b, Start) else None)


def _side(request: Request, number: int) -> Start | Side:
    words, ranks, name = request.sides[number], request.ranks[number], "ab"[number]
    if len(words) == 1 and Path(words[0]).is_file():
        return read_file(Path(words[0]))
    trainer = "ours"
    if words == [TRANSFORMERS]:
        trainer, words = TRANSFORMERS, ["--run_type", "baseline"]
    elif words and not words[0].startswith("-"):
        raise InputError(
            f"--{name} {words[0]} is neither flags of src/gpt2.py nor {TRANSFORMERS} nor a file that --save left"
        )
    return _start(request, name, trainer, words, ranks)


def _start(request: Request, name: str, trainer: str, words: Sequence[str], ranks: int) -> Start:
    """Return a run, checked. Raises InputError for what cannot be recorded."""
    is_made_up = not any(word.startswith("--train_data_path") for word in request.common)
    flags = [*QUIET, *(MADE_UP if is_made_up else [])]
    if is_made_up:
        data = request.folder / "data"
        write_made_up_tokens(data, VOCABULARY)
        flags += ["--train_data_path", str(data / "train.bin"), "--val_data_path", str(data / "val.bin")]
    if not any(word.startswith(("--max_train_steps", "--max_tokens", "--epochs")) for word in request.common):
        flags += ["--max_train_steps", str(max(request.steps, SHORTEST))]
    flags += [*request.common, *words, "--checkpoint_path", str(request.folder / name / "run")]
    settings = check_run(parse_command_line(flags), Launch(0, 0, ranks, ranks)).settings
    if settings.compute.precision == "fp16":
        raise InputError("--precision fp16 scales losses, and gradients with them, by another number on each side; "
                         "give --precision fp32 or bf16")  # fmt: skip
    if settings.checkpointing.resume is not None:
        raise InputError("--resume begins with weights of its own; give --init_from to both sides")
    if settings.finds_micro_batch:
        raise InputError("--micro_batch_size_per_gpu auto is found on the device; give a number")
    return Start(name, trainer, flags, ranks, settings)


def facts_of(start: Start) -> dict[str, Any]:
    """Return what a comparison needs to know of a run."""
    settings, of_place = start.settings, ("train_data_path", "val_data_path", "max_val_steps")
    work = {
        name: settings.value(name)
        for name, flag in FLAGS.items()
        if flag.field and flag.kind is Kind.WORK and name not in of_place
    }
    if settings.model.dropout > 0:  # other ranks would draw other numbers
        work |= {"ranks": start.ranks, "micro_batch_size_per_gpu": settings.batch.micro_batch_size_per_gpu}
    return {
        "work": work,
        "precision": settings.compute.precision if settings.compute.precision != "auto" else "bf16",
        "max_grad_norm": settings.optimizer.max_grad_norm,
        "data_ranks": settings.plan.data_world_size,
        "accumulation": settings.batch.grad_accum_steps,
        "steps": start.settings.last_step,
    }


def _another_split(request: Request, b: Start) -> Start | None:
    """Return side B with other micro batches, and another attention kernel: other sums of the same numbers."""
    batch = b.settings.batch
    assert batch.micro_batch_size_per_gpu is not None
    of_rank = batch.global_batch_size // b.settings.plan.data_world_size
    size = next((n for n in _other_sizes(batch.micro_batch_size_per_gpu) if of_rank % n == 0), None)
    if size is None or b.settings.model.dropout > 0:
        return None
    words = [*request.sides[1], "--micro_batch_size_per_gpu", str(size)]
    if request.sides[1] == [TRANSFORMERS]:
        words = ["--run_type", "baseline", *words[1:]]
    kernel = ["--attention", "flash" if b.settings.model.attention == "math" else "math"]
    try:
        return _start(request, "b_again", b.trainer, [*words, *kernel], b.ranks)
    except InputError:  # the run type takes this kernel alone, or this split
        return None


def _other_sizes(size: int) -> list[int]:
    """Return twice and half a micro batch, then others."""
    return [each for each in (2 * size, size // 2, 4 * size, 3 * size) if each > 0]


def record_sides(plan: Plan, say: Callable[[str], None]) -> tuple[Side, Side, Side | None]:
    """Make the runs. Returns sides A and B, and B in another split. Raises Failure."""
    with Stop() as stop:
        a, b = (side if isinstance(side, Side) else _record(plan.request, side, stop, say) for side in plan.sides)
        again = None if plan.again is None else _record(plan.request, plan.again, stop, say)
    return a, b, again


def _record(request: Request, start: Start, stop: Stop, say: Callable[[str], None]) -> Side:
    folder = request.folder / start.name
    (folder / "run").mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={start.ranks}"]
    program = ["-m", WORKER, str(folder / "prints"), str(request.steps), start.trainer, *start.flags]
    command = [sys.executable, *(launcher if start.ranks > 1 else []), *program]
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = run(command, folder / "train.log", stop, env=environment)
    say(f"{start.name.replace('_', ' ')}: {start.settings.training.run_type} on {start.ranks}, {ended.seconds:.0f} s")
    if stop.exit_code is not None:
        raise KeyboardInterrupt
    side = read_folder(folder / "prints", facts_of(start))
    wanted = min(request.steps, start.settings.last_step)
    if ended.exit_code != 0 and (start.name != "a" or side.steps < 1):
        why = reason_of_failure(folder / "run", folder / "train.log", ended.exit_code)
        raise Failure(f"side {start.name[0].upper()} failed: {re.sub(chr(10), ' ', why)}")
    if side.steps < wanted:
        say(f"side {start.name[0].upper()} ended after step {side.steps}; its first steps are compared")
    return side
