"""One global batch per step, cut by data rank: disjoint, complete, and the same for every world size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.settings import stand_in

from testbed.data.token_file import TokenFileWriter, open_token_file
from testbed.data.windows import Windows, longest_pair, num_windows
from testbed.step import NOT_A_TARGET
from testbed.train.batches import TrainingBatches, ValidationBatches

CPU = torch.device("cpu")
SEQUENCE = 8


DEFAULTS = {
    "seq_length": SEQUENCE,
    "global_batch_size": 24,
    "micro_batch_size_per_gpu": 1,
    "data_world_size": 1,
    "steps_per_epoch": 4,
    "last_step": 8,
    "seed": 3,
    "num_workers": 0,
    "max_val_steps": None,
}


def settings_with(**values: int | None) -> SimpleNamespace:
    """Return the settings that data reads."""
    return stand_in(**{**DEFAULTS, **values})


def counting_file(num_windows: int, odd_tokens: int = 5) -> SimpleNamespace:
    """Token i is i, so a window's first token says which window it is; a rest that fills no window follows."""
    tokens = np.arange(num_windows * SEQUENCE + 1 + odd_tokens)
    is_as_it_was = {"check_unchanged": lambda: None}
    return SimpleNamespace(tokens=tokens, path=Path("counting.bin"), targets=None, end_of_text_id=0, **is_as_it_was)


def pairs_file(folder: Path, lengths: list[tuple[int, int]]):
    """Pair i: its prompt holds 100 + i, its reference 200 + i. Lengths of (prompt, reference), without end-of-text."""
    with TokenFileWriter(folder / "pairs.bin", 1000, "bpe:1000", 999, has_targets=True) as writer:
        for number, (prompt, reference) in enumerate(lengths):
            writer.append_document([100 + number] * prompt + [200 + number] * reference, prompt)
    return open_token_file(folder / "pairs.bin")


