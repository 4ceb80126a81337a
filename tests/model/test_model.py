"""The model is GPT-2: its size, its initialisation, and transformers' numbers in both directions."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.reference import SHAPE, reference_model, some_tokens

from testbed.model.gpt2 import GPT2, from_transformers, to_transformers
from testbed.model.shape import MODEL_SIZES, ModelShape
from testbed.step import NOT_A_TARGET


def test_gpt2_has_exactly_the_published_number_of_parameters():
    assert MODEL_SIZES["gpt2"].num_parameters == 124_439_808
    assert MODEL_SIZES["gpt2-xl"].num_parameters == 1_557_611_200


@pytest.mark.parametrize("name", MODEL_SIZES)
def test_the_counted_parameters_are_those_that_exist(name):
    """The formula against the tensors themselves; the padded rows are not counted."""
    shape = MODEL_SIZES[name]
    with torch.device("meta"):
        model = GPT2(shape)
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.embedding_size
    assert sum(parameter.numel() for parameter in model.parameters()) - padding == shape.num_parameters


def test_the_head_is_the_embedding():
    """A separate head would be 38M more parameters and another model."""
    names = [name for name, _ in GPT2(SHAPE).named_parameters() if "head" in name]
    assert names == []
    model = GPT2(SHAPE)
    model(some_tokens(), some_tokens(1)).backward()
    never_read = sorted(set(range(SHAPE.vocab_size)) - set(some_tokens().flatten().tolist()))
    assert model.wte.weight.grad[never_read].abs().sum() > 0, "rows that are not in the input learn through the head"


def test_weights_from_transformers_give_the_same_logits():
    reference, model = reference_model(), GPT2(SHAPE).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(3.0)  # so large that another GELU or a forgotten bias would show
    model.load_state_dict(from_transformers(reference.state_dict(), SHAPE))
    with torch.no_grad():
        logits, expected = model(some_tokens()), reference(some_tokens()).logits
    assert logits.shape == expected.shape, "the padded vocabulary does not show"
    assert torch.allclose(logits, expected, atol=1e-4)


def test_weights_to_transformers_give_the_same_logits():
    model, reference = GPT2(SHAPE).eval(), reference_model()
    missing = reference.load_state_dict(to_transformers(model.state_dict(), SHAPE), strict=False)
    assert missing.unexpected_keys == []
    assert missing.missing_keys in ([], ["lm_head.weight"]), "the tied head is not stored twice"
    with torch.no_grad():
        assert torch.allclose(model(some_tokens()), reference(some_tokens()).logits, atol=1e-4)


def test_gradients_are_those_of_transformers():
    """Through the whole model, the embedding's two uses added up; padded rows get exactly nothing."""
    reference, model = reference_model().train(), GPT2(SHAPE).train()
    model.load_state_dict(from_transformers(reference.state_dict(), SHAPE))
    inputs, targets = some_tokens(), some_tokens(1)
    model(inputs, targets).backward()
    logits = reference(inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    expected = from_transformers({name: p.grad for name, p in reference.named_parameters()}, SHAPE)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-4, rtol=1e-4), name
    assert model.wte.weight.grad[SHAPE.vocab_size :].abs().max() == 0


def test_the_loss_is_the_sum_over_real_targets_and_the_real_vocabulary():
    model = GPT2(SHAPE).eval()
    inputs, targets = some_tokens(), some_tokens(1)
    targets[0, 5:] = NOT_A_TARGET
    with torch.no_grad():
        probabilities = model(inputs).double().log_softmax(-1)
        loss = model(inputs, targets)
    picked = probabilities.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert loss.item() == pytest.approx(-picked[targets != NOT_A_TARGET].sum().item(), rel=1e-5)


@pytest.mark.launches
@pytest.mark.slow
def test_a_compiled_head_gives_the_same_loss_and_gradients():
    """LayerNorm, padded head and cross entropy as one region; generation does not go through it."""
    torch.manual_seed(0)
    plain = GPT2(SHAPE).train()
    compiled = copy.deepcopy(plain)
    compiled.compile_head()
    inputs, targets = some_tokens(), some_tokens(1)
    targets[0, 5:] = NOT_A_TARGET
    losses = [model(inputs, targets) for model in (plain, compiled)]
    for loss in losses:
        (loss / 20).backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=5e-6)
    for (name, expected), found in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, rtol=0, atol=5e-6), name
    assert torch.equal(plain.eval()(inputs), compiled.eval()(inputs))


def test_initialisation_is_gpt2s():
    shape = ModelShape(num_layers=8, num_heads=4, embedding_size=128, vocab_size=1000, max_position_embeddings=64)
    torch.manual_seed(0)
    model = GPT2(shape)
    assert model.wte.weight[: shape.vocab_size].std().item() == pytest.approx(0.02, rel=0.02)
    assert model.h["0"].attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.02)
    scaled = 0.02 / math.sqrt(2 * shape.num_layers)
    assert model.h["3"].attn.c_proj.weight.std().item() == pytest.approx(scaled, rel=0.02)
    assert model.h["3"].mlp.c_proj.weight.std().item() == pytest.approx(scaled, rel=0.02)
    assert model.h["0"].mlp.c_fc.bias.abs().max() == 0 and (model.ln_f.weight == 1).all()
    first_loss = model(torch.zeros(1, 64, dtype=torch.long), torch.ones(1, 64, dtype=torch.long)) / 64
    assert first_loss.item() == pytest.approx(math.log(shape.vocab_size), abs=0.5)


def test_no_token_sees_the_future():
    model = GPT2(SHAPE).eval()
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % SHAPE.vocab_size
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, :12], model(changed)[:, :12])
        assert not torch.equal(model(tokens)[:, 12:], model(changed)[:, 12:])


def test_dropout_acts_in_training_only_and_where_gpt2_has_it():
    """On the embedding, the attention weights, and both branches of each block."""
    model = GPT2(SHAPE, dropout=0.5)
    calls = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, inputs, output: calls.append(module.p))
    model.train()(some_tokens())
    assert calls == [0.5] * (1 + 2 * SHAPE.num_layers)
    assert all(block.attn.dropout == 0.5 for block in model.h.values())
    tokens = some_tokens()
    assert not torch.equal(model.train()(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


def test_weights_of_another_model_are_refused():
    weights = reference_model().state_dict()
    del weights["transformer.h.1.ln_1.bias"]
    with pytest.raises(ValueError, match=r"h\.1\.ln_1\.bias is missing"):
        from_transformers(weights, SHAPE)
