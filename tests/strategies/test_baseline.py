"""Check what the plain step does only once."""

from __future__ import annotations

import pytest
import torch
from support.held_bytes import HeldBytes
from support.settings import checked_run
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from testbed.model.gpt2 import GPT2
from testbed.strategies.baseline import Baseline
from testbed.strategies.ddp import DDP
from testbed.train.batches import TrainingBatches

CPU = torch.device("cpu")
MICRO_BATCHES = 4


class CastsOfWeights(TorchDispatchMode):
    """Counts casts to bf16 of tensors that are as large as a matrix of the model."""

    def __init__(self, model: GPT2):
        super().__init__()
        self.places = {parameter.data_ptr() for parameter in model.parameters() if parameter.dim() == 2}
        self.count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        options = options or {}
        if operator is torch.ops.aten._to_copy.default and arguments[0].data_ptr() in self.places:
            self.count += options.get("dtype") == torch.bfloat16
        return operator(*arguments, **options)


def build(token_files, keeps_casts: bool | None, *more: str, kind: type[Baseline] = Baseline):
    """A strategy that keeps casts, does not, or (None) decides by itself; and its batches."""
    flags = ["--global_batch_size", str(MICRO_BATCHES), "--micro_batch_size_per_gpu", "1", "--max_train_steps", "3"]
    checked = checked_run(token_files, *flags, "--precision", "bf16", *more)
    torch.manual_seed(0)
    shape, recomputed = checked.settings.shape, checked.settings.compute.activation_checkpointing
    strategy = kind(checked.settings, GPT2(shape, checked.settings.model.dropout, recomputed), CPU)
    if keeps_casts is not None:
        strategy.keeps_casts = keeps_casts
    return strategy, TrainingBatches(checked.train_file, checked.settings, 0, CPU)


@pytest.mark.parametrize("more", [[], ["--dropout", "0.1"], ["--activation_checkpointing", "block"]], ids=" ".join)
def test_casts_that_are_kept_change_no_bit(token_files, more):
    """Also in the second and third step: a cast must not outlive the weights that it was made of."""
    seen = []
    for keeps_casts in (True, False):
        strategy, batches = build(token_files, keeps_casts, *more)
        torch.manual_seed(1)
        steps = [strategy.train_step(batches.of_step(step), 0.01) for step in range(3)]
        seen.append(([(step.loss_sum.item(), step.grad_norm.item()) for step in steps], strategy.full_state_dict()))
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(tensor, seen[1][1][name]) for name, tensor in seen[0][1].items())


def peak_bytes(token_files, keeps_casts: bool | None, *more: str) -> int:
    """Most bytes that a step held at once beyond weights and optimizer state, in a model whose weights outweigh its
    activations."""
    wide = ["--embedding_size", "64", "--num_layers", "8", "--seq_length", "8", "--num_heads", "2"]
    strategy, batches = build(token_files, keeps_casts, *wide, *more)
    strategy.train_step(batches.of_step(0), 0.01)
    with HeldBytes() as held:
        strategy.train_step(batches.of_step(1), 0.01)
    return held.peak


def test_casts_are_not_kept_where_that_takes_memory(token_files):
    """Where blocks are computed again, one block's casts would be alive otherwise, and kept ones are all blocks'."""
    recomputed = ["--activation_checkpointing", "block"]
    chosen, kept, dropped = (peak_bytes(token_files, keeps, *recomputed) for keeps in (None, True, False))
    bf16_blocks = 2 * 8 * 12 * 64**2
    assert chosen == dropped < kept - bf16_blocks / 2


@pytest.mark.parametrize(("size", "keeps"), [("1", True), (str(MICRO_BATCHES), False)])
def test_the_only_micro_batch_of_a_step_keeps_no_casts(token_files, size, keeps):
    """Held bytes are read when the last gradient, the first layer's, is there."""
    seen = []
    for keeps_casts in (None, False):
        strategy, batches = build(token_files, keeps_casts, "--micro_batch_size_per_gpu", size)
        with HeldBytes() as held:
            note = strategy.model.wpe.weight.register_post_accumulate_grad_hook(lambda _: seen.append(held.now))
            strategy.train_step(batches.of_step(0), 0.01)
        note.remove()
    assert (seen[len(seen) // 2 - 1] > seen[-1]) == keeps


@pytest.mark.parametrize(("keeps_casts", "times"), [(True, 1), (False, MICRO_BATCHES)])
def test_a_weight_is_cast_once_per_step(token_files, keeps_casts, times):
    """Not once per micro batch. The position embedding is looked up, not multiplied."""
    strategy, batches = build(token_files, keeps_casts)
    num_multiplied = sum(parameter.dim() == 2 for parameter in strategy.parameters) - 1
    with CastsOfWeights(strategy.model) as casts:
        strategy.train_step(batches.of_step(0), 0.01)
    assert casts.count == times * num_multiplied


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_gradients_that_ddp_averages_come_layer_by_layer(token_files):
    """In the last micro batch, which synchronises: the first block's come after all of the second's. With casts made in
    the first micro batch every matrix would come after every LayerNorm, and no bucket would leave before the end."""
    strategy, batches = build(token_files, None, "--run_type", "ddp", kind=DDP)
    arrived: list[str] = []
    for name, parameter in strategy.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    strategy.train_step(batches.of_step(0), 0.01)
    of_the_last = arrived[-len(strategy.parameters) :]
    blocks = [name.split(".")[1] for name in of_the_last if name.startswith("h.")]
    assert blocks == sorted(blocks, reverse=True) and len(set(blocks)) == 2
