"""Time whole optimizer steps of every run type in one process group. All ranks call it together."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.config.settings import CheckedRun
from testbed.distributed import process_group
from testbed.distributed.launch import Launch
from testbed.errors import InputError
from testbed.experiments.calibration.work import Setting
from testbed.memory_model.job import job_of_settings
from testbed.model.gpt2 import GPT2, attention_kernel
from testbed.optim.lr_schedule import learning_rate_at
from testbed.planner.calibration import WholeStep
from testbed.profiling.step_clock import StepClock
from testbed.strategies import build_strategy
from testbed.train.batches import TrainingBatches

INTERFACES = Path("/proc/net/dev")
TIMED_STEPS, WARMUP_STEPS = 5, 2


def accepted_runs(
    settings: Sequence[Setting], kinds: Sequence[str], flags: Sequence[str], data: Path, launch: Launch
) -> list[CheckedRun]:
    """Return each kind of run at each setting, as far as gpt2.py trains it on so many ranks.

    Args:
        kinds: of FLAGS_OF_KIND.
        flags: that all of them have besides.
        data: folder of the token files.
    """
    found = []
    for setting in settings:
        for kind in kinds:
            with contextlib.suppress(InputError):
                words = [*setting.arguments(kind, data, TIMED_STEPS + WARMUP_STEPS), *flags]
                found.append(check_run(parse_command_line(words), launch))
    return found


def time_steps(
    runs: Sequence[CheckedRun], device: torch.device, link: str, deadline_s: float = math.inf
) -> list[WholeStep]:
    """Train a few steps of each run.

    Args:
        link: name of the link between the ranks.
        deadline_s: of time.perf_counter() on rank 0; what has not begun by then is left out.
    """
    found = []
    for checked in runs:
        if process_group.gather_objects(time.perf_counter() > deadline_s)[0]:
            break
        seconds, sent = _train(checked, device)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        found.append(
            WholeStep(
                job=job_of_settings(checked.settings.with_values(compile=False)),
                link=link,
                seconds=median,
                low=low,
                high=high,
                steps=len(seconds),
                sent_bytes=statistics.median(sent) if sent else 0.0,
            )
        )
    return found


def _train(checked: CheckedRun, device: torch.device) -> tuple[list[float], list[float]]:
    """Return the seconds of each step of the slowest rank, and the bytes that this machine sent in it."""
    seconds, sent = [], []
    with _built(checked, device) as (strategy, batches):
        clock = StepClock(device)
        for step in range(checked.settings.last_step):
            process_group.wait_for_everyone()
            before = _bytes_sent()
            process_group.wait_for_everyone()
            with clock:
                micro_batches = clock.data_wait(batches.of_step, step)
                strategy.train_step(micro_batches, learning_rate_at(step, checked.settings))
            took = max(process_group.gather_objects(clock.step_time_s))
            after = _bytes_sent()
            if step >= WARMUP_STEPS:
                seconds.append(took)
                sent += [] if before is None or after is None else [after - before]
    return seconds, sent


@contextlib.contextmanager
def _built(checked: CheckedRun, device: torch.device) -> Iterator[tuple[Any, TrainingBatches]]:
    """Build model, strategy and batches as gpt2.py does."""
    settings = checked.settings
    torch.manual_seed(settings.training.seed)
    model = GPT2(settings.shape, settings.model.dropout, settings.compute.activation_checkpointing)
    strategy = build_strategy(settings, model, device)
    batches = TrainingBatches(checked.train_file, settings, strategy.data_rank, device)
    try:
        with attention_kernel(settings.model.attention):
            yield strategy, batches
    finally:
        batches.close()
        strategy.close()


def _bytes_sent() -> float | None:
    """Return what this machine has sent over all its network interfaces so far; None where the system does not say."""
    try:
        lines = INTERFACES.read_text(encoding="utf-8").splitlines()[2:]
        return float(sum(int(line.partition(":")[2].split()[8]) for line in lines))
    except (OSError, ValueError, IndexError):
        return None
