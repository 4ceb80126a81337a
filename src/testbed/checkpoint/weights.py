"""Weights in and out, in the form of `transformers`: config.json and model.safetensors."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from testbed.data.reachable import status_of
from testbed.errors import InputError, one_line, without_library_warnings
from testbed.io import open_regular, replacing, write_text
from testbed.model.gpt2 import from_transformers, to_transformers
from testbed.model.shape import MODEL_SIZES, ModelShape
from testbed.model.tensor_archive import check_finite
from testbed.run_folder import TOKENIZER

MOST_BUFFERS = 1 << 30  # bytes of what lies beside parameters in files of others: masks, one for each layer
HUB = "https://huggingface.co"


class WeightsUnavailable(OSError):
    """Published weights could not be had. One sentence that says what to do; not a mistake in what was typed."""


def read_initial_weights(init_from: str, shape: ModelShape, name: str | None = None) -> dict[str, torch.Tensor] | None:
    """Return the state dict that --init_from asks for: a folder's model.safetensors, a published GPT-2, or None for
    scratch.

    Args:
        name: what is read, in a sentence about it (default: --init_from and its value).

    Raises:
        InputError: the folder's file is damaged or belongs to another model.
        WeightsUnavailable: the hub could not be reached.
    """
    name = name or f"--init_from {init_from}"
    if init_from == "scratch":
        return None
    if init_from in MODEL_SIZES:
        return from_transformers(_published_weights(init_from, name), shape)
    path = Path(init_from) / "model.safetensors"
    try:
        with open_regular(path) as file:  # the library would wait for a FIFO
            num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > 16 * shape.num_parameters + MOST_BUFFERS:
            raise InputError(f"it has {num_bytes:,} bytes, more than {shape.num_parameters:,} parameters can take")
        tensors = load_file(path)
        for tensor_name, tensor in tensors.items():
            check_finite(tensor, one_line(tensor_name, 100))
        return from_transformers(tensors, shape)
    except (OSError, SafetensorError, ValueError) as error:
        fault = one_line(str(error), 300)
        raise InputError(f"{name}: model.safetensors cannot be used: {fault}") from None


def _published_weights(size: str, name: str) -> dict[str, torch.Tensor]:
    with without_library_warnings():  # of torchao, which transformers imports
        from transformers import GPT2LMHeadModel  # several seconds, and only needed here

    # where the hub does not answer, cached files or nothing: its own retries take a minute to say so
    is_reachable = status_of(os.environ.get("HF_ENDPOINT", HUB)) is not None

    try:
        return GPT2LMHeadModel.from_pretrained(
            size,
            local_files_only=not is_reachable,
            use_safetensors=True,  # never a pickle, which could run anything
        ).state_dict()
    except OSError as error:
        first_line = str(error).strip().splitlines()[0]
        raise WeightsUnavailable(
            f"{name}: the published weights could not be fetched from the Hugging Face hub ({first_line}); "
            "connect once so that they are cached, or copy a folder with config.json and model.safetensors here and "
            "give its path"
        ) from None


def write_weights(
    directory: Path,
    state_dict: dict[str, torch.Tensor],
    shape: ModelShape,
    dropout: float,
    end_of_text_id: int | None,
    tokenizer: str | None,
    tokenizer_text: str | None = None,
) -> None:
    """Write a folder that `GPT2LMHeadModel.from_pretrained` opens. The vocabulary is the real one, without padding.

    Args:
        tokenizer_text: the file of a trained BPE, so that the folder is all that `testbed.inference` needs. None where
            there is none: the weights are worth having without it.

    Raises:
        OSError: the disk does not take them; what was there before is whole.
    """
    directory.mkdir(exist_ok=True)  # and not its parents: the folder of a run that has vanished is not made again
    with replacing(directory / "model.safetensors") as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the umask makes of it: the library's own file is its owner's alone
        try:
            save_file(to_transformers(state_dict, shape), temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise _as_os_error(error) from None
        temporary.chmod(stat.S_IMODE(mode))
    write_config(directory, shape, dropout, end_of_text_id, tokenizer, tokenizer_text)


def write_config(
    directory: Path,
    shape: ModelShape,
    dropout: float,
    end_of_text_id: int | None,
    tokenizer: str | None,
    tokenizer_text: str | None = None,
) -> None:
    """Write config.json, and the file of a trained BPE. Errors as in `write_weights`."""
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **shape.as_transformers(dropout),
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "tokenizer": tokenizer,  # not theirs: which tokenizer the ids belong to
    }
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")
    if tokenizer_text is not None:
        write_text(directory / TOKENIZER, tokenizer_text)


def _as_os_error(error: SafetensorError) -> OSError:
    """Return what the system said, out of the library's words."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(one_line(str(error), 300))
