"""Plant mistakes that strategies of other programs really made: the agreement test must find each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch.distributed as dist

PLANTED_BUGS: dict[str, Callable[[], object]] = {}
MESH = ["--run_type", "mesh"]
TENSOR = ["--tensor_parallel_size", "2"]
CONTEXT = ["--context_parallel_size", "2"]
STAGES = ["--pipeline_stages", "2"]
CUT_STREAM = ["--sequence_parallel", "on"]
COPIES = ["--shard_size", "1"]
ZERO_BUBBLE = ["--pipeline_schedule", "zero_bubble"]
WHERE = {  # bug -> the flags of the run that has it, and the number of ranks
    "sum_instead_of_mean": (["--run_type", "allreduce"], 2),
    "no_division_by_accumulation": (["--run_type", "ddp"], 2),
    "stage_local_clipping": (["--run_type", "pipeline"], 2),
    "unsynchronised_tied_embedding": (["--run_type", "pipeline"], 2),
    "tied_embedding_counted_twice": (["--run_type", "pipeline"], 2),
    "data_ranks_of_a_pipeline_not_averaged": (["--run_type", "pipeline", *STAGES], 4),
    "identical_batches": (["--run_type", "fsdp"], 2),
    "shards_clip_by_their_own_norm": (["--run_type", "fsdp"], 2),
    "each_rank_by_its_own_targets": (["--run_type", "ddp", "PAIRS"], 2),
    "reduced_over_the_wrong_axis": ([*MESH, *COPIES, *TENSOR], 4),
    "whole_weights_counted_by_each_tensor_rank": ([*MESH, *TENSOR, *CUT_STREAM], 4),
    "strided_shards_left_out_of_the_norm": ([*MESH, *TENSOR], 4),
    "ring_sees_a_chunk_too_many": ([*MESH, *CONTEXT], 4),
    "positions_of_another_rank": ([*MESH, *CONTEXT], 4),
    "zigzag_lost": ([*MESH, *CONTEXT], 4),
    "gradients_of_keys_and_values_exchanged": ([*MESH, *CONTEXT], 4),
    "embedding_gradient_added_at_one_end": ([*MESH, *STAGES], 4),
    "loss_divided_by_the_tokens_of_a_context_rank": ([*MESH, *CONTEXT], 4),
    "shards_averaged_over_context_ranks": ([*MESH, *CONTEXT], 4),
    "shards_of_a_stage_not_reduced": ([*MESH, *STAGES], 4),
    "shards_reduced_twice": (MESH, 2),
    "micro_batches_divided_again": ([*MESH, *STAGES], 4),
    "weight_gradients_of_the_zero_bubble_lost": ([*MESH, *STAGES, *ZERO_BUBBLE], 4),
    "gradients_of_a_cut_stream_not_added": ([*MESH, *COPIES, *TENSOR, *CUT_STREAM], 4),
    "positions_learn_from_one_piece": ([*MESH, *TENSOR, *CUT_STREAM], 4),
}


def planted(bug: Callable[[], object]) -> Callable[[], object]:
    PLANTED_BUGS[bug.__name__] = bug
    return bug


def set_on_mesh(name: str, value_of: Callable) -> None:
    """Let a mesh have another value of an attribute once it is built."""
    from testbed.strategies.mesh import Mesh

    honest = Mesh.__init__

    def started(self, *arguments):
        honest(self, *arguments)
        setattr(self, name, value_of(self))

    patch("testbed.strategies.mesh.Mesh.__init__", started)


def patch(target: str, replacement: object) -> None:
    mock.patch(target, replacement).start()


@contextlib.contextmanager
def making(bug: str | None) -> Iterator[None]:
    """Around a run that shall have the bug; None: a sound one."""
    if bug is not None:
        PLANTED_BUGS[bug]()
    try:
        yield
    finally:
        mock.patch.stopall()


@planted
def sum_instead_of_mean() -> None:
    patch("testbed.strategies.allreduce.dist.ReduceOp.AVG", dist.ReduceOp.SUM)


@planted
def no_division_by_accumulation() -> None:
    """Each micro batch brings the mean over its own tokens, and the step does not divide by their number."""
    from testbed.strategies.baseline import Baseline

    whole_step = Baseline.loss_sum
    patch(
        "testbed.strategies.baseline.Baseline.loss_sum",
        lambda self, micro_batch: whole_step(self, micro_batch) * self.settings.batch.grad_accum_steps,
    )


@planted
def stage_local_clipping() -> None:
    from testbed.optim.optimizer import global_grad_norm

    patch("testbed.strategies.pipeline.global_grad_norm", lambda gradients, over: global_grad_norm(gradients))


@planted
def unsynchronised_tied_embedding() -> None:
    from testbed.strategies import pipeline

    patch("testbed.strategies.pipeline.Pipeline.synchronise_gradients", pipeline.Mesh.synchronise_gradients)


@planted
def tied_embedding_counted_twice() -> None:
    from testbed.optim.optimizer import global_grad_norm

    patch(
        "testbed.strategies.pipeline.Pipeline.grad_norm",
        lambda self: global_grad_norm([p.grad for p in self.parameters], over=self.axes.pipeline),
    )


@planted
def data_ranks_of_a_pipeline_not_averaged() -> None:
    patch("testbed.strategies.mesh.reduce_", lambda *_: None)


@planted
def identical_batches() -> None:
    from testbed.train.batches import TrainingBatches

    honest = TrainingBatches.__init__

    def every_rank_reads_the_share_of_rank_0(self, token_file, settings, data_rank, device):
        honest(self, token_file, settings, 0, device)

    patch("testbed.train.batches.TrainingBatches.__init__", every_rank_reads_the_share_of_rank_0)


@planted
def shards_clip_by_their_own_norm() -> None:
    patch("testbed.optim.optimizer._groups_of_shards", lambda tensor: ())


@planted
def each_rank_by_its_own_targets() -> None:
    """The mean of means: right of text, where every rank has as many targets."""
    from testbed.train import batches

    honest = batches.micro_batches

    def own_mean(windows, numbers, *arguments):
        mine = arguments if len(arguments) == 3 else (*arguments[:3], windows.num_target_tokens(numbers))
        return honest(windows, numbers, *mine)

    patch("testbed.train.batches.micro_batches", own_mean)


@planted
def reduced_over_the_wrong_axis() -> None:
    patch("testbed.distributed.axes.Axes.data", property(lambda self: self.whole.get_group("tensor")))


@planted
def whole_weights_counted_by_each_tensor_rank() -> None:
    patch("testbed.optim.optimizer._groups_of_shards", lambda tensor: tuple(tensor.device_mesh.get_all_groups()))


@planted
def strided_shards_left_out_of_the_norm() -> None:
    """PyTorch says of a shard of what tensor ranks had cut that it is no shard."""
    patch(
        "testbed.optim.optimizer._groups_of_shards",
        lambda tensor: tuple(
            tensor.device_mesh.get_group(axis) for axis, place in enumerate(tensor.placements) if place.is_shard()
        ),
    )


@planted
def ring_sees_a_chunk_too_many() -> None:
    """Queries meet all keys of an earlier rank, of which the second half lies in the future of their first."""
    from testbed.strategies import context

    forward = context._forward

    def of_all(query, key, value, is_causal):
        if key.shape[2] < query.shape[2]:  # half of what arrived: take the other half too
            key, value = (tensor._base.select(0, place) for place, tensor in enumerate((key, value)))
        return forward(query, key, value, is_causal)

    patch("testbed.strategies.context._forward", of_all)


@planted
def positions_of_another_rank() -> None:
    from testbed.strategies import mesh

    honest = mesh._positions_of_rank
    patch("testbed.strategies.mesh._positions_of_rank", lambda ranks, rank, *of, **how: honest(ranks, 0, *of, **how))


@planted
def zigzag_lost() -> None:
    """Each rank gets neighbouring tokens, and the ring takes them for its two chunks."""
    import torch

    def neighbours(seq_length, ranks, rank, device=None):
        return torch.arange(seq_length, device=device).chunk(ranks)[rank]

    patch("testbed.strategies.context.order_of_rank", neighbours)
    patch("testbed.strategies.mesh.order_of_rank", neighbours)


@planted
def gradients_of_keys_and_values_exchanged() -> None:
    """Forward is right: only what other ranks' queries send back is not."""
    from testbed.strategies import context

    honest = context._backward

    def exchanged(*tensors, is_causal):
        of_query, of_key, of_value = honest(*tensors, is_causal=is_causal)
        return (of_query, of_key, of_value) if is_causal else (of_query, of_value, of_key)

    patch("testbed.strategies.context._backward", exchanged)


