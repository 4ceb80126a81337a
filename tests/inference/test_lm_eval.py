"""Log-likelihoods of lm-evaluation-harness on a folder of ours are those of --multiple_choice."""

from __future__ import annotations

import json
import random

import pytest
import torch
from support.programs import REPOSITORY

from testbed.checkpoint.weights import write_weights
from testbed.data.tokenizer_file import train_bpe
from testbed.inference.multiple_choice import ending_nats
from testbed.inference.questions import read_questions
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

NUM_QUESTIONS = 50  # of four endings


@pytest.mark.slow
def test_lm_eval_loads_the_folder_and_gives_the_same_log_likelihoods(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # else accelerate, which lm_eval uses, looks for other ranks
        monkeypatch.delenv(name, raising=False)
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    tokenizer = train_bpe(iter([text]), 500, tmp_path / "bpe_500.json")
    torch.manual_seed(0)
    shape = ModelShape(num_layers=2, num_heads=2, embedding_size=64, vocab_size=501, max_position_embeddings=128)
    model, folder = GPT2(shape), tmp_path / "model"
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # else all endings of a length are about equally likely
    name, tokenizer_text = "bpe:501", (tmp_path / "bpe_500.json").read_text(encoding="utf-8")
    write_weights(folder, model.state_dict(), shape, 0.0, tokenizer.end_of_text_id, name, tokenizer_text)

    words, drawn = text.split(), random.Random(0)

    def some(least: int, most: int) -> str:
        first = drawn.randrange(len(words) - most)
        return " ".join(words[first : first + drawn.randint(least, most)])

    rows = [{"ctx": some(5, 20), "endings": [some(2, 8) for _ in range(4)], "label": 0} for _ in range(NUM_QUESTIONS)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    questions = read_questions(tmp_path / "q.jsonl", tokenizer, shape.max_position_embeddings)
    ours = [-nats for of_question in ending_nats(model, questions) for nats in of_question]

    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=8)
    asked = [(row["ctx"], f" {ending}") for row in rows for ending in row["endings"]]
    found = theirs.loglikelihood([Instance("loglikelihood", {}, each, 0) for each in asked])
    assert [value for value, _ in found] == pytest.approx(ours, abs=1e-4)
    assert len(found) == 4 * NUM_QUESTIONS
