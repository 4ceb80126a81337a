"""Files of llm.c's train_gpt2.cu, both ways: the model, and beside it AdamW's state, which each rank saves for itself.

`model_00010000.bin` and `state_00010000_00003.bin`, of rank 3, are of step 10,000, and `DONE_00010000` says that they
are whole. A file holds one kind of tensor after another, each for all layers. Without ZeRO a rank holds all numbers,
under ZeRO 1 its part of each layer of each tensor.
"""

from __future__ import annotations

import itertools
import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch.nn import functional as F

from testbed.checkpoint.adamw_state import EMBEDDING, MOMENTS, AdamWState, Rates, Tensors, checked_state, expected
from testbed.config.initial_file import BF16, FP32, HEADER_INTS, MAGIC, LlmcHeader, llmc_header, llmc_states, llmc_step
from testbed.errors import InputError
from testbed.io import open_regular, replacing
from testbed.model.shape import ModelShape
from testbed.model.tensor_archive import check_finite

RATES = Rates(3e-4, 0.9, 0.95, 1e-8, 0.0)  # -l and -c where its command line is silent; the others cannot be changed
_LEFT_OUT = "the optimizer's state is left out"
_STATE = 20240527, 1  # magic number, version
_SEED = 13371337  # of rank 0's numbers for rounding to bf16
_GENERATOR = 2520  # bytes of what shuffles its data
_OF_BLOCK = tuple(
    f"{layer}.{kind}"
    for layer in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for kind in ("weight", "bias")
)


def read_llmc(
    file: BinaryIO, path: Path, name: str, with_optimizer: bool
) -> tuple[Tensors, ModelShape, AdamWState | None, str]:
    """Read a model of llm.c, and AdamW's state from the state files beside it.

    Args:
        file: the model, open at its beginning.
        path: its name, which says the step.
        name: what it is called in a sentence.
        with_optimizer: read the state too.

    Returns:
        The weights: the fp32 ones of the state where it holds them, else the model's own. Then the shape, the state or
        None, and a note on the state, which may be empty.

    Raises:
        InputError: one sentence that begins with `name`: the file is not a model of llm.c.
    """
    header = llmc_header(file, name)
    # private pages: the ranks of a host share what they only read, and nothing is written to the file
    numbers = np.memmap(file, "<f4" if header.width == 4 else "<i2", "c", offset=4 * HEADER_INTS)
    mapped = torch.from_numpy(numbers) if header.width == 4 else torch.from_numpy(numbers).view(torch.bfloat16)
    weights, states = _named([mapped], header), llmc_states(path)
    if not with_optimizer or not states:
        is_missed = with_optimizer and llmc_step(path) is not None
        note = "no state_*.bin of its step lies beside it, so AdamW's state is left out" if is_missed else ""
        return weights, header.shape, None, note
    try:
        state, weights = _read_state(path, header, weights)
        note = (
            f"AdamW's state is that of step {state.step}, in {states[0].name}; it has no rates: a learning rate of "
            f"{RATES.learning_rate} and a weight decay of {RATES.weight_decay} are llm.c's defaults"
        )
    except OSError as error:
        state, note = None, f"{_LEFT_OUT}: {Path(error.filename or states[0]).name} cannot be read ({error.strerror})"
    except InputError as error:
        state, note = None, f"{_LEFT_OUT}: {error}"
    return weights, header.shape, state, note


def _named(ranks: list[torch.Tensor], header: LlmcHeader) -> Tensors:
    """Return tensors under our names out of the numbers that ranks have, each its part."""
    shape, at = header.shape, 0
    sizes, found = expected(shape), dict[str, torch.Tensor]()
    for names in _layout(shape.num_layers):
        size = (header.padded, shape.embedding_size) if names == [EMBEDDING] else sizes[names[0]].shape
        count = int(np.prod(size)) // len(ranks)
        parts = [numbers[at : at + len(names) * count].view(len(names), count) for numbers in ranks]
        layers = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        found |= zip(names, layers.float().view(-1, *size), strict=True)  # fp32 of one rank stays mapped
        at += len(names) * count
    filling = shape.padded_vocab_size - shape.vocab_size
    found[EMBEDDING] = F.pad(found[EMBEDDING][: shape.vocab_size], (0, 0, 0, filling))
    return {key: found[key] for key in sizes}


def _layout(layers: int) -> list[list[str]]:
    """Return our names in llm.c's order, those of one kind together."""
    blocks = [[f"h.{layer}.{kind}" for layer in range(layers)] for kind in _OF_BLOCK]
    return [[EMBEDDING], ["wpe.weight"], *blocks, ["ln_f.weight"], ["ln_f.bias"]]


