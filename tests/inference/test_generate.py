"""Generation: transformers' tokens and logits, the distribution that sampling asks for, refusals."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from scipy import stats
from support.generation_cases import NEW_TOKENS, SHAPE, expected_tokens, our_model, random_prompts, theirs
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from testbed.inference.cached_model import FEW_ROWS, WIDE_BYTES, CachedModel
from testbed.inference.generate import generate, stream
from testbed.inference.kv_cache import KVCache
from testbed.inference.sampling import NOT_A_TOKEN, Sampling, candidates, next_tokens
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape


@pytest.mark.parametrize("max_batch", range(1, 9))
def test_greedy_tokens_are_those_of_transformers(max_batch):
    assert len(set(chain(*expected_tokens()))) > 40, "a model that repeats itself would agree with anything"
    assert generate(our_model(), random_prompts(), NEW_TOKENS, max_batch=max_batch) == expected_tokens()


def test_generation_ends_behind_the_stop_token_as_transformers_does():
    prompts, stop_id = random_prompts()[:12], Counter(chain(*expected_tokens()[:12])).most_common(1)[0][0]
    ours = generate(our_model(), prompts, NEW_TOKENS, stop_id=stop_id)
    assert ours == [theirs(prompt, NEW_TOKENS, eos_token_id=stop_id) for prompt in prompts]
    ended = [tokens for tokens in ours if len(tokens) < NEW_TOKENS]
    assert ended and all(tokens[-1] == stop_id for tokens in ended)


def test_all_positions_can_be_used_to_the_last():
    prompt = random_prompts()[0]
    new = SHAPE.max_position_embeddings - len(prompt)
    assert generate(our_model(), [prompt], new) == [theirs(prompt, new)]


def test_tokens_stream_one_by_one_and_are_the_same():
    prompt, settings = random_prompts()[1], Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=3)
    tokens = stream(our_model(), prompt, NEW_TOKENS, settings)
    first = next(tokens)
    assert [first, *tokens] == generate(our_model(), [prompt], NEW_TOKENS, settings)[0]


@torch.no_grad()
def test_logits_with_the_cache_are_those_without():
    """Three sequences of unequal lengths, given tokens: every step against the whole prefix read anew."""
    model, generator = our_model(), torch.Generator().manual_seed(5)
    sequences = torch.randint(0, SHAPE.vocab_size, (3, 70), generator=generator)
    begun = [1, 30, 17]
    cache = KVCache(SHAPE, 5, 70, "cpu", torch.float32)
    cache.data.uniform_(-9, 9)  # whatever was there before
    padded = torch.full((3, max(begun)), 299)
    for row, length in enumerate(begun):
        padded[row, :length] = sequences[row, :length]
    logits = CachedModel(model)(padded, cache, 1, begun)
    for step in range(40):
        lengths = [length + step for length in begun]
        whole = torch.stack([model(sequences[row : row + 1, :length])[0, -1] for row, length in enumerate(lengths)])
        assert logits.shape == (3, SHAPE.vocab_size)
        assert torch.allclose(logits, whole, atol=1e-4), f"step {step}: {(logits - whole).abs().max()}"
        new = torch.stack([sequences[row, length] for row, length in enumerate(lengths)]).unsqueeze(1)
        logits = CachedModel(model)(new, cache, 1, [length + 1 for length in lengths])


@torch.no_grad()
def test_bf16_follows_the_plain_forward_pass_in_bf16():
    model = GPT2(SHAPE)
    model.load_state_dict(our_model().state_dict())
    model = model.to(torch.bfloat16).eval()
    (prompt,) = random_prompts(seed=8, number=1, longest=1)
    prompt = prompt * 9
    (tokens,) = generate(model, [prompt], 12)
    ids = torch.tensor([prompt + tokens])
    logits = model(ids)[0, len(prompt) - 1 : -1].float()
    # another order of the same sums may prefer the second of two that bf16 can hardly tell apart
    behind = logits.amax(-1) - logits.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
    assert (behind <= 2**-6 * logits.abs().amax()).all()


def test_every_token_is_read_once(monkeypatch):
    """Reading the prefix again for each token would be (9 + 16) / 2 times as many."""
    read, forward = [], CachedModel.forward
    monkeypatch.setattr(
        CachedModel, "forward", lambda self, ids, *rest: read.append(ids.numel()) or forward(self, ids, *rest)
    )
    generate(our_model(), [list(range(9))], 16)
    assert read == [9] + [1] * 15


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7),
    Sampling(temperature=2.5),
    Sampling(temperature=0.8, top_k=7),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=400),
    Sampling(temperature=1.0, top_p=0.6),
    Sampling(temperature=1.3, top_p=1e-9),
    Sampling(temperature=1.0, top_p=1.0),
    Sampling(temperature=1.2, top_k=20, top_p=0.75),
]


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 33])
def test_a_wide_vocabulary_has_the_same_logits_however_they_are_multiplied(rows, monkeypatch):
    """GPT-2's vocabulary, which is padded: the exchanged product is taken for few rows alone, and gives no padding."""
    model = GPT2(ModelShape(num_layers=1, num_heads=2, embedding_size=192, vocab_size=50257)).eval()
    assert model.wte.weight.nbytes >= WIDE_BYTES and model.shape.padded_vocab_size > 50257
    plain, asked = model.padded_logits, []
    monkeypatch.setattr(model, "padded_logits", lambda x: asked.append(len(x)) or plain(x))
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(2))
    logits = CachedModel(model)._logits(x)
    assert bool(asked) == (rows not in FEW_ROWS)
    assert logits.shape == (rows, 50257) and torch.allclose(logits, plain(x)[:, :50257], atol=1e-5)


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities by transformers' own steps."""
    steps = [TemperatureLogitsWarper(sampling.temperature)]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    for step in steps:
        logits = step(None, logits)
    return logits.softmax(-1)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_what_may_be_drawn_is_what_transformers_keeps(sampling):
    logits = torch.randn(16, 301, generator=torch.Generator().manual_seed(1)) * 3
    probabilities, token_ids = candidates(logits, sampling)
    ours = probabilities / probabilities.sum(-1, keepdim=True)
    if token_ids is not None:
        ours = torch.zeros_like(logits).scatter(1, token_ids, ours)
    expected = warped(logits, sampling)
    assert torch.equal(ours > 0, expected > 0)
    assert torch.allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_each_token_is_drawn_as_often_as_its_probability_says(sampling):
    """Evenly spaced random numbers: each token gets its share of them but for the two at its ends."""
    row = torch.randn(1, 301, generator=torch.Generator().manual_seed(2)) * 3
    number = 20_000
    uniforms = ((np.arange(number) + 0.5) / number).tolist()
    drawn = next_tokens(row.expand(number, -1), [sampling] * number, uniforms)
    shares = torch.bincount(drawn, minlength=301) / number
    assert (shares - warped(row, sampling)[0]).abs().max() <= 2 / number + 1e-6


