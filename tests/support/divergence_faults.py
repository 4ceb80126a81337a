"""Faults for scripts/first_divergence.py, planted from outside: those of planted_bugs.py and more; where each is."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F

from support.planted_bugs import CONTEXT, MESH, PLANTED_BUGS, TENSOR, WHERE, patch

FAULTS: dict[str, Callable[[], object]] = {}
ALLREDUCE, DDP, FSDP = (["--run_type", name] for name in ("allreduce", "ddp", "fsdp"))
PIPELINE, TENSORS = ["--run_type", "pipeline"], ["--run_type", "tensor"]
ZERO_1, ZERO_2, ZERO_3 = (["--run_type", "optimized", "--zero_stage", stage] for stage in "123")
BF16 = ["--precision", "bf16"]
DROPOUT = ["--dropout", "0.1"]


@dataclasses.dataclass(frozen=True)
class Where:
    """Where a fault is to be found: the run that has it, phase, a pattern of the name, the ranks (None: any), step."""

    flags: list[str]
    ranks: int
    phase: str
    name: str
    to_blame: tuple[int, ...] | None = None
    step: int = 1
    reference: tuple[list[str], int] | None = None  # another side B than the baseline

    def is_right(self, found: dict | None) -> bool:
        """Return whether an answer names this place."""
        return (
            found is not None
            and re.fullmatch(self.phase, found["phase"]) is not None
            and re.fullmatch(self.name, found["name"]) is not None
            and found["step"] == self.step
            and self.to_blame in (None, tuple(found["ranks"]))
        )


LAST = r"ln_f\.bias|ln_f\.weight"  # where backward begins
PLACES = {
    "sum_instead_of_mean": ("synchronisation", LAST),
    "no_division_by_accumulation": ("forward", "loss"),
    "stage_local_clipping": ("clipping", "norm"),
    "unsynchronised_tied_embedding": ("synchronisation", "wte.weight"),
    "tied_embedding_counted_twice": ("clipping", "norm"),
    "data_ranks_of_a_pipeline_not_averaged": ("synchronisation", LAST),
    "identical_batches": ("data", "inputs", (1,)),
    "shards_clip_by_their_own_norm": ("clipping", "norm"),
    "each_rank_by_its_own_targets": ("data", "target tokens"),
    "reduced_over_the_wrong_axis": ("synchronisation", LAST),
    "whole_weights_counted_by_each_tensor_rank": ("clipping", "norm"),
    "strided_shards_left_out_of_the_norm": ("clipping", "norm"),
    "ring_sees_a_chunk_too_many": ("forward", r"h\.0\.attention", (1, 3)),
    "positions_of_another_rank": ("forward", "wpe", (1, 3)),
    "zigzag_lost": ("forward", "wte"),
    "gradients_of_keys_and_values_exchanged": ("backward", r"h\.1\.attn\.c_attn.*"),
    "embedding_gradient_added_at_one_end": ("synchronisation", "wte.weight"),
    "loss_divided_by_the_tokens_of_a_context_rank": ("backward", LAST),
    # two faults that together halve the gradients: the divisor of the loss is the first
    "shards_averaged_over_context_ranks": ("backward", LAST),
    "shards_of_a_stage_not_reduced": ("synchronisation", LAST),
    "shards_reduced_twice": ("synchronisation", LAST),
    "micro_batches_divided_again": ("synchronisation", LAST),
    "weight_gradients_of_the_zero_bubble_lost": ("backward|synchronisation", r".*"),
    "gradients_of_a_cut_stream_not_added": ("synchronisation", LAST),
    "positions_learn_from_one_piece": ("forward", "wte"),  # the patch takes the sum of the token embedding away too
}
EXPECTED = {bug: Where(*WHERE[bug], *place) for bug, place in PLACES.items()}


def fault(*where: object, **named: object) -> Callable:
    def add(function: Callable[[], object]) -> Callable[[], object]:
        FAULTS[function.__name__] = function
        EXPECTED[function.__name__] = Where(*where, **named)
        return function

    return add


@contextlib.contextmanager
def planting(fault: str | None) -> Iterator[None]:
    """Around a side that shall have the fault; None: a sound one."""
    if fault is not None:
        (PLANTED_BUGS | FAULTS)[fault]()
    try:
        yield
    finally:
        mock.patch.stopall()


def around(target: str, honest: Callable, change: Callable) -> None:
    """Let `change(honest, *arguments)` take the place of a method."""
    patch(target, lambda *arguments, **named: change(honest, *arguments, **named))


def on_rank(rank: int) -> bool:
    return dist.get_rank() == rank


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


@fault(DDP, 2, "backward", r"h\.1\.ln_2.*", (1,))
def gradient_into_the_mlp_scaled_on_a_rank() -> None:
    from testbed.model.gpt2 import MLP

    around("testbed.model.gpt2.MLP.forward", MLP.forward,
           lambda honest, self, x: honest(self, _Scaled.apply(x, 0.9 if on_rank(1) else 1.0)))  # fmt: skip


@fault(ALLREDUCE, 2, "synchronisation", r"h\.0\.mlp\.c_fc\.weight")
def one_gradient_not_averaged() -> None:
    def but_one(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name != "h.0.mlp.c_fc.weight":
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    patch("testbed.strategies.allreduce.AllReduce.synchronise_gradients", but_one)


@fault(ALLREDUCE, 2, "synchronisation", "wte.weight")
def embedding_summed_twice() -> None:
    from testbed.strategies.allreduce import AllReduce

    def twice(honest, self) -> None:
        honest(self)
        dist.all_reduce(self.model.wte.weight.grad)

    around("testbed.strategies.allreduce.AllReduce.synchronise_gradients", AllReduce.synchronise_gradients, twice)


@fault(DDP, 2, "forward", r"h\.1\.mlp\.c_proj", (1,), step=2)
def a_rank_multiplies_by_last_steps_weight() -> None:
    from testbed.model.gpt2 import MLP

    versions: list[torch.Tensor] = []

    def stale(honest, self, x):
        now = self.c_proj.weight
        if not versions or not torch.equal(versions[-1], now):
            versions.append(now.detach().clone())
        if len(versions) < 2 or not on_rank(1):
            return honest(self, x)
        before = versions[-2]
        with mock.patch.object(self.c_proj, "forward", lambda x: F.linear(x, before + 0 * now, self.c_proj.bias)):
            return honest(self, x)

    _in_last_block("MLP", MLP.forward, stale)


def _in_last_block(name: str, honest: Callable, change: Callable) -> None:
    """As `around`, of the forward pass of the last block's MLP or attention alone."""
    from testbed.model.gpt2 import GPT2

    def marking(build, self, *arguments, **named):
        build(self, *arguments, **named)
        last = self.blocks[-1]
        (last.mlp if name == "MLP" else last.attn).is_meant = True

    def changed(honest, self, x):
        return change(honest, self, x) if getattr(self, "is_meant", False) else honest(self, x)

    around("testbed.model.gpt2.GPT2.__init__", GPT2.__init__, marking)
    around(f"testbed.model.gpt2.{name}.forward", honest, changed)


