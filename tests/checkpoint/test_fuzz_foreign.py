"""Break the files of other programs. Each is read and converted, or refused in one sentence, and left as it is."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.fuzz import REFUSED, Reader, Refused, break_in_every_way, gpt2_accepts
from support.mutations import broken_bytes, broken_json, broken_value, broken_words
from support.programs import TINY_RUN, data_flags, write_token_files

from testbed.checkpoint import adamw_state
from testbed.checkpoint.adamw_state import AdamWState, Rates
from testbed.checkpoint.formats import Checkpoint, read_checkpoint, write_checkpoint
from testbed.config.initial_file import shape_of_file
from testbed.data.tokenizer import TiktokenTokenizer
from testbed.errors import InputError
from testbed.inference.questions import read_questions
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

SHAPE = ModelShape(num_layers=1, num_heads=2, embedding_size=8, vocab_size=20, max_position_embeddings=16)


def checkpoint() -> Checkpoint:
    model = GPT2(SHAPE)
    with torch.no_grad():
        model.wte.weight[SHAPE.vocab_size :] = 0
    moments = {
        name: {key: torch.rand(each.shape) for key, each in model.state_dict().items()} for name in adamw_state.MOMENTS
    }
    return Checkpoint(model.state_dict(), SHAPE, optimizer=AdamWState(moments, 3, Rates()))


def converts(name: str) -> Any:
    """Return a reader: the file's sizes, then all that convert_checkpoint.py does with it."""

    def read(folder: Path) -> None:
        path = folder / name
        if path.suffix:
            shape_of_file(path, str(path))
        found = read_checkpoint(path, str(path))
        with tempfile.TemporaryDirectory() as made:
            for to in ("folder", "ckpt.pt", "model.bin"):
                write_checkpoint(Path(made) / to, found)

    return read


def read_state_of_llmc(folder: Path) -> None:
    found = read_checkpoint(folder / "model_00000003.bin", "it")
    if found.optimizer is None:
        raise InputError((*found.notes, "there is none")[0])


def written(name: str) -> Any:
    return lambda folder: write_checkpoint(folder / name, checkpoint())


ODD_TENSORS = [
    *(torch.zeros(8), torch.zeros(()), torch.zeros(0), torch.full((8,), torch.nan), torch.full((8,), -1.0)),
    *(
        torch.zeros(8, dtype=dtype)
        for dtype in (torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64)
    ),
    *(torch.zeros(1).expand(8), torch.zeros(16)[::2], torch.zeros(8).to_sparse(), torch.zeros(8, device="meta")),
    *(torch.quantize_per_tensor(torch.zeros(8), 0.1, 0, torch.qint8), torch.zeros(8, requires_grad=True)),
    torch.nn.Parameter(torch.zeros(8)),
]


@st.composite
def broken_content(draw, content: bytes) -> bytes:
    """nanoGPT's: other values in it, tensors of other kinds, one tensor for two names."""
    value = draw(broken_value(torch.load(io.BytesIO(content), weights_only=True)))
    model = value.get("model")
    states = value["optimizer"].get("state") if isinstance(value.get("optimizer"), dict) else None
    held = [each for each in (model, *(states.values() if isinstance(states, dict) else ())) if isinstance(each, dict)]
    for _ in range(draw(st.integers(0, 2))):
        if places := [(each, key) for each in held for key in each]:
            into, key = draw(st.sampled_from(places))
            shape = getattr(into[key], "shape", None)
            alike = [each[name] for each, name in places if getattr(each[name], "shape", None) == shape]
            into[key] = draw(st.one_of(st.sampled_from(alike), st.sampled_from(ODD_TENSORS)))
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


def broken_header(content: bytes) -> Any:
    """llm.c's: one of its numbers is another."""
    numbers = st.sampled_from([-1, 0, 1, 3, 5, 7, 20, 2**16, 2**31 - 1, -(2**31)])
    places = st.lists(st.tuples(st.integers(0, 10), numbers), min_size=1, max_size=2)

    def made(changes: list[tuple[int, int]]) -> bytes:
        header = np.frombuffer(content[:1024], "<i4").copy()
        for place, number in changes:
            header[place] = number
        return header.tobytes() + content[1024:]

    return st.one_of(places.map(made), broken_bytes(content))


def configuration(text: str, suffix: str) -> Any:
    def prepare(folder: Path) -> None:
        write_token_files(folder, train_tokens=2000, val_tokens=400)
        (folder / f"run.{suffix}").write_text(text)

    return prepare


def accepts(suffix: str) -> Any:
    return lambda folder: gpt2_accepts(
        ["--config", str(folder / f"run.{suffix}"), *TINY_RUN, *data_flags((folder / "train.bin", folder / "val.bin"))]
    )


def questions(folder: Path) -> None:
    line = {"ctx": "one two", "endings": ["three", "four é", "five"], "label": "2"}
    (folder / "hellaswag.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps({**line, 'label': 0})}\n")


def read_all_questions(folder: Path) -> None:
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding(
        "bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )
    read_questions(folder / "hellaswag.jsonl", TiktokenTokenizer("bpe:257", encoding, 256), 64)


READERS = {
    "ckpt.pt of nanoGPT": Reader(written("ckpt.pt"), "ckpt.pt", converts("ckpt.pt"), broken=broken_bytes),
    "content of ckpt.pt": Reader(written("ckpt.pt"), "ckpt.pt", converts("ckpt.pt"), broken=broken_content),
    "model.bin of llm.c": Reader(written("model.bin"), "model.bin", converts("model.bin"), broken=broken_header),
    "state of llm.c": Reader(
        written("model_00000003.bin"),
        "state_00000003_00000.bin",
        read_state_of_llmc,
        broken=broken_header,
        is_named=False,
    ),
    "universal checkpoint": Reader(
        lambda folder: write_checkpoint(folder / "start", checkpoint(), is_universal_wanted=True),
        "start/zero/transformer.h.0.ln_1.weight/fp32.pt",
        converts("start"),
        broken=broken_bytes,
        is_named=False,
    ),
    "config.json beside it": Reader(written("start"), "start/config.json", converts("start"), is_named=False),
    "TOML of --config": Reader(
        configuration('model = "gpt2"\nlearning_rate = 6e-4\nmax_tokens = "10B"\ntensorboard = false\n', "toml"),
        "run.toml",
        accepts("toml"),
        broken=broken_words,
        errors=(Refused,),
        is_named=False,
    ),
    "YAML of --config": Reader(
        configuration("model: gpt2\nlearning_rate: 6e-4\nmax_tokens: 10B\nrun_type: ddp\n", "yaml"),
        "run.yaml",
        accepts("yaml"),
        broken=broken_words,
        errors=(Refused,),
        is_named=False,
    ),
    "nanoGPT's config of --config": Reader(
        configuration("batch_size = 4 * 2\nblock_size = 32\ngradient_accumulation_steps = 1\ndecay_lr = True\n"
                      "learning_rate = 6e-4\nweight_decay = 1e-1\nlog_interval = 10\nwandb_log = False\n", "py"),
        "run.py",
        accepts("py"),
        broken=broken_words,
        errors=(Refused,),
        is_named=False,
        outcomes=(REFUSED,),  # an odd word in a line is hardly ever what nanoGPT takes
    ),
    "questions": Reader(
        questions, "hellaswag.jsonl", read_all_questions, broken=lambda content: st.one_of(
            broken_words(content), broken_bytes(content), broken_json(json.loads(content.splitlines()[0])))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_no_file_breaks_its_reader(tmp_path, name):
    break_in_every_way(name, READERS[name], tmp_path / "files")
