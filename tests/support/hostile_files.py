"""Make files as an attacker would: pickles that bring a reader out of step, and archives.

What a pickle may call, PyTorch decides (`weights_only`) and tests. Each file is made from opcodes and bytes, so that
nothing hostile lies in the repository. A pickle that does harm makes a folder at `canary`. Files that are only damaged
are drawn by mutations.py.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def stack_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def by_name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def whole(body: bytes, protocol: int = 4) -> bytes:
    """A pickle that makes what `body` leaves on the stack."""
    return b"\x80" + bytes([protocol]) + body + b"."


def tricks(canary: Path) -> Iterator[tuple[str, bytes]]:
    """name -> opcodes that reach for something without a name, and such as bring a machine out of step."""
    path = text(str(canary)) + b"\x85"
    yield "EXT4 of no extension", b"\x84\xff\xff\xff\x7f" + path + b"R"
    yield "EXT4 of a negative number", b"\x84\xff\xff\xff\xff" + path + b"R"
    yield "PERSID", b"Pposix.mkdir\n"
    yield "BINPERSID", text("posix.mkdir") + b"Q"
    yield "BINPERSID of a tuple", b"(" + text("storage") + by_name("torch", "FloatStorage") + text("../../x") + b"tQ"
    yield "an unknown opcode", b"\xfe"
    yield "an empty stack", b"R"
    yield "a mark that is not there", b"t"
    yield "a memo that is not there", b"h\x2a"
    yield "a long memo that is not there", b"j\xff\xff\xff\x7f"
    yield "a memo of 2^32", b"Nr\xff\xff\xff\xff"
    yield "text longer than the file", b"X\xff\xff\xff\xff"
    yield "text of 2^63 bytes", b"\x8d" + b"\xff" * 7 + b"\x7f"
    yield "bytes of 2^63 bytes", b"\x8e" + b"\xff" * 7 + b"\x7f"
    yield "a bytearray of 2^62 bytes", b"\x96" + b"\x00" * 7 + b"\x40"
    yield "a frame of 2^62 bytes", b"\x95" + b"\x00" * 7 + b"\x40"
    yield "a number of 2^31 bytes", b"\x8b\xff\xff\xff\x7f"
    yield "a number of a negative length", b"\x8b\xff\xff\xff\xff"
    yield "a list in itself", b"]\x94h\x00a"
    yield "a dict that is its own key", b"}\x94h\x00Ns"
    yield "lists 100,000 deep", b"]" * 100_000 + b"a" * 99_999
    yield "tuples 100,000 deep", b")" + b"\x85" * 100_000
    yield "a key 100,000 tuples deep", b"}" + b")" + b"\x85" * 100_000 + b"Ns"
    yield "an out-of-band buffer", b"\x97"
    yield (
        "a bytearray of 10^12",
        by_name("builtins", "bytearray") + b"\x8a\x06" + (10**12).to_bytes(6, "little") + (b"\x85R"),
    )
    yield "text half a character", b"X\x01\x00\x00\x00\xff"
    yield "a name with a line break", stack_global("os\nsystem", "x\x1b[2J")
    yield "no end", b"N" * 10
    for protocol in (0, 1, 6, 255):
        yield f"protocol {protocol}", b"\x80" + bytes([protocol]) + by_name("posix", "mkdir") + path + b"R"


def archive(content: bytes, more: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip as torch.save makes it, around any pickle."""
    file = io.BytesIO()
    members = {"archive/data.pkl": content, "archive/byteorder": b"little", "archive/version": b"3\n", **(more or {})}
    with zipfile.ZipFile(file, "w", compression) as into:
        for name, member in members.items():
            into.writestr(name, member)
    return file.getvalue()


def two_directories(packed: bytes) -> bytes:
    """The archive, with a second directory before its end record: in that one, no member is larger unpacked. Python's
    zipfile reads the second, PyTorch the first."""
    length, start = struct.unpack_from("<2L", packed, len(packed) - 10)
    end = start + length
    harmless = bytearray(packed[start : start + length])
    place = 0
    while (place := harmless.find(b"PK\1\2", place)) >= 0:
        harmless[place + 24 : place + 28] = harmless[place + 20 : place + 24]  # size unpacked = size packed
        place += 4
    return packed[:end] + bytes(harmless) + packed[end:]


