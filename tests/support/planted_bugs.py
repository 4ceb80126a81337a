"""Mistakes that strategies of other programs really made, to be made here on purpose: each must turn the agreement
red."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch.distributed as dist

PLANTED_BUGS: dict[str, Callable[[], object]] = {}
WHERE = {  # bug -> the flags of the run that has it, and the number of ranks
    "sum_instead_of_mean": (["--run_type", "allreduce"], 2),
    "no_division_by_accumulation": (["--run_type", "ddp"], 2),
    "stage_local_clipping": (["--run_type", "pipeline"], 2),
    "unsynchronised_tied_embedding": (["--run_type", "pipeline"], 2),
    "tied_embedding_counted_twice": (["--run_type", "pipeline"], 2),
    "data_ranks_of_a_pipeline_not_averaged": (["--run_type", "pipeline", "--pipeline_stages", "2"], 4),
    "identical_batches": (["--run_type", "fsdp"], 2),
    "shards_clip_by_their_own_norm": (["--run_type", "fsdp"], 2),
    "each_rank_by_its_own_targets": (["--run_type", "ddp", "PAIRS"], 2),
}


def planted(bug: Callable[[], object]) -> Callable[[], object]:
    PLANTED_BUGS[bug.__name__] = bug
    return bug


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
    """Each micro batch brings the mean over its own tokens, and nobody divides by their number."""
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

    patch(
        "testbed.strategies.pipeline.Pipeline.synchronise_gradients",
        lambda self: pipeline.average_([p.grad for p in self.parameters], self.data_group),
    )


@planted
def tied_embedding_counted_twice() -> None:
    from testbed.optim.optimizer import global_grad_norm

    patch(
        "testbed.strategies.pipeline.Pipeline.grad_norm",
        lambda self: global_grad_norm([p.grad for p in self.parameters], over=self.pipeline_group),
    )


@planted
def data_ranks_of_a_pipeline_not_averaged() -> None:
    patch("testbed.strategies.pipeline.average_", lambda tensors, group: None)


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