def test_the_edges_of_the_random_numbers_draw_real_tokens():
    logits = torch.full((1, 301), -math.inf)
    logits[0, 5], logits[0, 300] = 1.0, 1.0
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=10), Sampling(1.0, top_p=0.9)):
        for uniform in (0.0, np.nextafter(0.5, 0), 0.5, np.nextafter(1.0, 0)):
            assert next_tokens(logits, [sampling], [float(uniform)]).item() in (5, 300)


def test_a_low_temperature_is_greedy_and_a_nan_is_no_token():
    logits = torch.randn(3, 301, generator=torch.Generator().manual_seed(3)) * 50
    cold = next_tokens(logits, [Sampling(1e-300)] * 3, [0.0, 0.5, 0.999])
    assert cold.tolist() == logits.argmax(-1).tolist()
    logits[1, 7] = math.nan
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=3)):
        found = next_tokens(logits, [sampling] * 3, [0.1] * 3).tolist()
        assert found[1] == NOT_A_TOKEN and min(found[0], found[2]) >= 0


def test_prompts_are_drawn_independently_and_by_their_seed():
    """4,000 times the same prompt: the first tokens are distributed as the model says."""
    prompt, number = random_prompts()[2], 4_000
    settings = Sampling(temperature=1.0, top_k=6, seed=11)
    drawn = [tokens[0] for tokens in generate(our_model(), [prompt] * number, 1, settings, max_batch=500)]
    with torch.no_grad():
        likeliest, ids = our_model()(torch.tensor([prompt]))[0, -1].double().topk(6)
    expected = likeliest.softmax(-1).numpy() * number
    found = [drawn.count(int(token)) for token in ids]
    assert sum(found) == number
    assert stats.chisquare(found, expected).pvalue > 1e-3, (found, expected)
    again = generate(our_model(), [prompt] * 20, 1, settings)
    later = generate(our_model(), [prompt] * 20, 1, dataclasses.replace(settings, seed=12))
    assert [tokens[0] for tokens in again] == drawn[:20]
    assert [tokens[0] for tokens in later] == drawn[1:21]


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 97, {}, "97 tokens of prompt and 4 new ones are 101, more than the 96 positions"),
        ([1] * 93, {}, "are 97, more than the 96 positions of the model"),
        ([1, 301], {}, "token id 301, but the model knows 0 to 300"),
        ([-1], {}, "token id -1"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
        ([1], {"max_batch": 0}, "max_batch 0 must be at least 1"),
    ],
)
def test_what_cannot_be_generated_is_said_in_a_sentence(prompt, options, says):
    options = {"max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=says) as caught:
        generate(our_model(), [[1, 2], prompt], **options)
    assert "\n" not in str(caught.value)
    if "max_batch" not in options:
        with pytest.raises(ValueError, match=says):
            stream(our_model(), prompt, **options)  # at the call, not at the first token


def test_a_way_of_sampling_that_is_none_is_refused():
    wrong = {"temperature": (-0.1, math.nan, math.inf), "top_k": (0,), "top_p": (0.0, 1.5)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name} {value} must be"):
                Sampling(**{name: value})


def test_nothing_to_do_is_done():
    assert generate(our_model(), [], 5) == []


def test_the_cache_counts_its_bytes():
    cache = KVCache(SHAPE, num_slots=5, max_length=70, device="cpu", dtype=torch.bfloat16)
    assert cache.num_bytes == 3 * 2 * 5 * 48 * 70 * 2  # layers, keys and values, slots, channels, positions, bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_writes_the_same():
    model = GPT2(SHAPE)
    model.load_state_dict(our_model().state_dict())
    assert generate(model.to("cuda").eval(), random_prompts(), NEW_TOKENS) == expected_tokens()