@planted
def embedding_gradient_added_at_one_end() -> None:
    from testbed.strategies import pipeline

    honest = pipeline.Pipeline.synchronise_gradients

    def at_the_last_stage(self):
        before = self.model.wte.weight.grad.clone() if self.has_first else None
        honest(self)
        if before is not None:
            self.model.wte.weight.grad.copy_(before)

    patch("testbed.strategies.pipeline.Pipeline.synchronise_gradients", at_the_last_stage)


@planted
def loss_divided_by_the_tokens_of_a_context_rank() -> None:
    set_on_mesh("summed_over", lambda self: self.data_world_size / self.axes.sizes.context)


@planted
def shards_averaged_over_context_ranks() -> None:
    patch("torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor", lambda self, factor: None)
    patch("torch.distributed.fsdp.FSDPModule.set_force_sum_reduction_for_comms", lambda self, is_forced: None)
    # FSDP2 divides by all ranks of its mesh: right for the data ranks, and wrong by the context ranks
    set_on_mesh("summed_over", lambda self: 1)


@planted
def shards_of_a_stage_not_reduced() -> None:
    """Each rank keeps its own gradients, of which it has the rows of its shard."""

    def own_rows(output, input, group, **_):
        output.copy_(input.chunk(group.size())[group.rank()])

    is_new = hasattr(dist, "reduce_scatter_single")  # PyTorch 2.13 has another name for it
    patch(f"torch.distributed.reduce_scatter_{'single' if is_new else 'tensor'}", own_rows)


