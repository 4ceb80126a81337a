"""Write what nanoGPT's data/shakespeare_char/prepare.py writes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np


def ids_of(text: str) -> dict[str, int]:
    return {character: number for number, character in enumerate(sorted(set(text)))}


def write_meta(folder: Path, protocol: int | None = None, **content: object) -> Path:
    path = folder / "meta.pkl"
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def write_characters(folder: Path, text: str, ids: dict[str, int] | None = None, protocol: int | None = None) -> Path:
    """Return train.bin, nine tenths of a text; val.bin has the rest, meta.pkl the characters."""
    ids = ids or ids_of(text)
    tokens = np.array([ids[character] for character in text], dtype=np.uint16)
    cut = len(text) * 9 // 10
    tokens[:cut].tofile(folder / "train.bin")
    tokens[cut:].tofile(folder / "val.bin")
    itos = {number: character for character, number in ids.items()}
    write_meta(folder, protocol, vocab_size=len(ids), itos=itos, stoi=ids)
    return folder / "train.bin"
