"""Name the schemes that scripts/evaluate.py measures. No torch: --help and refusals read this."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.errors import InputError

TORCHAO = "torchao==0.18.0"  # as requirements.txt has it


@dataclass(frozen=True)
class Scheme:
    """A format of the linear layers' weights, and of what is multiplied with them."""

    bits: int  # of a weight of a linear layer, its scales apart
    summary: str
    needs_torchao: bool = False
    device_type: str | None = None  # the only one that it runs on
    mixes_neighbours: bool = False  # activations of all rows of a call share a scale


NONE = "none"  # what the others are compared with
SCHEMES = {
    NONE: Scheme(32, "fp32, as it was saved"),
    "bf16": Scheme(16, "everything in bf16"),
    "int8_dynamic": Scheme(8, "int8 weights, activations to int8 as they come, integer products", True),
    "int8_weight_only": Scheme(8, "int8 weights, widened for each product", True),
    "int4_weight_only": Scheme(
        4, "int4 weights in groups with a scale each, two in a byte; on CUDA the rest in bf16", True
    ),
    "torch_dynamic": Scheme(
        *(8, "torch.ao.quantization.quantize_dynamic, which torch has deprecated"),
        device_type="cpu",
        mixes_neighbours=True,
    ),
}


def chosen_schemes(text: str) -> list[str]:
    """Return names out of a list with commas, "all" for every one; NONE comes first whether it was named or not.

    Raises:
        InputError: one sentence, when a name is unknown.
    """
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        return list(SCHEMES)
    for name in names:
        if name not in SCHEMES:
            raise InputError(f"--quantize {text}: {name!r} is not one of all, {', '.join(SCHEMES)}")
    return list(dict.fromkeys([NONE, *names]))
