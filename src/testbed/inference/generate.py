"""Text from a model, token by token."""

from __future__ import annotations

import torch

from testbed.model import GPT2


@torch.no_grad()
def generate(
    model: GPT2, prompt: list[int], num_tokens: int, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> list[int]:
    """Continue a prompt by sampling from the `top_k` likeliest tokens.

    The whole prefix is read again for each token: fine for a sample after training.

    Returns:
        The new token ids only.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(num_tokens):
        window = torch.tensor([ids[-model.shape.max_position_embeddings :]])
        logits = model(window)[0, -1].float() / temperature
        likeliest, candidates = logits.topk(min(top_k, len(logits)))
        choice = torch.multinomial(likeliest.softmax(-1), 1, generator=generator)
        ids.append(int(candidates[choice]))
    return ids[len(prompt) :]
