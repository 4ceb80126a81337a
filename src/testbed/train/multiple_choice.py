"""Answer questions of several endings during training, for --eval_multiple_choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from testbed.config.settings import CheckedRun, RunSettings
from testbed.data.tokenizer_file import load_tokenizer
from testbed.errors import InputError
from testbed.inference.multiple_choice import accuracies, ending_nats
from testbed.inference.questions import Question, read_questions
from testbed.model.gpt2 import GPT2

FLAG = "--eval_multiple_choice"


def questions_of(checked: CheckedRun, tokenizer_text: str | None) -> list[Question]:
    """Return the questions that the flag names, in the tokens of the run's data. Empty: it names none.

    Args:
        tokenizer_text: what the BPE's file holds; None: the data's tokenizer is GPT-2's.

    Raises:
        InputError: one sentence that begins with the flag: the file or the tokenizer cannot be read.
    """
    path, data = checked.settings.training.eval_multiple_choice, checked.train_file
    if path is None:
        return []
    if data.tokenizer is None:
        raise InputError(
            f"{FLAG} {path} is text, and {data.path} names no tokenizer; make the token files with preprocess_small.py"
        )
    try:
        tokenizer = load_tokenizer(data.tokenizer, data.tokenizer_file, tokenizer_text)
    except (OSError, InputError) as error:
        raise InputError(f"{FLAG} {path} needs the tokenizer of {data.path}: {error}") from None
    return read_questions(Path(path), tokenizer, checked.settings.shape.max_position_embeddings, FLAG)


class _Interrupted(Exception):
    """The run is asked to stop."""


def answer(
    state_dict: dict[str, torch.Tensor],
    settings: RunSettings,
    questions: list[Question],
    device: torch.device,
    is_stopped: Callable[[], object] = lambda: False,
) -> dict[str, Any] | None:
    """Return the `multiple_choice` field of a validation: the accuracy of a model with these weights, in fp32.

    PyTorch's generators are left as they were: the run trains as it would without.

    Args:
        is_stopped: asked after each batch; once it is true, nothing is returned.
    """

    def look(_: int) -> None:
        if is_stopped():
            raise _Interrupted

    start_s = time.perf_counter()
    with torch.random.fork_rng(devices=[]):  # the initial weights are drawn
        model = GPT2(settings.shape)
    model.load_state_dict(state_dict)
    try:
        found = accuracies(questions, ending_nats(model.to(device), questions, look))
    except _Interrupted:
        return None
    return {"num_questions": len(questions), "accuracy": found, "seconds": time.perf_counter() - start_s}


def in_words(found: dict[str, Any]) -> str:
    """Return what a validation's line says of it."""
    share = found["accuracy"]["by_token"]
    return (
        f"multiple choice {share['value']:.1%} right, 95 % interval {share['low']:.1%} to {share['high']:.1%} "
        f"({found['num_questions']:,} questions, {found['seconds']:.1f} s)"
    )
