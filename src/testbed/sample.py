"""A sample of what the trained model writes, at the end of a run."""

from __future__ import annotations

import time

import torch

from testbed.inference.generate import generate
from testbed.model import GPT2
from testbed.settings import RunSettings
from testbed.token_file import TokenFile
from testbed.tokenizer import load_tokenizer


def sample_text(
    state_dict: dict[str, torch.Tensor], settings: RunSettings, token_file: TokenFile
) -> tuple[dict | None, str]:
    """Continue --sample_prompt with the trained weights.

    Returns:
        The `sample` field of training_metrics.json (None without a tokenizer), and a line for the screen.
    """
    if settings.sample_tokens == 0:
        return None, ""
    try:
        tokenizer = load_tokenizer(token_file.tokenizer, token_file.tokenizer_file)
    except (OSError, ValueError) as error:
        return None, f"no sample: {error}"
    model = GPT2(settings.shape)
    model.load_state_dict(state_dict)
    prompt = tokenizer.encode(settings.sample_prompt) or [tokenizer.end_of_text_id]
    start_s = time.perf_counter()
    ids = generate(model, prompt, settings.sample_tokens, seed=settings.seed)
    seconds = time.perf_counter() - start_s
    # a vocabulary may be larger than the tokenizer's: such ids mean nothing
    text = tokenizer.decode(token for token in ids if token < tokenizer.vocab_size)
    shown = "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)
    sample = {"prompt": settings.sample_prompt, "text": text, "num_tokens": len(ids), "seconds": seconds}
    return sample, f"sample: {settings.sample_prompt}{shown}"
