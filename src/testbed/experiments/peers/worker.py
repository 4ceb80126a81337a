"""Run other trainers' models, the matrix product and the facts of a comparison with peers, each in a process of ours.

`compare_peers.py --worker FILE.json` ends here: FILE.json says what to do and where the answer goes. All trainers here
get the windows, the order and the initial weights of src/gpt2.py, and are timed by its clock's rule: reading the data,
forward, backward, clipping and update, the device synchronised once per optimizer step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from testbed.autotune.device import device_type
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.config.settings import CheckedRun, RunSettings
from testbed.distributed.launch import Launch
from testbed.experiments.peers.nanogpt import CHECKPOINT
from testbed.io import write_text
from testbed.metrics import environment
from testbed.model.gpt2 import GPT2, to_transformers
from testbed.optim.optimizer import parameter_groups
from testbed.profiling.device_limits import PeakRate, is_bf16_faster
from testbed.profiling.step_clock import synchronize
from testbed.step import MicroBatch
from testbed.train.batches import TrainingBatches, ValidationBatches

ONE_PROCESS = Launch(0, 0, 1, 1)
MeanLoss = Callable[[nn.Module, MicroBatch], torch.Tensor]  # mean over the tokens of a micro batch, in nats


def run_work(file: Path) -> None:
    """Do what `file` says and write the answer where it says. "auto" is CUDA where PyTorch finds it."""
    work = json.loads(file.read_text(encoding="utf-8"))
    torch.set_num_threads(work["threads"])
    device = torch.device(device_type(work["device"]))
    write_text(Path(work["out"]), json.dumps(WORK[work["kind"]](work, device)))


def facts(work: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the machine, versions and commit, and whether the device multiplies bf16 fast."""
    return {**environment.facts(device, "accelerate"), "is_bf16_fast": is_bf16_faster(device)}


