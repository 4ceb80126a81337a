"""Train other trainers' GPT-2 with the flags, the batches, the weights and the files of src/gpt2.py.

A peer is the strategy of an ordinary run: the model and the loop are its own, all else is ours. So its run is compared
as any other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from testbed.config.settings import RunSettings
from testbed.errors import Failure
from testbed.metrics.world_step import WorldStep
from testbed.model.gpt2 import from_transformers, to_transformers
from testbed.optim.lr_schedule import learning_rate_at
from testbed.optim.optimizer import parameter_groups, set_learning_rate
from testbed.profiling.step_clock import phase
from testbed.step import MicroBatch, StepResult
from testbed.strategies.baseline import AUTOCAST_DTYPE
from testbed.train.batches import TrainingBatches
from testbed.train.reasons import raise_if_diverged
from testbed.train.run import TrainingRun, validate

MeanLoss = Callable[[nn.Module, MicroBatch], torch.Tensor]  # over the tokens of a micro batch, in nats
Weights = dict[str, torch.Tensor]


class PeerLoop:
    """The loop that one would write by hand around another model: autocast, fused AdamW, clipping."""

    data_rank, data_world_size = 0, 1
    saves_in_background = False
    file_group = None

    def __init__(self, run: TrainingRun, model: nn.Module, mean_loss: MeanLoss, to_ours: Callable[[Weights], Weights]):
        """Args: to_ours: the model's weights -> those of model.GPT2."""
        chosen = run.settings.optimizer
        self.settings, self.device = run.settings, run.device
        self.model = model.to(run.device)
        compiled: Any = torch.compile(model) if run.settings.compute.compile else model  # it is a module too
        self.forward_module: nn.Module = compiled
        self.mean_loss, self.to_ours = mean_loss, to_ours
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model.parameters(), chosen.weight_decay),
            lr=chosen.learning_rate,
            betas=(chosen.adam_beta1, chosen.adam_beta2),
            eps=chosen.adam_eps,
            fused=True,
        )

    def train_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        self.model.train()
        num_tokens = sum(batch.num_target_tokens for batch in micro_batches)
        loss_sum = torch.zeros((), device=self.device)
        for batch in micro_batches:
            with phase("forward"):
                loss = self._loss(batch)
            assert batch.loss_divisor is not None, "a micro batch to train on"
            with phase("backward"):
                (loss * (batch.num_target_tokens / batch.loss_divisor)).backward()
            loss_sum += loss.detach() * batch.num_target_tokens
        with phase("optimizer"):
            most = self.settings.optimizer.max_grad_norm or float("inf")  # 0: no clipping
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), most)
            set_learning_rate(self.optimizer, learning_rate)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss_sum, num_tokens, norm)

    def _loss(self, batch: MicroBatch) -> torch.Tensor:
        precision = self.settings.compute.precision
        with torch.autocast(self.device.type, AUTOCAST_DTYPE.get(precision), enabled=precision != "fp32"):
            return self.mean_loss(self.forward_module, batch)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self.model.eval()
        loss_sum = torch.zeros((), device=self.device)
        for batch in micro_batches:
            loss_sum += self._loss(batch) * batch.num_target_tokens
        return StepResult(loss_sum, sum(batch.num_target_tokens for batch in micro_batches), None)

    def full_state_dict(self) -> Weights:
        return self.to_ours({name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()})

    def save_checkpoint(self, directory: Path, in_background: bool = False) -> None:
        raise Failure("a peer's run saves no checkpoints, so what it did is lost; start it again")

    load_checkpoint = load_full_state = save_checkpoint

    def model_states(self) -> dict[str, list[torch.Tensor]]:
        return {"parameters": list(self.model.parameters()), "gradients": [], "optimizer": []}

    def close(self) -> None:
        pass


