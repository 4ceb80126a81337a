"""Put the linear layers of a model into fewer bits, and count from the tensors what its weights take up then.

torchao puts integers with their scales in place of the weight of every nn.Linear. GPT-2's head is not one: it is the
token embedding itself, which stays as it is, with the positions, the biases and the LayerNorms. So all matrix products
of a model but the head's are quantized, and of its parameters the fewer the larger its vocabulary. `Quantized` says how
many.

What a weight takes with its scales (C the embedding size, 4 C the longest row):
    int8     8 bits, and per row a 32-bit scale and an 8-bit zero point
    int4     4 bits, two in a byte, and per group of `group_size` weights a scale and a zero point of the model's width;
             on CUDA, where the rest is in bf16, of rows that are padded to a multiple of 1,024
    torch    8 bits, and one scale per matrix
"""

from __future__ import annotations

import copy
import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from testbed.errors import InputError, first_line, without_library_warnings
from testbed.inference.schemes import SCHEMES, TORCHAO
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

GROUP_SIZES = (128, 64, 32)  # of int4: what its CPU kernel takes; a larger group has fewer scales and is less exact
INT4_CUDA_ROW = 1024  # its CUDA kernel takes rows of a multiple of this (torchao's Int4TilePackedTo4dTensor pads them)


class Quantized(NamedTuple):
    """A model under a scheme, and its size as inference_metrics.json has it.

    Parameters are counted without the rows that pad the vocabulary, bytes with them.
    """

    model: GPT2
    size: dict[str, Any]


@torch.no_grad()
def quantize(model: GPT2, scheme: str) -> Quantized:
    """Return a copy of an fp32 model under a scheme of SCHEMES, ready to run; for "none" the model itself.

    Raises:
        InputError: the scheme does not run on the model's device, see `check_scheme`.
    """
    shape, device = model.shape, model.wte.weight.device
    check_scheme(scheme, shape, device)
    layers = {name: layer.weight.numel() for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    quantized, changed = model.eval(), []
    if scheme != "none":
        quantized = cast("GPT2", _convert(copy.deepcopy(model).eval(), scheme, shape, device))
        changed = [name for name in layers if _is_quantized(quantized.get_submodule(name))]
    is_whole = scheme == "bf16"  # the head too
    size = {
        "num_parameters": shape.num_parameters,
        "num_quantized_parameters": shape.num_parameters if is_whole else sum(layers[name] for name in changed),
        "num_products": len(layers) + 1,  # four per layer, and the head
        "num_quantized_products": len(layers) + 1 if is_whole else len(changed),
        "bytes_in_memory": bytes_in_memory(quantized),  # of the distinct storages behind the weights
        "bytes_on_disk": bytes_on_disk(quantized),  # of a file that torch.save wrote
        "bytes_expected": expected_bytes(shape, scheme, device.type),  # what the bit widths say
    }
    return Quantized(quantized, size)


def check_scheme(scheme: str, shape: ModelShape, device: torch.device) -> None:
    """Convert a small layer and run it: the one answer that holds for every build of PyTorch and torchao.

    Raises:
        InputError: one sentence, where the scheme does not run on this device with a model of this shape.
    """
    if scheme in ("none", "bf16"):
        return
    if SCHEMES[scheme].device_type not in (None, device.type):
        raise InputError(
            f"--quantize {scheme} runs on {SCHEMES[scheme].device_type} only, not on {device.type}; leave it out, or "
            f"give --device {SCHEMES[scheme].device_type}"
        )
    if SCHEMES[scheme].needs_torchao and find_spec("torchao") is None:
        raise InputError(f"--quantize {scheme} needs torchao; install it with: pip install {TORCHAO}")
    if scheme == "int4_weight_only" and group_size(shape) is None:
        raise InputError(
            f"--quantize {scheme} needs an embedding size that is a multiple of {GROUP_SIZES[-1]}, and this model's is "
            f"{shape.embedding_size}; leave it out"
        )
    size = shape.embedding_size
    try:
        with torch.no_grad():
            layer = _convert(nn.Sequential(nn.Linear(size, size)).to(device), scheme, shape, device)
            layer(torch.zeros(1, size, device=device, dtype=_rest_dtype(scheme, device.type)))
    except Exception as error:  # assertions and errors of every kind, by library, version and processor
        raise InputError(f"--quantize {scheme} does not run here ({first_line(error)}); leave it out") from None


def group_size(shape: ModelShape) -> int | None:
    """Return how many weights share a scale under int4: the most that divide every row, None where no group does."""
    return next((size for size in GROUP_SIZES if shape.embedding_size % size == 0), None)


def _convert(module: nn.Module, scheme: str, shape: ModelShape, device: torch.device) -> nn.Module:
    """Change every nn.Linear of `module`, or with bf16 everything."""
    if scheme == "bf16":
        return module.to(torch.bfloat16)
    if scheme == "torch_dynamic":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated; check_scheme says when it is gone
            return torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8, inplace=True)
    if scheme == "int4_weight_only" and device.type == "cuda":
        module.to(torch.bfloat16)  # the kernel multiplies nothing else
    torchao = _import_torchao()
    torchao.quantize_(module, _torchao_config(torchao, scheme, group_size(shape), device))
    return module