@fault(DDP, 2, "update", r"ln_f\.weight", (1,))
def a_rank_keeps_a_weight_as_it_was() -> None:
    from testbed.strategies.baseline import Baseline

    def kept(honest, self, learning_rate):
        before = self.model.ln_f.weight.detach().clone()
        norm = honest(self, learning_rate)
        if on_rank(1):
            self.model.ln_f.weight.data.copy_(before)
        return norm

    around("testbed.strategies.baseline.Baseline.update", Baseline.update, kept)


def _attend(is_wrong: Callable[[], bool], wrong: Callable) -> None:
    from testbed.model import gpt2

    honest = gpt2.attend
    patch("testbed.model.gpt2.attend", lambda *tensors: wrong(*tensors) if is_wrong() else honest(*tensors))


@fault(FSDP, 2, "forward", r"h\.0\.attention")
def attention_sees_the_future() -> None:
    _attend(lambda: True, lambda q, k, v, dropout: F.scaled_dot_product_attention(q, k, v))


@fault(DDP, 2, "forward", r"h\.0\.attention", (1,))
def a_ranks_mask_is_off_by_one() -> None:
    def off_by_one(q, k, v, dropout):
        length = q.shape[2]
        return F.scaled_dot_product_attention(q, k, v, torch.ones(length, length, dtype=torch.bool).tril(1))

    _attend(lambda: on_rank(1), off_by_one)


@fault(ZERO_2, 2, "forward", r"h\.0\.attention")
def attention_scaled_otherwise() -> None:
    _attend(lambda: True, lambda q, k, v, d: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2))


