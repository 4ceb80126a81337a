"""What ranks owe each other before the first step: the same weights, and random numbers of their own."""

from __future__ import annotations

import pytest
import torch

from testbed import distributed


def digests_of(monkeypatch, *ranks: dict[str, torch.Tensor]) -> list[str]:
    """What each rank would send; the last one then checks against all."""
    sent: list[str] = []
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "gather_objects", lambda mine: sent.append(mine) or list(sent))
    for tensors in ranks:
        distributed.check_identical(tensors, "initial weights")
    return sent


def test_ranks_with_the_same_weights_may_train(monkeypatch):
    first, second = digests_of(monkeypatch, {"wte": torch.ones(3)}, {"wte": torch.ones(3)})
    assert first == second


OTHER = {"a bit": {"wte": torch.tensor([1.0, 1.0, 1.0000001])}, "a name": {"wpe": torch.ones(3)}, "nothing": {}}


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_a_rank_with_other_weights_ends_the_run_with_a_way_out(monkeypatch, other):
    with pytest.raises(distributed.RanksDiffer, match=r"initial weights of rank 1.*--init_from"):
        digests_of(monkeypatch, {"wte": torch.ones(3)}, other)


def test_no_two_ranks_share_their_dropout():
    seeds = {distributed.seed_of_rank(seed, rank) for seed in range(20) for rank in range(50)}
    assert len(seeds) == 1000
    assert distributed.seed_of_rank(42, 3) == distributed.seed_of_rank(42, 3)
