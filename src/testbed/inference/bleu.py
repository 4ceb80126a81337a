"""BLEU: how near a model's answers to prompts come to the references, as a corpus score of sacrebleu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU

from testbed.data.tokenizer import Tokenizer
from testbed.inference.generate import generate
from testbed.inference.prompts import prompts_of_pairs
from testbed.inference.sampling import GREEDY, Sampling
from testbed.model.gpt2 import GPT2


def score_pairs(
    model: GPT2,
    tokenizer: Tokenizer,
    pairs_path: Path | str,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    max_batch: int | None = None,
    flag: str = "--bleu",
) -> dict[str, Any]:
    """Have every prompt of a pairs.jsonl continued, until end-of-text or `max_new_tokens`, and score the answers.

    The prompts have the form in which preprocess_small.py --pairs has them learned (pairs.py). Each answer is held
    against all references of its pair; the tokenization is sacrebleu's own (13a), not the model's.

    Args:
        sampling, max_batch: as of `generate`.
        flag: what named the file, for sentences.

    Returns:
        "pairs": their number; "score": corpus BLEU, 0 to 100; "signature": sacrebleu's, which says how it was
        computed; "max_new_tokens"; "num_empty": answers without text.

    Raises:
        ValueError: one sentence: the file is no pairs.jsonl or empty, a prompt leaves too little room for an answer
            (with its place among the pairs), or a setting is out of its range.
    """
    positions = model.shape.max_position_embeddings
    pairs, prompts = prompts_of_pairs(tokenizer, Path(pairs_path), max_new_tokens, positions, flag)
    answers = generate(model, prompts, max_new_tokens, sampling, stop_id=tokenizer.end_of_text_id, max_batch=max_batch)
    texts = [answer_text(tokenizer, answer) for answer in answers]
    metric = BLEU()
    # as sacrebleu wants them: the first references of all pairs, the second ones, ...; None where a pair has no more
    most = max(len(pair.references) for pair in pairs)
    references: Any = [
        [pair.references[n] if n < len(pair.references) else None for pair in pairs] for n in range(most)
    ]
    return {
        "pairs": len(pairs),
        "score": metric.corpus_score(texts, references).score,
        "signature": str(metric.get_signature()),
        "max_new_tokens": max_new_tokens,
        "num_empty": sum(not text.strip() for text in texts),
    }


def answer_text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The text of an answer, up to end-of-text. A model's vocabulary may be larger than the tokenizer's; such ids are
    left out."""
    if tokenizer.end_of_text_id in token_ids:
        token_ids = token_ids[: token_ids.index(tokenizer.end_of_text_id)]
    return tokenizer.decode(token for token in token_ids if token < tokenizer.vocab_size)
