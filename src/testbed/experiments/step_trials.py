"""What was tried to make the plain step faster: each alternative against the step as it is, in one process.

A trial is a context manager around one optimizer step of the baseline that does one thing in another way. The step as
it is and the step with the alternative take turns on the same weights, so that what the machine does from minute to
minute cancels in the ratio of neighbours. scripts/measure_trials.py repeats each trial in processes of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch.nn import functional as F

from testbed.autotune.device import why_nothing_compiles
from testbed.config.settings import CheckedRun, RunSettings
from testbed.model import gpt2 as model_module
from testbed.model.gpt2 import GPT2
from testbed.optim.optimizer import parameter_groups
from testbed.profiling.device_limits import is_bf16_faster
from testbed.profiling.step_clock import synchronize
from testbed.strategies.baseline import Baseline
from testbed.train.batches import TrainingBatches

WARMUP_PAIRS = 5  # in the first ones the memory that steps need is still being faulted in
Alternative = Callable[[Baseline], contextlib.AbstractContextManager]


@dataclass(frozen=True)
class Trial:
    """One thing done in another way.

    Attributes:
        what: the alternative, in words.
        predicted: what it was expected to do to the time of a step, and why; written before it was measured.
        alternative: makes, of a strategy, the context manager around each of its steps.
        kept: whether the step does it this way now, and why.
        needs: the flags that it is tried with beyond the script's own; empty for none.
        why_not: why it cannot be measured in this work on this device; None where it can be.
    """

    what: str
    predicted: str
    alternative: Alternative
    kept: str
    needs: tuple[str, ...] = ()
    why_not: Callable[[RunSettings, torch.device], str | None] = lambda settings, device: None


def times_of_pairs(checked: CheckedRun, device: torch.device, trial: Trial, pairs: int) -> list[tuple[float, float]]:
    """Seconds of a step (as it is, with the alternative), in turns; which of the two comes first alternates too.

    The first pairs warm up and are left out.
    """
    settings = checked.settings
    torch.manual_seed(settings.training.seed)
    strategy = Baseline(settings, GPT2(settings.shape, settings.model.dropout), device)
    batches = TrainingBatches(checked.train_file, settings, 0, device)
    around = trial.alternative(strategy)
    times = []
    for pair in range(WARMUP_PAIRS + pairs):
        micro_batches = batches.of_step(pair % settings.last_step)
        seconds = {}
        for is_alternative in (False, True) if pair % 2 else (True, False):
            synchronize(device)
            start_s = time.perf_counter()
            with around if is_alternative else contextlib.nullcontext():
                strategy.train_step(micro_batches, settings.optimizer.learning_rate)
            synchronize(device)
            seconds[is_alternative] = time.perf_counter() - start_s
        times.append((seconds[False], seconds[True]))
    batches.close()
    return times[WARMUP_PAIRS:]


class _Reentrant:
    """A context manager that can be entered again and again, made of a function that makes one."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager]):
        self.make = make

    def __enter__(self) -> None:
        self.entered = self.make()
        self.entered.__enter__()

    def __exit__(self, *reason) -> None:
        self.entered.__exit__(*reason)


def _unfused_adamw(strategy: Baseline) -> contextlib.AbstractContextManager:
    settings = strategy.settings
    plain = torch.optim.AdamW(
        parameter_groups(strategy.parameters, settings.optimizer.weight_decay),
        lr=settings.optimizer.learning_rate,
        betas=(settings.optimizer.adam_beta1, settings.optimizer.adam_beta2),
        eps=settings.optimizer.adam_eps,
    )
    return _Reentrant(lambda: mock.patch.object(strategy, "optimizer", plain))


def _gradients_in_place(strategy: Baseline) -> contextlib.AbstractContextManager:
    @contextlib.contextmanager
    def filled_with_zeros() -> Iterator[None]:
        for parameter in strategy.parameters:  # the step as it is let go of them
            parameter.grad = held.setdefault(parameter, torch.empty_like(parameter))
        torch._foreach_zero_([parameter.grad for parameter in strategy.parameters])
        yield

    held: dict[torch.Tensor, torch.Tensor] = {}
    return _Reentrant(filled_with_zeros)


def _written_out_attention(strategy: Baseline) -> contextlib.AbstractContextManager:
    def attention(query, key, value, dropout_p: float = 0.0, is_causal: bool = False) -> torch.Tensor:
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return F.dropout(scores.masked_fill(~visible, float("-inf")).softmax(-1), dropout_p) @ value

    return _Reentrant(lambda: mock.patch.object(model_module.F, "scaled_dot_product_attention", attention))


