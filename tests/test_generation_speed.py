"""Generation is as fast as it is said to be: with one thread, arms alternating, the bound of the interval counts."""

from __future__ import annotations

import pytest
import torch

from testbed.analysis.statistics import compare
from testbed.inference.peers import Arms, against_recomputing, against_transformers
from testbed.model import GPT2
from testbed.model_shape import ModelShape

pytestmark = pytest.mark.alone
NANO = ModelShape(num_layers=4, num_heads=4, embedding_size=128, vocab_size=8192)


@pytest.fixture(scope="module")
def model() -> GPT2:
    torch.manual_seed(0)
    return GPT2(NANO).eval()


def check(arms: Arms, at_least: float) -> None:
    assert arms.tokens[0] == arms.tokens[1] and all(arms.tokens[0])
    ratio = compare(*arms.rates)
    assert ratio.low > at_least, ratio


def test_the_cache_is_five_times_as_fast_as_reading_512_tokens_again(model):
    check(against_recomputing(model, prefix_tokens=512, new_tokens=32, rounds=7), at_least=5)


def test_a_batch_of_8_is_written_faster_than_by_transformers(model):
    check(against_transformers(model, batch=8, prompt_tokens=64, new_tokens=64, rounds=7), at_least=1.2)
