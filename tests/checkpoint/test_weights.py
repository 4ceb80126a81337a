"""Weights in and out of a folder: ours open in transformers, theirs start a run, damaged ones are refused."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from support.reference import SHAPE, reference_model, some_tokens
from transformers import GPT2LMHeadModel

from testbed.checkpoint.weights import WeightsUnavailable, read_initial_weights, write_weights
from testbed.config.initial_shape import shape_of_folder
from testbed.io import SOURCE
from testbed.model.gpt2 import GPT2


def test_a_folder_saved_by_transformers_starts_a_run(tmp_path):
    reference = reference_model()
    reference.save_pretrained(tmp_path)
    assert shape_of_folder(tmp_path) == SHAPE
    model = GPT2(SHAPE).eval()
    model.load_state_dict(read_initial_weights(str(tmp_path), SHAPE))
    with torch.no_grad():
        assert torch.allclose(model(some_tokens()), reference(some_tokens()).logits, atol=1e-4)


@pytest.mark.parametrize("gelu", ["tanh", "exact"])
def test_our_folder_opens_in_transformers_and_comes_back_bit_for_bit(tmp_path, gelu):
    shape = dataclasses.replace(SHAPE, gelu=gelu)
    model = GPT2(shape).eval()
    write_weights(tmp_path, model.state_dict(), shape, 0.1, end_of_text_id=300, tokenizer="bpe:301")
    assert shape_of_folder(tmp_path) == shape
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert (reference.config.vocab_size, reference.config.eos_token_id) == (301, 300)
    with torch.no_grad():
        assert torch.allclose(model(some_tokens()), reference(some_tokens()).logits, atol=1e-6)
        other = GPT2(dataclasses.replace(SHAPE, gelu="exact" if gelu == "tanh" else "tanh")).eval()
        other.load_state_dict(model.state_dict())
        assert not torch.allclose(other(some_tokens()), reference(some_tokens()).logits, atol=1e-6)
    again = GPT2(SHAPE)
    again.load_state_dict(read_initial_weights(str(tmp_path), SHAPE))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation_function", "relu"),
        ("activation_function", ["gelu_new"]),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("tie_word_embeddings", False),
    ],
)
def test_a_folder_of_a_model_that_computes_otherwise_is_refused(tmp_path, name, value):
    reference_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, name: value}))
    with pytest.raises(ValueError, match=f"--init_from .* its {name} is .*, but this program computes") as caught:
        shape_of_folder(tmp_path)
    assert "\n" not in str(caught.value)
    for same in ({**config, "activation_function": "gelu_pytorch_tanh"}, config):
        file.write_text(json.dumps(same))
        assert shape_of_folder(tmp_path) == SHAPE
    file.write_text(json.dumps({key: config[key] for key in config if key != name}))
    assert shape_of_folder(tmp_path) == SHAPE, "what it does not say is as transformers takes it"


def test_a_truncated_weights_file_is_refused(tmp_path):
    reference_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be used"):
        read_initial_weights(str(tmp_path), SHAPE)


@pytest.mark.launches
@pytest.mark.slow
def test_published_weights_are_read_without_the_warnings_of_libraries(tmp_path):
    """In a new process: transformers imports torchao once."""
    code = "from testbed.inference import load_model; load_model('gpt2')"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=SOURCE)
    assert said.stderr.startswith("Traceback") and said.stderr.splitlines()[-1].startswith(
        "testbed.checkpoint.weights.WeightsUnavailable: gpt2: the published weights could not be fetched"
    ), said.stderr


def test_published_weights_without_a_network_end_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(WeightsUnavailable) as caught:
        read_initial_weights("gpt2", SHAPE)
    assert "--init_from gpt2" in str(caught.value) and "\n" not in str(caught.value)
