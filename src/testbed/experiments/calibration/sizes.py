"""Sizes that a calibration measures. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from testbed.experiments.calibration.work import Setting
from testbed.model.shape import ModelShape

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of each operation, as the functions of operations.py take them."""

    products: tuple[tuple[int, int, int], ...]  # tokens, inputs, outputs
    attention: tuple[tuple[int, int, int, int], ...]  # batch, heads, length, head_dim
    elementwise: tuple[tuple[int, int], ...]  # rows, width
    logits: tuple[tuple[int, int], ...]  # tokens, vocabulary
    models: tuple[tuple[int, int, int, int], ...]  # layers, heads, hidden, vocabulary: of the optimizer
    copies: tuple[int, ...]
    messages: tuple[int, ...]  # bytes, of the collectives
    settings: tuple[Setting, ...]  # of whole steps
    small_layers: tuple[int, int] = (1, 5)

    @property
    def shapes(self) -> list[ModelShape]:
        return [ModelShape(*each, max_position_embeddings=128) for each in self.models]


def _layers(widths: tuple[int, ...], tokens: tuple[int, ...], heads: tuple[tuple[int, int, int], ...]) -> Any:
    """Return the linear layers of GPT-2's blocks of some widths, and some heads."""
    blocks = [(n, a * c, b * c) for n in tokens for c in widths for a, b in ((1, 3), (1, 1), (1, 4), (4, 1))]
    return (*blocks, *heads)


def _setting(layers: int, hidden: int, vocab: int, seq_length: int, micro: int, accumulation: int) -> Setting:
    return Setting(
        layers=layers,
        heads=max(2, hidden // (64 if hidden >= 512 else 32)),
        hidden=hidden,
        vocab=vocab,
        seq_length=seq_length,
        micro_batch=micro,
        accumulation=accumulation,
    )


# Of whole steps depth, width, batch and accumulation each differ between some two, else no factor could be told from
# another. Four micro batches, as interleaved pipelines on two ranks need them.
CPU = Sizes(
    products=_layers(
        (64, 128, 256),
        (128, 512, 2048),
        ((256, 64, 8192), (1024, 128, 8192), (512, 256, 4096), (256, 512, 2048)),
    ),
    attention=((4, 4, 64, 16), (4, 4, 128, 32), (2, 4, 256, 32), (2, 4, 256, 64), (1, 4, 512, 64), (8, 4, 128, 16)),
    elementwise=((64, 64), (256, 128), (512, 256), (2048, 256), (2048, 1024)),
    logits=((64, 1024), (256, 2048), (512, 8192), (1024, 8192)),
    models=((1, 2, 64, 1024), (2, 4, 128, 4096), (4, 4, 128, 16384), (4, 8, 256, 16384)),
    copies=(2**12, 2**16, 2**20, 2**23),
    messages=(KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    settings=(
        _setting(2, 128, 8192, 128, 2, 1),
        _setting(6, 128, 2048, 128, 1, 4),
        _setting(2, 256, 4096, 64, 4, 4),
        _setting(6, 64, 8192, 64, 4, 4),
        _setting(3, 128, 4096, 128, 8, 1),
    ),
)
GPU = Sizes(
    products=_layers(
        (768, 1024, 1600, 2560, 4096),
        (1024, 4096, 16384),
        ((4096, 768, 50304), (8192, 1600, 50304), (16384, 4096, 50304)),
    ),
    attention=((8, 12, 512, 64), (8, 12, 1024, 64), (4, 12, 2048, 64), (4, 32, 2048, 128), (2, 32, 4096, 128)),
    elementwise=((1024, 768), (4096, 768), (16384, 1600), (16384, 4096)),
    logits=((1024, 50304), (8192, 50304)),
    models=((2, 12, 768, 50304), (12, 12, 768, 50304), (12, 16, 2048, 50304)),
    copies=(2**16, 2**20, 2**24, 2**28),
    messages=(KIB, 16 * KIB, 256 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB),
    settings=(
        _setting(12, 768, 50304, 1024, 2, 4),
        _setting(12, 768, 50304, 1024, 8, 4),
        _setting(6, 1024, 50304, 1024, 4, 4),
        _setting(24, 1024, 50304, 512, 4, 4),
    ),
)
QUICK = Sizes(
    products=_layers((32, 64), (64, 256), ((64, 32, 512),)),
    attention=((2, 2, 32, 16), (2, 2, 64, 16)),
    elementwise=((64, 32), (256, 64)),
    logits=((64, 512), (256, 512)),
    models=((1, 2, 32, 512), (2, 2, 64, 512)),
    copies=(2**12, 2**16),
    messages=(KIB, 64 * KIB),
    settings=(_setting(2, 64, 1024, 32, 1, 4), _setting(4, 64, 1024, 32, 2, 4)),
)
BY_NAME = {"cpu": CPU, "cuda": GPU, "quick": QUICK}
