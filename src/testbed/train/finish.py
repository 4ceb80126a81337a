"""Finish a run that has done all its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.distributed import process_group, watchdog
from testbed.inference.after_training import benchmark_generation
from testbed.inference.sample import sample_text

if TYPE_CHECKING:
    from testbed.train.run import TrainingRun


def finish(run: TrainingRun) -> None:
    """Export the weights, then measure what only the whole run can tell, sample, and close the files."""
    watchdog.enter("finish")
    settings, report, train_file = run.settings, run.report, run.checked.train_file
    run.batches.close()
    report.end_training()
    report.memory(settings.last_step)
    state_dict = run.strategy.full_state_dict()
    process_group.by_rank_0(lambda: run.export(state_dict, run.directory))  # before anything that only measures
    if run.saves_at_end:
        run.checkpoints.save(settings.last_step)  # after the clocks of the run: it is no part of the training time
    run.checkpoints.wait()
    watchdog.enter("finish")
    report.measure_device(run.first_step)
    report.console.close()
    if settings.measuring.run_inference_benchmark:
        report.inference(*benchmark_generation(state_dict, settings, train_file, run.device))
    sampled = process_group.by_rank_0(lambda: sample_text(state_dict, settings, train_file, run.tokenizer_text))
    if sampled is not None:  # rank 0
        report.close(*sampled)
    process_group.wait_for_everyone()
    run.strategy.close()
