"""GPT-2 as published (Radford et al. 2019): pre-LayerNorm blocks, learned positions, GELU, tied head.

Module and parameter names are those of `transformers`, so weights go to and fro by name; only the matrices of the
linear layers are transposed (theirs are Conv1D, ours nn.Linear). This file knows nothing of distribution.

Shapes: B micro batch, T sequence, C channels, H heads, D = C // H, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from testbed.errors import InputError
from testbed.model.shape import ModelShape
from testbed.step import NOT_A_TARGET

INIT_STD = 0.02
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
EXPENSIVE_OPERATIONS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
PREFIX = "transformer."  # of every parameter in GPT2LMHeadModel


class Attention(nn.Module):
    """Causal self-attention; query, key and value come from one matrix product."""

    def __init__(self, shape: ModelShape, dropout: float):
        super().__init__()
        self.num_heads = shape.num_heads
        self.dropout = dropout
        self.attend: Callable[..., torch.Tensor] = attend  # another one where the sequence is cut over ranks
        self.c_attn = nn.Linear(shape.embedding_size, 3 * shape.embedding_size)
        self.c_proj = nn.Linear(shape.embedding_size, shape.embedding_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.c_attn(x)
        B, T, _ = heads.shape  # x may be a piece of the sequence, which c_attn completes
        query, key, value = heads.view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, D)
        mixed = self.attend(query, key, value, self.dropout if self.training else 0.0)
        return self.c_proj(mixed.transpose(1, 2).reshape(B, T, -1))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
    """Return causal attention, (B, H, T, D) like each argument."""
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


class MLP(nn.Module):
    """Four times as wide inside."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.approximate = "none" if shape.gelu == "exact" else shape.gelu
        self.c_fc = nn.Linear(shape.embedding_size, 4 * shape.embedding_size)
        self.c_proj = nn.Linear(4 * shape.embedding_size, shape.embedding_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))


