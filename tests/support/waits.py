"""Count what inside a step would make the host wait for a GPU. On a CPU the same calls return at once."""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# Operations whose result is a number on the host, or a shape that depends on the values.
OPERATIONS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
QUESTIONS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero")  # one inside the other
# The fused AdamW reads its step counter on a CPU only.
OF_NO_GPU = ("aten::_fused_adamw_",)
# Methods that need the values on the host. On a CPU no operation shows most of them.
METHODS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__")


# What a step may wait for, by the start of the name of its variant: function or operation -> why.
NORM_CHECK = {
    "__bool__ in utils.py:is_invalid_grad_norm": "DeepSpeed looks whether the gradient norm is finite",
    "aten::masked_fill_": "DeepSpeed replaces a norm that is not finite",
}
ALLOWED: dict[str, dict[str, str]] = {
    "optimized": NORM_CHECK,
    "ZeRO 0": {},
    "ZeRO 1": NORM_CHECK
    | {
        "__bool__ in stage_1_and_2.py:update_offload_overflow_tracker": "with --offload: gradients are in host memory",
        "item in stage_1_and_2.py:complete_grad_norm_calculation_for_cpu_offload": "with --offload: so is their norm",
    },
    "ZeRO 2": NORM_CHECK,
    "ZeRO 3": NORM_CHECK
    | {
        "__float__ in stage3.py:complete_grad_norm_calculation_for_cpu_offload": "with --offload: a norm on the host",
        "cpu in stage3.py:complete_grad_norm_calculation_for_cpu_offload": "with --offload: a norm on the host",
    },
    # The constant is a number on the host, so a GPU is not asked.
    "tensor": {"aten::_index_put_impl_": "PyTorch's parallel cross entropy writes a constant for other ranks' targets"},
}


def allowed_waits(variant: str) -> dict[str, str]:
    """Return what a step of a variant may wait for."""
    return next((waits for start, waits in ALLOWED.items() if variant.startswith(start)), {})


@contextlib.contextmanager
def counted_waits() -> Iterator[collections.Counter[str]]:
    """Count the waits inside the block, by the function or the operation that asks for a value."""
    found: collections.Counter[str] = collections.Counter()

    def counting(name: str, plain: Callable) -> Callable:
        def call(*arguments, **options):
            caller = sys._getframe(1).f_code
            found[f"{name} in {Path(caller.co_filename).name}:{caller.co_name}"] += 1
            return plain(*arguments, **options)

        return call

    with contextlib.ExitStack() as patches:
        for name in METHODS:
            plain = getattr(torch.Tensor, name)
            patches.enter_context(mock.patch.object(torch.Tensor, name, counting(name, plain)))
        if "deepspeed" in sys.modules:
            from deepspeed.accelerator import get_accelerator

            plain = get_accelerator().synchronize
            patches.enter_context(mock.patch.object(get_accelerator(), "synchronize", counting("synchronize", plain)))
        profiler = patches.enter_context(torch.autograd.profiler.profile())
        yield found
    found.update(_asking_operations(profiler.kineto_results.events()))


def _asking_operations(events: Iterable[Any]) -> Iterator[str]:
    """Yield for each question the operation inside which it is asked, or its own name where Python does not ask.

    The profiler's own tree of its events takes seconds to build: it is made of Python objects, for all of them.
    """
    open_events: dict[int, list[Any]] = {}  # of each thread, the one inside the other
    nested = (event for event in events if not event.is_async())
    for event in sorted(nested, key=lambda event: (event.start_ns(), -event.end_ns())):
        around = open_events.setdefault(event.start_thread_id(), [])
        while around and around[-1].end_ns() <= event.start_ns():
            around.pop()
        around.append(event)
        if event.name() in OPERATIONS:
            asking = _asking_operation([each.name() for each in around])
            if asking not in (None, *OF_NO_GPU):
                yield asking


def _asking_operation(names: list[str]) -> str | None:
    """Return the innermost of these operations, each inside the one before, that is no question; None for Python."""
    if names[-1] not in QUESTIONS:
        return names[-1]
    asking = next((name for name in reversed(names) if name not in QUESTIONS), "")
    return asking if asking.startswith("aten::") else None
