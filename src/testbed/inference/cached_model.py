"""Run GPT-2's forward pass for generation: each token is read once, its keys and values are kept.

The blocks' own submodules are called, so whatever stands in the place of a linear layer (a quantized one) takes part.

Shapes: R sequences, T new tokens of each, C channels, H heads, D = C // H, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from testbed.inference.kv_cache import KVCache
from testbed.model.gpt2 import GPT2, Block

# The head multiplies a few rows with the whole embedding. Of GPT-2 124M on two cores, 2 to 32 rows took 1.4 to 3 times
# as long as the same product with the factors exchanged; nano's embedding (4 MiB), one row and 64 rows did not.
FEW_ROWS, WIDE_BYTES = range(2, 33), 32 * 2**20


class CachedModel(nn.Module):
    """A GPT2 that continues sequences. It has no weights of its own; `model` trains on as before."""

    def __init__(self, model: GPT2):
        super().__init__()
        self.model = model
        self.shape = model.shape

    def forward(self, ids: torch.Tensor, cache: KVCache, first_slot: int, lengths: Sequence[int]) -> torch.Tensor:
        """Read new tokens of R sequences, which lie in the slots from `first_slot` on, and predict the next ones.

        T == 1 is a decode step: the token is appended to what its slot holds. T > 1 is a prefill: the slot begins
        again, and prompts shorter than T are filled up on the right, with any ids.

        Args:
            ids: (R, T) int64.
            lengths: tokens of each sequence after this call; host integers, so that nothing waits for the device.

        Returns:
            (R, V) logits at the last token of each sequence.
        """
        R, T = ids.shape
        slots = slice(first_slot, first_slot + R)
        last = _on_device([length - 1 for length in lengths], ids.device)  # (R,)
        longest = max(lengths)
        mask = None
        place: tuple[slice | torch.Tensor, ...]
        if T > 1:
            place = (slice(None), slots, slice(None), slice(0, T))
            positions = torch.arange(T, device=ids.device)
        elif min(lengths) == longest:
            place = (slice(None), slots, slice(None), slice(longest - 1, longest))
            positions = last[:1]
        else:
            place = (slice(None), torch.arange(slots.start, slots.stop, device=ids.device), slice(None), last)
            positions = last.unsqueeze(1)
            is_beyond = torch.arange(longest, device=ids.device) > positions  # (R, longest)
            mask = torch.zeros(R, 1, 1, longest, device=ids.device, dtype=cache.data.dtype)
            mask.masked_fill_(is_beyond.view(mask.shape), -torch.inf)
        x = self.model.wte(ids) + self.model.wpe(positions)  # (R, T, C)
        for layer, block in zip(cache.data, self.model.blocks, strict=True):
            query, new = _project(block, x, layer.dtype)
            # an index per sequence puts its own dimension first: (R, 2, H, D)
            layer[place] = new.squeeze(3).transpose(0, 1) if mask is not None else new
            if T > 1:
                mixed = F.scaled_dot_product_attention(query, new[0], new[1], is_causal=True)
            else:
                keys, values = layer[:, slots, :, :longest]  # a view: nothing is copied
                mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            x = x + block.attn.c_proj(mixed.transpose(1, 2).reshape(x.shape).to(x.dtype))
            x = x + block.mlp(block.ln_2(x))
        if T > 1:
            x = x[torch.arange(R, device=ids.device), last]  # before the head: (R, T, V) logits would be gigabytes
        return self._logits(self.model.ln_f(x.view(R, -1)))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """(R, V) of (R, C)."""
        embedding = self.model.wte.weight
        if (
            x.device.type == "cpu"
            and x.dtype == torch.float32
            and len(x) in FEW_ROWS
            and embedding.nbytes >= WIDE_BYTES
        ):
            return (embedding[: self.shape.vocab_size] @ x.t()).t().contiguous()
        return self.model.padded_logits(x)[:, : self.shape.vocab_size]


def _project(block: Block, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query (R, H, T, D), and key and value together (2, R, H, T, D), in the cache's precision."""
    R, T, _ = x.shape
    heads = block.attn.c_attn(block.ln_1(x)).to(dtype).view(R, T, 3, block.attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    return heads[0], heads[1:]


def _on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return integers as an int64 tensor, without waiting for what the device still has to do."""
    return torch.tensor(values).to(device, non_blocking=True)