@planted
def shards_reduced_twice() -> None:
    patch("testbed.strategies.mesh._axes_of", lambda tensor: ())


@planted
def micro_batches_divided_again() -> None:
    """PyTorch's schedules divide gradients by the number of micro batches, unless they are told not to."""
    import functools

    from testbed.strategies import pipeline

    honest = pipeline.SCHEDULES["1f1b"]

    @functools.wraps(honest)
    def scaling(*words, **named):
        return honest(*words, **{**named, "scale_grads": True})

    patch("testbed.strategies.pipeline.SCHEDULES", {**pipeline.SCHEDULES, "1f1b": scaling})


@planted
def weight_gradients_of_the_zero_bubble_lost() -> None:
    """Weights that are freed after forward: the half of backward that is theirs finds none, and says nothing."""
    import dataclasses

    from testbed.strategies import mesh

    honest = mesh.parallelize

    def resharding(strategy, settings, model):
        frees = dataclasses.replace(settings.data_parallel, reshard_after_forward="on")
        return honest(strategy, dataclasses.replace(settings, data_parallel=frees), model)

    patch("testbed.strategies.mesh.parallelize", resharding)


@planted
def gradients_of_a_cut_stream_not_added() -> None:
    """LayerNorms learn from the tokens of their own tensor rank."""
    from torch.distributed.tensor import DTensor

    from testbed.strategies.mesh import Mesh

    honest = Mesh.synchronise_gradients

    def of_own_tokens(self):
        for parameter in self.parameters:
            if isinstance(parameter, DTensor):
                own = parameter.grad.to_local()
                parameter.grad = DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False)
        honest(self)

    patch("testbed.strategies.mesh.Mesh.synchronise_gradients", of_own_tokens)


@planted
def positions_learn_from_one_piece() -> None:
    from torch.distributed.tensor import Replicate

    patch("testbed.strategies.tensor.Partial", lambda *_: Replicate())
