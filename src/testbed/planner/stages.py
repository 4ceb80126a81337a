"""Choose each pipeline stage's layers: a cut of the model into consecutive pieces of about equal cost. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.model.shape import ModelShape


@dataclass(frozen=True)
class Stage:
    """Consecutive pieces of the model, from the embedding over the blocks to the head."""

    blocks: range
    embeds: bool  # begins with token ids
    predicts: bool  # ends in logits

    def __str__(self) -> str:
        blocks = f"blocks {self.blocks[0]}-{self.blocks[-1]}" if len(self.blocks) > 1 else ""
        blocks = blocks or (f"block {self.blocks[0]}" if self.blocks else "")
        return " + ".join(part for part in ("embedding" * self.embeds, blocks, "head" * self.predicts) if part)


def balanced_stages(shape: ModelShape, seq_length: int, num_stages: int) -> list[Stage]:
    """Cut embedding, blocks and head so that the most expensive stage is as cheap as can be: all others wait for it."""
    pieces = _cut(piece_costs(shape, seq_length), num_stages)
    return [
        Stage(
            blocks=range(max(first, 1) - 1, min(end, shape.num_layers + 1) - 1),
            embeds=first == 0,
            predicts=end == shape.num_layers + 2,
        )
        for first, end in pieces
    ]


def piece_costs(shape: ModelShape, seq_length: int) -> list[int]:
    """FLOPs per token and forward pass of the embedding (a look-up: next to none), each block, and the head.

    A block: 24 C^2 of its matrix products and, causal, 2 C T of the attention scores. The head: 2 C V.
    """
    channels = shape.embedding_size
    block = 24 * channels**2 + 2 * channels * seq_length
    return [2 * channels, *[block] * shape.num_layers, 2 * channels * shape.padded_vocab_size]


def _cut(costs: list[int], parts: int) -> list[tuple[int, int]]:
    """(first, end) of each part: the smallest possible maximum, and among such cuts the smallest sum of squares."""
    # best[i]: for the first i pieces in the parts so far, (largest cost, sum of squares, where the parts begin)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(parts):
        longer = {}
        for end in range(1, len(costs) + 1):
            candidates = []
            for first, (largest, squares, begins) in best.items():
                if first < end:
                    cost = sum(costs[first:end])
                    candidates.append((max(largest, cost), squares + cost**2, (*begins, first)))
            if candidates:
                longer[end] = min(candidates)
        best = longer
    begins = best[len(costs)][2]
    return list(zip(begins, (*begins[1:], len(costs)), strict=True))
