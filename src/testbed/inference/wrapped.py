"""Time the plain model against the same weights inside DeepSpeed: its training engine, and `deepspeed.init_inference`.

One process, a world of one: what is compared is what the wrapper does around each forward pass, not communication.
init_inference has kernels of its own for classes of `transformers` only; around our model it is a wrapper.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from testbed.distributed.launch import Launch
from testbed.distributed.process_group import start_process_group, stop_process_group
from testbed.errors import first_line
from testbed.inference.cached_model import CachedModel
from testbed.inference.latency import time_in_turn
from testbed.model.gpt2 import GPT2
from testbed.strategies.deepspeed_zero import import_deepspeed

PLAIN, TRAINING_ENGINE = "plain", "training_engine"


def compare_wrapped(
    model: GPT2,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    warmup: int,
    device: torch.device,
    progress: Callable[[int], Any] = lambda number: None,
) -> dict[str, Any]:
    """Return the `wrapped` field of inference_metrics.json without its comparisons. An arm that does not run says why.

    Args:
        prompts: all of the same length; the first `warmup` of them are answered and forgotten.
    """
    start_process_group(device, Launch(0, 0, 1, 1), is_needed=True)
    modules: dict[str, nn.Module] = {PLAIN: CachedModel(model).eval()}
    unavailable = {}
    try:
        for name, wrap in ((TRAINING_ENGINE, _training_engine), ("init_inference", _init_inference)):
            try:
                module = wrap(CachedModel(copy.deepcopy(model)), device)
                # a trial: what it cannot do is said before anything is timed
                time_in_turn({name: module}, model.shape, prompts[:1], 2, 1, device)
            except Exception as error:  # of any kind, by version and machine
                unavailable[name] = first_line(error)
            else:
                modules[name] = module
        answers = time_in_turn(modules, model.shape, prompts, new_tokens, warmup, device, progress)
    finally:
        stop_process_group()
    arms: dict[str, dict[str, Any]] = {}
    for name, of_arm in answers.items():
        arms[name] = {
            "unavailable": None,
            "same_tokens": [each.tokens for each in of_arm] == [each.tokens for each in answers[PLAIN]],
            "latency_s": [each.latency_s for each in of_arm],
            "decode_tokens_per_s": [each.decode_tokens_per_s for each in of_arm],
        }
    for name, reason in unavailable.items():
        arms[name] = {"unavailable": reason, "same_tokens": None, "latency_s": [], "decode_tokens_per_s": []}
    return {
        "prompt_tokens": len(prompts[0]),
        "new_tokens": new_tokens,
        "warmup": warmup,
        "repeats": len(prompts) - warmup,
        "arms": arms,
    }


def _training_engine(model: CachedModel, device: torch.device) -> nn.Module:
    """Wrap the model as training with ZeRO 1 does, in which earlier projects generated."""
    engine, *_ = import_deepspeed(device).initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "steps_per_print": 2**31,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 1},
            "zero_force_ds_cpu_optimizer": False,
        },
        dist_init_required=False,
    )
    engine.eval()  # returns nothing, unlike a module's
    return engine


def _init_inference(model: CachedModel, device: torch.device) -> nn.Module:
    dtype = next(model.parameters()).dtype
    return import_deepspeed(device).init_inference(model, dtype=dtype, replace_with_kernel_inject=False).eval()
