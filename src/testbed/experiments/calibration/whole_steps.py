"""Time whole optimizer steps of every run type in one process group. All ranks call it together."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
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
from testbed.model.gpt2 import GPT2, attention_kernel
from testbed.optim.lr_schedule import learning_rate_at
from testbed.planner.calibration import WholeStep
from testbed.profiling.step_clock import StepClock
from testbed.strategies import build_strategy
from testbed.train.batches import TrainingBatches

INTERFACES = Path("/proc/net/dev")
WARMUP_STEPS = 2


def time_steps(
    work: Sequence[tuple[str, Setting]],
    launch: Launch,
    device: torch.device,
    common: Mapping[str, Any],
    deadline_s: float = math.inf,
) -> list[WholeStep]:
    """Train a few steps of each (kind, setting).

    Args:
        common: "data", the folder of token files; "precision"; "link"; "steps" of each, two or more.
        deadline_s: of time.perf_counter() on rank 0; what has not begun by then is left out.
    """
    found = []
    for kind, setting in work:
        if process_group.gather_objects(time.perf_counter() > deadline_s)[0]:
            break
        seconds, sent = _train(kind, setting, launch, device, common)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        found.append(
            WholeStep(
                job=setting.job(kind, launch.world_size, common["precision"]),
                link=common["link"],
                seconds=median,
                low=low,
                high=high,
                steps=len(seconds),
                sent_bytes=statistics.median(sent) if sent else 0.0,
            )
        )
    return found


def check_setting(kind: str, setting: Setting, ranks: int, data: Path) -> str | None:
    """Return why gpt2.py would refuse to train this; None where it would not."""
    try:
        check_run(parse_command_line(setting.arguments(kind, data, 2)), Launch(0, 0, ranks, ranks))
    except InputError as error:
        return str(error)
    return None


def _train(
    kind: str, setting: Setting, launch: Launch, device: torch.device, common: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    steps = common["steps"] + WARMUP_STEPS
    words = [*setting.arguments(kind, Path(common["data"]), steps), "--precision", common["precision"]]
    checked = check_run(parse_command_line([*words, "--device", device.type]), launch)
    seconds, sent = [], []
    with _built(checked, device) as (strategy, batches):
        clock = StepClock(device)
        for step in range(steps):
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
