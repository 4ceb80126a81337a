"""What ranks owe each other before the first step: the same weights, and random numbers of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.programs import TINY_RUN, data_flags

from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.distributed import average, process_group
from testbed.distributed.launch import Launch
from testbed.distributed.replicas import RanksDiffer
from testbed.model.gpt2 import GPT2
from testbed.train.run import build


def digests_of(monkeypatch, *ranks: dict[str, torch.Tensor]) -> list[str]:
    """What each rank would send; the last one then checks against all."""
    sent: list[str] = []
    monkeypatch.setattr(process_group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(process_group.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(process_group, "gather_objects", lambda mine: sent.append(mine) or list(sent))
    for tensors in ranks:
        process_group.check_identical(tensors, "initial weights")
    return sent


def test_ranks_with_the_same_weights_may_train(monkeypatch):
    first, second = digests_of(monkeypatch, {"wte": torch.ones(3)}, {"wte": torch.ones(3)})
    assert first == second


OTHER = {"a bit": {"wte": torch.tensor([1.0, 1.0, 1.0000001])}, "a name": {"wpe": torch.ones(3)}, "nothing": {}}


@pytest.mark.launches
@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_a_rank_with_other_weights_ends_the_run_with_a_way_out(monkeypatch, other):
    with pytest.raises(RanksDiffer, match=r"initial weights of rank 1.*--init_from"):
        digests_of(monkeypatch, {"wte": torch.ones(3)}, other)


@pytest.mark.parametrize("bucket_bytes", [1, 40, 100, 10**6])
def test_every_tensor_is_averaged_whatever_the_buckets(monkeypatch, bucket_bytes):
    """A group in which each rank holds the same: its mean is half the sum. Sizes below, at and above a bucket's."""
    tensors = [torch.full((size,), float(size)) for size in (3, 10, 1, 25, 7)] + [torch.ones(4, 6).t()]
    expected = [tensor * 0.5 for tensor in tensors]

    def halve(flat, op, group, async_op):
        flat.mul_(0.5)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(average, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(process_group.dist, "all_reduce", halve)
    average.average_(tensors, SimpleNamespace(size=lambda: 2))
    assert all(torch.equal(tensor, mean) for tensor, mean in zip(tensors, expected, strict=True))


def test_the_program_checks_the_weights_and_gives_each_rank_its_dropout(monkeypatch, token_files):
    arguments = [*TINY_RUN, *data_flags(token_files), "--run_type", "baseline"]
    settings = check_run(parse_command_line(arguments), Launch(0, 0, 1, 1)).settings
    checked = []
    monkeypatch.setattr(process_group, "check_identical", lambda tensors, what: checked.append(set(tensors)))
    weights = GPT2(settings.shape).state_dict()
    names, embedding = set(weights), weights["wte.weight"].clone()
    strategy = build(settings, Launch(5, 5, 6, 6), torch.device("cpu"), weights)
    assert checked == [names] and weights == {}, "a rank that trains a part keeps no copy of the whole"
    assert torch.equal(strategy.model.wte.weight, embedding)
    assert torch.initial_seed() == process_group.seed_of_rank(settings.training.seed, 5)


def test_no_two_ranks_share_their_dropout():
    seeds = {process_group.seed_of_rank(seed, rank) for seed in range(20) for rank in range(50)}
    assert len(seeds) == 1000
    assert process_group.seed_of_rank(42, 3) == process_group.seed_of_rank(42, 3)
