"""Shape of the initial model: a published size, flags, or the weights in a folder or file. Importing it loads no torch.

Each function raises InputError, one sentence for the first rule that is broken.
"""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.config.initial_file import (
    MOST_PARAMETERS,
    checked_shape,
    file_of_another_in,
    is_file_of_another,
    shape_of_file,
    tokenizer_of_shape,
)
from testbed.data.characters import tokenizer_json
from testbed.data.token_file import TokenFile
from testbed.errors import InputError
from testbed.io import not_a_folder, read_json
from testbed.model.shape import MODEL_SIZES, ModelShape, size_name
from testbed.run_folder import TOKENIZER

UNIVERSAL = "zero"  # the folder in a universal checkpoint of DeepSpeed that holds its tensors
# What the forward pass does whatever config.json says; first what it means where it does not say.
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),  # two names for the tanh form; the exact one
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
}


def model_dimensions(
    values: Mapping[str, Any], typed: frozenset[str], train_file: TokenFile, val_file: TokenFile
) -> dict[str, Any]:
    """Return the dimensions of the model, from its size or the weights of --init_from, overridden by flags; and
    --model, which weights decide.

    Args:
        typed: flags on the command line.
    """
    for attribute in ("tokenizer", "vocab_size", "end_of_text_id", "tokenizer_file"):
        ours, theirs = getattr(train_file, attribute), getattr(val_file, attribute)
        if ours != theirs:
            raise InputError(
                f"--train_data_path {train_file.path} has {attribute} {ours} and --val_data_path {val_file.path} has "
                f"{theirs}; both must come from one run of preprocess_small.py"
            )
    starting, tokenizer = _start_of(values)
    shape = dataclasses.asdict(_overridden(starting, values))
    if values["init_from"] == "scratch":
        shape["vocab_size"] = values["vocab_size"] or train_file.vocab_size
        shape["max_position_embeddings"] = positions_of_new_model(values, starting)
        check_shape(shape, values["seq_length"])
        return shape
    start, way_out = f"--init_from {values['init_from']}", _tokenize_for(values["init_from"], tokenizer)
    if tokenizer not in (None, train_file.tokenizer):
        raise InputError(
            f"{start} reads ids of the tokenizer {tokenizer}, but {train_file.path} is written with "
            f"{train_file.tokenizer}; {way_out}"
        )
    other = f"{train_file.path} is written with another {train_file.tokenizer}"
    check_same_bpe(Path(values["init_from"]), train_file.tokenizer_file, start, other, way_out)
    base, size = dataclasses.asdict(starting), size_name(starting)
    for name in base:
        if shape[name] != base[name]:
            raise InputError(
                f"--{name} {shape[name]} does not fit the weights of {start} ({base[name]}); leave the flag out"
            )
    if "model" in typed and size_name(_overridden(MODEL_SIZES[values["model"]], values)) != size:
        raise InputError(
            f"--model {values['model']} does not fit the weights of {start} "
            f"({size if size in MODEL_SIZES else starting.describe()}); leave the flag out"
        )
    if shape["vocab_size"] < train_file.vocab_size and values["vocab_size"] is None:
        raise InputError(
            f"{start} knows {shape['vocab_size']} tokens, but {train_file.path} is written with "
            f"{train_file.vocab_size}; {way_out}"
        )
    if values["seq_length"] > (positions := shape["max_position_embeddings"]):
        raise InputError(
            f"--seq_length {values['seq_length']} is longer than the {positions} positions of {start}; give "
            f"--seq_length {positions} or less"
        )
    check_shape(shape, values["seq_length"])
    return shape | ({"model": size} if size in MODEL_SIZES else {})


def positions_of_new_model(values: Mapping[str, Any], size: ModelShape) -> int:
    """Return what --max_position_embeddings says, else a size's positions, or as many as a sequence asks for."""
    return values.get("max_position_embeddings") or max(size.max_position_embeddings, values["seq_length"])


def _tokenize_for(init_from: str, name: str | None) -> str:
    """Return how text becomes ids of the weights: with their own file, as "bpe:N" would train another BPE."""
    own = Path(init_from) / TOKENIZER
    if name is not None and name.startswith("char:"):
        return f"give data whose meta.pkl has the characters of {own}"
    if name == "gpt2" or own.is_file():
        return f"tokenize the text with preprocess_small.py --tokenizer {name if name == 'gpt2' else own}"
    return (
        f"tokenize the text with their tokenizer's file, which {init_from} lacks: preprocess_small.py --tokenizer FILE"
    )


def _overridden(size: ModelShape, values: Mapping[str, Any]) -> ModelShape:
    """Return a size with the dimensions that flags give."""
    return ModelShape(**{name: values[name] or dimension for name, dimension in dataclasses.asdict(size).items()})


def check_shape(shape: Mapping[str, Any], seq_length: int) -> None:
    """Check that the dimensions fit together, and that sequences of `seq_length` fit into the model."""
    if shape["embedding_size"] % shape["num_heads"]:
        raise InputError(
            f"--embedding_size {shape['embedding_size']} is not a multiple of --num_heads {shape['num_heads']}; "
            "every head takes an equal share of the channels"
        )
    if ModelShape(**shape).num_parameters > MOST_PARAMETERS:
        raise InputError(
            f"the model would have {ModelShape(**shape).num_parameters:.1e} parameters, and every rank begins with all "
            "of them in its host's memory; lower --num_layers, --embedding_size, --vocab_size or "
            "--max_position_embeddings"
        )
    if seq_length > shape["max_position_embeddings"]:
        raise InputError(
            f"--seq_length {seq_length} is longer than the {shape['max_position_embeddings']} positions of "
            "the model; shorten it or raise --max_position_embeddings"
        )