def _import_torchao() -> ModuleType:
    with without_library_warnings():  # of kernels that were built for other versions and machines
        return importlib.import_module("torchao.quantization")


def _torchao_config(torchao: ModuleType, scheme: str, group: int | None, device: torch.device) -> Any:
    from torchao.utils import should_reduce_range

    # inductor's settings are for compiled models, and would stay changed for the whole process
    common = {"set_inductor_config": False}
    if scheme == "int8_weight_only":
        return torchao.Int8WeightOnlyConfig(**common)
    if scheme == "int8_dynamic":
        # without VNNI the sum of two products of 8 bits does not fit into the 16 that the processor adds them in
        return torchao.Int8DynamicActivationInt8WeightConfig(reduce_range=should_reduce_range(device), **common)
    if device.type == "cuda":
        return torchao.Int4WeightOnlyConfig(group, int4_packing_format="tile_packed_to_4d", **common)
    # torchao's one format with two weights in a byte and a kernel on the CPU (aten::_weight_int4pack_mm_for_cpu).
    # IntxWeightOnlyConfig runs there too, but keeps each 4-bit weight in a byte.
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group, **common)


def _rest_dtype(scheme: str, device_type: str) -> torch.dtype:
    """Return the dtype of what is not quantized, activations included."""
    is_bf16 = scheme == "bf16" or (scheme == "int4_weight_only" and device_type == "cuda")
    return torch.bfloat16 if is_bf16 else torch.float32


def _is_quantized(layer: nn.Module) -> bool:
    weight = layer.weight
    if not isinstance(weight, torch.Tensor):  # torch's own quantized layers have a method
        weight = cast("Callable[[], torch.Tensor]", weight)()
    return weight.is_quantized or is_traceable_wrapper_subclass(weight)


def expected_bytes(shape: ModelShape, scheme: str, device_type: str) -> int:
    """Return the bytes of the weights by arithmetic: what is quantized at its bits with its scales, the rest at its
    width.

    Per layer 12 C^2 weights in 9 C rows are quantized: 8 C rows of C, C rows of 4 C. The vocabulary counts with
    the rows that pad it.
    """
    channels, layers = shape.embedding_size, shape.num_layers
    all_parameters = shape.num_parameters + (shape.padded_vocab_size - shape.vocab_size) * channels
    width = _rest_dtype(scheme, device_type).itemsize
    if scheme in ("none", "bf16"):
        return all_parameters * width
    weights, rows = 12 * channels**2 * layers, 9 * channels * layers
    if scheme == "torch_dynamic":
        quantized = weights
    elif scheme == "int4_weight_only":
        row = INT4_CUDA_ROW if device_type == "cuda" else 1
        group = group_size(shape)
        assert group is not None, "check_scheme refuses such a shape"
        short, long = (-(-size // row) * row for size in (channels, 4 * channels))  # the next multiple
        kept = layers * channels * (8 * short + long)
        quantized = kept // 2 + kept // group * 2 * width
    else:
        quantized = weights + rows * (4 + 1)
    return (all_parameters - weights) * width + quantized


def bytes_in_memory(model: nn.Module) -> int:
    """Return the bytes of the distinct storages behind the weights; a view counts with all that it keeps alive."""
    state = model.state_dict()  # held while counting: torch's own quantized layers unpack into tensors of the moment
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _innermost(state)}
    return sum(storage.nbytes() for storage in storages.values())


def _innermost(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a state dict consists of, through tuples and through tensors made of tensors."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _innermost(each)
    elif is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _innermost(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def bytes_on_disk(model: nn.Module) -> int:
    """Return the size of a file that torch.save makes of the weights; safetensors holds no tensors made of tensors."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.pt"
        torch.save(model.state_dict(), file)
        return file.stat().st_size