def use_transformers(run: TrainingRun) -> None:
    """Give the run GPT2LMHeadModel with our weights. Its vocabulary is not padded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = run.settings.shape
    sizes: dict[str, Any] = {**shape.as_transformers(run.settings.model.dropout), "attn_implementation": "sdpa"}
    # use_cache is for generating; GPT-2's own special tokens lie outside a small vocabulary
    config = GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    result = model.load_state_dict(to_transformers(run.strategy.full_state_dict(), shape), strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}, result  # the tied head
    model.tie_weights()
    _use(run, PeerLoop(run, model, _loss_of_transformers, lambda weights: from_transformers(weights, shape)))


def _loss_of_transformers(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    # it would shift labels itself and so predict one token less than we do: give it the targets
    return model(input_ids=batch.inputs, labels=batch.targets, shift_labels=batch.targets).loss


def use_nanogpt(run: TrainingRun, folder: Path) -> None:
    """Give the run the model of a clone of nanoGPT with our weights: their names differ by a prefix, no layout does."""
    settings, shape = run.settings, run.settings.shape
    module = _module_at(folder / "model.py")
    config = module.GPTConfig(
        block_size=shape.max_position_embeddings,
        vocab_size=shape.padded_vocab_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_embd=shape.embedding_size,
        dropout=settings.model.dropout,
        bias=True,
    )
    model = module.GPT(config)
    weights = {f"transformer.{name}": tensor for name, tensor in run.strategy.full_state_dict().items()}
    model.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]})

    def to_ours(weights: Weights) -> Weights:
        return {name.removeprefix("transformer."): tensor for name, tensor in weights.items() if "lm_head" not in name}

    _use(run, PeerLoop(run, model, lambda module, batch: module(batch.inputs, batch.targets)[1], to_ours))
    differs = (
        ["exact GELU in place of the tanh form (give --gelu exact for equal work)"] if shape.gelu != "exact" else []
    )
    if shape.padded_vocab_size != shape.vocab_size:
        differs.append("the rows that fill the vocabulary up are in its softmax")
    if differs:
        run.report.recorder.note_other_mathematics(f"nanoGPT: {', and '.join(differs)}")


def _module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None and spec.loader is not None  # the name of a .py file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _use(run: TrainingRun, loop: PeerLoop) -> None:
    run.strategy = run.checkpoints.strategy = loop  # type: ignore[assignment]  # it has no file group


def train_with_trainer(run: TrainingRun, startup_s: float) -> None:
    """Train the model of `use_transformers` with transformers' Trainer as its guide uses it.

    A step is timed from the end of the step before, so that what Trainer does between steps is part of it. Its own
    loader batches our windows in our order.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    settings, device, signals = run.settings, run.device, run.signals
    model = run.strategy.model  # type: ignore[attr-defined]  # of PeerLoop
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []

    class Steps(TrainerCallback):
        """Record each optimizer step."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.clock.__enter__()

        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            assert trainer.optimizer is not None, "train() makes it before the first step"
            set_learning_rate(trainer.optimizer, learning_rate_at(state.global_step, settings))

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            run.clock.__exit__(None, None, None)
            step, seconds = state.global_step, run.clock.step_time_s
            tokens = settings.batch.global_batch_size * settings.data.seq_length
            waits = {"data_wait": [0.0]}  # Trainer does not say how long
            world = WorldStep(float(sum(losses)), tokens, [seconds], waits, grad_norm=float(norms[-1]))
            losses.clear()
            raise_if_diverged(step, world, settings.compute.precision)
            run.report.step(step, world, learning_rate_at(step - 1, settings), run.clock)
            if signals.agree(signals.number):
                raise signals.as_exception()
            run.clock.__enter__()

    class WithLosses(Trainer):
        def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
            losses.append(super().training_step(*arguments, **named).detach())  # divided by the micro batches already
            return losses[-1]

    arguments = TrainingArguments(**_arguments_of(settings, run.directory, device))
    trainer = WithLosses(model, arguments, train_dataset=_windows(run), callbacks=[Steps()])
    clip = trainer.accelerator.clip_grad_norm_

    def clip_and_keep(*arguments: Any, **named: Any) -> torch.Tensor:
        norms.append(clip(*arguments, **named))
        return norms[-1]

    trainer.accelerator.clip_grad_norm_ = clip_and_keep
    run.report.begin_training(startup_s)
    signals.defer()
    trainer.train()
    validate(run, settings.last_step)


def _arguments_of(settings: RunSettings, directory: Path, device: torch.device) -> dict[str, Any]:
    """Return what TrainingArguments takes of our settings. `Steps` sets the learning rate of every step."""
    chosen, batch = settings.optimizer, settings.batch
    return {
        "output_dir": str(directory),
        "max_steps": settings.last_step,
        "per_device_train_batch_size": batch.micro_batch_size_per_gpu,
        "gradient_accumulation_steps": batch.grad_accum_steps,
        "learning_rate": chosen.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": chosen.weight_decay,
        "adam_beta1": chosen.adam_beta1,
        "adam_beta2": chosen.adam_beta2,
        "adam_epsilon": chosen.adam_eps,
        "max_grad_norm": chosen.max_grad_norm or float("inf"),
        "bf16": settings.compute.precision == "bf16",
        "torch_compile": bool(settings.compute.compile),
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,  # else it drops shift_labels
        "use_cpu": device.type == "cpu",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": settings.training.seed,
    }


def _windows(run: TrainingRun) -> list[dict[str, torch.Tensor]]:
    """Return every window of the run in our order, one by one."""
    batches = TrainingBatches(run.checked.train_file, run.settings, 0, torch.device("cpu"))
    rows = [
        {"input_ids": inputs, "labels": targets, "shift_labels": targets}
        for step in range(run.settings.last_step)
        for batch in batches.of_step(step)
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True)
    ]
    batches.close()
    return rows
