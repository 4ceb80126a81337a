"""Score a model's answers to prompts against references: BLEU, as a corpus score of sacrebleu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU

from testbed.data.tokenizer import Tokenizer
from testbed.inference.generate import generate
from testbed.inference.prompts import prompts_of_pairs
from testbed.model.gpt2 import GPT2


def score_pairs(model: GPT2, tokenizer: Tokenizer, pairs_path: Path, max_new_tokens: int) -> dict[str, Any]:
    """Continue every prompt of a pairs.jsonl until end-of-text or `max_new_tokens`, and score the answers.

    The prompts have the form in which preprocess_small.py --pairs has them learned (pairs.py). Each answer is compared
    with all references of its pair; the tokenization is sacrebleu's own (13a), not the model's.

    Returns:
        "pairs": their number; "score": corpus BLEU, 0 to 100; "signature": sacrebleu's, which says how it was
        computed; "max_new_tokens"; "num_empty": answers without text.

    Raises:
        InputError: one sentence: it is not a pairs.jsonl or empty, or a prompt leaves too little room for an answer.
    """
    pairs, prompts = prompts_of_pairs(tokenizer, pairs_path, max_new_tokens, model.shape.max_position_embeddings)
    answers = generate(model, prompts, max_new_tokens, stop_id=tokenizer.end_of_text_id)
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
    """Return the text of an answer up to end-of-text, without ids that the tokenizer lacks."""
    if tokenizer.end_of_text_id in token_ids:
        token_ids = token_ids[: token_ids.index(tokenizer.end_of_text_id)]
    return tokenizer.decode(token for token in token_ids if tokenizer.has(token))
