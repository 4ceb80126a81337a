"""Multiple choice: likelihoods against a plain computation, accuracies, intervals, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from support.evaluate_cases import model_of
from support.programs import REPOSITORY

from testbed.data.tokenizer_file import train_bpe
from testbed.errors import InputError
from testbed.inference import multiple_choice as module
from testbed.inference.multiple_choice import ending_nats, multiple_choice
from testbed.inference.questions import read_questions
from testbed.inference.report import read_inference


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    return train_bpe(iter([text]), 300, tmp_path_factory.mktemp("choice") / "bpe_300.json")


def question(context: str, endings: list[str], label: int | str) -> dict:
    return {"ind": 3, "activity_label": "x", "ctx": context, "endings": endings, "label": label}


QUESTIONS = [
    question("A model reads", ["a file.", "the tokens of a long file and learns.", "x", "much"], 1),
    question("The run", ["ends", "goes on with another step"], "0"),
    question("word " * 80, ["one more word", "none"], 1),  # longer than the model's positions
]


def written(folder, lines) -> str:
    path = folder / "choice.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return str(path)


def plain_nats(model, tokenizer, context: str, ending: str, positions: int) -> tuple[float, int]:
    """One row at a time, by log_softmax in float64."""
    own = tokenizer.encode(" " + ending)
    ids = (tokenizer.encode(context) + own)[-(positions + 1) :]
    with torch.no_grad():
        logp = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return -sum(float(logp[at - 1, ids[at]]) for at in range(len(ids) - len(own), len(ids))), len(own)


@pytest.mark.parametrize("logits_bytes", [1, 10**9])
def test_likelihoods_are_those_of_one_row_at_a_time(tmp_path, tokenizer, monkeypatch, logits_bytes):
    monkeypatch.setattr(module, "LOGITS_BYTES", logits_bytes)  # one row at a time, and all that have room
    model, positions = model_of(), 64
    questions = read_questions(written(tmp_path, QUESTIONS), tokenizer, positions)
    counted: list[int] = []
    found = ending_nats(model, questions, counted.append)
    assert sum(counted) == 8
    for of, line in zip(found, QUESTIONS, strict=True):
        expected = [plain_nats(model, tokenizer, line["ctx"], ending, positions)[0] for ending in line["endings"]]
        assert of == pytest.approx(expected, abs=1e-4)


def test_accuracies_by_sum_by_character_and_by_token(tmp_path, tokenizer):
    questions = read_questions(path := written(tmp_path, QUESTIONS[:2]), tokenizer, 64)
    sizes = [[(ending.scored, ending.characters) for ending in each.endings] for each in questions]
    tokens, characters = sizes[0][1]
    assert characters == len(QUESTIONS[0]["endings"][1]) and tokens == len(
        tokenizer.encode(" " + QUESTIONS[0]["endings"][1])
    )
    # the long ending has the most nats and the fewest per character and per token
    nats = [[4.0 * sizes[0][0][1], 2.0 * characters, 1.0, 40.0 * sizes[0][3][1]], [1.0, 2.0 * sizes[1][1][1]]]
    nats[0][2] = 8.0 * sizes[0][2][1]
    found = multiple_choice(path, questions, nats)
    assert found["accuracy"]["by_character"]["value"] == 1 and found["accuracy"]["by_sum"]["value"] == 0.5
    assert found["chance"] == pytest.approx((1 / 4 + 1 / 2) / 2) and found["labels"] == [1, 0]
    low, high = (found["accuracy"]["by_sum"][end] for end in ("low", "high"))
    z, n, p = 1.959964, 2, 0.5  # Wilson's interval
    middle, half = (
        (p + z * z / (2 * n)) / (1 + z * z / n),
        z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n),
    )
    assert (low, high) == (pytest.approx(middle - half, abs=1e-5), pytest.approx(middle + half, abs=1e-5))
    with pytest.raises(ArithmeticError):
        multiple_choice(path, questions, [[math.nan] * 4, [1.0, 2.0]])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "is no"),
        ({"ctx": " ", "endings": ["a", "b"], "label": 0}, 'has no text as "ctx"'),
        ({"ctx": "a", "endings": ["a"], "label": 0}, "has no two texts or more"),
        ({"ctx": "a", "endings": ["a", "b"], "label": 2}, "is the place of none"),
    ],
)
def test_a_line_of_another_form_is_named(tmp_path, tokenizer, line, said):
    path = written(tmp_path, [QUESTIONS[1], line])
    with pytest.raises(InputError, match=f"^--multiple_choice {path} line 2 .*{said}"):
        read_questions(path, tokenizer, 64)


def test_a_file_that_is_missing_or_empty_is_named(tmp_path, tokenizer):
    with pytest.raises(InputError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl", tokenizer, 64)
    with pytest.raises(InputError, match="holds no questions"):
        read_questions(written(tmp_path, []), tokenizer, 64)


def test_the_program_reports_it(files, evaluate, tmp_path):
    path, out = written(tmp_path, QUESTIONS), tmp_path / "out.json"
    code, said, error = evaluate(
        "--checkpoint", "run", "--no-perplexity", "--no-latency", "--multiple_choice", path, "--out", out
    )
    assert code == 0, error
    found = read_inference(out)["multiple_choice"]
    assert found["num_questions"] == 3 and [len(each) for each in found["ending_nats"]] == [4, 2, 2]
    assert "Multiple choice on choice.jsonl: " in said and "3 questions, guessing gives 41.7%" in said
    code, _, error = evaluate(
        "--checkpoint",
        "theirs",
        "--no-perplexity",
        "--no-latency",
        "--multiple_choice",
        path,
        "--out",
        tmp_path / "b.json",
    )
    assert code == 2 and "--multiple_choice: " in error
