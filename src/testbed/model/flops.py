"""Arithmetic of speed: FLOPs per token, peak rates with their source, MFU. No torch."""

from __future__ import annotations

from testbed.model.shape import ModelShape

# Dense peak of the matrix units in FLOP/s per device (without sparsity), by the name that the driver reports: whole
# names, because boards of almost the same name differ. Source: NVIDIA's data sheets. What is not here is measured.
_PEAK_OF_BOARDS = {
    ("NVIDIA B200",): {"bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12},
    ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB"): {
        "bf16": 989.4e12,
        "fp16": 989.4e12,
        "fp8": 1978.9e12,
    },
    ("NVIDIA H200 NVL", "NVIDIA H100 NVL"): {"bf16": 835.5e12, "fp16": 835.5e12, "fp8": 1671e12},
    ("NVIDIA H100 PCIe",): {"bf16": 756.5e12, "fp16": 756.5e12, "fp8": 1513e12},
    ("NVIDIA L40S",): {"bf16": 362.05e12, "fp16": 362.05e12, "fp8": 733e12},
    ("NVIDIA A10",): {"bf16": 125e12, "fp16": 125e12},
    ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"): {
        "bf16": 312e12,
        "fp16": 312e12,
        "fp32": 19.5e12,
    },
    ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"): {"fp16": 125e12},
    ("Tesla T4",): {"fp16": 65e12},
    ("NVIDIA L4",): {"bf16": 121e12, "fp16": 121e12},
}
PEAK_FLOPS_PER_S = {
    (name, precision): peak
    for names, peaks in _PEAK_OF_BOARDS.items()
    for name in names
    for precision, peak in peaks.items()
}


def flops_per_token_palm(shape: ModelShape, seq_length: int) -> int:
    """Model FLOPs of forward + backward for one token, attention counted in full, without recomputation.

    6 per parameter of the matrix products plus 12 x layers x channels x sequence for the attention scores (PaLM,
    appendix B, arXiv:2204.02311). Position embeddings do not multiply. A multiply-add counts 2. MFU uses this.
    """
    multiplying = shape.num_parameters - shape.num_position_parameters
    return 6 * multiplying + 12 * shape.num_layers * shape.embedding_size * seq_length


def flops_per_token_causal(shape: ModelShape, seq_length: int) -> int:
    """The same with all parameters and only the causal half of the scores: llm.c's convention, 6-7 % lower at 124M."""
    return 6 * shape.num_parameters + 6 * shape.num_layers * shape.embedding_size * seq_length


def peak_from_table(device_name: str | None, precision: str) -> tuple[float, str] | None:
    """Peak FLOP/s of one device and where the number comes from; None for what the table does not hold."""
    peak = None if device_name is None else PEAK_FLOPS_PER_S.get((device_name, precision))
    return None if peak is None else (peak, f"NVIDIA data sheet, {device_name}, dense {precision}")


def mfu(tokens_per_s: float | None, flops_per_token: int, peak_per_device: float | None, devices: int) -> float | None:
    """Model FLOPs utilization, 0..1: what the model needs over what the devices could do in the same time."""
    if tokens_per_s is None or peak_per_device is None:
        return None
    return tokens_per_s * flops_per_token / (peak_per_device * devices)
