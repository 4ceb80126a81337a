"""Weights of nanoGPT and llm.c: read, written, and the same bits and logits both ways."""

from __future__ import annotations

import dataclasses
import json
import struct
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from support.programs import data_flags, run_here
from support.settings import refusal, typed

from testbed.checkpoint.adamw_state import MOMENTS, AdamWState, Rates
from testbed.checkpoint.formats import Checkpoint, notes_on, read_checkpoint, read_start, write_checkpoint
from testbed.config.initial_file import shape_of_file
from testbed.errors import Failure, InputError
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

SHAPE = ModelShape(num_layers=2, num_heads=2, embedding_size=16, vocab_size=300, max_position_embeddings=24)
PROGRAM = "scripts/convert_checkpoint.py"


@pytest.fixture(scope="module")
def ours() -> Checkpoint:
    torch.manual_seed(0)
    model = GPT2(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.wte.weight[SHAPE.vocab_size :] = 0
    return Checkpoint(model.state_dict(), SHAPE, "bpe:300", 299)


def same_bits(one: Checkpoint, other: Checkpoint) -> bool:
    return one.shape == other.shape and one.weights.keys() == other.weights.keys() and all(
        torch.equal(one.weights[key], other.weights[key]) for key in one.weights
    )  # fmt: skip


@pytest.mark.parametrize("name", ["ckpt.pt", "model.bin", "folder"])
def test_weights_come_back_bit_for_bit(tmp_path, ours, name):
    write_checkpoint(tmp_path / name, ours)
    assert same_bits(read_checkpoint(tmp_path / name, "it"), ours)


def logits_of_llmc(data: bytes, tokens: list[int]) -> np.ndarray:
    """A reader of llm.c's format and a forward pass in numpy, written from train_gpt2.c alone."""
    header = struct.unpack("<256i", data[:1024])
    assert header[:2] == (20240326, 3)
    positions, vocabulary, layers, heads, c, padded = header[2:8]
    sizes = [(padded, c), (positions, c), (layers, c), (layers, c), (layers, 3 * c, c), (layers, 3 * c), (layers, c, c),
             (layers, c), (layers, c), (layers, c), (layers, 4 * c, c), (layers, 4 * c), (layers, c, 4 * c),
             (layers, c), (c,), (c,)]  # fmt: skip
    numbers, at, parts = np.frombuffer(data[1024:], "<f4").astype(np.float64), 0, []
    for size in sizes:
        parts.append(numbers[at : at + int(np.prod(size))].reshape(size))
        at += int(np.prod(size))
    assert at == len(numbers)
    wte, wpe, ln1w, ln1b, qkvw, qkvb, projw, projb, ln2w, ln2b, fcw, fcb, fprojw, fprojb, lnfw, lnfb = parts

    def norm(x, weight, bias):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias

    x, length = wte[tokens] + wpe[: len(tokens)], len(tokens)
    for n in range(layers):
        query, key, value = np.split(norm(x, ln1w[n], ln1b[n]) @ qkvw[n].T + qkvb[n], 3, -1)
        mixed = np.zeros_like(x)
        for head in range(heads):
            part = slice(head * c // heads, (head + 1) * c // heads)
            scores = query[:, part] @ key[:, part].T / np.sqrt(c / heads)
            scores = np.where(np.tri(length) > 0, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, part] = weights / weights.sum(-1, keepdims=True) @ value[:, part]
        x = x + mixed @ projw[n].T + projb[n]
        h = norm(x, ln2w[n], ln2b[n]) @ fcw[n].T + fcb[n]
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + h @ fprojw[n].T + fprojb[n]
    return norm(x, lnfw, lnfb) @ wte[:vocabulary].T


def test_what_llmc_reads_computes_the_same(tmp_path, ours):
    write_checkpoint(tmp_path / "model.bin", ours)
    model, tokens = GPT2(SHAPE), [1, 5, 299, 0, 17]
    model.load_state_dict(ours.weights)
    with torch.no_grad():
        expected = model.eval()(torch.tensor([tokens]))[0, :, : SHAPE.vocab_size].double().numpy()
    assert logits_of_llmc((tmp_path / "model.bin").read_bytes(), tokens) == pytest.approx(expected, abs=1e-4)


def test_bf16_of_llmc_is_rounded_once(tmp_path, ours):
    write_checkpoint(tmp_path / "model.bin", ours, is_bf16=True)
    found = read_checkpoint(tmp_path / "model.bin", "it")
    assert all(torch.equal(found.weights[key], ours.weights[key].bfloat16().float()) for key in ours.weights)


def nanogpt(ours: Checkpoint, prefix: str = "", **changed) -> dict:
    """What nanoGPT's train.py saves of such a model, whose names and layouts are spelled here again."""
    model = {f"{prefix}transformer.{key}": tensor.clone() for key, tensor in ours.weights.items()}
    model[f"{prefix}transformer.wte.weight"] = ours.weights["wte.weight"][:300].clone()
    model[f"{prefix}lm_head.weight"] = model[f"{prefix}transformer.wte.weight"]
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24, "bias": True, "vocab_size": 300, "dropout": 0.1}
    return {"model": model, "model_args": sizes, "iter_num": 7, "optimizer": {"state": {}}, "config": {}, **changed}


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpts_file_is_read(tmp_path, ours, prefix):
    torch.save(nanogpt(ours, prefix), tmp_path / "ckpt.pt")
    assert same_bits(read_checkpoint(tmp_path / "ckpt.pt", "it"), ours)


def test_a_nanogpt_without_biases_gets_zeros_and_a_note(tmp_path, ours):
    content = nanogpt(ours)
    content["model"] = {key: tensor for key, tensor in content["model"].items() if not key.endswith(".bias")}
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(InputError, match=r"the weight h\.0\.ln_1\.bias is missing"):
        read_checkpoint(tmp_path / "ckpt.pt", "it")
    content["model_args"] = {**content["model_args"], "bias": False}
    torch.save(content, tmp_path / "ckpt.pt")
    found = read_checkpoint(tmp_path / "ckpt.pt", "it")
    assert all(not found.weights[key].any() for key in found.weights if key.endswith(".bias"))
    assert "exact GELU" in found.notes[0] and found.notes[1].startswith("13 biases that nanoGPT left out")


def test_a_ckpt_pt_says_what_nanogpt_will_miss(tmp_path, ours):
    assert "no best_val_loss and no config" in " ".join(notes_on(ours, tmp_path / "ckpt.pt"))
    assert "best_val_loss" not in " ".join(notes_on(ours, tmp_path / "model.bin"))


def test_what_nanogpt_resumes_from_fits_its_own_model(tmp_path, ours):
    """As train.py does it: the state dict into its model, the optimizer's into AdamW with its two groups."""
    write_checkpoint(tmp_path / "ckpt.pt", ours)
    content = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert content["model"].keys() == nanogpt(ours)["model"].keys()
    assert content["model"]["lm_head.weight"].data_ptr() == content["model"]["transformer.wte.weight"].data_ptr()
    assert content["model_args"]["vocab_size"] == 300 and content["iter_num"] == 0
    parameters = [tensor.clone().requires_grad_() for tensor in ours.weights.values()]
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    optimizer.load_state_dict(content["optimizer"])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": None}, 'it has no "model" and "model_args"'),
        ({"model_args": {"n_layer": 2}}, "does not say the sizes"),
        ({"model_args": {"n_layer": 3, "n_head": 2, "n_embd": 16, "block_size": 24, "vocab_size": 300}}, "h.2"),
        ({"model_args": {"n_layer": 2, "n_head": 3, "n_embd": 16, "block_size": 24, "vocab_size": 300}}, "that can be"),
        ({"model_args": {"n_layer": 10**9, "n_head": 2, "n_embd": 16, "block_size": 24, "vocab_size": 300}}, "sizes"),
    ],
)
def test_another_pt_is_refused_in_one_sentence(tmp_path, ours, change, said):
    torch.save(nanogpt(ours, **change), tmp_path / "ckpt.pt")
    with pytest.raises(InputError, match=r"^it") as caught:
        read_checkpoint(tmp_path / "ckpt.pt", "it")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_tensors_that_the_file_does_not_hold_are_refused(tmp_path, ours):
    """Kilobytes that claim gigabytes: a tensor of stride 0, a sparse one, integers."""
    shape = (300, 16)
    for tensor in (torch.zeros(1).expand(shape), torch.zeros(shape).to_sparse(), torch.zeros(shape, dtype=torch.int64)):
        content = nanogpt(ours)
        content["model"]["transformer.wte.weight"] = tensor
        torch.save(content, tmp_path / "ckpt.pt")
        with pytest.raises(InputError, match="is no plain tensor of numbers"):
            read_checkpoint(tmp_path / "ckpt.pt", "it")


