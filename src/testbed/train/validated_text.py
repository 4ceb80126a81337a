"""Say a validation loss in units that other tokenizers have too: bits per byte of the text, and perplexity."""

from __future__ import annotations

import math

from testbed.data.tokenizer import gpt2_files_at_hand
from testbed.data.tokenizer_file import load_tokenizer
from testbed.data.windows import Windows
from testbed.inference.perplexity import TokenWindow, scored_bytes


def bytes_per_token(windows: Windows, num_sequences: int, tokenizer_text: str | None) -> float | None:
    """Return how many bytes of text each target of the first `num_sequences` windows stands for, on average.

    Returns None for pairs, for a tokenizer whose tokens have no bytes of their own, and for one whose files are not on
    this machine.

    Args:
        tokenizer_text: what the file of the data's BPE holds; None: the tokenizer is GPT-2's, or its file is missing.
    """
    file, length = windows.token_file, windows.seq_length
    if not num_sequences or file.targets is not None or file.tokenizer is None:
        return None
    if file.tokenizer == "gpt2" and not gpt2_files_at_hand():
        return None
    read = [TokenWindow(number * length, length, length) for number in range(num_sequences)]
    try:
        tokenizer = load_tokenizer(file.tokenizer, file.tokenizer_file, tokenizer_text)
        return scored_bytes(file.tokens, read, tokenizer) / (num_sequences * length) if tokenizer.is_bytewise else None
    except (OSError, ValueError, IndexError):  # IndexError: an id that the tokenizer lacks
        return None


def in_words(loss: float, bytes_of_a_token: float | None) -> str:
    """Return what a validation's line says beside the loss, in nats per token."""
    words = f"perplexity {math.exp(loss):,.1f}" if loss < 50 else "perplexity beyond 1e21"
    return words if not bytes_of_a_token else f"{words}, {loss / math.log(2) / bytes_of_a_token:.4f} bits per byte"