def ceiling(work: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Measure the best rate of a large square matrix product, as a run of ours does for its MFU."""
    peak = PeakRate(device, work["precision"])
    peak.measure(repeats=work["repeats"])
    return {"flops_per_s": peak.flops_per_s(), "source": peak.source(1)}


def ceilings(work: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Measure it at several precisions in one process, which scripts/more/benchmark_gpu.py asks for."""
    return {precision: ceiling({**work, "precision": precision}, device) for precision in work["precisions"]}


def transformers_trainer(work: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Train with transformers' Trainer as its guide uses it; only what must be equal for equal work is set."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    checked, settings = _checked(work)
    model = _gpt2_of_transformers(settings, work["attention"])
    moments: list[float] = []
    losses: list[torch.Tensor] = []

    class StepEnds(TrainerCallback):
        """Time from the end of one optimizer step to the end of the next, so nothing between the steps is left out."""

        def _mark(self) -> None:
            synchronize(device)
            moments.append(time.perf_counter())

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._mark()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._mark()
            losses.append(torch.zeros((), device=device))

    class WithLosses(Trainer):
        def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **named)
            losses[-1] += loss  # of a micro batch, already divided by the number of them; stays on the device
            return loss

    losses.append(torch.zeros((), device=device))
    arguments = TrainingArguments(
        output_dir=str(Path(work["out"]).parent),
        max_steps=settings.last_step,
        per_device_train_batch_size=settings.batch.micro_batch_size_per_gpu,
        gradient_accumulation_steps=settings.batch.grad_accum_steps,
        learning_rate=settings.optimizer.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=settings.optimizer.weight_decay,
        adam_beta1=settings.optimizer.adam_beta1,
        adam_beta2=settings.optimizer.adam_beta2,
        adam_epsilon=settings.optimizer.adam_eps,
        max_grad_norm=settings.optimizer.max_grad_norm,
        bf16=work["precision"] == "bf16",
        torch_compile=work["compile"],
        train_sampling_strategy="sequential",  # the windows come in the order of src/gpt2.py
        remove_unused_columns=False,  # else it drops shift_labels
        use_cpu=device.type == "cpu",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings.training.seed,
    )
    trainer = WithLosses(model, arguments, train_dataset=_dataset(checked, settings), callbacks=[StepEnds()])
    trainer.train()
    times = [end - start for start, end in itertools.pairwise(moments)]
    val_loss = _validation_loss(model, _loss_of_transformers, checked, device, work["precision"])
    return _answer(times, [float(loss) for loss in losses[: len(times)]], val_loss, sum(times[work["warmup_steps"] :]))


def transformers_loop(work: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Train GPT2LMHeadModel in the loop that one would write by hand."""
    checked, settings = _checked(work)
    return _loop(_gpt2_of_transformers(settings, work["attention"]), _loss_of_transformers, checked, work, device)


def nanogpt_loop(work: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Train nanoGPT's model in the same loop, from our initial weights: their names differ by a prefix, no layout
    does."""
    checked, settings = _checked(work)
    model = _nanogpt(work, settings)
    weights = {f"transformer.{name}": tensor for name, tensor in _initial_weights(settings).items()}
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][: settings.data.seq_length]
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    model.load_state_dict(weights)
    return _loop(model, _loss_of_nanogpt, checked, work, device)


def nanogpt_validation(work: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Validate the weights that nanoGPT's train.py left, on our windows, with its own model."""
    checked, settings = _checked(work)
    saved = torch.load(Path(work["checkpoint"]) / CHECKPOINT, map_location="cpu", mmap=True, weights_only=True)
    model = _nanogpt(work, settings)
    model.load_state_dict({name.removeprefix("_orig_mod."): tensor for name, tensor in saved["model"].items()})
    model.to(device)
    return {
        "val_loss": _validation_loss(model, _loss_of_nanogpt, checked, device, work["precision"]),
        "num_steps": saved["iter_num"],
    }


def _checked(work: dict[str, Any]) -> tuple[CheckedRun, RunSettings]:
    """Return the run that src/gpt2.py would make of these flags."""
    checked = check_run(parse_command_line(work["gpt2_arguments"]), ONE_PROCESS)
    return checked, checked.settings


def _initial_weights(settings: RunSettings) -> dict[str, torch.Tensor]:
    """Return the weights with which src/gpt2.py begins."""
    torch.manual_seed(settings.training.seed)
    return GPT2(settings.shape).state_dict()


def _gpt2_of_transformers(settings: RunSettings, attention: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = settings.shape
    sizes: dict[str, Any] = {**shape.as_transformers(settings.model.dropout), "attn_implementation": attention}
    config = GPT2Config(
        **sizes,
        use_cache=False,  # it is for generating
        bos_token_id=0,  # not used here, and GPT-2's own lies outside a small vocabulary
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    result = model.load_state_dict(to_transformers(_initial_weights(settings), shape), strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}, result  # the tied head
    model.tie_weights()
    return model


def _nanogpt(work: dict[str, Any], settings: RunSettings) -> nn.Module:
    module = _module_at(Path(work["nanogpt_dir"]) / "model.py")
    return module.GPT(
        module.GPTConfig(
            block_size=settings.data.seq_length,
            vocab_size=settings.shape.padded_vocab_size,
            n_layer=settings.model.num_layers,
            n_head=settings.model.num_heads,
            n_embd=settings.model.embedding_size,
            dropout=settings.model.dropout,
            bias=True,
        )
    )


def _module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None and spec.loader is not None  # the name of a .py file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _loss_of_transformers(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    # it would shift labels itself and so predict one token less than we do: give it the targets
    return model(input_ids=batch.inputs, labels=batch.targets, shift_labels=batch.targets).loss


def _loss_of_nanogpt(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    return model(batch.inputs, batch.targets)[1]


def _dataset(checked: CheckedRun, settings: RunSettings) -> list[dict[str, torch.Tensor]]:
    """Return every window of the run in our order, one by one, for Trainer's own loader to batch."""
    batches = TrainingBatches(checked.train_file, settings, 0, torch.device("cpu"))
    rows = [
        {"input_ids": inputs, "labels": targets, "shift_labels": targets}
        for step in range(settings.last_step)
        for batch in batches.of_step(step)
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True)
    ]
    batches.close()
    return rows


def _autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def _loop(
    model: nn.Module, mean_loss: MeanLoss, checked: CheckedRun, work: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Train as a careful person would by hand, with our parameter groups and hyper-parameters."""
    settings, precision = checked.settings, work["precision"]
    model.to(device).train()
    optimizer = torch.optim.AdamW(
        parameter_groups(model.parameters(), settings.optimizer.weight_decay),
        lr=settings.optimizer.learning_rate,
        betas=(settings.optimizer.adam_beta1, settings.optimizer.adam_beta2),
        eps=settings.optimizer.adam_eps,
        fused=True,
    )
    batches = TrainingBatches(checked.train_file, settings, 0, device)
    times, losses, loop_start_s = [], [], 0.0
    synchronize(device)
    for step in range(settings.last_step):
        start_s = time.perf_counter()
        loop_start_s = start_s if step == work["warmup_steps"] else loop_start_s
        loss_of_step = torch.zeros((), device=device)
        micro_batches = batches.of_step(step)
        for batch in micro_batches:
            with _autocast(device, precision):
                loss = mean_loss(model, batch) / len(micro_batches)
            loss.backward()
            loss_of_step += loss.detach()
        if settings.optimizer.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        end_s = time.perf_counter()
        times.append(end_s - start_s)
        losses.append(float(loss_of_step))
    batches.close()
    val_loss = _validation_loss(model, mean_loss, checked, device, precision)
    return _answer(times, losses, val_loss, end_s - loop_start_s)


@torch.no_grad()
def _validation_loss(
    model: nn.Module, mean_loss: MeanLoss, checked: CheckedRun, device: torch.device, precision: str
) -> float | None:
    """Return the mean loss over the tokens of the windows that src/gpt2.py validates on, at the precision of
    training."""
    model.eval()
    loss_sum, num_tokens = 0.0, 0
    validation = ValidationBatches(checked.val_file, checked.settings, 0, device)
    for index in range(len(validation)):
        for batch in validation.of_batch(index):
            with _autocast(device, precision):
                loss_sum += float(mean_loss(model, batch)) * batch.num_target_tokens
            num_tokens += batch.num_target_tokens
    return loss_sum / num_tokens if num_tokens else None


def _answer(times: Sequence[float], losses: Sequence[float], val_loss: float | None, loop_s: float) -> dict[str, Any]:
    """`measured_loop_s`: from the end of warm-up to the end of the last step, what lies between the steps included."""
    return {
        "step_times_s": list(times),
        "losses": list(losses),
        "val_loss": val_loss,
        "measured_loop_s": loop_s,
    }


WORK = {
    "facts": facts,
    "ceiling": ceiling,
    "ceilings": ceilings,
    "transformers": transformers_trainer,
    "transformers-loop": transformers_loop,
    "nanogpt-bf16": nanogpt_loop,
    "nanogpt-validation": nanogpt_validation,
}