def test_a_damaged_bin_is_refused_in_one_sentence(tmp_path, ours):
    path = tmp_path / "model.bin"
    write_checkpoint(path, ours)
    data = path.read_bytes()
    for other, said in (
        (data[:-4], "bytes, its header needs"),
        (data[:100], "is no model of llm.c"),
        (data[:101], "is no model of llm.c"),
        (b"", "is no model of llm.c"),
        (b"\1" + data[1:], "is no model of llm.c"),
        (data[:16] + struct.pack("<i", 2**30) + data[20:], "sizes"),
        (data[:8] + struct.pack("<i", -1) + data[12:], "does not say the sizes"),
        (data[:2000] + struct.pack("<f", float("nan")) + data[2004:], "NaN"),
    ):
        path.write_bytes(other)
        with pytest.raises(InputError, match=said):
            read_checkpoint(path, "it")


def test_the_program_converts_and_refuses(tmp_path, ours):
    torch.save(nanogpt(ours), tmp_path / "ckpt.pt")
    done = run_here(PROGRAM, "--from", tmp_path / "ckpt.pt", "--to", tmp_path / "ours")
    assert done.returncode == 0 and "nanoGPT to folder" in done.stdout, done.stderr
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["n_positions"] == 24
    assert same_bits(read_checkpoint(tmp_path / "ours", "it"), ours)
    done = run_here(PROGRAM, "--from", tmp_path / "ours", "--to", tmp_path / "model.bin", "--bf16")
    assert done.returncode == 0, done.stderr
    for words, said in (
        (["--to", tmp_path / "model.bin"], "exists; give --overwrite"),
        (["--to", tmp_path / "ours"], "are both"),
        (["--to", tmp_path / "no" / "a.pt"], "there is no folder"),
        (["--to", tmp_path / "b.pt", "--bf16"], "--bf16 is for a .bin"),
    ):
        done = run_here(PROGRAM, "--from", tmp_path / "ours", *words)
        assert done.returncode == 2 and said in done.stderr, (words, done.stderr)
    done = run_here(PROGRAM, "--from", tmp_path / "none.pt", "--to", tmp_path / "c.pt")
    assert done.returncode == 2 and "--from" in done.stderr