@fault(FSDP, 2, "clipping", r".*")
def clipped_to_twice_the_norm() -> None:
    from testbed.optim.optimizer import clip_gradients_

    patch("testbed.strategies.baseline.clip_gradients_", lambda them, most, norm: clip_gradients_(them, 2 * most, norm))


@fault(DDP, 2, "clipping", r".*", (1,))
def a_rank_does_not_clip() -> None:
    from testbed.optim.optimizer import clip_gradients_

    patch("testbed.strategies.baseline.clip_gradients_",
          lambda them, most, norm: clip_gradients_(them, 0 if on_rank(1) else most, norm))  # fmt: skip


@fault(DDP, 2, "backward", "wte.weight")
def embedding_learns_nothing_from_the_head() -> None:
    from testbed.model.gpt2 import GPT2

    def untied(honest, self, x):
        return self.head(x, self.wte.weight.detach() + 0, self.padding_bias.to(x.dtype))

    around("testbed.model.gpt2.GPT2.padded_logits", GPT2.padded_logits, untied)


@fault(FSDP, 2, "update", r"weight decay of .*")
def biases_decay_too() -> None:
    patch("testbed.optim.optimizer.parameter_groups",
          lambda parameters, decay: [{"params": list(parameters), "weight_decay": decay}])  # fmt: skip


@fault(DDP, 2, "update", r".*", (1,), step=2)
def a_rank_skips_a_step() -> None:
    from testbed.strategies.baseline import Baseline

    steps = []

    def skipping(honest, self, learning_rate):
        steps.append(1)
        if len(steps) == 2 and on_rank(1):
            with mock.patch.object(self.optimizer, "step", lambda: None):
                return honest(self, learning_rate)
        return honest(self, learning_rate)

    around("testbed.strategies.baseline.Baseline.update", Baseline.update, skipping)


@fault(ZERO_3, 2, "update", "all weights", (1,), step=2)
def deepspeed_skips_a_step_on_a_rank() -> None:
    """As after an overflow that one rank alone sees: its shard of every weight stands still."""
    from testbed.strategies.deepspeed_zero import DeepSpeedZero

    steps = []

    def skipping(honest, self, *arguments):
        steps.append(1)
        if len(steps) == 2 and on_rank(1):
            with mock.patch.object(self.optimizer, "step", lambda *_: None):
                return honest(self, *arguments)
        return honest(self, *arguments)

    around("testbed.strategies.deepspeed_zero.DeepSpeedZero.train_step", DeepSpeedZero.train_step, skipping)


@fault(ALLREDUCE, 2, "synchronisation", LAST)
def averaged_in_bf16() -> None:
    def rounded(self) -> None:
        for parameter in self.parameters:
            small = parameter.grad.bfloat16() / 2
            dist.all_reduce(small)
            parameter.grad.copy_(small)

    patch("testbed.strategies.allreduce.AllReduce.synchronise_gradients", rounded)


@fault([*ZERO_2, *BF16], 2, "synchronisation", r".*(c_attn|c_fc|c_proj).*")
def deepspeed_averages_linear_gradients_in_bf16() -> None:
    from testbed.strategies import deepspeed_config

    honest = deepspeed_config.effective_config

    def own_default(settings):
        config = honest(settings)
        del config["torch_autocast"]["lower_precision_safe_modules"]
        return config

    patch("testbed.strategies.deepspeed_zero.effective_config", own_default)


@fault([*DDP, *DROPOUT], 2, "forward", r"h\.0.*", (1,), reference=([*ALLREDUCE, *DROPOUT], 2))
def ranks_drop_the_same_places() -> None:
    from testbed.distributed import process_group

    patch("testbed.distributed.process_group.seed_of_rank", lambda seed, rank, h=process_group.seed_of_rank: h(seed, 0))


@fault(DDP, 2, "update", "learning rate", (1,))
def a_rank_has_a_higher_learning_rate() -> None:
    from testbed.strategies import baseline

    honest = baseline.set_learning_rate
    patch("testbed.strategies.baseline.set_learning_rate",
          lambda optimizer, rate: honest(optimizer, rate * (1.1 if on_rank(1) else 1.0)))  # fmt: skip


@fault(FSDP, 2, "update", r".*", step=2)
def adams_second_beta_is_the_first() -> None:
    def wrong(model, settings):
        from testbed.optim.optimizer import parameter_groups

        chosen = settings.optimizer
        groups = parameter_groups(model.parameters(), chosen.weight_decay)
        betas = (chosen.adam_beta1, chosen.adam_beta1)
        return torch.optim.AdamW(groups, lr=chosen.learning_rate, betas=betas, eps=chosen.adam_eps, fused=True)

    patch("testbed.strategies.baseline.build_optimizer", wrong)


