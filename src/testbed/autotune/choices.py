"""What the flags leave to the program: precision, micro batch, attention kernel, compilation and reading ahead.

Decided once the device is known and before anything is built, by all ranks alike: rank 0 tries out and tells, or each
rank finds out for its own memory and the smallest counts. What was decided stands in the settings as if it had been
given.
"""

from __future__ import annotations

from typing import Any

import torch

from testbed.autotune.attention import check_backend, fastest_backend
from testbed.autotune.device import why_nothing_compiles, with_precision_resolved
from testbed.autotune.micro_batch import find_micro_batch, with_micro_batch
from testbed.config.compatibility import why_not_compiled_unasked
from testbed.config.earlier_flags import in_todays_terms
from testbed.config.settings import RunSettings
from testbed.distributed import process_group
from testbed.distributed.launch import Launch


class ChoiceContradicts(Exception):
    """What was decided does not go with what was typed; one sentence."""


def decide(settings: RunSettings, launch: Launch, device: torch.device) -> tuple[RunSettings, list[str]]:
    """Settings in which nothing is left open, and what to say about it. All ranks call it.

    Raises:
        ChoiceContradicts: the device lacks the kernel of --attention in the precision that --precision auto came to.
    """
    said: list[str] = []
    left_open = _left_open(settings)
    settings, words = with_precision_resolved(settings, launch, device)
    if words is not None:
        said.append(words)
        try:
            check_backend(settings, device)
        except ValueError as error:
            raise ChoiceContradicts(str(error)) from None
    if settings.plan.finds_micro_batch:  # before the kernels are timed, which is done with it
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
    """Settings of a start that resumes: what they leave open was decided when the run began.

    Args:
        recorded: the settings in a checkpoint, of this version or an earlier one.
    """
    recorded, left_open = in_todays_terms(recorded), _left_open(settings)
    changes: dict[str, Any] = {}
    if settings.compute.precision == "auto":
        changes["precision"] = recorded["precision"]
    if settings.compute.compile is None:
        changes["compile"] = recorded["compile"]
    if settings.model.attention == "auto":
        changes["attention"] = recorded["attention"]
    settings = settings.with_values(**changes)
    if settings.plan.finds_micro_batch:
        settings = with_micro_batch(settings, recorded["micro_batch_size_per_gpu"])
    return _with_choices(settings, left_open)


def _left_open(settings: RunSettings) -> frozenset[str]:
    """Settings that nobody gave a value."""
    is_open = {
        "precision": settings.compute.precision == "auto",
        "attention": settings.model.attention == "auto",
        "compile": settings.compute.compile is None,
        "micro_batch_size_per_gpu": settings.plan.finds_micro_batch,
        "num_workers": settings.data.num_workers is None,
    }
    return frozenset(name for name, value in is_open.items() if value)


def _with_choices(settings: RunSettings, left_open: frozenset[str]) -> RunSettings:
    """The settings, with the names of those that were open and are no longer added to `chosen`."""
    return settings.with_values(chosen=settings.origin.chosen | (left_open - _left_open(settings)))


def _told_by_rank_0(choose, settings: RunSettings, launch: Launch, device: torch.device, said: list[str]) -> Any:
    """What rank 0 chooses, on every rank. Its line is added to `said`."""
    chosen, words = choose(settings, device) if launch.rank == 0 else (None, "")
    chosen, words = process_group.gather_objects((chosen, words))[0]
    if words:
        said.append(words)
    return chosen


def _attention(settings: RunSettings, device: torch.device) -> tuple[str, str]:
    chosen, trials = fastest_backend(settings, device)
    return chosen, f"attention {chosen}: {', '.join(map(str, trials))}"


def _compiles(settings: RunSettings, device: torch.device) -> tuple[bool, str]:
    """On CUDA where tests show that compiled blocks compute the same, and the compiler works. A CPU gains nothing."""
    if device.type != "cuda" or settings.training.eval_only:
        return False, ""
    if (reason := why_not_compiled_unasked(settings.by_flag())) is not None:
        return False, f"not compiled {reason}"
    reason = why_nothing_compiles(device)
    return reason is None, "" if reason is None else f"not compiled, as {reason}"
