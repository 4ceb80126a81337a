"""Let a recorder see a strategy's steps. Nothing in the training loop or in a strategy knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from testbed.config.settings import RunSettings
from testbed.experiments.divergence.comparison import SQUARES_OF_ALL
from testbed.experiments.divergence.recorder import (
    BACKWARD,
    CLIPPING,
    FORWARD,
    SYNCHRONISATION,
    UPDATE,
    Recorder,
    wrapped,
)
from testbed.experiments.divergence.sides import PRECISION
from testbed.experiments.peers import PeerLoop
from testbed.model.gpt2 import PREFIX
from testbed.optim.optimizer import gradient_of
from testbed.step import MicroBatch, StepResult
from testbed.strategies.baseline import Baseline
from testbed.strategies.deepspeed_zero import DeepSpeedZero
from testbed.strategies.mesh import Mesh
from testbed.strategies.pipeline import Pipeline


class EnoughSteps(Exception):
    """All steps are recorded."""


def attach(strategy: Any, settings: RunSettings, rank: int, folder: Path, steps: int) -> None:
    """Record `steps` steps of a strategy into a folder; the step after them raises EnoughSteps."""
    recorder = _recorder_of(strategy, settings, rank, folder)
    if rank == 0:
        (folder / PRECISION).write_text(settings.compute.precision, encoding="utf-8")
    _watch_model(recorder, strategy, bool(settings.compute.compile))
    _watch_gradients(recorder, strategy)
    strategy.optimizer.register_step_pre_hook(lambda *_: _before_update(recorder, strategy))
    _add_weights(recorder, strategy)
    recorder.end_step(0)
    done = 0

    def train_step(honest: Callable, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        nonlocal done
        if done == steps:
            raise EnoughSteps
        done += 1
        recorder.begin_step(micro_batches)
        result = honest(micro_batches, learning_rate)
        recorder.add_number(FORWARD, "loss", f"rank{recorder.rank}", float(result.loss_sum))
        recorder.add_number(CLIPPING, "norm", "", float(result.grad_norm))
        _add_weights(recorder, strategy)
        recorder.end_step(done)
        return result

    wrapped(strategy, "train_step", train_step)


def _recorder_of(strategy: Any, settings: RunSettings, rank: int, folder: Path) -> Recorder:
    """Return a recorder that knows the rank's place."""
    place: dict[str, Any] = {"data_rank": _data_rank_by_place(strategy, rank)}
    if isinstance(strategy, Mesh):
        sizes, ranks = strategy.axes.sizes, strategy.axes.ranks
        place |= {axis: (getattr(sizes, axis), ranks[axis]) for axis in ("context", "tensor")}
        place["stage"] = ranks["pipeline"]
    else:  # a mesh adds, the others average
        place["share_of_local"] = 1 / strategy.data_world_size
    place["is_transposed"] = isinstance(strategy, PeerLoop)
    return Recorder(folder, settings, rank, **place)


def _data_rank_by_place(strategy: Any, rank: int) -> int:
    """Return which share of the batch a rank has to read, by its place alone: the strategy's own word may be wrong."""
    if not isinstance(strategy, Mesh):
        return rank % strategy.data_world_size
    axes = strategy.axes
    inner = axes.whole.size(2) // axes.sizes.context
    return axes.whole.get_local_rank("replicate") * inner + axes.whole.get_local_rank("fsdp") // axes.sizes.context


def _watch_model(recorder: Recorder, strategy: Any, is_compiled: bool) -> None:
    """Hook the modules, and say which rows pass through them."""
    model = _model_of(strategy)
    recorder.watch_model(model, not isinstance(strategy, Pipeline), is_compiled)
    if not isinstance(strategy, Mesh) or not strategy.is_sharded:  # shards are no parameters of forward
        for name, parameter in _parameters(strategy):
            recorder.watch_parameter(name, parameter)
    if isinstance(strategy, Pipeline):
        _watch_stages(recorder, strategy)


def _model_of(strategy: Any) -> nn.Module:
    return strategy.engine.module if isinstance(strategy, DeepSpeedZero) else strategy.model


