"""Which kernel computes attention: what the device offers, and which of them is fastest at the run's shape."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from testbed.errors import first_line
from testbed.profiling.device_limits import DTYPES
from testbed.profiling.step_clock import synchronize

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings
from testbed.model.gpt2 import BACKENDS

# Of these the trial chooses, the earlier one where two are about as fast: repeats of a run then take the same kernel.
# The plain one stores a T x T matrix per head.
FUSED = ("cudnn", "flash", "efficient")
ABOUT_AS_FAST = 1.05  # times the fastest
LARGEST_ERROR = 2e-2  # of the largest element; bf16 rounds to 4e-3
PASSES = 5  # one after the other, so that the host's part does not decide


@dataclasses.dataclass(frozen=True)
class Trial:
    """What became of one kernel: seconds of a forward and a backward pass, or why it does not take part."""

    backend: str
    seconds: float | None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.backend} {f'{self.seconds * 1e3:.2f} ms' if self.seconds is not None else self.reason}"


def check_backend(settings: RunSettings, device: torch.device) -> None:
    """Whether the device has the kernel that --attention insists on, in the run's precision; in one of those that
    --precision auto may come to while that is open.

    Raises:
        ValueError: it has not.
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
    raise ValueError(
        f"--attention {settings.model.attention}: PyTorch has no such kernel for {device.type}, --precision "
        f"{' or '.join(precisions)} and --dropout {settings.model.dropout} ({reasons[0]}); {way_out}"
    )


def why_not(backend: str, settings: RunSettings, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a kernel does not run here, in PyTorch's words; None where it does. Tried on 16 tokens, forward and back."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            _forward_and_backward(backend, settings, _heads(settings, device, dtype, (1, 16)))
        except RuntimeError as error:
            return first_line(error)
    return None


def fastest_backend(settings: RunSettings, device: torch.device, rounds: int = 7) -> tuple[str, list[Trial]]:
    """The first of the fused kernels, in a fixed order, that is about as fast as the fastest: by the time of a forward
    and a backward pass at the run's shape.

    They are timed in turns, and of each the least time counts: what else the machine does meets them alike, and only
    adds. A kernel whose result is not that of the plain computation in fp32 does not take part. Random state and peak
    memory are left as they were. "auto", which is PyTorch's own choice, where no fused kernel runs.

    Returns:
        The name, and what became of each kernel.
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
    """The kernel that PyTorch picks by itself while training, as it would be named with --attention."""
    heads = _heads(settings, device, DTYPES[settings.compute.precision], (1, settings.data.seq_length))
    number = torch._fused_sdp_choice(*heads, dropout_p=settings.model.dropout, is_causal=True)
    return next((name for name, backend in BACKENDS.items() if backend.value == number), "math")


def _check_result(backend: str, settings: RunSettings, device: torch.device) -> None:
    """RuntimeError: the kernel does not compute what the plain computation in fp32 does. Dropout lets nobody tell."""
    dtype = DTYPES[settings.compute.precision]
    if settings.model.dropout == 0 and (error := _error(backend, settings, device, dtype)) > LARGEST_ERROR:
        raise RuntimeError(f"is wrong by {error:.1e} here")


def _seconds_of_pass(backend: str, settings: RunSettings, device: torch.device) -> float:
    """Of a forward and a backward pass at the run's shape, the mean of PASSES."""
    shape = (settings.batch.micro_batch_size_per_gpu, settings.data.seq_length)
    heads = _heads(settings, device, DTYPES[settings.compute.precision], shape)
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(PASSES):
        _forward_and_backward(backend, settings, heads)
    synchronize(device)
    return (time.perf_counter() - start_s) / PASSES


def _error(backend: str, settings: RunSettings, device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference of output and gradient from the plain computation in fp32, relative to its largest element."""
    shape = (1, min(settings.data.seq_length, 256))
    ours = _forward_and_backward(backend, settings, _heads(settings, device, dtype, shape))
    exact = _forward_and_backward("math", settings, _heads(settings, device, dtype, shape), dtype=torch.float32)
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(ours, exact, strict=True))


def _heads(
    settings: RunSettings, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> tuple[torch.Tensor, ...]:
    """Query, key and value (B, H, T, D) as they lie in the model: views of one product. The same numbers every time."""
    heads = settings.model.num_heads // settings.plan.mesh.tensor
    size = settings.model.embedding_size // settings.model.num_heads
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randn(*shape, 3, heads, size, device=device, generator=generator).to(dtype).requires_grad_()
    return packed.permute(2, 0, 3, 1, 4).unbind(0)


def _forward_and_backward(
    backend: str, settings: RunSettings, heads: tuple[torch.Tensor, ...], dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """Output, and the gradients of query, key and value when the output's is one everywhere."""
    heads = tuple(head.detach().to(dtype or head.dtype).requires_grad_() for head in heads)
    with sdpa_kernel(BACKENDS[backend]):
        output = F.scaled_dot_product_attention(*heads, dropout_p=settings.model.dropout, is_causal=True)
    return output.detach(), *torch.autograd.grad(output, heads, torch.ones_like(output))
