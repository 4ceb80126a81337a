"""Choose each pipeline stage's layers: a cut of the model into consecutive pieces of about equal cost. No torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.memory_model.job import DenseModel
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
    """Cut a GPT-2 as `stages_of` cuts any model."""
    return list(stages_of(DenseModel.of_gpt2(shape, seq_length), num_stages))


@functools.cache
def stages_of(model: DenseModel, num_stages: int) -> tuple[Stage, ...]:
    """Cut embedding, blocks and head so that the most expensive stage is as cheap as can be: all others wait for it."""
    pieces = _cut(piece_costs(model), num_stages)
    return tuple(
        Stage(
            blocks=range(max(first, 1) - 1, min(end, model.layers + 1) - 1),
            embeds=first == 0,
            predicts=end == model.layers + 2,
        )
        for first, end in pieces
    )


def stages_of_ranks(stages: Sequence[Stage], ranks: int, schedule: str | None) -> list[list[Stage]]:
    """Return the stages of each pipeline rank: they go round the ranks, and in a zero-bubble schedule's V back."""
    held: list[list[Stage]] = [[] for _ in range(ranks)]
    is_v = schedule == "zero_bubble" and len(stages) == 2 * ranks
    for number, stage in enumerate(stages):
        runs_back = is_v and number >= ranks
        held[len(stages) - 1 - number if runs_back else number % ranks].append(stage)
    return held


def piece_costs(model: DenseModel) -> list[int]:
    """FLOPs per token and forward pass of the embedding (a look-up: next to none), each block, and the head.

    A block of GPT-2: 24 C^2 of its matrix products and, causal, 2 C T of the attention scores. The head: 2 C V.
    """
    scores = 2 * model.heads * model.head_dim * model.seq_length
    block = 2 * model.block_matrix_parameters + scores
    return [2 * model.hidden, *[block] * model.layers, 2 * model.head_parameters]


def _cut(costs: list[int], parts: int) -> list[tuple[int, int]]:
    """(first, end) of each part: the smallest possible maximum, and among such cuts the smallest sum of squares."""
    # best[i]: for the first i pieces in the parts so far, (largest cost, sum of squares, where the parts begin)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    until = [0, *itertools.accumulate(costs)]
    for part in range(parts):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for end in range(part + 1, len(costs) - parts + part + 2):  # a piece for each part before and after
            for first in range(end - 1, -1, -1):
                cost = until[end] - until[first]
                if end in longer and cost > longer[end][0]:
                    break  # a longer part costs no less
                if first in best and (end not in longer or best[first][0] <= longer[end][0]):
                    largest, squares, begins = best[first]
                    found = (max(largest, cost), squares + cost**2, (*begins, first))
                    longer[end] = min(longer.get(end, found), found)
        best = longer
    begins = best[len(costs)][2]
    return list(zip(begins, (*begins[1:], len(costs)), strict=True))
