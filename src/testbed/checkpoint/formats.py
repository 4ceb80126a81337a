"""Weights of GPT-2 in the files of other programs: nanoGPT's `ckpt.pt` and llm.c's `.bin`, both ways, bit for bit.

A folder with config.json and model.safetensors, as runs and `transformers` write it, is the third form (weights.py). A
run's checkpoint (of_run.py) is read, DeepSpeed's universal one read and written (universal.py). AdamW's state goes with
the weights where both forms have it (adamw_state.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.api import CheckpointException

from testbed.checkpoint import adamw_state
from testbed.checkpoint.adamw_state import EMBEDDING, AdamWState, expected, fitted, unpadded
from testbed.checkpoint.folders import checkpoint_in, is_own, remove, replacing_folder, step_folders, tokenizer_of_saved
from testbed.checkpoint.llmc import read_llmc, write_llmc
from testbed.checkpoint.of_run import read_state, write_state
from testbed.checkpoint.universal import LATEST, read_universal, write_universal
from testbed.checkpoint.weights import read_initial_weights, write_config, write_weights
from testbed.config.initial_file import (
    LLMC,
    NANOGPT,
    SUFFIXES,
    is_file_of_another,
    llmc_step,
    nanogpt_shape,
    tokenizer_of_shape,
)
from testbed.config.initial_shape import is_universal, shape_of_folder, tokenizer_of_folder
from testbed.data.characters import META, tokenizer_json
from testbed.distributed.process_group import root_cause
from testbed.errors import Failure, InputError, one_line
from testbed.io import open_regular, read_json, replacing, write_text
from testbed.model.gpt2 import PREFIX
from testbed.model.shape import MODEL_SIZES, ModelShape
from testbed.model.tensor_archive import check_finite, check_plain, is_apart, load_tensors
from testbed.run_folder import CHECKPOINTS, TOKENIZER, is_converted

FOLDER, DEEPSPEED = "folder", "DeepSpeed universal"
TRAINER_STATE = "optimizer.pt"
GPT2_END = 50256
COMPILED = "_orig_mod."  # before each name where nanoGPT compiled the model


@dataclass(frozen=True)
class Checkpoint:
    """Weights under our names, the embedding padded as `GPT2` has it; what is known of the tokens."""

    weights: dict[str, torch.Tensor]
    shape: ModelShape
    tokenizer: str | None = None
    end_of_text_id: int | None = None
    tokenizer_text: str | None = None
    notes: tuple[str, ...] = ()
    optimizer: AdamWState | None = None


def kind_of(path: Path) -> str:
    """Return the form of a checkpoint: NANOGPT or LLMC by its name, DEEPSPEED by its folder zero/, else FOLDER."""
    if is_universal(path):
        return DEEPSPEED
    return SUFFIXES[path.suffix.lower()] if is_file_of_another(path) else FOLDER


def read_start(init_from: str, shape: ModelShape) -> dict[str, torch.Tensor] | None:
    """Return the state dict that --init_from asks for, in whatever form; None for scratch. Errors as in weights.py."""
    path = Path(init_from)
    if init_from in MODEL_SIZES or not (is_file_of_another(path) or is_universal(path)):
        return read_initial_weights(init_from, shape)
    found = read_checkpoint(path, f"--init_from {init_from}", with_optimizer=False)
    if found.shape != shape:
        raise InputError(f"--init_from {init_from} is no longer what it was: it holds another model now")
    return found.weights


def read_checkpoint(path: Path, name: str, with_optimizer: bool = True) -> Checkpoint:
    """Return the weights of a checkpoint in any form, and AdamW's state where it has it.

    Args:
        name: what it is called in a sentence.
        with_optimizer: of a run's folder, read the newest checkpoint, with its state; else the weights of its end.

    Raises:
        InputError: one sentence that begins with `name`: it is missing, damaged, or of another model.
    """
    kind = kind_of(path)
    try:
        if kind in (FOLDER, DEEPSPEED):
            return _read_folder(path, name, with_optimizer)
        with open_regular(path) as file:
            if kind == NANOGPT:
                found = _read_nanogpt(file, path, name, with_optimizer)
            else:
                weights, shape, optimizer, note = read_llmc(file, path, name, with_optimizer)
                found = Checkpoint(weights, shape, notes=(note,) if note else (), optimizer=optimizer)
    except OSError as error:
        raise InputError(f"{name} cannot be read ({error.strerror or error})") from None
    for key, tensor in found.weights.items():
        check_finite(tensor, f"{name}: {key}")
    if found.tokenizer or tokenizer_of_shape(found.shape) is None:
        return found
    return dataclasses.replace(found, tokenizer=tokenizer_of_shape(found.shape), end_of_text_id=GPT2_END)


def write_checkpoint(
    path: Path, checkpoint: Checkpoint, is_bf16: bool = False, is_universal_wanted: bool = False
) -> None:
    """Write the weights in the form that the name says, or into a folder as DeepSpeed's universal one.

    Args:
        is_bf16: round those of llm.c.

    Raises:
        OSError, Failure: the disk refuses.
    """
    kind = DEEPSPEED if is_universal_wanted else kind_of(path)
    try:
        if kind == DEEPSPEED:
            _write_universal(Path(os.path.realpath(path)), checkpoint)
        elif kind == FOLDER:
            _write_folder(path, checkpoint)
        elif kind == NANOGPT:
            with replacing(path) as temporary:
                torch.save(_as_nanogpt(checkpoint), temporary)
        else:
            write_llmc(path, checkpoint.weights, checkpoint.shape, checkpoint.optimizer, is_bf16)
    except (RuntimeError, CheckpointException) as error:
        if "inline_container" not in str(error):
            raise
        raise Failure(f"{path} could not be written: {root_cause(error)}; make room, or name another place") from None


def _write_folder(path: Path, made: Checkpoint) -> None:
    """Write weights as `transformers` has them, and AdamW's state beside them as a checkpoint of this program."""
    states = path / CHECKPOINTS
    for old in filter(is_own, step_folders(states)):  # of the weights that stood there before
        remove(old)
    write_weights(path, made.weights, made.shape, 0.0, made.end_of_text_id, made.tokenizer, made.tokenizer_text)
    if made.tokenizer_text is None:
        (path / TOKENIZER).unlink(missing_ok=True)
    if made.optimizer is not None:
        states.mkdir(exist_ok=True)
        write_state(states / f"step_{made.optimizer.step:06d}", made.weights, made.optimizer, made.shape)
    else:
        with contextlib.suppress(OSError):  # others' files stay
            states.rmdir()


