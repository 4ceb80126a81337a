"""Score multiple choice as HellaSwag does (Zellers et al. 2019, arXiv:1905.07830): the ending that a model finds
likeliest is its answer.

Each line of the file is {"ctx": TEXT, "endings": [TEXT, ...], "label": N}, as hellaswag_val.jsonl has them; other keys
are not read, and the text is taken as it stands. An ending is scored with a space before it, by the log-likelihood of
its tokens after the context: as it is (`acc` of lm_eval), divided by the ending's characters (its `acc_norm`), or by
its tokens (what llm.c and nanoGPT's descendants call `acc_norm`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from testbed.inference.perplexity import LOGITS_BYTES, token_nats
from testbed.inference.questions import Question
from testbed.io import open_regular
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

WAYS = ("by_sum", "by_character", "by_token")  # of comparing endings


Place = tuple[int, int]  # of an ending: question, and number within it


def ending_nats(
    model: GPT2, questions: Sequence[Question], progress: Callable[[int], Any] = lambda number: None
) -> list[list[float]]:
    """Return minus the log-likelihood of each ending after its context, in nats, by question.

    Args:
        progress: called with the number of endings just read.
    """
    found: dict[Place, float] = {}
    for batch in batches_of(questions, model.shape):
        found |= nats_of_batch(model, questions, batch)
        progress(len(batch))
    return by_question(questions, found)


def batches_of(questions: Sequence[Question], shape: ModelShape) -> list[list[Place]]:
    """Return which endings go through the model together: of neighbouring lengths, the longest first."""
    places = [(at, number) for at, question in enumerate(questions) for number in range(len(question.endings))]
    places.sort(key=lambda place: len(questions[place[0]].endings[place[1]].token_ids))
    batches = []
    while places:
        longest = len(questions[places[-1][0]].endings[places[-1][1]].token_ids)
        most = max(1, LOGITS_BYTES // (longest * shape.padded_vocab_size * 4))
        batches.append(places[-most:])
        places = places[:-most]
    return batches


@torch.no_grad()
def nats_of_batch(model: GPT2, questions: Sequence[Question], batch: Sequence[Place]) -> dict[Place, float]:
    """Return minus the log-likelihoods of these endings. Rows are filled up behind, which causal attention does not
    see.
    """
    model.eval()
    rows = [questions[at].endings[number] for at, number in batch]
    longest = max(len(row.token_ids) for row in rows)
    filled = [[*row.token_ids, *[0] * (longest - len(row.token_ids))] for row in rows]
    ids = torch.tensor(filled, device=model.wte.weight.device)
    found = {}
    for place, row, of_row in zip(batch, rows, token_nats(model, ids), strict=True):
        end = len(row.token_ids) - 1
        found[place] = float(of_row[end - row.scored : end].sum())
    return found


def by_question(questions: Sequence[Question], found: Mapping[Place, float]) -> list[list[float]]:
    return [[found[at, number] for number in range(len(each.endings))] for at, each in enumerate(questions)]


def multiple_choice(path: Path, questions: Sequence[Question], nats: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the `multiple_choice` field of the file: accuracies with their 95 % intervals, and raw scores.

    Raises:
        ArithmeticError: a score is not finite.
    """
    accuracy = accuracies(questions, nats)
    with open_regular(Path(path)) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "name": Path(path).name,
        "sha256": sha256,
        "num_questions": len(questions),
        "chance": float(np.mean([1 / len(question.endings) for question in questions])),
        "accuracy": accuracy,
        "labels": [question.label for question in questions],
        "ending_nats": [list(each) for each in nats],
    }


def accuracies(questions: Sequence[Question], nats: Sequence[Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return the share of right answers by each of WAYS, with its 95 % interval (Wilson 1927).

    Raises:
        ArithmeticError: a score is not finite.
    """
    from scipy import stats  # half a second

    if not all(np.isfinite(each).all() for each in nats):
        raise ArithmeticError("the model's losses are not finite numbers")
    divisors = {
        "by_sum": [[1] * len(question.endings) for question in questions],
        "by_character": [[ending.characters for ending in question.endings] for question in questions],
        "by_token": [[ending.scored for ending in question.endings] for question in questions],
    }
    accuracy = {}
    for way in WAYS:
        answers = [int(np.argmin(np.divide(*pair))) for pair in zip(nats, divisors[way], strict=True)]
        right = sum(answer == question.label for answer, question in zip(answers, questions, strict=True))
        interval = stats.binomtest(right, len(questions)).proportion_ci(method="wilson")
        accuracy[way] = {"value": right / len(questions), "low": float(interval.low), "high": float(interval.high)}
    return accuracy
