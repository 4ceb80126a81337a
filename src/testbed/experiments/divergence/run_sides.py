"""Check what two sides are to do, and let each record its steps in processes of its own. No torch."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.config.check import check_run
from testbed.config.flag import Kind
from testbed.config.flags import parse_command_line
from testbed.config.settings import RunSettings
from testbed.config.table import FLAGS
from testbed.distributed.launch import Launch
from testbed.distributed.processes import Interrupted, Stop, run
from testbed.errors import Failure, InputError, one_line
from testbed.experiments.divergence.sides import Side, read_file, read_folder
from testbed.experiments.made_up_tokens import TINY, VOCABULARY, as_flags, write_made_up_tokens
from testbed.io import SOURCE, not_a_file
from testbed.sweep.runner import reason_of_failure

WORKER = "testbed.experiments.divergence.worker"
TRANSFORMERS = "transformers"
AGAIN = "b_again"  # side B in another split
MADE_UP = {**TINY, "micro_batch_size_per_gpu": 2, "max_grad_norm": 0.25, "precision": "fp32"}
SHORTEST = 3  # the warm-up of MADE_UP fits into it
# a run that only trains
QUIET = "--max_val_steps 0 --sample_tokens 0 --save_at_end off --threads_per_rank 1 --overwrite".split()


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for: sides A and B in words and their ranks, flags of both, steps, and where the runs go."""

    sides: tuple[list[str], list[str]]
    ranks: tuple[int, int]
    common: list[str]
    steps: int
    folder: Path


@dataclasses.dataclass(frozen=True)
class Start:
    """A run to record; `trainer` is "ours" or "transformers"."""

    name: str
    trainer: str
    flags: list[str]
    ranks: int
    settings: RunSettings


def check(request: Request) -> list[Start | Side]:
    """Check that both sides do the same work, before anything is started. Raises InputError.

    Returns:
        Sides A and B: a run, or what a file holds. Then B in another split, where there is one.
    """
    a, b = (_side(request, number) for number in (0, 1))
    work = [(facts_of(side) if isinstance(side, Start) else side.facts)["work"] for side in (a, b)]
    held = [side.steps for side in (a, b) if isinstance(side, Side)]
    for name in sorted(work[0].keys() | work[1].keys()):
        of_today = FLAGS[name].default if name in FLAGS else None  # of a file from before the flag
        mine, other = (of_side.get(name, of_today) for of_side in work)
        if mine != other and name == "lr_decay_steps" and held and held[0] != request.steps:
            raise InputError(
                f"--steps is {request.steps}, and the file holds {held[0]}, so schedules differ; give --steps {held[0]}"
            )
        if mine != other:
            raise InputError(
                f"--{name} is {mine} of side A and {other} of side B, so they do not do the same work; give both the "
                "same, after --"
            )
    again = _another_split(request, b) if isinstance(b, Start) else None
    return [a, b] if again is None else [a, b, again]


def _side(request: Request, number: int) -> Start | Side:
    words, name = request.sides[number], "ab"[number]
    if len(words) == 1 and not_a_file(Path(words[0])) is None:
        return read_file(Path(words[0]))
    if words[:1] != [TRANSFORMERS] and words and not words[0].startswith("-"):
        raise InputError(
            f"--{name} {words[0]} is neither flags of src/gpt2.py nor {TRANSFORMERS} nor a file that --save left"
        )
    return _start(request, name, words, request.ranks[number])