def _write_universal(path: Path, made: Checkpoint) -> None:
    """Write a universal checkpoint, which has its name once it is whole, and where DeepSpeed looks for that name."""
    with replacing_folder(path) as folder:
        write_universal(folder, made.weights, made.optimizer, made.shape)
        write_config(folder, made.shape, 0.0, made.end_of_text_id, made.tokenizer, made.tokenizer_text)
    if not (path.parent / LATEST).exists():
        write_text(path.parent / LATEST, path.name)


def _read_folder(path: Path, name: str, with_optimizer: bool) -> Checkpoint:
    saved = None if is_universal(path) else checkpoint_in(path)
    if saved is not None and (with_optimizer or saved == path):
        weights, shape, optimizer, note = read_state(saved, name, with_optimizer)
        run = saved.absolute().parent.parent  # perhaps: a checkpoint may lie alone
        tokenizer = tokenizer_of_folder(run, name) if is_converted(run) else tokenizer_of_saved(saved, name)
        return Checkpoint(weights, shape, tokenizer, *_of_tokens(run, name), (note,), optimizer)
    shape, optimizer, note = shape_of_folder(path, name), None, ""
    if is_universal(path):
        try:
            weights, optimizer, note = read_universal(path, shape, with_optimizer)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    else:
        weights = read_initial_weights(str(path.absolute()), shape, name) or {}  # a path is no "scratch"
        if with_optimizer and (path / TRAINER_STATE).is_file():
            note = (
                f"{TRAINER_STATE}, the optimizer's state of transformers' Trainer, is not read: the weights alone are"
            )
    notes = (note,) if note else ()
    return Checkpoint(weights, shape, tokenizer_of_folder(path, name), *_of_tokens(path, name), notes, optimizer)


def _of_tokens(folder: Path, name: str) -> tuple[int | None, str | None]:
    """Return the id that ends a text, and the file of the BPE, as they lie beside weights."""
    own, config = folder / TOKENIZER, folder / "config.json"  # a run that was stopped has none
    try:
        text = own.read_text(encoding="utf-8") if own.is_file() else None
    except UnicodeDecodeError:
        raise InputError(f"{name}: {TOKENIZER} is not UTF-8 text") from None
    content = read_json(config, f"{name}: config.json") if config.is_file() else None
    end = content.get("eos_token_id") if isinstance(content, dict) else None
    return end if type(end) is int else None, text