@fault(ZERO_1, 2, "clipping", r"squares.*")
def deepspeed_does_not_clip() -> None:
    from testbed.strategies import deepspeed_config

    honest = deepspeed_config.effective_config
    patch("testbed.strategies.deepspeed_zero.effective_config",
          lambda settings: honest(settings) | {"gradient_clipping": 0.0})  # fmt: skip


@fault(ZERO_3, 2, "backward", LAST)
def deepspeed_is_given_the_sum_of_micro_batches() -> None:
    import deepspeed

    honest = deepspeed.DeepSpeedEngine.backward
    patch("deepspeed.DeepSpeedEngine.backward",
          lambda self, loss, *more, **named: honest(self, loss * 4, *more, **named))  # fmt: skip


@fault(TENSORS, 2, "initial weights", r"h\.0\.attn\.c_attn.*", step=0)  # wrong before the first step
def heads_of_tensor_ranks_mixed_up() -> None:
    patch("testbed.strategies.tensor.exchange_order", lambda tensor, outer, inner: tensor)


@fault(ALLREDUCE, 2, "data", "targets")
def targets_are_the_inputs() -> None:
    from testbed.train import batches

    honest = batches.micro_batches

    def copies(*arguments):
        return [dataclasses.replace(each, targets=each.inputs) for each in honest(*arguments)]

    patch("testbed.train.batches.micro_batches", copies)


@fault(ZERO_1, 2, "data", "inputs", (1,))
def a_rank_reads_a_micro_batch_twice() -> None:
    from testbed.train import batches

    honest = batches.micro_batches

    def repeated(*arguments):
        found = honest(*arguments)
        return [*found[:-1], found[0]] if on_rank(1) else found

    patch("testbed.train.batches.micro_batches", repeated)


@fault(PIPELINE, 2, "forward", r"h\.1.*|ln_f", (1,))
def activations_travel_in_bf16() -> None:
    from testbed.strategies.pipeline import _StageModule

    def rounded(honest, self, x):
        y = honest(self, x)
        return y if self.layers.predicts else y.bfloat16().float()

    around("testbed.strategies.pipeline._StageModule.forward", _StageModule.forward, rounded)


@fault(FSDP, 2, "forward", r"h\.0\.ln_1")
def layer_norm_with_another_epsilon() -> None:
    from torch import nn

    patch("torch.nn.LayerNorm.forward",
          lambda self, x: nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-3))  # fmt: skip


@fault([*MESH, *TENSOR], 4, "forward", r"h\.0\.mlp\.c_proj")
def another_gelu() -> None:
    patch("testbed.model.gpt2.MLP.forward", lambda self, x: self.c_proj(F.gelu(self.c_fc(x))))


@fault(ALLREDUCE, 2, "synchronisation", LAST, step=2)
def gradients_are_not_emptied() -> None:
    from testbed.strategies.baseline import Baseline

    def keeping(honest, self, learning_rate):
        with mock.patch.object(self.optimizer, "zero_grad", lambda **_: None):
            return honest(self, learning_rate)

    around("testbed.strategies.baseline.Baseline.update", Baseline.update, keeping)


@fault(ALLREDUCE, 2, "initial weights", "wpe.weight", (1,), step=0)
def a_rank_begins_with_another_weight() -> None:
    from testbed.model.gpt2 import GPT2

    def other(honest, self):
        honest(self)
        if dist.is_initialized() and on_rank(1):
            self.wpe.weight.data[3, 4] += 0.01

    around("testbed.model.gpt2.GPT2.initialise", GPT2.initialise, other)


@fault([*MESH, *CONTEXT], 4, "backward|synchronisation", LAST)
def losses_divided_by_twice_the_tokens() -> None:
    from support.planted_bugs import set_on_mesh

    set_on_mesh("summed_over", lambda self: 2 * self.data_world_size)


@fault(ZERO_3, 2, "forward", r"h\.1\.attn\.c_attn.*")
def a_gathered_weight_loses_its_last_rows() -> None:
    from testbed.model.gpt2 import Attention

    def cut(honest, self, x):
        with torch.no_grad():
            self.c_attn.weight[-8:] = 0.0
        return honest(self, x)

    _in_last_block("Attention", Attention.forward, cut)