def windows_in(micro_batches) -> list[int]:
    return [int(row[0]) // SEQUENCE for batch in micro_batches for row in batch.inputs]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_ranks_read_disjoint_shares_that_make_up_the_global_batch(world_size, micro_batch):
    file = counting_file(num_windows=100)  # 4 whole steps of 24, and 4 windows that no step uses
    settings = settings_with(data_world_size=world_size, micro_batch_size_per_gpu=micro_batch)
    reference = TrainingBatches(file, settings_with(), 0, CPU)
    ranks = [TrainingBatches(file, settings, rank, CPU) for rank in range(world_size)]
    for step in range(8):
        shares = [windows_in(rank.of_step(step)) for rank in ranks]
        together = [window for share in shares for window in share]
        assert len(set(together)) == 24, "no sequence twice in a step"
        assert together == windows_in(reference.of_step(step)), "the global batch knows nothing of the world size"
        assert {len(share) for share in shares} == {24 // world_size}


def test_an_epoch_reads_every_window_at_most_once_and_the_next_in_another_order():
    batches = TrainingBatches(counting_file(num_windows=100), settings_with(), 0, CPU)
    epochs = [[w for step in range(first, first + 4) for w in windows_in(batches.of_step(step))] for first in (0, 4)]
    for windows in epochs:
        assert len(windows) == len(set(windows)) == 96
        assert max(windows) < 100
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


def test_targets_are_the_inputs_shifted_by_one():
    for batch in TrainingBatches(counting_file(100), settings_with(), 0, CPU).of_step(0):
        assert torch.equal(batch.targets, batch.inputs + 1)
        assert batch.num_target_tokens == batch.targets.numel()
        assert batch.loss_divisor == 24 * SEQUENCE


def test_the_seed_decides_the_order():
    orders = [
        windows_in(TrainingBatches(counting_file(100), settings_with(seed=seed), 0, CPU).of_step(0))
        for seed in (3, 3, 4)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_reading_ahead_changes_nothing():
    plain = TrainingBatches(counting_file(100), settings_with(), 0, CPU)
    ahead = TrainingBatches(counting_file(100), settings_with(num_workers=3), 0, CPU)
    for step in range(8):
        assert windows_in(plain.of_step(step)) == windows_in(ahead.of_step(step))
    ahead.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_windows", [1, 23, 24, 25, 61])
def test_validation_reads_every_window_once_in_file_order(world_size, num_windows):
    """Also the partial last batch; what fills a rank's share up has no targets, so it does not count."""
    settings = settings_with(data_world_size=world_size, micro_batch_size_per_gpu=2)
    ranks = [ValidationBatches(counting_file(num_windows), settings, rank, CPU) for rank in range(world_size)]
    seen = []
    for index in range(len(ranks[0])):
        of_ranks = [rank.of_batch(index) for rank in ranks]
        assert len({len(micro_batches) for micro_batches in of_ranks}) == 1, "ranks call the model equally often"
        for micro_batches in of_ranks:
            for batch in micro_batches:
                counted = [row for row in range(len(batch.targets)) if (batch.targets[row] != NOT_A_TARGET).any()]
                assert batch.num_target_tokens == int((batch.targets != NOT_A_TARGET).sum()) == len(counted) * SEQUENCE
                seen += [int(batch.inputs[row][0]) // SEQUENCE for row in counted]
    assert seen == list(range(num_windows))


def test_max_val_steps_counts_global_batches():
    batches = ValidationBatches(counting_file(61), settings_with(max_val_steps=2), 0, CPU)
    assert len(batches) == 2 and batches.num_sequences == 48
    assert ValidationBatches(counting_file(61), settings_with(max_val_steps=100), 0, CPU).num_sequences == 61


def test_a_window_holds_one_whole_pair_and_only_its_reference_is_learned(tmp_path):
    """With windows of 8 a pair has 9 tokens at most: the third fills one, the second and the fifth fit into none."""
    file = pairs_file(tmp_path, [(2, 3), (6, 3), (7, 1), (1, 1), (20, 20)])
    settings = settings_with(global_batch_size=3, micro_batch_size_per_gpu=3, max_val_steps=None)
    (batch,) = ValidationBatches(file, settings, 0, CPU).of_batch(0)
    N = NOT_A_TARGET
    assert batch.inputs.tolist() == [
        [100, 100, 200, 200, 200, 999, 999, 999],
        [102, 102, 102, 102, 102, 102, 102, 202],
        [103, 203, 999, 999, 999, 999, 999, 999],
    ]
    assert batch.targets.tolist() == [
        [N, 200, 200, 200, 999, N, N, N],
        [N, N, N, N, N, N, 202, 999],
        [203, 999, N, N, N, N, N, N],
    ]
    assert batch.num_target_tokens == 4 + 2 + 2 and batch.loss_divisor is None
    assert num_windows(file, SEQUENCE) == 3 and num_windows(file, 9) == 4
    assert longest_pair(file) == 40 and num_windows(file, 40) == 5 and num_windows(file, 39) == 4
    assert Windows(file, SEQUENCE).num_target_tokens() == 8
    assert Windows(file, 40).num_target_tokens(np.array([4, 0])) == 21 + 4


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_divides_by_the_targets_of_the_global_batch(tmp_path, world_size):
    """The mean over ranks of (sum of a rank's losses / divisor) is the mean over all targets of the batch."""
    random = np.random.default_rng(0)
    file = pairs_file(tmp_path, [(1, int(length)) for length in random.integers(1, 7, 50)])
    settings = settings_with(global_batch_size=8, data_world_size=world_size, steps_per_epoch=6)
    ranks = [TrainingBatches(file, settings, rank, CPU) for rank in range(world_size)]
    unequal = 0
    for step in range(8):
        of_ranks = [rank.of_step(step) for rank in ranks]
        counts = [sum(batch.num_target_tokens for batch in batches) for batches in of_ranks]
        assert counts == [sum(int((b.targets != NOT_A_TARGET).sum()) for b in batches) for batches in of_ranks]
        assert {b.loss_divisor for batches in of_ranks for b in batches} == {sum(counts) / world_size}
        unequal += len(set(counts)) > 1
    assert world_size == 1 or unequal > 4, "the case tests what it says"