def _read_nanogpt(file: BinaryIO, path: Path, name: str, with_optimizer: bool) -> Checkpoint:
    """Read what nanoGPT's train.py saves: {"model": state dict, "model_args": sizes, ...}."""
    content, num_bytes = load_tensors(file, name, is_mapped=True), file.seek(0, os.SEEK_END)
    shape = nanogpt_shape(content, name)
    model, sizes = content["model"], content["model_args"]
    optimizer = content.get("optimizer")
    check_plain([*model.items(), *_tensors_of(optimizer)], num_bytes, name)
    theirs = {str(key).removeprefix(COMPILED).removeprefix(PREFIX): tensor for key, tensor in model.items()}
    passed_over = ("lm_head.weight", *(key for key in theirs if key.endswith(".attn.bias")))  # the tied head, masks
    theirs = {key: tensor for key, tensor in theirs.items() if key not in passed_over}
    if not is_apart(theirs.values()):
        raise InputError(f"{name} has one tensor under the names of two weights")
    held, weights, notes = set(theirs), {}, list[str]()
    try:
        for key, ours in expected(shape).items():
            if key not in theirs and key.endswith(".bias") and sizes.get("bias") is False:
                weights[key] = torch.zeros(ours.shape)
            else:
                weights[key] = fitted(theirs.pop(key, None), key, ours, shape, "its model_args need")
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if theirs:
        raise InputError(f"{name}: the weight {one_line(min(theirs), 80)} is none of a GPT-2")
    if without := len(weights) - len(held):
        notes.append(f"{without} biases that nanoGPT left out (--bias=False) are zeros, and are trained from here on")
    state = None
    try:
        state = adamw_state.of_torch(optimizer, held, shape) if with_optimizer else None
    except InputError as error:  # the weights are worth having without it
        notes.append(f"the optimizer's state is left out: {error}")
    characters, note = _characters_of(path, content.get("config"), shape)
    named = None if characters is None else f"char:{shape.vocab_size}"
    notes += [note] if note else []
    return Checkpoint(weights, shape, named, None, characters, tuple(notes), state)


def _characters_of(path: Path, config: Any, shape: ModelShape) -> tuple[str | None, str]:
    """Return a tokenizer.json of the characters of nanoGPT's data, which lies near ckpt.pt or here, and a note."""
    dataset = config.get("dataset") if isinstance(config, dict) else None
    if not isinstance(dataset, str):
        return None, ""
    places = (folder / "data" / dataset / META for folder in (path.absolute().parent.parent, Path()))
    if (file := next(filter(os.path.isfile, places), None)) is None:
        return None, ""
    try:
        text = tokenizer_json(file).decode()
    except InputError as error:  # the weights are worth having without it
        return None, f"no tokenizer is taken: {error}"
    if (held := len(json.loads(text)["model"]["vocab"])) != shape.vocab_size:
        return None, f"no tokenizer is taken: {file} has {held:,} characters, and the model {shape.vocab_size:,} tokens"
    return text, f"its tokens are the characters of {file}"


def _tensors_of(optimizer: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in an optimizer's state, which each parameter has by names."""
    states = optimizer.get("state") if isinstance(optimizer, dict) else None
    states = [each for each in states.values() if isinstance(each, dict)] if isinstance(states, dict) else []
    return [(str(key), each) for state in states for key, each in state.items() if isinstance(each, torch.Tensor)]


def notes_on(checkpoint: Checkpoint, to: Path) -> tuple[str, ...]:
    """Return what somebody who has converted should know."""
    notes, kind, state = list(checkpoint.notes), kind_of(to), checkpoint.optimizer
    if (own := {NANOGPT: "exact", LLMC: "tanh"}.get(kind, gelu := checkpoint.shape.gelu)) != gelu:
        notes.append(f"{kind} computes the {own} form of GELU, and these weights are of the {gelu} one: other losses")
    if kind == LLMC:
        if llmc_step(to) is None:
            notes.append("AdamW's state is written only beside a model whose name says its step: model_00005000.bin")
        elif state:
            notes.append(
                "llm.c has betas of 0.9 and 0.95 and an eps of 1e-8, takes the learning rate (-l) and the weight decay "
                "(-c) of its command line, and reads its data from the beginning, in their order"
            )
    if kind == NANOGPT:
        notes += [
            "it holds no best_val_loss and no dataset: nanoGPT's first validation replaces the file, and its sample.py "
            "reads tokens as GPT-2's until checkpoint['config']['dataset'] names the folder of their meta.pkl",
        ]
    if kind == DEEPSPEED:
        notes.append("DeepSpeed takes the learning rate and the weight decay of its own settings")
        path = Path(os.path.realpath(to))
        if (path.parent / LATEST).read_bytes() != os.fsencode(path.name):
            notes.append(f"{path.parent / LATEST} names another checkpoint: load this one with tag={path.name!r}")
    return tuple(dict.fromkeys(notes))


def _as_nanogpt(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what nanoGPT's train.py reads with --init_from=resume."""
    shape, state = checkpoint.shape, checkpoint.optimizer
    model = {PREFIX + key: tensor for key, tensor in unpadded(checkpoint.weights, shape).items()}
    model["lm_head.weight"] = model[PREFIX + EMBEDDING]  # one storage, as it is tied there
    return {
        "model": model,
        "optimizer": adamw_state.as_torch(shape, state),
        "model_args": {
            "n_layer": shape.num_layers,
            "n_head": shape.num_heads,
            "n_embd": shape.embedding_size,
            "block_size": shape.max_position_embeddings,
            "bias": True,
            "vocab_size": shape.vocab_size,
            "dropout": 0.0,
        },
        "iter_num": state.step if state else 0,
        "best_val_loss": 1e9,
        "config": {"gelu": shape.gelu},  # for the way back, as nanoGPT computes the exact one
    }
