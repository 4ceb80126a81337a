"""GPT-2 as published (Radford et al. 2019): pre-LayerNorm blocks, learned positions, tanh GELU, tied head.

Module and parameter names are those of `transformers`, so weights go to and fro by name; only the matrices of the
linear layers are transposed (theirs are Conv1D, ours nn.Linear). This file knows nothing of distribution.

Shapes: B micro batch, T sequence, C channels, H heads, D = C // H, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from testbed.model_shape import ModelShape
from testbed.step import NOT_A_TARGET

INIT_STD = 0.02
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
PREFIX = "transformer."  # of every parameter in GPT2LMHeadModel


class Attention(nn.Module):
    """Causal self-attention; query, key and value come from one matrix product."""

    def __init__(self, shape: ModelShape, dropout: float):
        super().__init__()
        self.num_heads = shape.num_heads
        self.dropout = dropout
        self.c_attn = nn.Linear(shape.embedding_size, 3 * shape.embedding_size)
        self.c_proj = nn.Linear(shape.embedding_size, shape.embedding_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # each (B, H, T, D)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Four times as wide inside."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.c_fc = nn.Linear(shape.embedding_size, 4 * shape.embedding_size)
        self.c_proj = nn.Linear(4 * shape.embedding_size, shape.embedding_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer layer: attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(self, shape: ModelShape, dropout: float):
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.embedding_size)
        self.attn = Attention(shape, dropout)
        self.ln_2 = nn.LayerNorm(shape.embedding_size)
        self.mlp = MLP(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT2(nn.Module):
    """The language model. The head is the token embedding itself."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0, use_flash_attention: bool = False):
        super().__init__()
        self.shape = shape
        self.use_flash_attention = use_flash_attention
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.embedding_size)
        self.wpe = nn.Embedding(shape.max_position_embeddings, shape.embedding_size)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(shape, dropout) for _ in range(shape.num_layers))
        self.ln_f = nn.LayerNorm(shape.embedding_size)
        # Padded rows must not take part in the softmax. A bias of -inf inside the head's matrix product does that
        # without a copy of the logits, and gives those rows a gradient of exactly zero.
        bias = torch.zeros(shape.padded_vocab_size)
        bias[shape.vocab_size :] = -math.inf
        self.register_buffer("padding_bias", bias, persistent=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """GPT-2's initialisation: N(0, 0.02), projections into the residual stream scaled by 1/sqrt(2 x layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif ".ln_" in name or name.startswith("ln_"):
                parameter.fill_(1.0)
            else:
                is_residual = name.endswith("c_proj.weight")
                parameter.normal_(0.0, INIT_STD / math.sqrt(2 * self.shape.num_layers) if is_residual else INIT_STD)
        self.wte.weight[self.shape.vocab_size :] = 0.0

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits, or the sum of the losses.

        Args:
            inputs: (B, T) int64 token ids.
            targets: (B, T) int64; NOT_A_TARGET where nothing is to be predicted.

        Returns:
            Without targets (B, T, V) logits; with targets the sum of the token losses in nats, 0-dim float32.
        """
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.drop(self.wte(inputs) + self.wpe(positions))  # (B, T, C)
        if self.use_flash_attention:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                x = self._blocks(x)
        else:
            x = self._blocks(x)
        is_padded = self.shape.padded_vocab_size != self.shape.vocab_size
        logits = F.linear(x, self.wte.weight, self.padding_bias.to(x.dtype) if is_padded else None)  # (B, T, padded V)
        if targets is None:
            return logits[..., : self.shape.vocab_size]
        return F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NOT_A_TARGET, reduction="sum"
        )

    def _blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


def _on_meta(shape: ModelShape) -> GPT2:
    """The model without memory: names and shapes only."""
    with torch.device("meta"):
        return GPT2(shape)


def to_transformers(state_dict: dict[str, torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    """Our weights under the names and in the layout of GPT2LMHeadModel; the tied head is stored once, as theirs is."""
    exported = {}
    for name, tensor in state_dict.items():
        if name == "wte.weight":
            tensor = tensor[: shape.vocab_size]
        exported[PREFIX + name] = (tensor.t() if name.endswith(TRANSPOSED) else tensor).contiguous()
    return exported


def from_transformers(weights: dict[str, torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    """Weights of a GPT2LMHeadModel or GPT2Model as a state dict for GPT2.

    Raises:
        ValueError: a weight is missing, superfluous or of another shape.
    """
    imported = {}
    for name, tensor in weights.items():
        name = name.removeprefix(PREFIX)
        if name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # the tied head, and the causal masks that old files carry
        imported[name] = tensor.t() if name.endswith(TRANSPOSED) else tensor
    expected = {name: tuple(tensor.shape) for name, tensor in _on_meta(shape).state_dict().items()}
    if "wte.weight" in imported and len(imported["wte.weight"]) == shape.vocab_size:
        filling = shape.padded_vocab_size - shape.vocab_size
        imported["wte.weight"] = F.pad(imported["wte.weight"], (0, 0, 0, filling))
    for name in sorted(expected.keys() | imported.keys()):
        found = tuple(imported[name].shape) if name in imported else None
        if found != expected.get(name):
            raise ValueError(f"the weight {name} is {found or 'missing'}, this model needs {expected.get(name)}")
    return {name: tensor.to(torch.float32).contiguous() for name, tensor in imported.items()}
