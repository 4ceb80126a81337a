"""Time whole optimizer steps of every run type in one process group. All ranks call it together."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.config.settings import CheckedRun
from testbed.distributed import process_group
from testbed.distributed.launch import Launch
from testbed.errors import InputError
from testbed.model.gpt2 import GPT2
from testbed.optim.lr_schedule import learning_rate_at
from testbed.planner.residuals import FLAGS_OF_KIND
from testbed.profiling.step_clock import StepClock
from testbed.strategies import build_strategy
from testbed.train.batches import TrainingBatches

INTERFACES = Path("/proc/net/dev")
WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a whole step trains. Shapes as in ModelShape and Job; `micro_batch` of a data rank."""

    layers: int
    heads: int
    hidden: int
    vocab: int
    seq_length: int
    micro_batch: int
    accumulation: int

    def arguments(self, kind: str, data: Path, steps: int) -> list[str]:
        """Return the flags of gpt2.py."""
        values: dict[str, Any] = {
            "num_layers": self.layers,
            "num_heads": self.heads,
            "embedding_size": self.hidden,
            "vocab_size": self.vocab,
            "seq_length": self.seq_length,
            "max_position_embeddings": self.seq_length,
            "micro_batch_size_per_gpu": self.micro_batch,
            "grad_accum_steps": self.accumulation,
            "max_train_steps": steps,
            "timing_warmup_steps": 1,
            "epochs": 10_000,
            "max_val_steps": 0,
            "sample_tokens": 0,
            "train_data_path": data / "train.bin",
            "val_data_path": data / "val.bin",
        }
        words = [str(word) for name, value in values.items() for word in (f"--{name}", value)]
        return [*FLAGS_OF_KIND[kind], *words]


@dataclass
class Steps:
    """Times of one setting of one run type, in seconds of the slowest rank, and the bytes that all ranks sent."""

    kind: str
    setting: Setting
    seconds: list[float]
    sent_bytes: list[float]

    def as_row(self, ranks: int) -> dict[str, Any]:
        """Return the row of calibration.json."""
        low, median, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        sent = statistics.median(self.sent_bytes) if self.sent_bytes else None
        return {
            "kind": self.kind,
            "ranks": ranks,
            **vars(self.setting),
            "seconds": median,
            "low": low,
            "high": high,
            "steps": len(self.seconds),
            "sent_bytes": sent,
        }


def time_steps(
    work: Sequence[tuple[str, Setting]], launch: Launch, device: torch.device, common: Mapping[str, Any], rounds: int,
    deadline_s: float = math.inf,
) -> list[dict[str, Any]]:
    """Train a few steps of each (kind, setting), in rounds, so that a drift of the machine meets all alike.

    Args:
        common: "data", the folder of token files; "precision"; "steps" of each in a round.
        deadline_s: of time.perf_counter() on rank 0; what has not begun by then is left out.
    """
    found = [Steps(kind, setting, [], []) for kind, setting in work]
    for _ in range(rounds):
        for each in found:
            if process_group.gather_objects(time.perf_counter() > deadline_s)[0]:
                break
            seconds, sent = _train(each, launch, device, common)
            each.seconds += seconds
            each.sent_bytes += sent
    return [each.as_row(launch.world_size) for each in found if each.seconds]


def check_setting(kind: str, setting: Setting, ranks: int, data: Path) -> str | None:
    """Return why gpt2.py would refuse to train this; None where it would not."""
    try:
        check_run(parse_command_line(setting.arguments(kind, data, 2)), Launch(0, 0, ranks, ranks))
    except InputError as error:
        return str(error)
    return None


def _train(
    each: Steps, launch: Launch, device: torch.device, common: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    steps = common["steps"] + WARMUP_STEPS
    words = [*each.setting.arguments(each.kind, Path(common["data"]), steps), "--precision", common["precision"]]
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
    model = GPT2(
        settings.shape, settings.model.dropout, settings.model.attention, settings.compute.activation_checkpointing
    )
    strategy = build_strategy(settings, model, device)
    batches = TrainingBatches(checked.train_file, settings, strategy.data_rank, device)
    try:
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

