"""Read a config file of nanoGPT as our flags. It is parsed, never executed. No torch.

Such a file changes the defaults of nanoGPT's train.py, so those that decide what is trained hold where it is silent,
and where nothing that is said speaks against them.
"""

from __future__ import annotations

import ast
import operator
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

from testbed.config.flag_parser import OF_OTHERS
from testbed.config.table import FLAGS
from testbed.errors import InputError

_DEFAULTS: dict[str, Any] = {
    "dataset": "openwebtext", "batch_size": 12, "gradient_accumulation_steps": 40, "block_size": 1024, "n_layer": 12,
    "n_head": 12, "n_embd": 768, "dropout": 0.0, "init_from": "scratch", "learning_rate": 6e-4, "max_iters": 600_000,
    "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "decay_lr": True, "warmup_iters": 2000,
    "lr_decay_iters": 600_000, "min_lr": 6e-5, "eval_interval": 2000, "eval_iters": 200, "always_save_checkpoint": True,
}  # fmt: skip
_NAMES = {*_DEFAULTS, "out_dir", "log_interval", "wandb_log", "dtype"}  # where they are not ours; OF_OTHERS has more
_NOT_TAKEN = {"wandb_project", "wandb_run_name", "bias"}  # W&B reads the environment; our GPT-2 has biases
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_OF_DECAY = {"warmup_iters", "lr_decay_iters", "min_lr"}
_OF_SHAPE = {"n_layer", "n_head", "n_embd"}
_LENGTHS = {"epochs", "max_train_steps", "max_tokens"}
_LARGEST = 1e18  # no setting is larger, and products of products would fill the memory


def nanogpt_flags(text: str, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags of ours and values; a name that is neither ours nor nanoGPT's stays. InputError: a line is something
    else than a name and a value.

    Args:
        typed: flags on the command line and their values.
    """
    written: dict[str, Any] = {}
    for line in _lines(text):
        match line:
            case ast.Assign(targets=[ast.Name(id=name)]) if name in _NOT_TAKEN:
                pass
            case ast.Assign(targets=[ast.Name(id=name)]):
                written[name] = _value(line.value, ChainMap(written, _DEFAULTS))
            case ast.Import() | ast.Expr(value=ast.Constant()):  # of a name not taken; a text about the file
                pass
            case _:
                raise InputError(f"line {line.lineno} is not NAME = VALUE, and a config is read, not executed")
    return _as_ours(written, typed)


def _lines(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError as error:  # as text it ends in "(<unknown>, line 1)"
        raise InputError(error.msg + (f" in line {error.lineno}" if error.lineno else "")) from None
    except MemoryError:  # of so short a text it says that Python's parser is too deep in it
        raise RecursionError from None


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return a literal, a name that was given before, or numbers with + - * / and // between them."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.UnaryOp(op=ast.USub()):
            return -_number(node.operand, known)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_number(node.left, known), _number(node.right, known))
    raise InputError(f"the value in line {node.lineno} is no number, text, True or False, nor simple arithmetic")


def _number(node: ast.expr, known: Mapping[str, Any]) -> int | float:
    value = _value(node, known)
    if not isinstance(value, int | float) or not abs(value) < _LARGEST:
        raise InputError(f"line {node.lineno} calculates with {str(value)[:40]!r}, which is no number of a setting")
    return value


def _as_ours(written: dict[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what nanoGPT's settings mean here, where these are typed."""
    decays = written.pop("decay_lr", True)
    said = {_flag_of(name)[0]: value for name, value in written.items()} | dict(typed)
    theirs = _defaults_beside(said) | written
    dataset, is_saved_always = theirs.pop("dataset"), theirs.pop("always_save_checkpoint")
    ours: dict[str, Any] = {f"{part}_data_path": f"data/{dataset}/{part}.bin" for part in ("train", "val")}
    sequences, times = theirs.pop("batch_size"), theirs.pop("gradient_accumulation_steps")
    if not all(type(factor) is int and 0 < factor < _LARGEST for factor in (sequences, times)):
        raise InputError("batch_size and gradient_accumulation_steps must be whole numbers from 1, below 10^18")
    ours["global_batch_size"] = sequences * times
    if type(theirs["eval_iters"]) is int and theirs["eval_iters"] > 0:  # batches of batch_size; ours are global
        theirs["eval_iters"] = -(-theirs["eval_iters"] // times)
    ours |= {"save_every": theirs["eval_interval"]} if is_saved_always else {"keep_best": True}
    is_begun = said.get("init_from", "scratch") != "scratch"  # with weights, which decide the shape
    ours |= {} if is_begun else {"max_position_embeddings": theirs["block_size"]}
    ours |= {} if decays else {"lr_schedule": "constant", "warmup_steps": 0}
    left_out = (_OF_SHAPE if is_begun else set()) | (set() if decays else _OF_DECAY)
    for name in (name for name in theirs if name not in left_out):
        flag, meant = _flag_of(name)
        if not meant:
            ours[flag] = _spelled(flag, theirs[name])
        elif theirs[name]:  # wandb_log = True
            ours[flag] = meant
    return ours


def _defaults_beside(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return nanoGPT's defaults but those that do not go with what the file or the command line says."""
    rate, decay = (
        value if isinstance(value, int | float) else _LARGEST
        for value in (said.get("learning_rate"), said.get("lr_decay_steps"))
    )
    left_out = {"decay_lr"}
    left_out |= _OF_SHAPE if "model" in said else set()
    left_out |= {"max_iters"} if said.keys() & _LENGTHS else set()
    left_out |= _OF_DECAY if "lr_schedule" in said else set()
    left_out |= {"min_lr"} if rate < _DEFAULTS["min_lr"] else set()
    kept = {name: value for name, value in _DEFAULTS.items() if name not in left_out}
    if "warmup_iters" in kept and 0 < decay < kept["warmup_iters"]:
        kept["warmup_iters"] = int(decay) // 10  # as this program warms up for a tenth
    return kept


def _flag_of(name: str) -> tuple[str, str]:
    """Return our flag for a name of nanoGPT's, and the value that it stands for, if any; another name as it is."""
    theirs = OF_OTHERS.get(name, "") if name in _NAMES and name not in FLAGS else ""
    flag, _, meant = theirs.removeprefix("--").partition(" ")
    return flag or name, meant


def _spelled(flag: str, value: Any) -> Any:
    """Return a value as our flag has it: "on" of True, "bf16" of "bfloat16"."""
    if isinstance(value, bool) and flag in FLAGS and not FLAGS[flag].is_switch:
        return "on" if value else "off"
    of, _, meant = OF_OTHERS.get(value, "").partition(" ") if isinstance(value, str) else ("", "", "")
    return meant if of == f"--{flag}" and meant else value