def _start_of(values: Mapping[str, Any]) -> tuple[ModelShape, str | None]:
    """Return the shape that the model begins with, and the tokenizer of its weights; None if unknown."""
    init_from = values["init_from"]
    if init_from == "scratch":
        return MODEL_SIZES[values["model"]], None
    if init_from in MODEL_SIZES and init_from.startswith("gpt2"):
        return MODEL_SIZES[init_from], "gpt2"
    if is_file_of_another(Path(init_from)):
        shape = shape_of_file(Path(init_from))
        return shape, tokenizer_of_shape(shape)
    return shape_of_folder(Path(init_from)), tokenizer_of_folder(Path(init_from))


def check_same_bpe(folder: Path, file: Path | None, weights: str, other: str, way_out: str | None = None) -> None:
    """Check that weights and token ids use the same BPE: two of one size have one name, but other ids. A missing one is
    not checked.

    Args:
        folder: of the weights.
        file: the BPE of the ids; None: GPT-2's.
        weights, other: parts of the sentence that name both, such as "--init_from DIR" and "train.bin is written
            with another bpe:8192".
        way_out: end of the sentence (default: make the ids again with the folder's BPE).
    """
    own = folder / TOKENIZER
    if file is None or not file.is_file() or not own.is_file():
        return
    try:
        if tokenizer_json(file) == tokenizer_json(own):
            return
    except OSError as error:
        raise InputError(
            f"{weights}: {error.filename} cannot be read ({error.strerror}); put the BPE there again"
        ) from None
    way_out = way_out or f"tokenize the text with preprocess_small.py --tokenizer {own}"
    raise InputError(f"{weights} reads ids of its own {TOKENIZER}, but {other}, {file.name}; {way_out}")


def check_start_is_not_overwritten(init_from: Path, checkpoint_path: Path) -> None:
    """Check that the initial weights are not in the folder that the run writes."""
    start, run = (Path(os.path.realpath(path)) for path in (init_from, checkpoint_path))
    if init_from.is_dir() and (start == run or run in start.parents):
        raise InputError(
            f"--checkpoint_path {checkpoint_path}, which this run writes, holds the weights that it begins with; name "
            f"{init_from} with --init_from or --resume, and give another --checkpoint_path"
        )


def tokenizer_of_folder(folder: Path, name: str | None = None) -> str | None:
    """Return the name of the tokenizer that a folder's weights were trained with; None if config.json has none.

    Args:
        name: name of the folder in errors (default: --init_from and the folder).
    """
    name = name or f"--init_from {folder}"
    tokenizer = _config_of_folder(folder, name).get("tokenizer")
    if not isinstance(tokenizer, str | None):
        raise InputError(f"{name}: config.json has the tokenizer {reprlib.repr(tokenizer)}, no name")
    return tokenizer


def shape_of_folder(folder: Path, name: str | None = None) -> ModelShape:
    """Return the shape in a `config.json` of `transformers`.

    Args:
        name: name of the folder in errors (default: --init_from and the folder).
    """
    name = name or f"--init_from {folder}"
    config, lead = _config_of_folder(folder, name), f"{name}: config.json does not describe a GPT-2:"
    if config.get("model_type") != "gpt2":
        raise InputError(f"{lead} its model_type is {reprlib.repr(config.get('model_type'))}, not gpt2")
    for key, computed in _COMPUTED.items():
        if config.get(key, computed[0]) not in computed:
            raise InputError(
                f"{lead} its {key} is {reprlib.repr(config[key])}, but this program computes "
                f"{' or '.join(map(str, computed))}; the same weights would mean another model"
            )
    sizes = tuple(map(config.get, ("n_layer", "n_head", "n_embd", "vocab_size")))
    gelu = "exact" if config.get("activation_function") == "gelu" else "tanh"
    return checked_shape(f"{name}: config.json", (*sizes, config.get("n_positions", 1024)), gelu)


def is_universal(folder: Path) -> bool:
    """Return whether a folder is a universal checkpoint of DeepSpeed."""
    return (folder / UNIVERSAL).is_dir() and not (folder / "model.safetensors").exists()


def _config_of_folder(folder: Path, name: str) -> dict[str, Any]:
    """Return config.json of `folder`, beside which weights must lie."""
    config_file = folder / "config.json"
    if is_universal(folder) and not config_file.is_file():
        raise InputError(
            f"{name} is a universal checkpoint of DeepSpeed, whose files do not say the heads and the tokens of the "
            "model; copy its config.json into the folder"
        )
    if not (is_universal(folder) or (folder / "model.safetensors").is_file()) or not config_file.is_file():
        if (file := file_of_another_in(folder)) is not None:
            raise InputError(f"{name} has no config.json with weights, but another program's file; name {file}")
        if inside := sorted(folder.glob("*/model.safetensors")):
            raise InputError(
                f"{name} has no config.json with weights, but folders in it have; name one, such as {inside[0].parent}"
            )
        fault = not_a_folder(folder)
        kinds = (
            "neither scratch, nor one of gpt2, gpt2-medium, gpt2-large, gpt2-xl, nor a folder with config.json and "
            "model.safetensors, nor a .pt of nanoGPT or a .bin of llm.c, nor a universal checkpoint of DeepSpeed"
        )
        raise InputError(f"{name} {f'{fault}, and ' if fault else ''}is {kinds}")
    config = read_json(config_file, f"{name}: config.json")
    if not isinstance(config, dict):
        raise InputError(f"{name}: config.json does not describe a GPT-2: it holds no JSON object")
    return config
