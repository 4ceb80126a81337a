"""--matmul fp8: the linear layers of the blocks multiply in 8 bits, by torchao's float8 training.

Weights, optimizer state and everything outside these layers stay as they are; input, weight and gradient of each
product are scaled by one number per tensor and rounded to e4m3 or e5m2 (Micikevicius et al. 2022, arXiv:2209.05433).
"""

from __future__ import annotations

from torch import nn

from testbed.errors import without_library_warnings


def convert_to_float8_(model: nn.Module, emulate: bool = False) -> list[str]:
    """Replace the linear layers of the blocks, in place; parameters and their names stay.

    Args:
        emulate: round as float8 does but multiply in fp32, on devices without it (for tests).

    Returns:
        The names of the layers that were replaced.
    """
    with without_library_warnings():  # of kernels built for other versions of PyTorch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    converted: list[str] = []

    def is_of_a_block(module: nn.Module, name: str) -> bool:
        if not name.startswith("h."):
            return False
        converted.append(name)
        return True

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=emulate), module_filter_fn=is_of_a_block)
    return converted
