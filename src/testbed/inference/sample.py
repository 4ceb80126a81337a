"""Write a sample with the trained model at the end of a run, and turn new tokens into text while they come."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable, Iterator

import torch

from testbed.config.settings import RunSettings
from testbed.data.token_file import TokenFile
from testbed.data.tokenizer import Tokenizer
from testbed.data.tokenizer_file import load_tokenizer
from testbed.errors import InputError
from testbed.inference.generate import generate
from testbed.inference.sampling import Sampling
from testbed.model.gpt2 import GPT2


def sample_text(
    state_dict: dict[str, torch.Tensor], settings: RunSettings, token_file: TokenFile, tokenizer_text: str | None
) -> tuple[dict | None, str]:
    """Continue --sample_prompt with the trained weights, up to --sample_tokens or to the model's last position.

    Args:
        tokenizer_text: what the BPE's file held when the run began; None: GPT-2's, or it could not be read.

    Returns:
        The `sample` field of training_metrics.json (None where there is none), and a line for the screen.
    """
    if settings.measuring.sample_tokens == 0:
        return None, ""
    try:
        if token_file.tokenizer is None:
            raise InputError(f"{token_file.path} names no tokenizer")
        tokenizer = load_tokenizer(token_file.tokenizer, token_file.tokenizer_file, tokenizer_text)
        prompt, end = tokenizer.encode(settings.measuring.sample_prompt), tokenizer.end_of_text_id
        if not prompt and end is None:
            raise InputError(f"--sample_prompt is empty, and no token of {tokenizer.name} ends the text before it")
        prompt = prompt if end is None else prompt or [end]
        room = settings.shape.max_position_embeddings - len(prompt)
        if room < 1:
            raise InputError(
                f"the {len(prompt)} tokens of --sample_prompt leave none of the "
                f"{settings.shape.max_position_embeddings} positions free"
            )
        model = GPT2(settings.shape)
        model.load_state_dict(state_dict)
        start_s = time.perf_counter()
        new = min(settings.measuring.sample_tokens, room)
        (ids,) = generate(model.eval(), [prompt], new, Sampling(temperature=0.8, top_k=50, seed=settings.training.seed))
        seconds = time.perf_counter() - start_s
    except (OSError, ValueError, ArithmeticError) as error:  # a run is no worse for it
        return None, f"no sample: {error}"
    text = "".join(text_of(ids, tokenizer))
    sample = {"prompt": settings.measuring.sample_prompt, "text": text, "num_tokens": len(ids), "seconds": seconds}
    return sample, f"sample: {settings.measuring.sample_prompt}{text}"


def text_of(token_ids: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of tokens, piece by piece as they come. Together it is `tokenizer.decode` of all of them.

    A token may end inside a character: its bytes then wait for those of the next. Where the text of a token depends on
    its neighbours (WordPiece, Unigram), all of it comes at the end. Ids that the tokenizer lacks mean nothing and are
    left out.
    """
    if not tokenizer.is_bytewise:
        yield tokenizer.decode(token for token in token_ids if tokenizer.has(token))
        return
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in token_ids:
        if tokenizer.has(token) and (piece := decoder.decode(tokenizer.decode_bytes([token]))):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest
