"""Check BLEU: what is scored, the score against sacrebleu's own function, and a model trained on pairs."""

from __future__ import annotations

import hashlib
import itertools
import json
import random

import pytest
import sacrebleu
import torch
from support.data_fixtures import run_program as run_of_root
from support.programs import TINY_RUN

from testbed.data.pairs import read_pairs
from testbed.data.tokenizer_file import train_bpe
from testbed.inference import bleu
from testbed.inference.bleu import answer_text, score_pairs
from testbed.inference.loading import load_model, tokenizer_of
from testbed.metrics.file import read_metrics
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

ANSWERS = {
    "one": "the cat sat on the mat today",
    "two": "there is a dog in the garden of the house",
    "three": "",
    "four": "nothing of it",
}
REFERENCES = {
    "one": ["the cat sat on the mat", "a cat was sitting on the mat today"],
    "two": ["there is a dog in the garden"],
    "three": ["an answer that does not come", "another one", "a third"],
    "four": ["something else entirely"],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    text = " ".join([*ANSWERS.values(), *itertools.chain(*REFERENCES.values())])
    return train_bpe(iter([text] * 3), 300, tmp_path_factory.mktemp("bpe") / "bpe_300.json")


@pytest.fixture
def answering(tokenizer, monkeypatch):
    """A model that gives ANSWERS: what it was asked and how is kept."""
    asked = []

    def generate(model, prompts, max_new_tokens, stop_id):
        asked.append((prompts, max_new_tokens, stop_id))
        answers = [tokenizer.encode(ANSWERS[tokenizer.decode(prompt).removesuffix("\n")]) for prompt in prompts]
        # ended by end-of-text, by it and what an engine may have added, or by the number of tokens
        endings = itertools.cycle([[stop_id], [stop_id, 65, stop_id], []])
        return [[*answer, *ending] for answer, ending in zip(answers, endings, strict=False)]

    monkeypatch.setattr(bleu, "generate", generate)
    return asked


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT2(ModelShape(1, 2, 8, 384, 32)).eval()


def write_pairs(path, prompts):
    lines = [{"prompt": prompt, "reference": REFERENCES[prompt]} for prompt in prompts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_score_is_sacrebleus_over_all_references(tmp_path, answering, tokenizer, model):
    found = score_pairs(model, tokenizer, write_pairs(tmp_path / "pairs.jsonl", ANSWERS), 12)
    # as many streams as the longest list, by sacrebleu's rule for pairs that have fewer
    streams = [
        [REFERENCES["one"][0], REFERENCES["two"][0], REFERENCES["three"][0], REFERENCES["four"][0]],
        [REFERENCES["one"][1], None, REFERENCES["three"][1], None],
        [None, None, REFERENCES["three"][2], None],
    ]
    expected = sacrebleu.corpus_bleu(list(ANSWERS.values()), streams).score
    assert 10 < expected < 90, "the case tests something"
    version = sacrebleu.__version__
    assert found == {
        "pairs": 4,
        "score": pytest.approx(expected, abs=1e-9),
        "signature": f"nrefs:var|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}",
        "max_new_tokens": 12,
        "num_empty": 1,
    }
    ((prompts, max_new_tokens, stop_id),) = answering
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["one\n", "two\n", "three\n", "four\n"]
    assert (max_new_tokens, stop_id) == (12, tokenizer.end_of_text_id)


def test_an_answer_ends_at_end_of_text_and_has_only_ids_of_the_tokenizer(tokenizer):
    ids = tokenizer.encode("the cat")
    end = tokenizer.end_of_text_id
    assert answer_text(tokenizer, [*ids, end, *ids]) == "the cat"
    assert answer_text(tokenizer, [*ids, 350]) == "the cat", "a model's vocabulary may be larger"
    assert answer_text(tokenizer, [end]) == "" and answer_text(tokenizer, []) == ""


def test_what_cannot_be_scored_is_one_sentence(tmp_path, tokenizer, model):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match=f"^--bleu {path} holds no pairs"):
        score_pairs(model, tokenizer, path, 4)
    path.write_text('{"prompt": "a", "reference": "b"}\n{"prompt": "c"}\n')
    with pytest.raises(ValueError, match=f'^--bleu {path} line 2 has no "reference"'):
        score_pairs(model, tokenizer, path, 4)
    long = {"prompt": "x " * 20, "reference": "b"}
    path.write_text(f'{{"prompt": "a", "reference": "b"}}\n{json.dumps(long)}\n')
    with pytest.raises(ValueError, match=r"the prompt of pair 2 has \d+ tokens, which with 4 new ones are more"):
        score_pairs(model, tokenizer, path, 4)
    path.write_text('{"prompt": "a", "reference": "b"}\n')


ENGLISH = ["red", "blue", "old", "new", "big", "small"], ["cat", "dog", "bird", "fish", "horse", "cow"]
GERMAN = ["rot", "blau", "alt", "neu", "gross", "klein"], ["katze", "hund", "vogel", "fisch", "pferd", "kuh"]


@pytest.mark.launches
@pytest.mark.slow
def test_a_model_that_was_trained_on_pairs_translates_what_it_has_not_seen(ranks, tmp_path):
    """From the text to the score through the programs, in seconds: a tiny model learns a dictionary of 12 words."""
    words = [list(zip(*sides, strict=True)) for sides in zip(ENGLISH, GERMAN, strict=True)]
    phrases = list(itertools.product(words[0], words[1], words[0], words[1]))
    random.Random(0).shuffle(phrases)
    pairs = [
        {"prompt": " ".join(english for english, _ in phrase), "reference": " ".join(german for _, german in phrase)}
        for phrase in phrases
    ]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    done = run_of_root("preprocess_small.py", "--pairs", "all.jsonl", "--tokenizer", "bpe:339", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    flags = "--train_data_path train_pairs.bin --val_data_path val_pairs.bin --global_batch_size 32 --epochs 100 "
    flags += "--micro_batch_size_per_gpu 16 --seq_length 12 --max_train_steps 150 --learning_rate 0.01 "
    flags += "--warmup_steps 10 --sample_tokens 0 --checkpoint_path run"
    done = ranks.run_program([*TINY_RUN, *flags.split()], tmp_path / "rank", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "fit whole into --seq_length 12" in done.stdout and "of tokens are targets" in done.stdout
    metrics = read_metrics(tmp_path / "run" / "training_metrics.json")
    learned, windows = (
        metrics["data"]["target_tokens_train"],
        metrics["training_config"]["dataset_subset_sizes"]["train"],
    )
    assert 0 < learned < windows * 12
    content = (tmp_path / "train_pairs.bin").read_bytes() + (tmp_path / "train_pairs.targets.bin").read_bytes()
    assert metrics["training_config"]["dataset_sha256"]["train"] == hashlib.sha256(content).hexdigest()
    assert metrics["evaluations"][-1]["num_target_tokens"] == metrics["data"]["target_tokens_val"]

    trained = load_model(tmp_path / "run")
    tokenizer = tokenizer_of(tmp_path / "run")
    torch.manual_seed(0)
    untrained = GPT2(trained.shape).eval()
    held_out = tmp_path / "val_pairs.jsonl"
    scores = [score_pairs(model, tokenizer, held_out, 12) for model in (untrained, trained)]
    assert scores[0]["score"] < 5 and scores[1]["score"] > 80, scores
    assert scores[1]["pairs"] == len(list(read_pairs(held_out))) > 100
    assert scores[1]["num_empty"] == 0