def _chunked_cross_entropy(strategy: Baseline) -> contextlib.AbstractContextManager:
    def run(x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        with mock.patch.object(strategy.model, "padded_logits", lambda hidden: hidden):
            hidden = strategy.model.run_layers(x)
        weight = strategy.model.wte.weight.to(hidden.dtype)
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(
            hidden.flatten(0, 1), weight, targets.flatten(), reduction="sum", options=options
        ).float()

    return _Reentrant(lambda: mock.patch.object(strategy, "wrapped", run))


def _no_chunked_cross_entropy(settings: RunSettings, device: torch.device) -> str | None:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"torch {torch.__version__} has no LinearCrossEntropyOptions"
    shape = settings.shape
    if shape.padded_vocab_size != shape.vocab_size:
        return (
            f"--vocab_size {shape.vocab_size} is filled up to {shape.padded_vocab_size} rows, which this function "
            "cannot keep out of the softmax"
        )
    return None


def _no_fast_bf16(settings: RunSettings, device: torch.device) -> str | None:
    return None if is_bf16_faster(device) else "this device does not multiply bf16 faster than fp32"


def _no_compiler(settings: RunSettings, device: torch.device) -> str | None:
    return why_nothing_compiles(device)


def _float32_norm(strategy: Baseline) -> contextlib.AbstractContextManager:
    def norm() -> torch.Tensor:
        return torch.nn.utils.get_total_norm([parameter.grad for parameter in strategy.parameters])

    return _Reentrant(lambda: mock.patch.object(strategy, "grad_norm", norm))


def _casts_thrown_away(strategy: Baseline) -> contextlib.AbstractContextManager:
    return _Reentrant(lambda: mock.patch.object(strategy, "keeps_casts", False))


def _compiled_blocks(strategy: Baseline) -> contextlib.AbstractContextManager:
    compiled = {block: torch.compile(block.forward) for block in strategy.model.h.values()}

    @contextlib.contextmanager
    def with_compiled_blocks() -> Iterator[None]:
        for block, forward in compiled.items():
            block.forward = forward
        try:
            yield
        finally:
            for block in compiled:
                del block.forward  # the class's own again

    return _Reentrant(with_compiled_blocks)


def _compiled_head(strategy: Baseline) -> contextlib.AbstractContextManager:
    model = strategy.model

    @torch.compile
    def loss_sum(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return model_module.token_loss_sum(model.padded_logits(model.ln_f(hidden)), targets)

    def run(x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        with mock.patch.object(model, "predicts", False):
            hidden = model.run_layers(x)
        return loss_sum(hidden, targets)

    return _Reentrant(lambda: mock.patch.object(strategy, "wrapped", run))


TRIALS = {
    "unfused AdamW": Trial(
        "torch.optim.AdamW's default on the device in place of fused=True",
        "slower: about 12 passes over weights, gradients and moments in place of one",
        _unfused_adamw,
        kept="no: fused=True does the same arithmetic in one pass",
    ),
    "gradients in place": Trial(
        "gradients filled with zeros in place of let go of",
        "slower by one pass over the gradients, unless new memory costs more",
        _gradients_in_place,
        kept="no: letting go of gradients also leaves their memory to the forward pass",
    ),
    "written-out attention": Trial(
        "attention as matrix products, mask and softmax, as in the seeds",
        "slower: the T x T scores of every head go through memory several times",
        _written_out_attention,
        kept="no: the fused kernel's memory also grows with T, not with T x T",
    ),
    "chunked cross entropy": Trial(
        "torch's linear_cross_entropy, which never holds all logits",
        "less memory; slower on a CPU, where its chunks are small matrix products",
        _chunked_cross_entropy,
        kept="no: not in every torch, not with a padded vocabulary, and a smaller micro batch saves this memory too",
        why_not=_no_chunked_cross_entropy,
    ),
    "float32 norm": Trial(
        "gradient norm summed in float32 in place of float64",
        "faster by under 1 %; off by 3e-5 at 124M parameters",
        _float32_norm,
        kept="no: in float64 the norm does not depend on how ranks cut the weights",
    ),
    "casts per micro batch": Trial(
        "weights cast to bf16 for every micro batch in place of once per step",
        "slower by 6 bytes of traffic per weight and micro batch",
        _casts_thrown_away,
        kept="no: backward reads the cast weights anyway, so keeping them costs no memory",
        needs=("--precision", "bf16"),
        why_not=_no_fast_bf16,
    ),
    "compiled blocks": Trial(
        "torch.compile of each block, after its start-up",
        "faster: LayerNorm, GELU and sums in fewer passes; on a CPU those are a few per cent of the step",
        _compiled_blocks,
        kept="on CUDA, by --compile auto; on a CPU only where it is typed: the first step waits for the compiler",
        why_not=_no_compiler,
    ),
    "compiled head": Trial(
        "last LayerNorm, head and cross entropy in one compiled region, after its start-up",
        "faster by 1 to 3 %: the softmax and its backward in fewer passes over the logits; the product stays as it is",
        _compiled_head,
        kept="no: one more region that the first step waits for; what it gains on CUDA nobody has measured",
        why_not=_no_compiler,
    ),
}