def compressed(content: bytes) -> bytes:
    """The same archive, in which nothing but the packing is wrong."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as whole, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as into:
        for name in whole.namelist():
            into.writestr(name, whole.read(name))
    return packed.getvalue()


def saved(value: object, **options: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


class Planted:
    """Unpickled, it makes a folder."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.canary),)


def archives(good: object, canary: Path) -> Iterator[tuple[str, bytes]]:
    """Archives in place of the one that holds `good`: what torch.save would never leave there."""
    content = saved(good)
    data = next(zipfile.ZipFile(io.BytesIO(content)).read(n) for n in zipfile.ZipFile(io.BytesIO(content)).namelist()
                if n.endswith("data.pkl"))  # fmt: skip
    for part in range(1, 20):
        yield f"cut after {part} of 20 parts", content[: len(content) * part // 20]
    yield "empty", b""
    yield "one byte", b"\x80"
    yield "no archive", pickle.dumps(good if not isinstance(good, torch.Tensor) else [1])
    yield "a planted pickle without an archive", pickle.dumps(Planted(canary))
    yield "a planted pickle in the old form", saved(Planted(canary), _use_new_zipfile_serialization=False)
    yield "the old form", saved(good, _use_new_zipfile_serialization=False)
    yield "a planted pickle in the archive", saved({"a": Planted(canary)})
    yield "members that lead out", archive(data, {"../../../canary": b"x", "/canary": b"x", "archive/../../x": b"x"})
    yield "compressed members", compressed(content)
    yield "a bomb", archive(data, {"archive/data/0": b"\0" * (64 << 20)}, zipfile.ZIP_DEFLATED)
    yield "a bomb of lzma", archive(data, {"archive/data/0": b"\0" * (1 << 20)}, zipfile.ZIP_LZMA)
    yield "without its tensors", archive(data)
    yield "without a pickle", archive(b"", {"archive/data/0": b"\0" * 64})
    yield "an empty archive", b"PK\x05\x06" + b"\0" * 18
    yield "a program of TorchScript", archive(data, {"archive/constants.pkl": data, "archive/code/a.py": b"import os"})
    lied = bytearray(content)
    place = content.rfind(b"PK\x01\x02")
    lied[place + 20 : place + 28] = b"\xfe\xff\xff\x7f" * 2  # the directory says 2 GiB
    yield "a member of 2 GiB that is not there", bytes(lied)
    end = content.rfind(b"PK\x05\x06")
    yield "a directory beyond the end", content[: end + 16] + b"\xff\xff\xff\x7f" + content[end + 20 :]
    yield "two directories", two_directories(archive(data, {"archive/data/0": bytes(1 << 20)}, zipfile.ZIP_DEFLATED))
    yield "two directories, with a record of 64 bits", two_directories(content)
    yield "bytes after the archive", content + b"\0"
    yield "many directories", content + content[content.rfind(b"PK\x05\x06") :] * 50
    for name, value in {
        "a number": 7, "text": "x" * 1000, "a list": [1, 2], "nothing": None, "a dict in itself": {"cpu": {}},
        "a sparse tensor": torch.eye(3).to_sparse(), "a tensor of another shape": torch.zeros(7, 5, 3),
        "a tensor on no device": torch.zeros(2, 3, device="meta"), "a complex tensor": torch.zeros(2, 3) + 1j,
        "a quantized tensor": torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 0, torch.qint8),
        "a parameter": torch.nn.Parameter(torch.zeros(2, 3)), "booleans": torch.zeros(2, 3) > 0,
        "a giant of one number": torch.zeros(1).expand(1 << 40), "no elements": torch.zeros(0),
    }.items():  # fmt: skip
        yield name, saved(value)
    # a view that reaches beyond what it is a view of
    for what, size, stride, offset in (
        ("beyond its end", 1 << 20, 1, 0),
        ("before its beginning", 4, 1, -8),
        ("by a giant stride", 4, 1 << 60, 0),
        ("by a giant offset", 4, 1, 1 << 61),
    ):
        storage = b"(" + text("storage") + by_name("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
        view = number(offset) + number(size) + b"\x85" + number(stride) + b"\x85\x89"
        more = by_name("collections", "OrderedDict") + b")R"
        body = by_name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + view + more + b"tR"
        yield f"a tensor that reads {what}", archive(whole(body, 2), {"archive/data/0": b"\0" * 16})


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