def _parameters(strategy: Any) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in _model_of(strategy).named_parameters():
        yield name.removeprefix(PREFIX), parameter


def _watch_stages(recorder: Recorder, strategy: Pipeline) -> None:
    """A schedule says which micro batch a stage works at."""
    size, per_pass = strategy.settings.batch.micro_batch_size_per_gpu, strategy.micro_batches_per_pass
    assert size is not None, "decided by now"
    schedule: Any = strategy.schedule

    def step(honest: Callable, *inputs: Any, **named: Any) -> Any:
        answer = honest(*inputs, **named)
        recorder.next_row += size * per_pass
        return answer

    def forward(honest: Callable, chunk: int, *inputs: Any, **named: Any) -> Any:
        first = recorder.next_row + chunk * size
        recorder.rows = slice(first, first + size)
        try:
            return honest(chunk, *inputs, **named)
        finally:
            recorder.rows = None

    wrapped(schedule, "step", step)
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        wrapped(stage, "forward_one_chunk", forward)


def _watch_gradients(recorder: Recorder, strategy: Any) -> None:
    """Record gradients when they are synchronised and not yet clipped: when their norm is taken."""

    def add(gradient: Callable[[Any], torch.Tensor] = gradient_of) -> None:
        for name, parameter in _parameters(strategy):
            recorder.add_parameter(SYNCHRONISATION, name, gradient(parameter))

    def add_of_deepspeed() -> None:
        from deepspeed.utils import safe_get_full_grad

        if strategy.engine.is_gradient_accumulation_boundary():
            add(safe_get_full_grad)

    def add_missing() -> None:  # the zero-bubble schedule adds to gradients past all hooks
        seen = {key.split("|")[1] for key in recorder.records if key.startswith(f"{BACKWARD}|")}
        for name, parameter in _parameters(strategy):
            if not getattr(strategy, "is_sharded", False) and name not in seen:
                recorder.add_local_gradient(name, gradient_of(parameter))

    if isinstance(strategy, Baseline):
        _before(strategy, "synchronise_gradients", add_missing)
        _before(strategy, "grad_norm", add)
    elif isinstance(strategy, PeerLoop):
        _before(nn.utils, "clip_grad_norm_", add)
    elif strategy.settings.deepspeed.zero_stage == 0:
        _before(strategy, "_clip_averaged_gradients", add)
    else:
        _before(strategy.engine, "step", add_of_deepspeed)


def _before(holder: Any, method: str, action: Callable[[], None]) -> None:
    """Let an action come before a method of an object."""

    def both(honest: Callable, *arguments: Any, **named: Any) -> Any:
        action()
        return honest(*arguments, **named)

    wrapped(holder, method, both)


def _before_update(recorder: Recorder, strategy: Any) -> None:
    """Record what the optimizer is to apply, the clipped gradients, and how each weight is updated."""
    names = {id(parameter): name for name, parameter in _parameters(strategy)}
    rate = max(float(group["lr"]) for group in strategy.optimizer.param_groups)
    recorder.set_number(UPDATE, "learning rate", rate)  # ZeRO's optimizer comes here once for each piece
    for group in strategy.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                name = names.get(id(parameter))
                if name is None:  # a flat piece of many
                    square = float(parameter.grad.double().square().sum())
                    recorder.add_number(CLIPPING, SQUARES_OF_ALL, f"rank{recorder.rank}", square)
                    continue
                recorder.add_parameter(CLIPPING, name, parameter.grad)
                recorder.add_number(UPDATE, f"weight decay of {name}", "", float(group["weight_decay"]))


def _add_weights(recorder: Recorder, strategy: Any) -> None:
    """Record the weights between two steps."""
    is_gathered = isinstance(strategy, DeepSpeedZero) and strategy.settings.deepspeed.zero_stage == 3
    for name, parameter in _parameters(strategy):
        recorder.add_parameter(UPDATE, name, strategy._master_weight(parameter) if is_gathered else parameter)
