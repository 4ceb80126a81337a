"""Answer questions of several endings during training, for --eval_multiple_choice."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from testbed.config.settings import CheckedRun, RunSettings
from testbed.data.tokenizer_file import load_tokenizer
from testbed.distributed import process_group
from testbed.errors import InputError
from testbed.inference.multiple_choice import Place, accuracies, batches_of, by_question, nats_of_batch
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
    return read_questions(Path(path), tokenizer, checked.settings.data.seq_length, FLAG)


def answer(
    weights: dict[str, torch.Tensor],
    settings: RunSettings,
    questions: list[Question],
    device: torch.device,
    rounds: Callable[[int], Iterable[int]] = range,
    is_stopped: Callable[[], object] = lambda: False,
) -> dict[str, Any] | None:
    """Return the `multiple_choice` field of a validation: the accuracy of a model with these weights, in fp32.

    All ranks call it, and each reads its share of the endings. PyTorch's generators are left as they were: the run
    trains as it would without.

    Args:
        weights: the whole model's on rank 0; the others receive them.
        rounds: yields the numbers of rounds, of how many there are. In each every rank reads one batch.
        is_stopped: asked by all ranks before each round; once it is true, nothing is returned.
    """
    start_s, (rank, world_size) = time.perf_counter(), process_group.place()
    model = _model_on_every_rank(weights, settings, device)
    batches = batches_of(questions, settings.shape)
    mine: dict[Place, float] = {}
    for number in rounds(math.ceil(len(batches) / world_size)):
        if is_stopped():
            return None
        for batch in batches[number * world_size + rank : number * world_size + rank + 1]:  # none in the last round
            mine |= nats_of_batch(model, questions, batch)
    found = {place: nats for of_rank in process_group.gather_objects(mine) for place, nats in of_rank.items()}
    accuracy = accuracies(questions, by_question(questions, found))
    return {"num_questions": len(questions), "accuracy": accuracy, "seconds": time.perf_counter() - start_s}


def _model_on_every_rank(weights: dict[str, torch.Tensor], settings: RunSettings, device: torch.device) -> GPT2:
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=generators), device:  # the initial weights are drawn
        model = GPT2(settings.shape)
    if weights:
        model.load_state_dict(weights)
    process_group.broadcast(model.parameters())
    return model


def in_words(found: dict[str, Any]) -> str:
    """Return what a validation's line says of it."""
    share = found["accuracy"]["by_token"]
    return (
        f"multiple choice {share['value']:.1%} right, 95 % interval {share['low']:.1%} to {share['high']:.1%} "
        f"({found['num_questions']:,} questions, {found['seconds']:.1f} s)"
    )
