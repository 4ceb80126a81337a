"""The sizes of GPT-2 and what follows from them by arithmetic. No torch: settings, FLOPs and reports read this."""

from __future__ import annotations

from dataclasses import dataclass

GELUS = ("tanh", "exact")  # GPT-2's, transformers' and llm.c's; nanoGPT's
VOCABULARY_MULTIPLE = 128  # rows of the embedding are padded to this: matrix products like aligned sizes


@dataclass(frozen=True)
class ModelShape:
    """What fixes a GPT-2 model."""

    num_layers: int
    num_heads: int
    embedding_size: int
    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    gelu: str = "tanh"

    @property
    def padded_vocab_size(self) -> int:
        """Rows that the embedding holds in memory. Never shown: exports, counts, logits and norms use `vocab_size`."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def num_parameters(self) -> int:
        """Trainable numbers, the tied head counted once. GPT-2 small: 124,439,808."""
        channels = self.embedding_size
        # per block: two LayerNorms, qkv and output projections, MLP up and down, each with its bias
        per_block = 4 * channels + (4 * channels * channels + 4 * channels) + (8 * channels * channels + 5 * channels)
        embeddings = (self.vocab_size + self.max_position_embeddings) * channels
        return embeddings + self.num_layers * per_block + 2 * channels

    @property
    def num_position_parameters(self) -> int:
        return self.max_position_embeddings * self.embedding_size

    def describe(self) -> str:
        """The spelling of `training_config.model_size` in training_metrics.json since version 2.0."""
        return f"n_layer={self.num_layers}, n_head={self.num_heads}, n_embd={self.embedding_size}"

    def as_transformers(self, dropout: float = 0.0) -> dict[str, int | float | str]:
        """Return the shape under the names of transformers' GPT2Config."""
        return {
            "activation_function": "gelu" if self.gelu == "exact" else "gelu_new",  # their name for the tanh form
            "vocab_size": self.vocab_size,
            "n_positions": self.max_position_embeddings,
            "n_embd": self.embedding_size,
            "n_layer": self.num_layers,
            "n_head": self.num_heads,
            "resid_pdrop": dropout,
            "embd_pdrop": dropout,
            "attn_pdrop": dropout,
        }


def size_name(shape: ModelShape) -> str:
    """The name of the size that has these dimensions, whatever its vocabulary; "custom" where there is none."""
    dimensions = (shape.num_layers, shape.num_heads, shape.embedding_size)
    for name, size in MODEL_SIZES.items():
        if dimensions == (size.num_layers, size.num_heads, size.embedding_size):
            return name
    return "custom"


# Peak learning rates of AdamW. nano's was searched for (docs/optimizers.md); the others are those of the models of
# about the same size in Brown et al. 2020 (arXiv:2005.14165), table 2.1.
LEARNING_RATES = {"nano": 4e-3, "gpt2": 6e-4, "gpt2-medium": 3e-4, "gpt2-large": 2.5e-4, "gpt2-xl": 2e-4}
# Of both parts of Muon, which are on AdamW's scale; where none was searched for, AdamW's.
MUON_LEARNING_RATES = {"nano": 2e-2}

# The four published sizes (Radford et al. 2019, table 2), and one that trains on a laptop core in minutes.
MODEL_SIZES = {
    "nano": ModelShape(num_layers=4, num_heads=4, embedding_size=128),
    "gpt2": ModelShape(num_layers=12, num_heads=12, embedding_size=768),
    "gpt2-medium": ModelShape(num_layers=24, num_heads=16, embedding_size=1024),
    "gpt2-large": ModelShape(num_layers=36, num_heads=20, embedding_size=1280),
    "gpt2-xl": ModelShape(num_layers=48, num_heads=25, embedding_size=1600),
}
