"""What a file of another program says of its model: the sizes in nanoGPT's `ckpt.pt`, in the header of llm.c's `.bin`.

Importing this loads no torch. Only a `.pt` needs it, and is read without its numbers; the weights are read later, by
checkpoint/formats.py.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import struct
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from testbed.errors import InputError, one_line
from testbed.io import open_regular
from testbed.model.shape import GELUS, ModelShape

NANOGPT, LLMC = "nanoGPT", "llm.c"
NANOGPT_FILE = "ckpt.pt"  # in the out_dir of its train.py
SUFFIXES = MappingProxyType({".pt": NANOGPT, ".bin": LLMC})
MOST_PARAMETERS = 10**12  # 4 TB in fp32
GPT2_VOCABULARY = 50257
MAGIC, HEADER_INTS = 20240326, 256
FP32, BF16 = 3, 5  # versions of llm.c's header
_SIZES = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")


@dataclass(frozen=True)
class LlmcHeader:
    shape: ModelShape
    padded: int  # rows of its embedding
    width: int  # bytes of a number
    count: int  # of all numbers


def is_file_of_another(path: Path) -> bool:
    """Return whether a path names a file of nanoGPT or llm.c: by its ending, unless a folder has that name."""
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def llmc_step(path: Path) -> int | None:
    """Return the step in the name of a model of llm.c, such as model_00010000.bin; None: it says none."""
    found = re.fullmatch(r"model_([0-9]{8})\.bin", path.name)
    return int(found[1]) if found else None


def llmc_states(path: Path) -> list[Path]:
    """Return what ranks of llm.c keep beside a model of that step, such as state_00010000_00003.bin."""
    step = llmc_step(path)
    return [] if step is None else sorted(path.parent.glob(f"state_{step:08d}_*.bin"))


def file_of_another_in(folder: Path) -> Path | None:
    """Return llm.c's model of the last step in a folder, else nanoGPT's ckpt.pt; None: there is neither."""
    models = [path for path in sorted(folder.glob("model_*.bin")) if llmc_step(path) is not None]
    saved = [path for path in (folder / NANOGPT_FILE, *models) if path.is_file()]
    return saved[-1] if saved else None


def as_a_folder(path: Path, take: str = "name") -> str:
    """Return the way out for a file of another program: the command that makes a folder of it, and to `take` that."""
    folder = path.with_suffix("")
    named = f"--from {shlex.quote(str(path))} --to {shlex.quote(str(folder))}"
    return f"make a folder of it: python scripts/convert_checkpoint.py {named}; then {take} {folder}"


def shape_of_file(path: Path, name: str | None = None) -> ModelShape:
    """Return the shape of the model in a file of nanoGPT or llm.c.

    Args:
        name: what it is called in a sentence (default: --init_from and the path).

    Raises:
        InputError: one sentence that begins with `name`: it is missing, damaged, or of another model.
    """
    name = name or f"--init_from {path}"
    try:
        with open_regular(path) as file:
            if SUFFIXES[path.suffix.lower()] == LLMC:
                return llmc_header(file, name).shape
            from testbed.model.tensor_archive import load_tensors  # torch: seconds

            return nanogpt_shape(load_tensors(file, name, map_location="meta"), name)
    except OSError as error:
        raise InputError(f"{name} cannot be read ({error.strerror or error})") from None


def tokenizer_of_shape(shape: ModelShape) -> str | None:
    """Return the tokenizer of a file that does not name it: both programs train on GPT-2's. None: it is another."""
    return "gpt2" if shape.vocab_size >= GPT2_VOCABULARY else None


def nanogpt_shape(content: Any, name: str) -> ModelShape:
    """Return the sizes in what nanoGPT's train.py saves: {"model": state dict, "model_args": sizes, ...}."""
    model, sizes = (content.get(key) if isinstance(content, dict) else None for key in ("model", "model_args"))
    if not isinstance(model, dict) or not isinstance(sizes, dict):
        raise InputError(f'{name} is no checkpoint of nanoGPT: it has no "model" and "model_args"')
    config = content.get("config")  # of its train.py, which names no GELU; of convert_checkpoint.py
    gelu = config.get("gelu", "exact") if isinstance(config, dict) else "exact"
    shape = checked_shape(name, tuple(sizes.get(key) for key in _SIZES), gelu)
    if shape.num_layers > len(model):
        fault = f"{len(model):,} tensors, which are too few for the {shape.num_layers:,} layers it says"
        raise InputError(f"{name} has {fault}")
    return shape


def llmc_header(file: BinaryIO, name: str) -> LlmcHeader:
    """Read the header of a model of llm.c, and check that the file is as long as it says."""
    head = file.read(4 * HEADER_INTS)
    header = struct.unpack("<8i", head[:32]) if len(head) == 4 * HEADER_INTS else (0, 0)
    if header[0] != MAGIC or header[1] not in (FP32, BF16):
        raise InputError(f"{name} is no model of llm.c in fp32 or bf16: its header has another magic number or version")
    positions, vocabulary, layers, heads, channels, padded = header[2:]
    shape = checked_shape(name, (layers, heads, channels, vocabulary, positions))
    if not vocabulary <= padded < vocabulary + (1 << 16):
        raise InputError(f"{name} pads {vocabulary:,} tokens to {padded:,}")
    width, num_bytes = 4 if header[1] == FP32 else 2, os.fstat(file.fileno()).st_size
    count = shape.num_parameters + (padded - vocabulary) * channels
    needed = 4 * HEADER_INTS + width * count
    if num_bytes != needed:  # before anything of that size is made
        raise InputError(f"{name} has {num_bytes:,} bytes, its header needs {needed:,}")
    return LlmcHeader(shape, padded, width, count)


def checked_shape(name: str, numbers: tuple[Any, ...], gelu: Any = "tanh") -> ModelShape:
    """Return the shape with these sizes. InputError, which begins with `name`: there is no such model."""
    if not all(type(number) is int and 0 < number < 1 << 31 for number in numbers) or gelu not in GELUS:
        raise InputError(f"{name} does not say the sizes of a GPT-2: {one_line(repr((*numbers, gelu)), 100)}")
    shape = dataclasses.replace(ModelShape(*numbers), gelu=gelu)
    if shape.embedding_size % shape.num_heads or shape.num_parameters > MOST_PARAMETERS:
        raise InputError(f"{name} does not say the sizes of a GPT-2 that can be: {shape.describe()}")
    return shape