@pytest.mark.parametrize("name", ["ckpt.pt", "model.bin"])
def test_training_begins_with_a_file_of_another_program(tmp_path, ours, token_files, name):
    write_checkpoint(tmp_path / name, ours)
    flags = ["--seq_length", "16", "--device", "cpu", *data_flags(token_files), "--init_from", str(tmp_path / name)]
    checked = typed(flags)
    assert checked.settings.shape == SHAPE
    assert ("exact GELU" in " ".join(checked.notes)) == (name == "ckpt.pt")
    weights = read_start(str(tmp_path / name), SHAPE)
    assert all(torch.equal(weights[key], ours.weights[key]) for key in ours.weights)
    with pytest.raises(InputError, match=rf"--num_layers 3 does not fit the weights of --init_from .*{name}"):
        typed([*flags, "--num_layers", "3"])
    with pytest.raises(InputError, match="another model now"):
        read_start(str(tmp_path / name), dataclasses.replace(SHAPE, num_heads=4))


def test_a_file_that_cannot_be_begun_with_is_refused_with_the_flags(tmp_path, ours, token_files):
    write_checkpoint(tmp_path / "cut.bin", ours)
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-1])
    torch.save(nanogpt(ours, model=[]), tmp_path / "odd.pt")
    (tmp_path / "no.pt").write_bytes(b"PK")
    for name, said in {
        "cut.bin": "its header needs",
        "odd.pt": 'no "model"',
        "no.pt": "cannot be read as tensors",
        "none.pt": "cannot be read (No such file",
        "none": "nor a .pt of nanoGPT or a .bin",
    }.items():
        assert said in (found := refusal(token_files, "--init_from", str(tmp_path / name))), found
        assert found.startswith(f"--init_from {tmp_path / name} ")