def _read_state(path: Path, header: LlmcHeader, weights: Tensors) -> tuple[AdamWState, Tensors]:
    """Return AdamW's state, and the weights in fp32 where it has them. InputError: it is not of this model. OSError."""
    ranks, first = _of_rank(path, 0, header)
    is_sharded = first.shape[1] < header.count
    held = [first, *(_of_rank(path, rank, header)[1] for rank in range(1, ranks if is_sharded else 1))]
    if len({each.shape for each in held}) > 1:
        raise InputError("its ranks are not of one run: they hold parts of other sizes")
    tensors = [_named(list(parts), header) for parts in zip(*held, strict=True)]
    state = checked_state(dict(zip(MOMENTS, tensors[:2], strict=True)), [llmc_step(path)], RATES)
    if len(tensors) == len(MOMENTS):
        return state, weights
    for key, tensor in tensors[-1].items():
        check_finite(tensor, f"the fp32 of {key}")
    return state, tensors[-1]


def _of_rank(path: Path, rank: int, header: LlmcHeader) -> tuple[int, torch.Tensor]:
    """Return how many ranks trained, and a row each of what one holds: first moments, second, perhaps weights."""
    step = llmc_step(path)
    path = path.with_name(f"state_{step:08d}_{rank:05d}.bin")
    with open_regular(path) as file:
        head, num_bytes = file.read(4 * HEADER_INTS), os.fstat(file.fileno()).st_size
        numbers = struct.unpack("<11i", head[:44]) if len(head) == 4 * HEADER_INTS else (0,) * 11
        ranks, own, has_weights, is_shuffled = numbers[2:6]
        if numbers[:2] != _STATE or (own, numbers[10]) != (rank, step):
            raise InputError(f"{path.name} is not a state of llm.c for rank {rank} and step {step}, by its header")
        kinds = 3 if has_weights else 2
        for parts in {1, ranks}:
            if parts < 1 or header.shape.embedding_size % parts:  # a layer norm is the smallest tensor that is shared
                continue
            count = header.count // parts
            end = len(head) + 4 * kinds * count
            if num_bytes == end + (_bytes_of_order(file, end) if is_shuffled else 0):
                return ranks, torch.from_numpy(np.memmap(file, "<f4", "c", len(head), (kinds, count)))
    raise InputError(f"{path.name} has {num_bytes:,} bytes, which is not what one of {ranks} ranks has of this model")


def _bytes_of_order(file: BinaryIO, start: int) -> int:
    """Return how many bytes from `start` say the order of the data: of shards, of samples, and what shuffles them."""
    end = start
    for _ in range(2):
        file.seek(end)
        end += 8 + 4 * min(int.from_bytes(file.read(8), "little"), 1 << 40)  # a lie must not be too far to seek
    return end + _GENERATOR - start


def write_llmc(path: Path, weights: Tensors, shape: ModelShape, state: AdamWState | None, is_bf16: bool) -> None:
    """Write the model, and where its name says the step, `state` as a single rank saves it. OSError: the disk refuses.

    Weights in fp32 go with the state, as llm.c begins with those where it trains in bf16.
    """
    step, earlier = llmc_step(path), llmc_states(path)
    done = path.with_name(f"DONE_{step:08d}") if step is not None else None
    if done:
        done.unlink(missing_ok=True)
    sizes = (shape.max_position_embeddings, shape.vocab_size, shape.num_layers, shape.num_heads, shape.embedding_size)
    of_model = (MAGIC, BF16 if is_bf16 else FP32, *sizes, shape.padded_vocab_size)
    order = [*itertools.chain(*_layout(shape.num_layers))]
    _write(path, dict(enumerate(of_model)), [weights[key] for key in order], is_bf16)
    if state and done:
        first = path.with_name(f"state_{step:08d}_00000.bin")
        of_state = {0: _STATE[0], 1: _STATE[1], 2: 1, 4: 1, 10: state.step, 20: _SEED, 22: _SEED}  # 1 rank, has weights
        kinds = (*(state.moments[moment] for moment in MOMENTS), weights)
        _write(first, of_state, [tensors[key] for tensors in kinds for key in order])
        done.touch()  # llm.c resumes only where this lies
        earlier = [file for file in earlier if file != first]
    for file in earlier:  # of the weights that stood here before
        file.unlink()


def _write(path: Path, numbers: dict[int, int], tensors: list[torch.Tensor], is_bf16: bool = False) -> None:
    header = np.zeros(HEADER_INTS, "<i4")
    for place, number in numbers.items():
        header[place] = number
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(header.tobytes())
        for tensor in map(torch.Tensor.contiguous, tensors):  # the padding of the embedding is zeros there too
            file.write((tensor.bfloat16().view(torch.int16) if is_bf16 else tensor).numpy().tobytes())