class Block(nn.Module):
    """One transformer layer: attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(self, shape: ModelShape, dropout: float, activation_checkpointing: str):
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.embedding_size)
        self.attn = Attention(shape, dropout)
        self.ln_2 = nn.LayerNorm(shape.embedding_size)
        self.mlp = MLP(shape)
        self.dropout = nn.Dropout(dropout)
        self.activation_checkpointing = activation_checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the recomputation lies inside the module: what wraps a block (FSDP) gathers its weights around both passes
        if self.activation_checkpointing == "none" or not torch.is_grad_enabled():
            return self._layer(x)
        if self.activation_checkpointing == "selective":
            return checkpoint(self._layer, x, use_reentrant=False, context_fn=_keep_matrix_products)
        return checkpoint(self._layer, x, use_reentrant=False)

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


def _keep_matrix_products():
    """Keep what is expensive to compute (selective checkpointing); LayerNorms, GELU and sums are computed again."""
    return create_selective_checkpoint_contexts(list(EXPENSIVE_OPERATIONS))


class GPT2(nn.Module):
    """The language model, or with `part` some layers of it. The head is the token embedding itself."""

    padding_bias: torch.Tensor

    def __init__(self, shape: ModelShape, dropout: float = 0.0, activation_checkpointing: str = "none"):
        super().__init__()
        self.shape = shape
        self.label_smoothing = 0.0  # of the loss in training; build_strategy sets it
        # what another takes the place of where the sequence or the vocabulary is cut over ranks
        self.positions: Callable[..., torch.Tensor] = torch.arange
        self.head: Callable[..., torch.Tensor] = F.linear
        self.loss_sum: Callable[..., torch.Tensor] = loss_sum
        self.embeds = self.predicts = True  # whether it begins with token ids and ends in logits
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.embedding_size)
        self.wpe = nn.Embedding(shape.max_position_embeddings, shape.embedding_size)
        self.drop = nn.Dropout(dropout)
        blocks = (Block(shape, dropout, activation_checkpointing) for _ in range(shape.num_layers))
        self.h = nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        self.ln_f = nn.LayerNorm(shape.embedding_size)
        # Padded rows must not take part in the softmax. A bias of -inf inside the head's matrix product does that
        # without a copy of the logits, and gives those rows a gradient of exactly zero.
        bias = torch.zeros(shape.padded_vocab_size)
        bias[shape.vocab_size :] = -math.inf
        self.register_buffer("padding_bias", bias, persistent=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Initialise as GPT-2: N(0, 0.02), projections into the residual stream scaled by 1/sqrt(2 x layers)."""
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
        """Return logits, or the sum of the losses.

        Args:
            inputs: (B, T) int64 token ids.
            targets: (B, T) int64; NOT_A_TARGET where nothing is to be predicted.

        Returns:
            Without targets (B, T, V) logits; with targets the sum of the token losses in nats, 0-dim float32.
        """
        if targets is None:
            return self.run_layers(inputs)[..., : self.shape.vocab_size]
        return self.loss_of_hidden(self.run_blocks(inputs), targets)

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, T, padded V) logits of (B, T) token ids; a part may begin or end with (B, T, C) activations."""
        x = self.run_blocks(x)
        return self.padded_logits(self.ln_f(x)) if self.predicts else x

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last block's (B, T, C) for (B, T) token ids, or for (B, T, C) activations in a later part."""
        if self.embeds:
            x = self.drop(self.wte(x) + self.wpe(self.positions(x.shape[1], device=x.device)))  # (B, T, C)
        for block in self.h.values():
            x = block(x)
        return x

    def loss_of_hidden(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the token losses for the last block's (B, T, C): final LayerNorm, head, cross entropy."""
        return self.loss_of_logits(self.padded_logits(self.ln_f(x)), targets)

    def loss_of_logits(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the token losses of (B, T, padded V) logits, smoothed in training."""
        smoothing = self.label_smoothing if self.training else 0.0
        return self.loss_sum(logits, targets, self.shape.vocab_size, smoothing)

    @property
    def blocks(self) -> list[Block]:
        """Return the layers that this model has, from the first on."""
        return cast("list[Block]", list(self.h.values()))

    def padded_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, T, padded V) logits; minus infinity where there is no token."""
        is_padded = self.shape.padded_vocab_size != self.shape.vocab_size
        return self.head(x, self.wte.weight, self.padding_bias.to(x.dtype) if is_padded else None)

    def part(self, blocks: Iterable[int], embeds: bool, predicts: bool) -> GPT2:
        """Return some layers as a model of their own, under the same names and with the same parameters."""
        part = copy.copy(self)
        part._modules, part._buffers = dict(self._modules), dict(self._buffers)  # the copy shared these too
        part.embeds, part.predicts = embeds, predicts
        part.h = nn.ModuleDict({str(index): self.h[str(index)] for index in blocks})
        unused = [] if embeds else ["wpe", "drop"]
        unused += [] if predicts else ["ln_f", "padding_bias"]
        unused += [] if embeds or predicts else ["wte"]
        for name in unused:
            part._modules.pop(name, None)
            part._buffers.pop(name, None)
        return part

    def compile_blocks(self) -> None:
        """Compile each block's forward pass; blocks are alike, so the compiler works once. Hooks stay outside.

        A compiled block casts its weights inside its graph (AOTAutograd), once per micro batch, whatever the strategy
        keeps.
        """
        # Under DDP the compiler would cut graphs where a bucket of gradients ends, so that buckets leave during
        # backward, and refuses those that are computed again. Each block is a graph of its own anyway.
        torch._dynamo.config.optimize_ddp = False
        for block in self.h.values():
            block.forward = torch.compile(block.forward)

    def compile_head(self) -> None:
        """Compile the final LayerNorm, the head and the cross entropy as one region, for training steps.

        The compiler fuses the softmax and its backward into fewer passes over the logits. Generation and pipeline
        stages, which want the logits, do not use this region.
        """
        self.loss_of_hidden = torch.compile(self.loss_of_hidden)  # type: ignore[method-assign]  # on purpose


def token_loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross entropies in nats of (B, T, padded V) logits against (B, T) targets, 0-dim float32.

    Padded logits are minus infinity, so they add nothing.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NOT_A_TARGET, reduction="sum")


def loss_sum(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, smoothing: float) -> torch.Tensor:
    """Return the sum of the cross entropies, with label smoothing where it is above zero; 0-dim float32.

    With smoothing e a target t costs (1 - e) (-log p_t) + e mean_v (-log p_v) over the real tokens v. As -log p_v is
    logsumexp(x) - x_v, that is the cross entropy plus e (x_t - mean_v x_v): a sum of logits, without those of padding,
    which are minus infinity.
    """
    loss = token_loss_sum(logits, targets)
    if not smoothing:
        return loss
    is_target = targets != NOT_A_TARGET
    of_target = logits.gather(-1, torch.where(is_target, targets, 0).unsqueeze(-1)).squeeze(-1).float()  # (B, T)
    mean = logits[..., :vocab_size].sum(-1, dtype=torch.float32) / vocab_size
    return loss + smoothing * torch.where(is_target, of_target - mean, 0.0).sum()


def _on_meta(shape: ModelShape) -> GPT2:
    """Return the model without memory: names and shapes only."""
    with torch.device("meta"):
        return GPT2(shape)


def to_transformers(state_dict: dict[str, torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return our weights under the names and in the layout of GPT2LMHeadModel; the tied head is stored once."""
    exported = {}
    for name, tensor in state_dict.items():
        if name == "wte.weight":
            tensor = tensor[: shape.vocab_size]
        exported[PREFIX + name] = (tensor.t() if name.endswith(TRANSPOSED) else tensor).contiguous()
    return exported


def from_transformers(weights: dict[str, torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return the weights of a GPT2LMHeadModel or GPT2Model as a state dict for GPT2.

    Raises:
        InputError: a weight is missing, superfluous or of another shape.
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
            raise InputError(f"the weight {name} is {found or 'missing'}, this model needs {expected.get(name)}")
    return {name: tensor.to(torch.float32).contiguous() for name, tensor in imported.items()}


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@contextlib.contextmanager
def attention_kernel(name: str) -> Iterator[None]:
    """Let attention run in one kernel alone, a key of BACKENDS, or in PyTorch's own choice with "auto".

    It holds for the whole process, recomputation in backward and DataParallel's threads included. A context in each
    layer would cost the host more than the call inside, and threads that enter and leave it would undo each other's.

    The compiler builds the kernel into what it keeps on disk, and would give it to a later run with another kernel: the
    name of the kernel is not in its key. So the key gets it here. Nor is it among the guards of what was compiled in
    this process, so that is dropped where the kernel changes.
    """
    if name == "auto":
        yield
        return
    tag = torch.compiler.config.cache_key_tag
    torch.compiler.config.cache_key_tag = f"{tag} attention={name}"
    try:
        _forget_compiled()
        with sdpa_kernel(BACKENDS[name]):
            yield
    finally:
        torch.compiler.config.cache_key_tag = tag
        _forget_compiled()


def _forget_compiled() -> None:
    """Let what was compiled in this process be compiled again at its next call."""
    compiler = sys.modules.get("torch._dynamo")  # loading it takes seconds, and a reset loads still more of it
    if compiler is not None and compiler.convert_frame.FRAME_COUNTER:
        compiler.reset()
