#!/usr/bin/env python3
"""Train GPT-2 with one parallelism strategy, and measure it.

    python src/gpt2.py --run_type baseline
    deepspeed src/gpt2.py --run_type optimized
    torchrun --nproc-per-node 2 src/gpt2.py --run_type optimized

`main` sets a run up, `train` is the loop. The rest is in src/testbed/; docs/metrics_file.md explains the files that a
run writes.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

STARTED_S = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parent))  # so that `testbed` is this checkout's, installed or not

from testbed.config.check import check_command_line
from testbed.config.settings import CheckedRun

if TYPE_CHECKING:
    from testbed.config.automatic_run_type import Taken
    from testbed.config.flags import ParsedFlags
    from testbed.distributed.launch import Launch


def best_plan(asked: "ParsedFlags", launch: "Launch") -> "Taken | None":
    """Return the plan's fastest run. Only `--run_type auto` loads the planner."""
    from testbed.planner import automatic

    return automatic.best_plan(asked, launch)


if __name__ == "__main__":
    # ends here after --help or an error, before torch is imported
    CHECKED, LAUNCH = check_command_line(sys.argv[1:], best_plan)
    if LAUNCH.rank == 0:
        print("starting: loading PyTorch, checking the data ...", flush=True)

from testbed.distributed import process_group
from testbed.distributed.launch import Launch
from testbed.metrics.world_step import gather_step
from testbed.model.gpt2 import attention_kernel
from testbed.optim.lr_schedule import learning_rate_at
from testbed.train.ending import RunEnding, RunPreempted
from testbed.train.reasons import raise_if_diverged
from testbed.train.run import TrainingRun, finish, open_run, validate


def main(checked: CheckedRun, launch: Launch) -> int:
    """Set up and train. However the run ends, `RunEnding` leaves whole files and one mark. Returns the exit code."""
    with RunEnding(checked.settings, launch) as ending:
        run = open_run(checked, launch, ending)  # device, process group, data, checkpoint, model, strategy
        if run is not None:
            train(run)
    assert ending.exit_code is not None  # leaving the block above sets it
    return ending.exit_code


def train(run: TrainingRun) -> None:
    """Train and validate with the run's attention kernel, then finish the run."""
    with attention_kernel(run.settings.model.attention):
        do_steps(run)
    finish(run)


def do_steps(run: TrainingRun) -> None:
    """Train step after step; save, validate and stop where the settings or a signal say so."""
    settings, strategy, clock, report = run.settings, run.strategy, run.clock, run.report
    report.begin_training(startup_s=time.perf_counter() - STARTED_S)
    run.signals.defer()  # from here on a stop waits for the end of the step
    if run.owes_validation:
        stop = validate(run, run.first_step)
        if stop:
            leave_preempted(run, run.first_step)
    with report.profiled():
        for steps_done in range(run.first_step, settings.last_step):
            if run.is_out_of_patience:
                run.stop_early(steps_done)
                break
            step = steps_done + 1  # the files count steps from 1
            learning_rate = learning_rate_at(steps_done, settings)
            process_group.wait_for_everyone(before_step=step)  # what rank 0 alone wrote is not part of the step
            with clock:  # the wait for data is inside, as a phase of its own
                micro_batches = clock.data_wait(run.batches.of_step, steps_done)
                result = strategy.train_step(micro_batches, learning_rate)
            world = gather_step(result, clock, run.device, run.signals.number)  # one collective: loss, times, stop
            stop = run.signals.agree(world.stop)
            raise_if_diverged(step, world, settings.compute.precision)
            report.step(step, world, learning_rate, clock)
            if not stop and run.saves_after(step):
                run.checkpoints.save(step)  # before validation, which the last save may overlap
            if not stop and run.validates_after(step):
                stop = validate(run, step)
            if stop:
                leave_preempted(run, step)
    if settings.training.eval_only:
        stop = validate(run, 0)
        if stop:  # nothing was trained, so there is nothing to save
            raise run.signals.as_exception()


def leave_preempted(run: TrainingRun, step: int) -> NoReturn:
    """Save a checkpoint of `step`, and end the run there. All ranks agreed to it. Raises RunPreempted or RunStopped."""
    if run.settings.data_parallel.skip_gradient_sync:
        raise run.signals.as_exception()
    run.checkpoints.save(step)
    run.checkpoints.wait()
    raise RunPreempted


if __name__ == "__main__":
    sys.exit(main(CHECKED, LAUNCH))
