"""Measure the loss over the validation windows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from testbed import run_folder
from testbed.distributed import process_group, watchdog
from testbed.metrics.world_step import gather_loss
from testbed.profiling.step_clock import named_range
from testbed.train.divergence import check_validation

if TYPE_CHECKING:
    from testbed.train.run import TrainingRun


def validate(run: TrainingRun, step: int) -> int:
    """Record the validation loss after `step`. With --keep_best, export the weights if it is the best so far.

    Every rank evaluates its share. When a rank is asked to stop, all ranks stop before the next batch, and no loss is
    recorded: a later start validates again.

    Returns:
        What all ranks agreed to stop for (StopSignals.number), or 0.
    """
    if run.settings.training.max_val_steps == 0:
        return 0
    start_s = time.perf_counter()
    watchdog.enter("validation")
    loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=run.device), 0
    for index in run.report.console.batches(len(run.validation), "validation"):
        if stop := run.signals.agree(process_group.agree_on_stop(run.signals.number, run.device)):
            return stop
        with named_range("val/batch", run.clock.emits_nvtx):
            result = run.strategy.evaluate(run.validation.of_batch(index))
        loss_sum += result.loss_sum
        num_tokens += result.num_target_tokens
    loss, num_tokens = gather_loss(loss_sum, num_tokens, run.device)
    check_validation(step, loss)
    run.report.memory(step)
    seconds = time.perf_counter() - start_s
    if loss < run.best_val_loss:
        run.best_val_loss = loss
        if (
            run.settings.checkpointing.keep_best
        ):  # before the row: if this fails, the start that resumes validates again
            state_dict = run.strategy.full_state_dict()
            process_group.by_rank_0(lambda: run.export(state_dict, run.directory / run_folder.BEST))
    run.report.validation(step, loss, num_tokens, run.validation.num_sequences, seconds)
    return 0
