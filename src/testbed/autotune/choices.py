"""Decide open settings: precision, micro batch, attention kernel, compilation, reading ahead.

All ranks decide alike, once the device is known: rank 0 tries and tells the others, or each rank checks its memory and
the smallest result counts.
"""

from __future__ import annotations

from typing import Any

import torch

from testbed.autotune.attention import check_backend, fastest_backend
from testbed.autotune.device import why_nothing_compiles, with_precision_resolved
from testbed.autotune.micro_batch import find_micro_batch, with_micro_batch
from testbed.config.compatibility import auto_compile_blocker
from testbed.config.run_types import can_find_micro_batch
from testbed.config.settings import RunSettings
from testbed.config.table import upgrade_settings
from testbed.distributed import process_group
from testbed.distributed.launch import Launch

# flag -> its value while it is open
_OPEN = {
    "precision": "auto",
    "micro_batch_size_per_gpu": None,
    "attention": "auto",
    "compile": None,
    "num_workers": None,
}


class ChoiceContradicts(Exception):
    """A choice does not work with a given flag; one sentence."""


def decide_open_settings(settings: RunSettings, launch: Launch, device: torch.device) -> tuple[RunSettings, list[str]]:
    """Return the settings with every open value decided, and lines for the screen. All ranks call it.

    Raises:
        ChoiceContradicts: the device lacks the kernel of --attention in the precision that was chosen.
    """
    said: list[str] = []
    settings = with_micro_batch_left_open(settings)
    left_open = _left_open(settings)
    settings, words = with_precision_resolved(settings, launch, device)
    if words is not None:
        said.append(words)
        try:
            check_backend(settings, device)
        except ValueError as error:
            raise ChoiceContradicts(str(error)) from None
    if settings.finds_micro_batch:  # before the kernels are timed, which is done with it
        micro_batch, words = find_micro_batch(settings, launch, device)
        settings = with_micro_batch(settings, micro_batch)
        said.append(words)
    if settings.model.attention == "auto" and device.type == "cuda":
        settings = settings.with_values(attention=_told_by_rank_0(_attention, settings, launch, device, said))
    if settings.compute.compile is None:
        settings = settings.with_values(compile=_told_by_rank_0(_compiles, settings, launch, device, said))
    if settings.data.num_workers is None:  # on a CPU the reader would take time from the step that it reads for
        settings = settings.with_values(num_workers=1 if device.type == "cuda" else 0)
    return _with_choices(settings, left_open), said


def as_decided_before(settings: RunSettings, recorded: dict[str, Any]) -> RunSettings:
    """Return the settings of a resumed run, with open values as decided at its beginning.

    Args:
        recorded: settings in a checkpoint of any version. What is open among them stays open.
    """
    settings = with_micro_batch_left_open(settings)
    recorded, left_open = upgrade_settings(recorded), _left_open(settings)
    taken = left_open - {"num_workers", "micro_batch_size_per_gpu"}
    settings = settings.with_values(**{name: recorded[name] for name in taken if name in recorded})
    if settings.finds_micro_batch and recorded.get("micro_batch_size_per_gpu") is not None:
        settings = with_micro_batch(settings, recorded["micro_batch_size_per_gpu"])
    return _with_choices(settings, left_open)


def with_micro_batch_left_open(settings: RunSettings) -> RunSettings:
    """Leave a micro batch that no flag gave to the memory of a GPU. On a CPU the default stands.

    Each micro batch casts weights and adds gradients; 4 sequences would cost a GPU an estimated fifth of its speed.
    """
    is_given = {"micro_batch_size_per_gpu", "grad_accum_steps"} & settings.origin.given
    can_find = can_find_micro_batch(settings.training.run_type, settings.plan.mesh.pipeline)
    if settings.compute.device != "cuda" or is_given or not can_find or settings.training.eval_only:
        return settings
    return settings.with_values(micro_batch_size_per_gpu=None, grad_accum_steps=None)


def _left_open(settings: RunSettings) -> frozenset[str]:
    """Return the names of settings without a value."""
    return frozenset(name for name, value in _OPEN.items() if settings.value(name) == value)


def _with_choices(settings: RunSettings, left_open: frozenset[str]) -> RunSettings:
    """Return the settings, with those that were open and have a value now marked as chosen."""
    return settings.with_values(chosen=settings.origin.chosen | (left_open - _left_open(settings)))


def _told_by_rank_0(choose, settings: RunSettings, launch: Launch, device: torch.device, said: list[str]) -> Any:
    """Return what rank 0 chooses, on every rank. Its line is added to `said`."""
    chosen, words = choose(settings, device) if launch.rank == 0 else (None, "")
    chosen, words = process_group.gather_objects((chosen, words))[0]
    if words:
        said.append(words)
    return chosen


def _attention(settings: RunSettings, device: torch.device) -> tuple[str, str]:
    if settings.plan.mesh.context > 1:  # the trial would be of another attention than context ranks compute
        return "auto", "attention auto: context ranks share each sequence"
    chosen, trials = fastest_backend(settings, device)
    return chosen, f"attention {chosen}: {', '.join(map(str, trials))}"


def _compiles(settings: RunSettings, device: torch.device) -> tuple[bool, str]:
    """Return whether to compile, and why not: only on CUDA, and if tests cover the run type."""
    if device.type != "cuda" or settings.training.eval_only:
        return False, ""
    if (reason := auto_compile_blocker(settings.by_flag())) is not None:
        return False, f"not compiled {reason}"
    reason = why_nothing_compiles(device)
    return reason is None, "" if reason is None else f"not compiled, as {reason}"
