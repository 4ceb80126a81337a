"""Token file -> the micro batches of one data rank.

The global batch of an optimizer step depends on the seed and the step alone: never on the world size, the micro batch
or the strategy. What a window is, windows.py says.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from testbed.config.settings import RunSettings
from testbed.data.token_file import TokenFile
from testbed.data.windows import Windows
from testbed.step import NOT_A_TARGET, MicroBatch


class _Batches:
    def __init__(self, token_file: TokenFile, settings: RunSettings, data_rank: int, device: torch.device):
        self.windows = Windows(token_file, settings.data.seq_length)
        self.settings, self.data_rank, self.device = settings, data_rank, device


class TrainingBatches(_Batches):
    """Micro batches of one data rank, by optimizer step counted from 0."""

    def __init__(self, token_file: TokenFile, settings: RunSettings, data_rank: int, device: torch.device):
        super().__init__(token_file, settings, data_rank, device)
        self._order_of_epoch: tuple[int, np.ndarray] | None = None
        self._reader = ThreadPoolExecutor(1, "read-ahead", self._use_device) if settings.data.num_workers else None
        self._ahead: dict[int, Future[list[MicroBatch]]] = {}

    def of_step(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro batches of the step, on the device."""
        if self._reader is None:
            return self._read(step)
        assert self.settings.data.num_workers is not None
        for coming in range(step, min(step + self.settings.data.num_workers + 1, self.settings.last_step)):
            if coming not in self._ahead:
                self._ahead[coming] = self._reader.submit(self._read, coming)
        return self._ahead.pop(step).result()

    def _use_device(self) -> None:
        """Select this rank's device in the new thread, which begins on device 0, where pinning memory would open a
        context of its own."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def windows_of_step(self, step: int) -> np.ndarray:
        """Indices of the whole global batch's windows. The incomplete last batch of an epoch is dropped."""
        epoch, step_in_epoch = divmod(step, self.settings.plan.steps_per_epoch)
        if self._order_of_epoch is None or self._order_of_epoch[0] != epoch:
            order = np.random.default_rng([self.settings.training.seed, epoch]).permutation(len(self.windows))
            self._order_of_epoch = (epoch, order)
        first = step_in_epoch * self.settings.batch.global_batch_size
        return self._order_of_epoch[1][first : first + self.settings.batch.global_batch_size]

    def _read(self, step: int) -> list[MicroBatch]:
        share = self.settings.batch.global_batch_size // self.settings.plan.data_world_size
        global_windows = self.windows_of_step(step)
        own_windows = global_windows[self.data_rank * share : (self.data_rank + 1) * share]
        loss_divisor = self.windows.num_target_tokens(global_windows) / self.settings.plan.data_world_size
        return micro_batches(self.windows, own_windows, share, self.settings, self.device, loss_divisor)


class ValidationBatches(_Batches):
    """The same windows in file order for every world size; the partial last global batch is kept."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are validated."""
        most = self.settings.training.max_val_steps
        everything = len(self.windows)
        return everything if most is None else min(everything, most * self.settings.batch.global_batch_size)

    def __len__(self) -> int:
        """Return the number of global batches."""
        return -(-self.num_sequences // self.settings.batch.global_batch_size)

    def of_batch(self, index: int) -> list[MicroBatch]:
        """Return this rank's micro batches of a global batch. Every rank gets the same number of them, filled up with
        sequences that have no targets: strategies that shard weights must call the model equally often."""
        first = index * self.settings.batch.global_batch_size
        windows = np.arange(first, min(first + self.settings.batch.global_batch_size, self.num_sequences))
        share = -(-len(windows) // self.settings.plan.data_world_size)
        own_windows = windows[self.data_rank * share : (self.data_rank + 1) * share]
        return micro_batches(self.windows, own_windows, share, self.settings, self.device)


def micro_batches(
    windows: Windows,
    numbers: np.ndarray,
    num_sequences: int,
    settings: RunSettings,
    device: torch.device,
    loss_divisor: float | None = None,
) -> list[MicroBatch]:
    """Read windows and cut them into micro batches; missing ones up to `num_sequences` carry no targets."""
    tokens, is_target = windows.read(numbers, num_sequences)
    inputs = torch.from_numpy(tokens[:, :-1].copy())
    targets = torch.from_numpy(tokens[:, 1:].copy())
    targets[len(numbers) :] = NOT_A_TARGET
    if is_target is not None:
        targets[torch.from_numpy(~is_target)] = NOT_A_TARGET
    if device.type == "cuda":  # pinned, so that the copy does not stop the host
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
    batches = []
    for first in range(0, num_sequences, settings.batch.micro_batch_size_per_gpu):
        rows = slice(first, min(first + settings.batch.micro_batch_size_per_gpu, num_sequences))
        num_target_tokens = windows.num_target_tokens(numbers[rows])
        batches.append(MicroBatch(inputs[rows], targets[rows], num_target_tokens, loss_divisor))
    return batches
