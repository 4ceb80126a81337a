"""PyTorch's pickled description of a state (`.metadata`, what checkpoints had up to format 1), read without unpickling.

A pickle is a program for a small machine, and Python's own machine lets it name any class and set attributes, of a
class too. This one knows the few instructions that PyTorch's description needs. A class is its name to it, an object
the name, the arguments and the state that were given: nothing is imported, called or set. What comes out are dicts,
lists, text and numbers, which `description` checks as it checks what it reads from JSON. A name that PyTorch's never
has is refused all the same.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

from testbed.errors import InputError

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_NAMES = {
    _METADATA: {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    _FILES: {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "builtins": {"getattr"},  # Python 3.11.0 to 3.11.3 name the members of an enum with it; it is never called
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # since Python 3.13
}
MOST_DIMENSIONS = 8
_PUSHED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_ARGUMENTS = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class NotOurs(Exception):
    """The pickle is none of PyTorch's description."""


@dataclass(frozen=True)
class Name:
    """A class or a function that the pickle names. It is never looked up."""

    module: str
    name: str


@dataclass(eq=False, repr=False, slots=True)
class Made:
    """An object as the pickle says that it is made."""

    by: Name
    arguments: tuple
    state: Any = None


def plain_form_of(content: bytes, name: str) -> dict[str, Any]:
    """Return the description in the form of `description`, unchecked.

    Raises:
        InputError: one sentence that begins with `name`: it is no description that PyTorch made of tensors.
    """
    try:
        return _description(_run(content))
    except NotOurs as fault:
        raise InputError(f"{name} does not describe a state: {fault}") from None
    # pickletools raises InputError for what is no pickle and IndexError at its end; a pickle out of step the others
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        kind = type(error).__name__
        raise InputError(f"{name} does not describe a state: it is no whole pickle of PyTorch's ({kind})") from None


def _run(content: bytes) -> Any:
    """Return what the pickle makes."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    argument: Any
    for instruction, argument, _ in pickletools.genops(content):
        code = instruction.name
        if code in _ARGUMENTS:
            stack.append(argument)
        elif code in _PUSHED:
            stack.append(_PUSHED[code])
        elif code == "MEMOIZE":
            memo.append(stack[-1])
        elif code in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif code == "EMPTY_DICT":
            stack.append({})
        elif code == "EMPTY_LIST":
            stack.append([])
        elif code == "MARK":
            marks.append(len(stack))
        elif code == "STACK_GLOBAL":
            member, module = _text(stack.pop()), _text(stack.pop())
            if member not in _NAMES.get(module, ()):
                raise NotOurs(f"it names {_shown(module)}.{_shown(member)}, which it has no use for")
            stack.append(Name(module, member))
        elif code in ("NEWOBJ", "REDUCE"):
            arguments, by = stack.pop(), stack.pop()
            if not isinstance(by, Name) or not isinstance(arguments, tuple):
                raise NotOurs(f"it makes an object of {_kind(by)}")
            stack.append(Made(by, arguments))
        elif code == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Made) or stack[-1].state is not None:
                raise NotOurs(f"it sets attributes of {_kind(stack[-1])}")
            stack[-1].state = state
        elif code in ("SETITEM", "SETITEMS"):
            items = since_mark() if code == "SETITEMS" else [stack.pop(-2), stack.pop()]
            if type(stack[-1]) is not dict or len(items) % 2:
                raise NotOurs(f"it sets items of {_kind(stack[-1])}")
            for key, value in zip(items[::2], items[1::2], strict=True):
                if not isinstance(key, str | Made):
                    raise NotOurs(f"it has {_kind(key)} as a key")
                stack[-1][key] = value
        elif code in ("APPEND", "APPENDS"):
            items = since_mark() if code == "APPENDS" else [stack.pop()]
            if type(stack[-1]) is not list:
                raise NotOurs(f"it appends to {_kind(stack[-1])}")
            stack[-1].extend(items)
        elif code in _TUPLES:
            stack[-_TUPLES[code] :] = [tuple(stack[-_TUPLES[code] :])]
        elif code == "TUPLE":
            stack.append(tuple(since_mark()))
        elif code == "STOP":
            return stack.pop()
        elif code not in ("PROTO", "FRAME"):
            raise NotOurs(f"it has the instruction {code}, which PyTorch's has no use for")
    raise NotOurs("it has no end")


def _description(made: Any) -> dict[str, Any]:
    state = _state_of(made, _METADATA, "Metadata")
    places = {}
    for key, value in _of_kind(state["storage_data"], dict).items():
        index, where = _state_of(key, _METADATA, "MetadataIndex"), _state_of(value, _FILES, "_StorageInfo")
        if set(where) - {"relative_path", "offset", "length"}:
            raise NotOurs(f"a piece has {_kind(where.get('transform_descriptors'))} in place of its own bytes")
        places[_text(index["fqn"]), tuple(_size(index["offset"]))] = where
    tensors, num_pieces = {}, 0
    for name, value in _of_kind(state["state_dict_metadata"], dict).items():
        of_tensor = _state_of(value, _METADATA, "TensorStorageMetadata")
        num_pieces += len(_of_kind(of_tensor["chunks"], list))
        if num_pieces > len(places):  # a list may stand in the pickle once and be meant a million times
            raise NotOurs(f"it tells where {len(places)} pieces lie, and has more")
        pieces = []
        for chunk in of_tensor["chunks"]:
            box = _state_of(chunk, _METADATA, "ChunkStorageMetadata")
            offsets, sizes = _size(box["offsets"]), _size(box["sizes"])
            where = places[_text(name), tuple(offsets)]
            pieces.append(
                {
                    "offsets": offsets,
                    "sizes": sizes,
                    "file": where["relative_path"],
                    "start": where["offset"],
                    "length": where["length"],
                }
            )
        dtype = _of_kind(of_tensor["properties"], Made).state[0]
        if not isinstance(dtype, Name) or dtype.module != "torch":
            raise NotOurs(f"a tensor has {_kind(dtype)} as its dtype")
        tensors[name] = {"dtype": dtype.name, "size": _size(of_tensor["size"]), "pieces": pieces}
    return {"format": 1, "tensors": tensors}


def _state_of(made: Any, module: str, name: str) -> dict:
    """Return the attributes of an object that must be one of PyTorch's."""
    if not isinstance(made, Made) or made.by != Name(module, name) or made.arguments:
        raise NotOurs(f"it has {_kind(made)} where a {name} should be")
    return _of_kind(made.state, dict)


def _size(made: Any) -> list:
    if not isinstance(made, Made) or made.by != Name("torch", "Size") or made.state is not None:
        raise NotOurs(f"it has {_kind(made)} where a torch.Size should be")
    (numbers,) = made.arguments
    if len(_of_kind(numbers, tuple)) > MOST_DIMENSIONS:  # one long tuple may be meant by every piece
        raise NotOurs(f"it has a torch.Size of {len(numbers):,} numbers")
    if any(type(number) is not int for number in _of_kind(numbers, tuple)):
        raise NotOurs("it has a torch.Size of something else than numbers")
    return list(numbers)


def _of_kind(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise NotOurs(f"it has {_kind(value)} where a {kind.__name__} should be")
    return value


def _text(value: Any) -> str:
    return _of_kind(value, str)


def _kind(value: Any) -> str:
    if isinstance(value, Made):
        value = value.by
    return f"{value.module}.{value.name}" if isinstance(value, Name) else type(value).__name__


def _shown(text: str) -> str:
    return ascii(text[:60])[1:-1]