def _start(request: Request, name: str, words: Sequence[str], ranks: int) -> Start:
    """Return a run, checked. Raises InputError for what cannot be recorded."""
    trainer = "ours"
    if words[:1] == [TRANSFORMERS]:
        trainer, words = TRANSFORMERS, ["--run_type", "baseline", *words[1:]]
    flags, given = [*QUIET], parse_command_line([*request.common, *words]).explicit  # by a file of --config too
    if "resume" in given:
        raise InputError("--resume begins with weights of its own; give --init_from to both sides")
    if "train_data_path" not in given:
        data = request.folder / "data"
        write_made_up_tokens(data, VOCABULARY)
        files = {"train_data_path": data / "train.bin", "val_data_path": data / "val.bin"}
        flags += as_flags({name: value for name, value in {**MADE_UP, **files}.items() if name not in given})
    if not {"max_train_steps", "max_tokens", "epochs"} & given:
        flags += ["--max_train_steps", str(max(request.steps, SHORTEST))]
    flags += [*request.common, *words, "--checkpoint_path", str(request.folder / name / "run")]
    settings = check_run(parse_command_line(flags), Launch(0, 0, ranks, ranks)).settings
    if settings.compute.precision == "fp16":
        raise InputError(
            "--precision fp16 scales losses, and gradients with them, by another number on each side; give --precision "
            "fp32 or bf16"
        )
    if settings.training.eval_only:
        raise InputError("--eval_only makes no step, and steps are compared; leave it out")
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
        "precision": settings.compute.precision,  # auto: the run says later what it takes
        "max_grad_norm": settings.optimizer.max_grad_norm,
        "data_ranks": settings.plan.data_world_size,
        "accumulation": settings.batch.grad_accum_steps,
        "steps": start.settings.last_step,
    }


def _another_split(request: Request, b: Start) -> Start | None:
    """Return side B with other micro batches, and another attention kernel: other sums of the same numbers."""
    size, of_rank = b.settings.batch.micro_batch_size_per_gpu, b.settings.batch.global_batch_size
    assert size is not None
    of_rank //= b.settings.plan.data_world_size
    sizes = (size // 2, 2 * size, *range(1, of_rank + 1))
    other = next((each for each in sizes if each not in (0, size) and of_rank % each == 0), None)
    if other is None or b.settings.model.dropout > 0:
        return None
    kernel = "flash" if b.settings.model.attention == "math" else "math"
    words = [*request.sides[1], "--micro_batch_size_per_gpu", str(other)]
    for also in (["--attention", kernel], []):
        try:
            return _start(request, AGAIN, [*words, *also], b.ranks)
        except InputError:  # the run type takes one kernel alone, or one split
            continue
    return None


def record(request: Request, start: Start, stop: Stop) -> tuple[Side | None, str]:
    """Make a run. Raises Failure, Interrupted.

    Returns:
        Its side, and in a line what was done. The side of A that failed after a step has its first steps and "failed"
        among its facts; of B in another split that failed there is none, and floors take its place.
    """
    folder = request.folder / start.name
    (folder / "run").mkdir(parents=True, exist_ok=True)
    prints = Path(tempfile.mkdtemp(prefix="prints_", dir=folder))  # an earlier call may have left others
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={start.ranks}"]
    program = ["-m", WORKER, str(prints), str(request.steps), start.trainer, *start.flags]
    command = [sys.executable, *(launcher if start.ranks > 1 else []), *program]
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    # -m would look for modules in the current folder first
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    ended = run(command, folder / "train.log", stop, env=environment)
    if stop.exit_code is not None:
        raise Interrupted
    side = read_folder(prints, facts_of(start), start.ranks)
    trainer = start.settings.training.run_type if start.trainer == "ours" else start.trainer
    said = f"{start.name.replace('_', ' ')}: {trainer} on {start.ranks}, {ended.seconds:.0f} s"
    if ended.exit_code != 0:
        why = reason_of_failure(folder / "run", folder / "train.log", ended.exit_code)
        if start.name == AGAIN:
            return None, f"{said}; it failed, so the noise of rounding is not measured ({one_line(why)})"
        if start.name == "b" or side.steps < 1:
            raise Failure(f"side {start.name.upper()} failed: {one_line(why)}")
        side.facts["failed"] = one_line(why)
        said += f"; it failed after step {side.steps}, and its steps until then are compared ({one_line(why)})"
    return side, said
