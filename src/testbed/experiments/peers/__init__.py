"""List other trainers that do the same work as ours: what each one is, and in what it differs.

Importing this loads no torch. `plan.py` says which runs a comparison has, `running.py` makes them one by one,
`nanogpt.py` is what is special about nanoGPT's own program, `worker.py` what runs in a process of ours.
"""

from __future__ import annotations

from dataclasses import dataclass

NANOGPT_SOURCE = "https://github.com/karpathy/nanoGPT"


@dataclass(frozen=True)
class Peer:
    """A trainer. `own_precision`: what it computes in by default, by device; "auto" is ours to choose.

    `differs`: what is not equal to our run, in words; printed with every comparison.
    """

    summary: str
    own_precision: dict[str, str]
    packages: tuple[str, ...] = ()
    needs_nanogpt: bool = False
    has_our_batches: bool = True  # the same windows in the same order, from the same weights: losses compare closely
    differs: tuple[str, ...] = ()


_EVERYWHERE_FP32 = {"cpu": "fp32", "cuda": "fp32"}
_TRAINER = (
    "its time per step also covers what Trainer does between steps (callbacks, its look at the loss)",
    "the vocabulary is not padded (GPT-2's has 50,257 rows, ours multiplies 50,304), and the linear layers are Conv1D",
)

PEERS = {
    "ours": Peer(
        "src/gpt2.py --run_type baseline as a user starts it",
        {"cpu": "auto", "cuda": "auto"},
    ),
    "transformers": Peer(
        "transformers' Trainer with GPT2LMHeadModel, SDPA attention, its default AdamW",
        _EVERYWHERE_FP32,
        packages=("transformers", "accelerate"),
        differs=_TRAINER,
    ),
    "transformers-compiled": Peer(
        "the same with torch_compile=True, and bf16 of itself on CUDA: what a careful user switches on",
        {"cpu": "fp32", "cuda": "bf16"},
        packages=("transformers", "accelerate"),
        differs=(*_TRAINER, "it compiles the whole model, ours each block", "in fp32 on CUDA it allows TF32"),
    ),
    "transformers-eager": Peer(
        "Trainer with attn_implementation='eager'",
        _EVERYWHERE_FP32,
        packages=("transformers", "accelerate"),
        differs=_TRAINER,
    ),
    "transformers-loop": Peer(
        "a plain PyTorch loop around GPT2LMHeadModel, SDPA attention, fused AdamW",
        _EVERYWHERE_FP32,
        packages=("transformers",),
        differs=(_TRAINER[1],),
    ),
    "nanogpt": Peer(
        "nanoGPT's own train.py as it runs: not compiled and fp32 on a CPU, compiled and bf16 on CUDA",
        {"cpu": "fp32", "cuda": "bf16"},
        needs_nanogpt=True,
        has_our_batches=False,
        differs=(
            "windows drawn at random, and weights of the same distribution from its own seed: its loss is that of "
            "other batches and compares only loosely",
            "exact GELU instead of the tanh form; its AdamW is fused on CUDA only; its head has as many rows as ours "
            "(50,304 for GPT-2's 50,257, its own default), and those that fill it up take part in its softmax; it has "
            "as many positions as the sequence",
            "--bias=True, because its default without biases is another model; a constant learning rate, as ours here",
            "its times are what it prints: reading the next batch, forward, backward, clipping, update, and the print "
            "of the step before; on CUDA the wait for the device falls into the next line, so single lines are shifted "
            "and their sum, of which its tokens/s are made, is whole",
            "in fp32 on CUDA it allows TF32",
        ),
    ),
    "nanogpt-bf16": Peer(
        "nanoGPT's model in a plain loop under bf16 autocast, fused AdamW: what its train.py lacks on a CPU",
        {"cpu": "bf16", "cuda": "bf16"},
        needs_nanogpt=True,
        differs=("exact GELU instead of the tanh form; the rows that fill the vocabulary up take part in its softmax",),
    ),
}
