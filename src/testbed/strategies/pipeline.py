"""Layers cut over ranks: activations travel forward, their gradients back, by torch.distributed.pipelining.

The token embedding is also the head, so the first and the last stage both hold it: their gradients are added, and as
both begin alike and update alike they stay one matrix. The gradient norm is taken over all stages before any of them
clips.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from testbed.distributed.tensors import pass_on
from testbed.memory_model.stages import Stage, balanced_stages
from testbed.model.gpt2 import GPT2
from testbed.optim.optimizer import global_grad_norm, gradient_of, local_tensor
from testbed.profiling.step_clock import phase
from testbed.step import MicroBatch, StepResult
from testbed.strategies.mesh import Mesh

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings


MOST_IN_FLIGHT = 2  # activations of validation on their way to the next stage
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
}


class Pipeline(Mesh):
    """All micro batches of a step pass through the stages, several at once, in the order of a schedule."""

    def stages_of(self, settings: RunSettings, model: GPT2) -> GPT2:
        """Return the layers of this rank, of one stage or two."""
        self.schedule_name, self.micro_batches_per_pass = self.schedule_of(settings)
        self.num_ranks, self.rank = settings.plan.mesh.pipeline, self.axes.ranks["pipeline"]
        stages = balanced_stages(
            settings.shape, settings.data.seq_length, self.num_ranks * (settings.model_parallel.stages_per_rank or 1)
        )
        self.num_stages = len(stages)
        self.mine = {number: stage for number, stage in enumerate(stages) if self._holder_of(number) == self.rank}
        self.has_first, self.has_last = 0 in self.mine, self.num_stages - 1 in self.mine
        blocks = [block for stage in self.mine.values() for block in stage.blocks]
        return model.part(blocks, self.has_first, self.has_last)

    def modules_to_call(self, model: GPT2) -> list[nn.Module]:
        self.stages = {number: _StageModule(self, model, stage) for number, stage in self.mine.items()}
        return list(self.stages.values())

    def kept_whole(self, model: GPT2) -> set[nn.Parameter]:
        """The embedding, where one rank has both ends: FSDP2 lets one root alone have a parameter."""
        has_both = self.has_first and self.has_last
        return {cast("nn.Parameter", model.wte.weight)} if has_both else set()

    def __init__(self, settings: RunSettings, model: GPT2, device: torch.device):
        super().__init__(settings, model, device)
        self._loss_divisor = 1.0  # of the step
        self.schedule = self._build_schedule()

    def schedule_of(self, settings: RunSettings) -> tuple[str, int]:
        """Return the schedule, and how many micro batches it takes at once."""
        assert settings.model_parallel.pipeline_schedule is not None
        return settings.model_parallel.pipeline_schedule, settings.batch.grad_accum_steps

    def _holder_of(self, number: int) -> int:
        """Return the pipeline rank of a stage. Stages go round the ranks; the zero-bubble schedule's second round runs
        back, so that one rank holds both ends."""
        if self.schedule_name == "zero_bubble" and number >= self.num_ranks:
            return self.num_stages - 1 - number
        return number % self.num_ranks

    def _build_schedule(self):
        stages = [
            _TimedStage(module, number, self.num_stages, self.device, group=self.axes.pipeline)
            for number, module in self.stages.items()
        ]
        takes_one = self.schedule_name in ("gpipe", "1f1b")
        return SCHEDULES[self.schedule_name](
            stages[0] if takes_one else stages,
            self.micro_batches_per_pass,
            loss_fn=self._mean_loss,
            scale_grads=False,  # each micro batch's loss is divided by the tokens of the whole step
        )

    def _mean_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a micro batch's part of the mean over the step."""
        with phase("forward"):
            return self.model.loss_of_logits(logits, targets) / self._loss_divisor

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        self.model.train()
        assert micro_batches[0].loss_divisor is not None, "micro batches to train on"
        self._loss_divisor = micro_batches[0].loss_divisor * self.summed_over
        num_tokens = sum(micro_batch.num_target_tokens for micro_batch in micro_batches)
        losses: list[torch.Tensor] = []
        with self.casts_kept(len(micro_batches)):  # else each micro batch in flight would hold its own
            for first in range(0, len(micro_batches), self.micro_batches_per_pass):
                passing = [*map(self.of_this_rank, micro_batches[first : first + self.micro_batches_per_pass])]
                inputs = [torch.cat([micro_batch.inputs for micro_batch in passing])] if self.has_first else []
                targets = torch.cat([micro_batch.targets for micro_batch in passing]) if self.has_last else None
                of_pass: list[torch.Tensor] = []
                with phase("schedule"):
                    self.schedule.step(*inputs, target=targets, losses=of_pass, return_outputs=False)
                losses += [loss.detach() for loss in of_pass]
        loss_sum = sum(losses, torch.zeros((), device=self.device)) * self._loss_divisor
        with phase("synchronise"):
            self.synchronise_gradients()
        with phase("optimizer"):
            grad_norm = self.update(learning_rate)
        return self.counted_once(StepResult(loss_sum, num_tokens if self.has_last else 0, grad_norm))

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Forward only, written out: the schedules take a fixed number of micro batches of one size, and those with two
        stages per rank go through the motions of backward too."""
        self.model.eval()
        loss_sum, num_tokens = torch.zeros((), device=self.device), 0
        sent: deque[tuple[torch.Tensor, dist.Work]] = deque()  # an activation must live until it has arrived
        for micro_batch in map(self.of_this_rank, micro_batches):
            x = micro_batch.inputs
            for number, stage in self.stages.items():
                if number > 0 and self._holder_of(number - 1) != self.rank:
                    x = torch.empty(self._shape_between(*micro_batch.inputs.shape), device=self.device)
                    dist.recv(x, group=self.axes.pipeline, group_src=self._holder_of(number - 1))
                x = stage(x)
                if number == self.num_stages - 1:
                    loss_sum += self.model.loss_of_logits(x, micro_batch.targets)
                    num_tokens += micro_batch.num_target_tokens
                elif self._holder_of(number + 1) != self.rank:
                    receiver = self._holder_of(number + 1)
                    sending = dist.isend(x, group=self.axes.pipeline, group_dst=receiver)
                    assert sending is not None, "this rank is of the group"
                    sent.append((x, sending))
                    if len(sent) > MOST_IN_FLIGHT:
                        sent.popleft()[1].wait()
        for _, work in sent:
            work.wait()
        return self.counted_once(StepResult(loss_sum, num_tokens, None))

    def _shape_between(self, batch: int, length: int) -> tuple[int, int, int]:
        """Return the shape of what travels between two stages."""
        is_cut = self.settings.model_parallel.sequence_parallel == "on"
        return batch, length // (self.axes.sizes.tensor if is_cut else 1), self.settings.model.embedding_size

    def synchronise_gradients(self) -> None:
        """Over the data ranks, then add the two gradients of the tied embedding. In this order: a sum over three ranks
        or more depends on the length of its buckets, which the two ends do not share, and a sum of two does not, so
        that both ends update by the same bits."""
        super().synchronise_gradients()
        if self.has_first == self.has_last:
            return  # neither end, or both: then the gradient is one
        mine = local_tensor(gradient_of(self.model.wte.weight))
        other = self._holder_of(self.num_stages - 1 if self.has_first else 0)
        theirs, exchange = pass_on(mine, self.axes.pipeline, to=other, source=other)
        for work in exchange:
            work.wait()
        mine += theirs

    def grad_norm(self) -> torch.Tensor:
        """Over all stages; the last stage's copy of the embedding is the first stage's, and counts once."""
        counted_elsewhere = None if self.has_first or not self.has_last else self.model.wte.weight
        mine = [gradient_of(parameter) for parameter in self.parameters if parameter is not counted_elsewhere]
        return global_grad_norm(mine, over=self.axes.pipeline)


class ModelParallel(Pipeline):
    """Without overlap: a micro batch passes all stages forward and back before the next begins, one rank works at a
    time."""

    def schedule_of(self, settings: RunSettings) -> tuple[str, int]:
        return "gpipe", 1


class _TimedStage(PipelineStage):
    """What a schedule calls, as phases of the step: what remains of the schedule is waiting, its bubble."""

    def _get_init_p2p_neighbors_ops(self):
        """Return PyTorch 2.11's P2P warm-up operations of a stage, except sends to the rank itself.

        Where a V of stages turns, both neighbours are on one rank, and gloo cannot send to its own rank. PyTorch 2.12
        makes itself known to neighbours in another way, and does not call this.
        """
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *args, **kwargs):
        """Leave the random numbers as they are. PyTorch 2.11 runs a forward pass to learn the shapes, before the first
        step of every start, so a resumed run would drop other places than one that was not interrupted."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            return super()._prepare_forward_infra(*args, **kwargs)

    def forward_one_chunk(self, *args, **kwargs):
        with phase("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args, **kwargs):
        with phase("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args, **kwargs):
        with phase("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)


class _StageModule(nn.Module):
    """Module that PipelineStage calls: some layers, in the precision of the run."""

    def __init__(self, strategy: Pipeline, model: GPT2, stage: Stage):
        super().__init__()
        self.layers = model.part(stage.blocks, stage.embeds, stage.predicts)
        self.autocast = strategy.autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            return self.layers.run_layers(x)


class AnyMesh(Mesh):
    """Any product of axes, with stages or without: one of the two above."""

    def __new__(cls, settings: RunSettings, model: GPT2, device: torch.device) -> Mesh:  # type: ignore[misc]
        return (Pipeline if settings.plan.mesh.pipeline > 1 else Mesh)(settings, model, device)
