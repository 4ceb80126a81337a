"""What the flags leave to the program: precision, attention kernel, compilation and micro batch.

Decided once the device is known and before anything is built, by all ranks alike: rank 0 tries out and tells, or each
rank finds out for its own memory and the smallest counts. What was decided stands in the settings as if it had been
given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from testbed import distributed
from testbed.attention_backend import fastest_backend
from testbed.batch import with_micro_batch
from testbed.device import with_precision_resolved
from testbed.largest_micro_batch import find_micro_batch
from testbed.launch import Launch
from testbed.parallelism import why_not_compiled
from testbed.settings import RunSettings


def decide(settings: RunSettings, launch: Launch, device: torch.device) -> tuple[RunSettings, list[str]]:
    """Settings in which nothing is left open, and what to say about it. All ranks call it."""
    said: list[str] = []
    settings = with_precision_resolved(settings, launch, device)
    if settings.attention == "auto" and device.type == "cuda":
        settings = dataclasses.replace(settings, attention=_told_by_rank_0(_attention, settings, launch, device, said))
    if settings.compile is None:
        settings = dataclasses.replace(settings, compile=_told_by_rank_0(_compiles, settings, launch, device, said))
    if settings.finds_micro_batch:
        micro_batch, words = find_micro_batch(settings, launch, device)
        settings = with_micro_batch(settings, micro_batch)
        said.append(words)
    return settings, said


def as_decided_before(settings: RunSettings, recorded: dict[str, Any]) -> RunSettings:
    """Settings of a start that resumes: what they leave open was decided when the run began.

    Args:
        recorded: the settings in a checkpoint, of this version or an earlier one.
    """
    recorded = in_todays_terms(recorded)
    changes: dict[str, Any] = {}
    if settings.precision == "auto":
        changes["precision"] = recorded["precision"]
    if settings.compile is None:
        changes["compile"] = recorded["compile"]
    if settings.attention == "auto":
        changes["attention"] = recorded["attention"]
    settings = dataclasses.replace(settings, **changes)
    if settings.finds_micro_batch:
        settings = with_micro_batch(settings, recorded["micro_batch_size_per_gpu"])
    return settings


def in_todays_terms(recorded: dict[str, Any]) -> dict[str, Any]:
    """The settings in a checkpoint, with what its version did where it did not have these flags."""
    before = {"attention": "auto", "compile": False, "matmul": "default"} | recorded
    if before.pop("use_flash_attention", False):
        before["attention"] = "flash"
    return before


def _told_by_rank_0(choose, settings: RunSettings, launch: Launch, device: torch.device, said: list[str]) -> Any:
    """What rank 0 chooses, on every rank. Its line is added to `said`."""
    chosen, words = choose(settings, device) if launch.rank == 0 else (None, "")
    chosen, words = distributed.gather_objects((chosen, words))[0]
    if words:
        said.append(words)
    return chosen


def _attention(settings: RunSettings, device: torch.device) -> tuple[str, str]:
    chosen, trials = fastest_backend(settings, device)
    return chosen, f"attention {chosen}: {', '.join(map(str, trials))}"


def _compiles(settings: RunSettings, device: torch.device) -> tuple[bool, str]:
    """On CUDA where the run type allows it and the compiler works; nothing is gained on the CPU."""
    if device.type != "cuda" or settings.eval_only or why_not_compiled(vars(settings)) is not None:
        return False, ""
    try:
        x = torch.ones(8, device=device, requires_grad=True)
        torch.compile(lambda x: torch.nn.functional.gelu(x) * 2)(x).sum().backward()
    except Exception as error:  # no Triton, no C compiler, a driver too old: of many types
        return False, f"not compiled, as the compiler does not work here ({str(error).splitlines()[0][:200]})"
    finally:
        torch._dynamo.reset()
    return True, ""
