"""Record the fingerprints of a run's steps: what goes in, what modules compute, gradients, norm and weights.

A record has a phase, a name and a part. Ranks that have the same part have copies of one thing, and different parts add
up to the whole, whatever the run type. `attach.py` says when a strategy does what.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from testbed.config.settings import RunSettings
from testbed.experiments.divergence.layouts import positions_of, print_of
from testbed.experiments.divergence.projections import NUMBERS, bins_of, fingerprint
from testbed.experiments.divergence.sides import file_name
from testbed.io import replacing
from testbed.model.gpt2 import PREFIX, TRANSPOSED
from testbed.optim.optimizer import local_tensor
from testbed.step import MicroBatch
from testbed.strategies.tensor import exchange_order

DATA, WEIGHTS, FORWARD, BACKWARD = "data", "weights", "forward", "backward"
SYNCHRONISATION, CLIPPING, UPDATE = "synchronisation", "clipping", "update"
OUTER = ("wte", "wpe")
INNER = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
ATTENTION = "attn.c_proj"  # its input is what attention mixed
CUT_BY_CHANNELS = ("attn.c_attn", "mlp.c_fc", "attention")  # over tensor ranks; all else is the residual stream


@dataclasses.dataclass
class Recorder:
    """Fingerprints of the step that runs; `end_step` writes them.

    Attributes:
        data_rank: which share of the global batch this rank reads.
        context, tensor: number of ranks, and which this is, of each axis.
        stage: number of the pipeline rank.
        share_of_local: what a rank's own gradients count in the synchronised ones: 1 / ranks where they are averaged.
        is_transposed: whether linear layers are transformers' Conv1D.
        rows: of this rank's share, what passes through the model now; None: nothing.
        backward_row: where the micro batch begins that backward is at; None: unknown.
    """

    folder: Path
    settings: RunSettings
    rank: int
    data_rank: int
    context: tuple[int, int] = (1, 0)
    tensor: tuple[int, int] = (1, 0)
    stage: int = 0
    share_of_local: float = 1.0
    is_transposed: bool = False
    records: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    rows: slice | None = None
    next_row: int = 0
    backward_row: int | None = None
    watched: set[int] = dataclasses.field(default_factory=set)

    @property
    def share(self) -> int:
        """Return the rows of a global batch that a rank reads."""
        return self.settings.batch.global_batch_size // self.settings.plan.data_world_size

    def add(self, phase: str, name: str, part: str, numbers: np.ndarray) -> None:
        """Add to a record of this step."""
        key = f"{phase}|{name}|{part}"
        self.records[key] = self.records[key] + numbers if key in self.records else numbers

    def add_number(self, phase: str, name: str, part: str, number: float) -> None:
        self.add(phase, name, part, np.array([number], dtype=np.float64))

    def set_number(self, phase: str, name: str, number: float) -> None:
        """Record what is the same whenever it is told within a step."""
        self.records[f"{phase}|{name}|"] = np.array([number], dtype=np.float64)

    def begin_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Record what the step reads."""
        self.next_row = 0
        for name in ("inputs", "targets"):
            rows = torch.cat([getattr(micro_batch, name) for micro_batch in micro_batches])
            self._add_rows(DATA, name, rows.unsqueeze(-1), torch.arange(rows.shape[1]), torch.arange(1), slice(None))
        divisor = micro_batches[0].loss_divisor
        assert divisor is not None, "micro batches to train on"
        self.add_number(DATA, "target tokens", "", divisor * self.settings.plan.data_world_size)

    def end_step(self, step: int) -> None:
        """Write the records of a step, 0 before the first, and begin anew."""
        with replacing(self.folder / file_name(step, self.rank)) as path, path.open("wb") as file:
            numbers = {f"{step}|{self.rank}|{key}": array for key, array in self.records.items()}
            np.savez(file, **numbers)  # type: ignore[arg-type]
        self.records = {}

    def _add_rows(
        self, phase: str, name: str, x: torch.Tensor, positions: torch.Tensor, channels: torch.Tensor, rows: slice
    ) -> None:
        """Add (B, t, c) of some positions and channels, as `rows` of this rank's share of the batch."""
        length = self.settings.data.seq_length
        x = local_tensor(x.detach())
        found = fingerprint(x, positions.to(x.device), channels.to(x.device), length)
        every = np.zeros((self.share, bins_of(length), NUMBERS))
        every[rows] = found
        cut = f"{int(positions[0])}-{int(positions[-1])}-{len(positions)},{int(channels[0])}-{len(channels)}"
        self.add(phase, name, f"{self.data_rank * self.share}:{cut}", every)

    def watch_model(self, model: nn.Module, is_root_called: bool, is_compiled: bool) -> None:
        """Hook a model's modules.

        Args:
            is_root_called: each forward pass calls the model itself; else whoever calls its layers sets `rows`.
            is_compiled: blocks are left alone inside.
        """
        for whole_name, module in model.named_modules():
            name = whole_name.removeprefix(PREFIX)
            if name == "lm_head":  # transformers' module for the embedding as the head
                continue
            layer = name.split(".", 2)[2] if name.count(".") >= 2 else ""
            is_block = name.startswith("h.") and name.count(".") == 1
            if is_block or name in OUTER or (not is_compiled and (layer in INNER or name == "ln_f")):
                module.register_forward_hook(functools.partial(self._after_module, name))
            if not is_compiled and any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(functools.partial(self._before_module, name, module))
            if name == "wte":
                embedding = module
            if name == "ln_f" and not is_compiled:  # the head comes next, and it is no module
                module.register_forward_pre_hook(functools.partial(self._before_module, "wte", embedding))
            if layer == ATTENTION and not is_compiled:
                block = name.removesuffix(ATTENTION)
                module.register_forward_pre_hook(
                    lambda module, inputs, name=f"{block}attention": self._after_module(name, module, (), inputs[0])
                )
        if is_root_called:
            model.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
            model.register_forward_hook(self._end_pass)

    def _begin_pass(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not _computes_again():
            batch = (inputs[0] if inputs else named["input_ids"]).shape[0]
            self.rows = slice(self.next_row, self.next_row + batch)
            self.next_row += batch

    def _end_pass(self, *_: object) -> None:
        if not _computes_again() and self.rows is not None:
            self.backward_row = self.rows.start
            self.rows = None

    def _after_module(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self.rows is None or _computes_again():
            return
        x = output[0] if isinstance(output, tuple) else output
        batch = self.rows.stop - self.rows.start
        x = local_tensor(x)
        x = x.unsqueeze(0) if x.dim() == 2 else x
        x = x.expand(batch, *x.shape[1:])  # positions are alike in all rows
        positions = positions_of(self.settings.data.seq_length, *self.context)
        width = {"attn.c_attn": 3, "mlp.c_fc": 4}.get(name.split(".", 2)[-1], 1) * self.settings.model.embedding_size
        channels, (ranks, rank) = torch.arange(width), self.tensor
        if name.endswith(CUT_BY_CHANNELS):
            channels = exchange_order(channels, 3, ranks) if name.endswith("c_attn") else channels
            channels = channels.chunk(ranks)[rank]
        elif x.shape[1] < len(positions):  # the stream is cut by positions
            positions = positions.chunk(ranks)[rank]
        self._add_rows(FORWARD, name, x, positions, channels, self.rows)

    def _before_module(self, name: str, module: nn.Module, *_: object) -> None:
        if self.rows is None or _computes_again():
            return
        for of_module, parameter in module.named_parameters(recurse=False):
            self.watch_parameter(f"{name}.{of_module}", parameter)
            is_seen = any(key.startswith(f"{WEIGHTS}|{name}.{of_module}|") for key in self.records)
            if not is_seen:  # in this step
                self.add_parameter(WEIGHTS, f"{name}.{of_module}", parameter)

    def watch_parameter(self, name: str, parameter: torch.Tensor) -> None:
        """Record what backward brings to a parameter. FSDP2 has others in forward than between steps."""
        if id(parameter) not in self.watched and parameter.requires_grad:
            self.watched.add(id(parameter))  # it lives as long as the run
            parameter.register_hook(functools.partial(self.add_local_gradient, name))

    def add_local_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add a summand of a gradient, before ranks exchange theirs."""
        part, numbers = self._print(name, gradient)
        part += f":data{self.data_rank}:context{self.context[1]}stage{self.stage}"
        if self.backward_row is not None:
            part += f":row{self.data_rank * self.share + self.backward_row}"
        self.add(BACKWARD, name, part, numbers * self.share_of_local)

    def add_parameter(self, phase: str, name: str, tensor: torch.Tensor) -> None:
        """Add a rank's piece of a weight or of a synchronised gradient."""
        part, numbers = self._print(name, tensor)
        if part:
            self.add(phase, name, part, numbers)

    def _print(self, name: str, tensor: torch.Tensor) -> tuple[str, np.ndarray]:
        is_transposed = self.is_transposed and name.endswith(TRANSPOSED)
        return print_of(name, tensor.t() if is_transposed else tensor, self.settings.shape)


def _computes_again() -> bool:
    """Return whether backward runs: what calls a module then is recomputation."""
    return torch._C._current_graph_task_id() != -1


def wrapped(holder: Any, method: str, around: Callable[..., Any]) -> None:
    """Let `around(honest, *arguments)` take the place of an object's method."""
    setattr(holder, method, functools.partial(around, getattr(holder, method)))
