"""Arithmetic of speed: FLOPs per token, peak rates with their source, MFU. No torch."""

from __future__ import annotations

from testbed.model.shape import ModelShape

# Dense peak of the matrix units in FLOP/s per device (without sparsity), by the name that the driver reports: whole
# names, because boards of almost the same name differ. Source: NVIDIA's data sheets. What is not here is measured.
_PEAK_OF_BOARDS = {
    ("NVIDIA H200", "NVIDIA H100 80GB HBM3"): {"bf16": 989.4e12, "fp16": 989.4e12},
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


def least_flops_per_token(shape: ModelShape, seq_length: int) -> int:
    """What forward + backward cannot do without: of the PaLM count only the causal half of the scores. With a rate it
    bounds the time of a step from below."""
    return flops_per_token_palm(shape, seq_length) - 6 * shape.num_layers * shape.embedding_size * seq_length


def least_bytes_of_step(shape: ModelShape, tokens: int, micro_batches: int, precision: str) -> int:
    """Memory traffic that an optimizer step of AdamW on one device cannot do without, when no cache holds a tensor from
    one use to the next. With the FLOPs it bounds the time of a step from below.

    Weights, gradients and moments are fp32. Each micro batch reads every weight forward and backward and adds to every
    gradient (the first one writes it, a later one reads and writes it); the norm reads gradients; AdamW reads weight,
    gradient and two moments and writes three of them. Per token a layer keeps 15 channels (two normalised inputs,
    query, key, value, attention's output, the residual stream after it, 4 before and 4 after GELU, and its own output),
    the head its logits: each is written and read forward, its gradient written and read backward.

    In bf16 and fp16 an activation, and a weight as forward and backward read it, takes 2 bytes instead of 4; weights
    are cast once per step (the casts are kept), which reads 4 bytes and writes 2. Biases, gains and positions, which
    are not cast, are counted as if they were: under 1 % of the weights.
    """
    size = 4 if precision == "fp32" else 2
    cast = 0 if precision == "fp32" else 4 + size
    per_weight = cast + 2 * size * micro_batches + 4 * (1 + 2 * (micro_batches - 1) + 1 + 7)
    per_token = 15 * shape.num_layers * shape.embedding_size + shape.padded_vocab_size
    return per_weight * shape.num_parameters + 4 * size * per_token * tokens


def peak_from_table(device_name: str | None, precision: str) -> tuple[float, str] | None:
    """Peak FLOP/s of one device and where the number comes from; None for what the table does not hold."""
    peak = None if device_name is None else PEAK_FLOPS_PER_S.get((device_name, precision))
    return None if peak is None else (peak, f"NVIDIA data sheet, {device_name}, dense {precision}")


def mfu(tokens_per_s: float | None, flops_per_token: int, peak_per_device: float | None, devices: int) -> float | None:
    """Model FLOPs utilization, 0..1: what the model needs over what the devices could do in the same time."""
    if tokens_per_s is None or peak_per_device is None:
        return None
    return tokens_per_s * flops_per_token / (peak_per_device * devices)
