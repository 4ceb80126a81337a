"""Choose the attention kernel: by what the device offers, and by a trial at the run's shape."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional as F

from testbed.errors import InputError, first_line
from testbed.model.gpt2 import BACKENDS, attention_kernel
from testbed.profiling.device_limits import DTYPES
from testbed.profiling.step_clock import synchronize

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings

# Of these the trial chooses, the earlier one where two are about as fast: repeats of a run then take the same kernel.
# The plain one stores a T x T matrix per head.
FUSED = ("cudnn", "flash", "efficient")
ABOUT_AS_FAST = 1.05  # times the fastest
LARGEST_ERROR = 2e-2  # of the largest element; bf16 rounds to 4e-3
Heads: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
PASSES = 5  # one after the other, so that the host's part does not decide
SCORES_AT_ONCE = 1 << 26  # of plain attention in fp32, 256 MiB; it holds a few such tensors


@dataclasses.dataclass(frozen=True)
class Trial:
    """Result of one kernel: seconds of a forward and backward pass, or why it was excluded."""

    backend: str
    seconds: float | None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.backend} {f'{self.seconds * 1e3:.2f} ms' if self.seconds is not None else self.reason}"


def check_backend(settings: RunSettings, device: torch.device) -> None:
    """Check that the device has the kernel of --attention in the run's precision, or in one that --precision auto may
    choose.

    Raises:
        InputError: it has not.
    """
    if settings.model.attention == "auto":
        return
    precisions = [settings.compute.precision] if settings.compute.precision != "auto" else ["bf16", "fp32"]
    reasons = [why_not(settings.model.attention, settings, device, DTYPES[precision]) for precision in precisions]
    if None in reasons:
        return
    way_out = "leave --attention out to let it choose"
    if (
        settings.compute.precision == "fp32"
        and why_not(settings.model.attention, settings, device, torch.bfloat16) is None
    ):
        way_out = f"give --precision bf16, in which it has one, or {way_out}"
    raise InputError(
        f"--attention {settings.model.attention}: PyTorch has no such kernel for {device.type}, --precision "
        f"{' or '.join(precisions)} and --dropout {settings.model.dropout} ({reasons[0]}); {way_out}"
    )


def why_not(backend: str, settings: RunSettings, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a kernel does not run here, in PyTorch's words; None if it runs on 16 tokens."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            _forward_and_backward(backend, settings, _heads(settings, device, dtype, (1, 16)))
        except RuntimeError as error:
            return first_line(error)
    return None


def fastest_backend(settings: RunSettings, device: torch.device, rounds: int = 7) -> tuple[str, list[Trial]]:
    """Return the first fused kernel, in a fixed order, that is about as fast as the fastest at the run's shape, and all
    trials.

    Kernels take turns and each keeps its least time, so other work on the machine does not decide. A kernel that
    differs from plain attention in fp32 is excluded. "auto", PyTorch's choice, if no fused kernel runs. Random state
    and peak memory are left as they were.
    """
    reasons: dict[str, str] = {}
    seconds: dict[str, list[float]] = {backend: [] for backend in FUSED}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for number in range(rounds + 1):
            for backend in FUSED:
                if backend in reasons:
                    continue
                try:
                    if number == 0:  # it also chooses and loads kernels
                        _check_result(backend, settings, device)
                    taken_s = _seconds_of_pass(backend, settings, device)
                except RuntimeError as error:  # not built in, not for this shape, or out of memory
                    reasons[backend] = first_line(error)
                else:
                    seconds[backend] += [taken_s] if number else []
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    least = {backend: min(times) for backend, times in seconds.items() if backend not in reasons}
    fast = [backend for backend in least if least[backend] <= ABOUT_AS_FAST * min(least.values())]
    trials = [Trial(backend, least.get(backend), reasons.get(backend, "")) for backend in FUSED]
    return (fast[0] if fast else "auto"), trials


def own_choice(settings: RunSettings, device: torch.device) -> str:
    """Return the kernel that PyTorch itself picks for training, by its name for --attention."""
    heads = _heads(settings, device, DTYPES[settings.compute.precision], (1, settings.data.seq_length))
    number = torch._fused_sdp_choice(*heads, dropout_p=settings.model.dropout, is_causal=True)
    return next((name for name, backend in BACKENDS.items() if backend.value == number), "math")


def _check_result(backend: str, settings: RunSettings, device: torch.device) -> None:
    """Check the kernel at the run's shape against plain attention in fp32, if there is no dropout.

    Raises:
        RuntimeError: it is wrong.
    """
    dtype = DTYPES[settings.compute.precision]
    if settings.model.dropout == 0 and not (error := _error(backend, settings, device, dtype)) <= LARGEST_ERROR:  # nan
        raise RuntimeError(f"is wrong by {error:.1e} here")


def _seconds_of_pass(backend: str, settings: RunSettings, device: torch.device) -> float:
    """Return the mean seconds of PASSES forward and backward passes at the run's shape."""
    heads = _heads(settings, device, DTYPES[settings.compute.precision], _shape_of_run(settings))
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(PASSES):
        _forward_and_backward(backend, settings, heads)
    synchronize(device)
    return (time.perf_counter() - start_s) / PASSES


def _error(backend: str, settings: RunSettings, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference of output and gradients from plain attention in fp32, relative to the largest
    element, at the run's shape.

    Plain attention stores T x T scores for each head, so it computes a few heads of all sequences at a time.
    """
    heads = _heads(settings, device, dtype, _shape_of_run(settings))
    ours = _forward_and_backward(backend, settings, heads)
    at_once = max(1, SCORES_AT_ONCE // settings.data.seq_length**2)
    pieces = zip(*(tensor.flatten(0, 1).split(at_once) for tensor in (*ours, *heads)), strict=True)
    differences, largest = torch.zeros(2, len(ours), device=device)
    for *mine, query, key, value in pieces:  # each (at_once, T, D)
        exact = _forward_and_backward("math", settings, (query, key, value), dtype=torch.float32)
        differences = torch.maximum(differences, _largest(a.float() - b for a, b in zip(mine, exact, strict=True)))
        largest = torch.maximum(largest, _largest(exact))
    return float((differences / largest).max())


def _largest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value of each."""
    return torch.stack([tensor.abs().max() for tensor in tensors])


def _shape_of_run(settings: RunSettings) -> tuple[int, int]:
    """Return the sequences and tokens of a micro batch."""
    return settings.batch.micro_batch_size_per_gpu, settings.data.seq_length


def _heads(settings: RunSettings, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Heads:
    """Return query, key and value (B, H, T, D) as views of one product, as in the model; always the same numbers."""
    heads = settings.model.num_heads // settings.plan.mesh.tensor
    size = settings.model.embedding_size // settings.model.num_heads
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randn(*shape, 3, heads, size, device=device, generator=generator).to(dtype).requires_grad_()
    query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def _forward_and_backward(
    backend: str, settings: RunSettings, heads: Heads, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the output, and the gradients of query, key and value for an output gradient of ones."""
    query, key, value = (head.detach().to(dtype or head.dtype).requires_grad_() for head in heads)
    with attention_kernel(backend):
        output = F.scaled_dot_product_attention(query, key, value, dropout_p=settings.model.dropout, is_causal=True)
    return output.detach(), *torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