def test_the_sizes_of_a_pt_are_read_without_its_numbers(tmp_path, ours):
    write_checkpoint(tmp_path / "ckpt.pt", ours)
    with mock.patch("torch._C.PyTorchFileReader.get_storage_from_record", side_effect=AssertionError("numbers")):
        assert shape_of_file(tmp_path / "ckpt.pt") == SHAPE


@pytest.mark.parametrize("name", ["ckpt.pt", "model.bin"])
def test_a_start_maps_the_weights_and_leaves_the_moments(tmp_path, ours, monkeypatch, name):
    write_checkpoint(path := tmp_path / name, ours)
    before = path.read_bytes()
    monkeypatch.setattr("testbed.checkpoint.adamw_state.of_torch", None)  # would be called
    weights = read_start(str(path), ours.shape)
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    assert lines and all(line.split()[1].endswith("p") for line in lines), "private: what is written is not the file's"
    weights["h.0.ln_1.weight"].zero_()
    assert path.read_bytes() == before


def test_a_compressed_tensor_is_refused(tmp_path, ours):
    write_checkpoint(path := tmp_path / "ckpt.pt", ours)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    smallest = min((name for name in members if "/data/" in name), key=lambda name: len(members[name]))
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content, zipfile.ZIP_DEFLATED if name == smallest else zipfile.ZIP_STORED)
    with pytest.raises(InputError, match="compressed"):
        read_start(str(path), ours.shape)


def test_a_circle_of_links_and_a_file_of_holes_are_refused(tmp_path):
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    done = run_here(PROGRAM, "--from", tmp_path / "loop.pt", "--to", tmp_path / "made")
    assert done.returncode == 2 and "Too many levels of symbolic links" in done.stderr
    shape = ModelShape(1000, 1, 8192, 13, 64)
    header = struct.pack("<8i", 20240326, 3, 64, 13, 1000, 1, 8192, 13)
    with (tmp_path / "model.bin").open("wb") as file:  # 3 TB that take no room on the disk
        file.write(header.ljust(1024, b"\0"))
        file.truncate(1024 + 4 * shape.num_parameters)
    done = run_here(PROGRAM, "--from", tmp_path / "model.bin", "--to", tmp_path / "made")
    assert done.returncode == 2 and "bytes of memory, and this machine has" in done.stderr


def test_one_tensor_for_two_weights_is_refused_and_for_two_moments_left_out(tmp_path, ours):
    content = nanogpt(ours)
    content["model"]["transformer.h.1.ln_1.weight"] = content["model"]["transformer.h.0.ln_1.weight"]
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(InputError, match="one tensor under the names of two weights"):
        read_checkpoint(tmp_path / "ckpt.pt", "it")
    moments = {name: {key: torch.rand(each.shape) for key, each in ours.weights.items()} for name in MOMENTS}
    write_checkpoint(path := tmp_path / "ckpt.pt", dataclasses.replace(ours, optimizer=AdamWState(moments, 3, Rates())))
    content = torch.load(path, weights_only=True)
    content["optimizer"]["state"][0]["exp_avg"] = content["optimizer"]["state"][0]["exp_avg_sq"]
    torch.save(content, path)
    found = read_checkpoint(path, "it")
    # the embedding's are padded, so they are two tensors again
    assert found.optimizer is not None
    content["optimizer"]["state"][1]["exp_avg"] = content["optimizer"]["state"][1]["exp_avg_sq"]
    torch.save(content, path)
    found = read_checkpoint(path, "it")
    assert found.optimizer is None and "one tensor as two moments" in " ".join(found.notes)


@pytest.mark.parametrize("name", ["ckpt.pt", "folder"])
def test_a_full_disk_is_a_sentence(tmp_path, ours, monkeypatch, name):
    """PyTorch says how far it came, and not what the system said."""

    def torn(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr("torch.save", torn)
    moments = dict.fromkeys(MOMENTS, ours.weights)
    with pytest.raises(Failure, match=rf"{name} could not be written: .*only a part of a file .*make room"):
        write_checkpoint(tmp_path / name, dataclasses.replace(ours, optimizer=AdamWState(moments, 3, Rates())))
    assert not list(tmp_path.rglob("*.tmp"))
