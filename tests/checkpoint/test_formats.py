"""Checkpoints of other programs: every form into every other with the same bits, in whose names and layout they may be,
and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from support import nanogpt
from support.characters import write_characters
from support.plain_loop import batch, losses_of
from support.programs import TINY_RUN, data_flags, run_here
from support.settings import refusal, typed

from testbed.checkpoint.adamw_state import MOMENTS, AdamWState, Rates
from testbed.checkpoint.formats import Checkpoint, notes_on, read_checkpoint, read_start, write_checkpoint
from testbed.checkpoint.manifest import write_manifest
from testbed.config.initial_file import shape_of_file
from testbed.errors import Failure, InputError
from testbed.inference.loading import tokenizer_of
from testbed.model.gpt2 import GPT2, to_transformers
from testbed.model.shape import ModelShape
from testbed.optim.optimizer import parameter_groups

SHAPE = ModelShape(num_layers=2, num_heads=2, embedding_size=16, vocab_size=300, max_position_embeddings=24)
PROGRAM = "scripts/convert_checkpoint.py"
LLMC = "model_00000005.bin"
FORMS = ("ckpt.pt", LLMC, "folder", "universal")
STATES = "zero_pp_rank_0_mp_rank_00_model_states.pt"
QKV = "transformer.h.0.attn.c_attn.weight"


def trained() -> tuple[GPT2, torch.optim.Optimizer]:
    """A model after five steps."""
    torch.manual_seed(0)
    model = GPT2(SHAPE)
    optimizer = torch.optim.AdamW(parameter_groups(model.parameters(), 0.2), lr=2e-3, betas=(0.8, 0.97), eps=1e-7)
    losses_of(model, optimizer, range(5))
    return model, optimizer


@pytest.fixture(scope="module")
def ours() -> Checkpoint:
    model, optimizer = trained()
    moments = {
        moment: {name: optimizer.state[each][moment].clone() for name, each in model.named_parameters()}
        for moment in MOMENTS
    }
    for tensors in (weights := dict(model.state_dict()), *moments.values()):
        tensors["wte.weight"][SHAPE.vocab_size :] = 0
    state = AdamWState(moments, 5, Rates(2e-3, 0.8, 0.97, 1e-7, 0.2))
    return Checkpoint(weights, SHAPE, "bpe:300", 299, optimizer=state)


def write(path: Path, made: Checkpoint) -> Path:
    write_checkpoint(path, made, is_universal_wanted=path.name == "universal")
    return path


def same(found: Checkpoint, ours: Checkpoint) -> bool:
    pairs = [(found.weights, ours.weights)]
    if found.optimizer:
        pairs += [(found.optimizer.moments[moment], ours.optimizer.moments[moment]) for moment in MOMENTS]
    return found.shape == ours.shape and all(torch.equal(a[key], b[key]) for a, b in pairs for key in a | b)


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", FORMS)
def test_every_form_becomes_every_other_bit_for_bit(tmp_path, ours, first, second):
    (tmp_path / "b").mkdir()
    found = read_checkpoint(write(tmp_path / first, ours), "it")
    again = read_checkpoint(write(tmp_path / "b" / second, found), "it")
    assert same(found, ours) and same(again, ours)
    assert again.optimizer.step == 5
    assert {first, second} & {LLMC, "universal"} or again.optimizer.rates == ours.optimizer.rates
    if {first, second} <= {"folder", "universal"}:
        assert (again.tokenizer, again.end_of_text_id) == ("bpe:300", 299)


@pytest.mark.parametrize("name", FORMS)
def test_training_begins_with_each_and_writes_nothing_to_it(tmp_path, ours, token_files, name):
    path = write(tmp_path / name, ours)
    flags = ["--seq_length", "16", "--device", "cpu", *data_flags(token_files), "--init_from", str(path)]
    assert typed(flags).settings.shape == SHAPE
    with mock.patch("testbed.checkpoint.adamw_state.of_torch", side_effect=AssertionError("moments")):
        weights = read_start(str(path), SHAPE)
    assert all(torch.equal(weights[key], ours.weights[key]) for key in ours.weights)
    with pytest.raises(InputError, match=rf"--num_layers 3 does not fit the weights of --init_from .*{name}"):
        typed([*flags, "--num_layers", "3"])
    if path.is_file():
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
        assert lines and all(line.split()[1].endswith("p") for line in lines), "mapped, and private"
        before = path.read_bytes()
        weights["h.0.ln_1.weight"].zero_()
        assert path.read_bytes() == before
        with mock.patch("torch._C.PyTorchFileReader.get_storage_from_record", side_effect=AssertionError("numbers")):
            assert shape_of_file(path) == SHAPE
        with pytest.raises(InputError, match="another model now"):
            read_start(str(path), dataclasses.replace(SHAPE, num_heads=4))


C, POSITIONS = SHAPE.embedding_size, SHAPE.max_position_embeddings
LAYOUT = {  # of train_gpt2.c, `fill_in_parameter_sizes`; what begins with h. for both layers one after another
    "wte.weight": (384, C), "wpe.weight": (POSITIONS, C), "h.ln_1.weight": (C,), "h.ln_1.bias": (C,),
    "h.attn.c_attn.weight": (3 * C, C), "h.attn.c_attn.bias": (3 * C,), "h.attn.c_proj.weight": (C, C),
    "h.attn.c_proj.bias": (C,), "h.ln_2.weight": (C,), "h.ln_2.bias": (C,), "h.mlp.c_fc.weight": (4 * C, C),
    "h.mlp.c_fc.bias": (4 * C,), "h.mlp.c_proj.weight": (C, 4 * C), "h.mlp.c_proj.bias": (C,), "ln_f.weight": (C,),
    "ln_f.bias": (C,),
}  # fmt: skip
PARTS = [
    (key.replace("h.", f"h.{layer}."), size)
    for key, size in LAYOUT.items()
    for layer in range(2 if key.startswith("h.") else 1)
]


def test_what_llmc_reads_lies_where_it_looks_and_its_bf16_is_rounded_once(tmp_path, ours):
    """Its own code computes the same with such a file: docs/results/llmc."""
    path = write(tmp_path / "model.bin", ours)
    assert struct.unpack("<8i", path.read_bytes()[:32]) == (20240326, 3, POSITIONS, 300, 2, 2, C, 384)
    numbers = torch.from_numpy(np.fromfile(path, "<f4", offset=1024))
    for (key, size), part in zip(PARTS, numbers.split([math.prod(size) for _, size in PARTS]), strict=True):
        assert torch.equal(ours.weights[key], part.view(size)), key
    write_checkpoint(path, ours, is_bf16=True)
    found = read_checkpoint(path, "it")
    assert all(torch.equal(found.weights[key], ours.weights[key].bfloat16().float()) for key in ours.weights)
    assert found.optimizer is None, "its name says no step"


def of_ranks(
    path: Path, ours: Checkpoint, ranks: int, is_sharded: bool = True, has_weights: bool = True, order: bytes = b""
) -> Path:
    """Write what as many ranks of train_gpt2.cu save after training in bf16, spelled from it alone: `gpt2_update` for
    the parts of ZeRO 1, `save_state` for the file."""
    write_checkpoint(path, ours, is_bf16=True)
    whole = np.fromfile((first := path.with_name("state_00000005_00000.bin")), "<f4")[256:].reshape(3, -1)
    header = np.zeros(256, "<i4")
    for rank in range(ranks):
        parts, at = [], 0
        for size in (math.prod(size) for _, size in PARTS):
            own = (rank * size // ranks, (rank + 1) * size // ranks) if is_sharded else (0, size)
            parts.append(whole[: 3 if has_weights else 2, at + own[0] : at + own[1]])
            at += size
        assert at == whole.shape[1]
        header[:6], header[10] = (20240527, 1, ranks, rank, has_weights, bool(order)), 5
        file = first.with_name(f"state_00000005_{rank:05d}.bin")
        file.write_bytes(header.tobytes() + np.concatenate(parts, 1).tobytes() + order)
    return path


SHUFFLED = struct.pack("<Q3iQ7i", 3, 2, 0, 1, 7, *range(7)) + bytes(2520)


@pytest.mark.parametrize(
    ("ranks", "is_sharded", "order"), [(1, False, SHUFFLED), (2, True, b""), (4, True, SHUFFLED), (3, False, b"")]
)
def test_the_ranks_of_llmc_become_one_state_and_its_weights_are_the_fp32_ones(tmp_path, ours, ranks, is_sharded, order):
    path = of_ranks(tmp_path / LLMC, ours, ranks, is_sharded, order=order)
    found = read_checkpoint(path, "it")
    assert same(found, ours) and found.optimizer.rates == Rates(3e-4, 0.9, 0.95, 1e-8, 0.0)
    assert "is that of step 5, in state_00000005_00000.bin; it has no rates" in found.notes[0]
    of_ranks(path, ours, ranks, is_sharded, has_weights=False, order=order)
    found, rounded = read_checkpoint(path, "it"), {key: each.bfloat16().float() for key, each in ours.weights.items()}
    assert same(found, dataclasses.replace(ours, weights=rounded)), "-w 0: there are no others"
    write(path, ours)
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["DONE_00000005", LLMC, "state_00000005_00000.bin"]
    write(path, dataclasses.replace(ours, optimizer=None))
    assert [each.name for each in tmp_path.iterdir()] == [LLMC], "no state of what was there before"
    assert read_checkpoint(path, "it").optimizer is None


def test_nanogpt_and_the_run_go_on_from_each_others_file(tmp_path, ours):
    """What it resumes from has the losses of the uninterrupted run; what it saves then comes back with all bits."""
    content = torch.load(write(tmp_path / "ckpt.pt", ours), weights_only=True)
    assert content["iter_num"] == 5 and content["model_args"]["vocab_size"] == 300
    (first, second), uninterrupted = content["optimizer"]["param_groups"], losses_of(*trained(), range(5, 9))
    assert (first["lr"], first["betas"], first["eps"], first["weight_decay"]) == (2e-3, (0.8, 0.97), 1e-7, 0.2)
    assert second["weight_decay"] == 0
    model, optimizer = nanogpt.resumed(content, SHAPE)
    assert losses_of(model, optimizer, range(5, 9)) == pytest.approx(uninterrupted, abs=1e-5)
    anew = nanogpt.resumed({**content, "optimizer": {**content["optimizer"], "state": {}}}, SHAPE)
    assert losses_of(*anew, range(5, 9)) != pytest.approx(uninterrupted, abs=1e-5), "a lost state would be seen"
    for prefix in ("", "_orig_mod."):
        saved = nanogpt.saved(model.state_dict(), SHAPE, optimizer.state_dict(), 9, prefix)
        torch.save(saved, tmp_path / "theirs.pt")
        found = read_checkpoint(tmp_path / "theirs.pt", "it")
        assert found.optimizer.step == 9
        for name, parameter in model.named_parameters():
            rows = SHAPE.vocab_size if name == "wte.weight" else len(parameter)
            assert torch.equal(found.weights[name][:rows], parameter[:rows]), name
            for moment in MOMENTS:
                there = optimizer.state[parameter][moment]
                assert torch.equal(found.optimizer.moments[moment][name][:rows], there[:rows]), (name, moment)


def test_a_nanogpt_without_biases_gets_zeros_and_a_note(tmp_path, ours):
    content = nanogpt.saved(ours.weights, SHAPE, {"state": {}}, 7)
    content["model"] = {key: tensor for key, tensor in content["model"].items() if not key.endswith(".bias")}
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(InputError, match=r"the weight h\.0\.ln_1\.bias is missing"):
        read_checkpoint(tmp_path / "ckpt.pt", "it")
    content["model_args"]["bias"] = False
    torch.save(content, tmp_path / "ckpt.pt")
    found = read_checkpoint(tmp_path / "ckpt.pt", "it")
    assert all(not found.weights[key].any() for key in found.weights if key.endswith(".bias"))
    assert found.notes[0].startswith("13 biases that nanoGPT left out") and found.shape.gelu == "exact"
    assert "llm.c computes the tanh form of GELU, and these weights are of the exact one" in "".join(
        notes_on(found, tmp_path / LLMC)
    )
    assert "no best_val_loss and no dataset" in " ".join(notes_on(found, tmp_path / "ckpt.pt"))


def test_a_state_that_lies_there_and_is_not_read_has_a_note(tmp_path, ours):
    bare = dataclasses.replace(ours, optimizer=None)
    for name, said in ((LLMC, ("no state_*.bin of its step",)), ("model.bin", ()), ("folder", ("optimizer.pt, the",))):
        path = write(tmp_path / name, bare)
        if path.is_dir():
            assert not read_checkpoint(path, "it").notes
            (path / "optimizer.pt").touch()
        notes = read_checkpoint(path, "it").notes
        assert len(notes) == len(said) and all(map(str.startswith, notes, said)), notes
        assert not read_checkpoint(path, "it", with_optimizer=False).notes


def of_characters(folder: Path, ours: Checkpoint, dataset: object, count: int = SHAPE.vocab_size) -> Path:
    """Write nanoGPT's folder of a model of so many characters."""
    for name in ("out", "data/words"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_characters(folder / "data" / "words", "".join(map(chr, range(0x4E00, 0x4E00 + count))))
    content = nanogpt.saved(ours.weights, SHAPE, {"state": {}}, 7) | {"config": {"dataset": dataset}}
    torch.save(content, folder / "out" / "ckpt.pt")
    return folder / "out" / "ckpt.pt"


def test_a_nanogpt_of_characters_takes_them_along(tmp_path, ours, monkeypatch):
    path = of_characters(tmp_path, ours, "words")
    found = read_checkpoint(path, "it")
    assert found.notes == (f"its tokens are the characters of {tmp_path / 'data/words/meta.pkl'}",)
    tokenizer = tokenizer_of(write(tmp_path / "folder", found))
    assert tokenizer.name == found.tokenizer == "char:300"
    assert tokenizer.decode_bytes(tokenizer.encode("\u4e03\u4e01")).decode() == "\u4e03\u4e01"
    monkeypatch.chdir(tmp_path)
    path = path.rename(tmp_path / "ckpt.pt")
    assert read_checkpoint(path, "it").tokenizer == "char:300", "data/ of the folder where one is"
    for dataset, count, said in (
        ("words", 299, "no tokenizer is taken: "),
        ("other", 300, ""),
        ("\0" * 999, 300, ""),
        (5, 300, ""),
    ):
        found = read_checkpoint(of_characters(tmp_path, ours, dataset, count), "it")
        assert found.tokenizer is None is found.tokenizer_text and "".join(found.notes).startswith(said)
        assert bool(found.notes) == bool(said)
    (tmp_path / "data" / "words" / "meta.pkl").write_bytes(b"cos\nsystem\n.")
    without = read_checkpoint(path, "it")
    assert without.tokenizer is None and "a pickle that does more" in without.notes[0]
    with pytest.raises(InputError, match=r"has no tokenizer.json.*bpe_N.json, or meta.pkl of nanoGPT"):
        tokenizer_of(write(tmp_path / "folder", without))


def of_deepspeed(
    folder: Path, ours: Checkpoint, prefix: str = "", is_theirs: bool = False, is_flat: bool = False, change=None
) -> Path:
    """Write what ds_to_universal does, of a model under these names, and config.json beside it. `is_flat`: of ZeRO 3,
    after two skipped steps."""
    write_checkpoint(folder, dataclasses.replace(ours, optimizer=None))
    (folder / "model.safetensors").unlink()
    files, sizes = {}, {}
    for kind, tensors in {"fp32": ours.weights, **ours.optimizer.moments}.items():
        for name, tensor in (to_transformers(tensors, SHAPE) if is_theirs else tensors).items():
            sizes[f"{prefix}{name}"] = tensor.shape
            files[f"{prefix}{name}/{kind}"] = tensor.flatten() if is_flat else {"cat_dim": 0, "param": tensor}
            if not is_flat:
                files[f"{prefix}{name}/step"] = torch.tensor(5.0)
    files[f"{prefix}lm_head.weight/fp32"] = {"param": ours.weights["wte.weight"]}
    if change:
        change(files)
    for name, content in files.items():
        (folder / "zero" / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / "zero" / f"{name}.pt")
    if is_flat:
        torch.save({"param_shapes": [sizes], "global_steps": 7, "skipped_steps": 2}, folder / STATES)
    return folder


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(("prefix", "is_theirs"), [("", False), ("module.", False), ("", True), ("module.", True)])
def test_a_universal_checkpoint_is_read_whoever_wrote_it(tmp_path, ours, prefix, is_theirs, is_flat):
    found = read_checkpoint(of_deepspeed(tmp_path / "universal", ours, prefix, is_theirs, is_flat), "it")
    assert same(found, ours) and found.optimizer.step == 5 and found.tokenizer == "bpe:300"
    assert "nanoGPT's defaults" in found.notes[0]


def changed_content(**change) -> Callable[[Path, Checkpoint], Path]:
    """A ckpt.pt in which these are others; of the model, names and tensors."""

    def made(folder: Path, ours: Checkpoint) -> Path:
        content = nanogpt.saved(ours.weights, SHAPE, {"state": {}}, 7)
        for key, value in change.items():
            content[key] = {**content[key], **value} if isinstance(value, dict) and value else value
        torch.save(content, folder / "ckpt.pt")
        return folder / "ckpt.pt"

    return made


def changed_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path, Checkpoint], Path]:
    def made(folder: Path, ours: Checkpoint) -> Path:
        path = write(folder / "model.bin", ours)
        path.write_bytes(change(path.read_bytes()))
        return path

    return made


def changed_files(change, is_flat: bool = False, said=None) -> Callable[[Path, Checkpoint], Path]:
    def made(folder: Path, ours: Checkpoint) -> Path:
        path = of_deepspeed(folder / "universal", ours, "", True, is_flat, change)
        if said is not None:
            torch.save({**torch.load(path / STATES, weights_only=True), **said}, path / STATES)
        return path

    return made


def put(tensor, kind: str = "fp32") -> Callable[[dict], None]:
    return lambda files: files.update({f"{QKV}/{kind}": tensor})


def changed_record(**settings) -> Callable[[Path, Checkpoint], Path]:
    """A run's checkpoint that describes itself as another."""

    def made(folder: Path, ours: Checkpoint) -> Path:
        path = write(folder / "folder", ours)
        saved = path / "checkpoints" / "step_000005"
        content = json.loads((saved / "checkpoint.json").read_text())
        content["settings"] |= settings
        (saved / "checkpoint.json").write_text(json.dumps(content))
        (saved / "manifest.json").unlink()
        write_manifest(saved)
        return path

    return made


WTE = "transformer.wte.weight"
REFUSED = {
    "no model": (changed_content(model=None), 'it has no "model" and "model_args"'),
    "another GELU": (changed_content(config={"gelu": "relu"}), "does not say the sizes of a GPT-2"),
    "a layer too few": (changed_content(model_args={"n_layer": 3}), "the weight h.2"),
    "stride 0": (changed_content(model={WTE: torch.zeros(1).expand(300, 16)}), "is no plain tensor of numbers"),
    "cut off": (changed_bytes(lambda data: data[:-4]), "bytes, its header needs"),
    "NaN": (changed_bytes(lambda data: data[:2000] + struct.pack("<f", float("nan")) + data[2004:]), "NaN"),
    "a layer too many": (changed_files(lambda files: files.update({"h.9.ln_1.weight/fp32": 1})), "h.9"),
    "another size": (changed_files(put({"param": torch.zeros(48, 7)})), "c_attn.weight is [48, 7]"),
    "flat, other sizes": (changed_files(None, True, {"param_shapes": [{QKV: torch.Size([7, 7])}]}), "is flat; ZeRO 3"),
    "fewer bytes": (changed_record(embedding_size=32), "the model that checkpoint.json names needs"),
    "another vocabulary": (changed_record(vocab_size=200), "wte.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_checkpoint_of_a_gpt2_is_refused_in_one_sentence(tmp_path, ours, case):
    make, said = REFUSED[case]
    path = make(tmp_path, ours)
    with pytest.raises(InputError, match=r"^it") as caught:
        read_checkpoint(path, "it")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def changed_state(change) -> Callable[[Path, Checkpoint], Path]:
    def made(folder: Path, ours: Checkpoint) -> Path:
        content = torch.load(write(folder / "ckpt.pt", ours), weights_only=True)
        change(content["optimizer"])
        torch.save(content, folder / "ckpt.pt")
        return folder / "ckpt.pt"

    return made


def changed_rank(change: Callable[[Path], object], rank: int = 1) -> Callable[[Path, Checkpoint], Path]:
    """A model that two ranks trained, of which one's state is changed."""

    def made(folder: Path, ours: Checkpoint) -> Path:
        path = of_ranks(folder / LLMC, ours, 2)
        write_checkpoint(folder / "model.bin", ours)
        path.write_bytes((folder / "model.bin").read_bytes())  # its weights in fp32
        change(folder / f"state_00000005_{rank:05d}.bin")
        return path

    return made


def put_number(place: int, number: float, kind: str = "<i4") -> Callable[[Path], object]:
    """Write a number over the one at this place of a file, of four bytes each."""
    return lambda path: np.memmap(path, kind, "r+").__setitem__(place, number)


LEFT_OUT = {
    "a missing rank": (changed_rank(Path.unlink), "state_00000005_00001.bin cannot be read (No such file"),
    "no rank 0": (changed_rank(Path.unlink, 0), "state_00000005_00000.bin cannot be read"),
    "no state of llm.c": (
        changed_rank(put_number(0, 7)),
        "state_00000005_00001.bin is not a state of llm.c for rank 1 and step 5",
    ),
    "another rank": (changed_rank(put_number(3, 0)), "for rank 1 and step 5, by its header"),
    "another step of llm.c": (changed_rank(put_number(10, 6), 0), "for rank 0 and step 5, by its header"),
    "cut off": (changed_rank(lambda path: path.write_bytes(path.read_bytes()[:-4])), "what one of 2 ranks has"),
    "no order": (changed_rank(put_number(5, 1), 0), "what one of 2 ranks has"),
    "minus one rank": (changed_rank(put_number(2, -1), 0), "what one of -1 ranks has"),
    "NaN of llm.c": (changed_rank(put_number(300, np.nan, "<f4")), "exp_avg of"),
    "NaN in fp32": (changed_rank(put_number(-1, np.nan, "<f4")), "the fp32 of ln_f.bias"),
    "one group": (changed_state(lambda held: held["param_groups"].pop()), "the two that nanoGPT makes"),
    "no moment": (changed_state(lambda held: held["state"][0].clear()), "wte.weight is missing, in exp_avg"),
    "no state": (changed_state(lambda held: held["state"].pop(0)), "is not AdamW's of this model"),
    "odd steps": (changed_state(lambda held: held["state"][3].update(step=torch.tensor(4.0))), "number of steps"),
    "NaN": (changed_state(lambda held: held["state"][3]["exp_avg"].fill_(float("nan"))), "NaN"),
    "negative": (changed_state(lambda held: held["state"][3]["exp_avg_sq"].fill_(-1.0)), "negative"),
    "a word": (changed_state(lambda held: held["param_groups"][0].update(lr="high")), "no such numbers"),
    "no file": (changed_files(lambda files: files.pop(f"{QKV}/exp_avg")), "exp_avg.pt"),
    "another size": (changed_files(put({"param": torch.zeros(3, 3)}, "exp_avg")), "[3, 3]"),
    "another step": (changed_files(put(torch.tensor(6.0), "step")), "number of steps"),
    "an odd step": (changed_files(None, True, {"global_steps": 10**400}), "number of steps"),
    "another optimizer": (changed_record(optimizer="muon"), "is not AdamW"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_state_that_is_not_of_the_model_is_left_out_and_named(tmp_path, ours, case):
    make, said = LEFT_OUT[case]
    found = read_checkpoint(make(tmp_path, ours), "it")
    assert found.optimizer is None and said in found.notes[-1] and same(found, ours)


def test_layers_without_weights_are_refused_before_they_are_made(tmp_path, ours):
    folder = of_deepspeed(tmp_path / "universal", ours)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"n_layer": 2', '"n_layer": 900000'))
    never = mock.patch("testbed.checkpoint.universal.expected", side_effect=AssertionError("made"))
    with never, pytest.raises(InputError, match=r"^it: its weights have .* bytes, its config.json needs"):
        read_checkpoint(folder, "it")


def test_a_file_that_cannot_be_begun_with_is_refused_with_the_flag(tmp_path, ours, token_files):
    changed_bytes(lambda data: data[:-1])(tmp_path, ours)
    (tmp_path / "no.pt").write_bytes(b"PK")
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    (of_deepspeed(tmp_path / "universal", ours) / "config.json").unlink()
    for name, said in {
        "model.bin": " has ",
        "no.pt": " cannot be read as tensors",
        "none.pt": " cannot be read (No such file",
        "loop.pt": " cannot be read (Too many levels of symbolic links",
        "none": " does not exist (looked for in",
        "universal": " is a universal checkpoint of DeepSpeed, whose files do not say the heads",
    }.items():
        assert refusal(token_files, "--init_from", str(path := tmp_path / name)).startswith(f"--init_from {path}{said}")


@pytest.mark.parametrize("name", ["ckpt.pt", "folder"])
def test_a_full_disk_is_a_sentence(tmp_path, ours, monkeypatch, name):
    """PyTorch says how far it came, and not what the system said."""

    def torn(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr("torch.save", torn)
    with pytest.raises(Failure, match=rf"{name} could not be written: .*only a part of a file .*make room"):
        write(tmp_path / name, ours)
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_program_converts_and_refuses(tmp_path, ours):
    def convert(source: str, to: str, *more: str):
        return run_here(PROGRAM, "--from", tmp_path / source, "--to", tmp_path / to, *more)

    write(tmp_path / "ckpt.pt", ours)
    done = convert("ckpt.pt", "folder")
    assert done.returncode == 0 and "nanoGPT to folder" in done.stdout, done.stderr
    done = convert("folder", "universal", "--deepspeed")
    assert done.returncode == 0 and "are those of step 5" in done.stdout, done.stderr
    assert "weight decay of its own" in done.stdout and "names another" not in done.stdout
    assert (tmp_path / "latest_universal").read_text() == "universal"
    wte = torch.load(tmp_path / "universal" / "zero" / WTE / "fp32.pt")["param"]
    assert wte.shape == (300, 16) and wte.untyped_storage().nbytes() == wte.nbytes
    (tmp_path / "universal" / "zero" / "old").mkdir()
    assert convert("folder", "universal", "--deepspeed", "--overwrite").returncode == 0
    assert not (tmp_path / "universal" / "zero" / "old").exists()
    done = convert("folder", "second", "--deepspeed")
    assert done.returncode == 0 and "names another checkpoint: load this one with tag='second'" in done.stdout
    done = convert("folder", "model.bin", "--bf16")
    assert done.returncode == 0 and "only beside a model whose name says its step" in done.stdout
    done = convert("universal", LLMC)
    assert done.returncode == 0 and "takes the learning rate (-l) and the weight decay" in done.stdout, done.stderr
    (tmp_path / LLMC).unlink()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    for source, to, more, said in (
        ("folder", "model.bin", "", "exists; give --overwrite"),
        ("folder", "folder", "", "are both"),
        ("folder", LLMC, "", "state_00000005_00000.bin exists; give --overwrite"),
        ("folder", "model_00000007.bin", "", "says step 7, and --from"),
        ("folder", "no/a.pt", "", "there is no folder"),
        ("folder", "b.pt", "--bf16", "--bf16 is for a .bin"),
        ("none.pt", "c.pt", "", "--from"),
        ("folder", "a.pt", "--deepspeed", "leave .pt out"),
        ("second", "folder", "--deepspeed --overwrite", "holds no universal checkpoint, and --deepspeed replaces"),
        ("ckpt.pt", "universal", "--overwrite", "give --deepspeed, or name another"),
    ):
        done = convert(source, to, *more.split())
        assert done.returncode == 2 and said in done.stderr, (source, to, done.stderr)
    done = convert("folder", "/proc/x.bin")
    assert done.returncode == 1 and "error: --to /proc/x.bin could not be written (No such file" in done.stderr
    write(tmp_path / "ckpt.pt", dataclasses.replace(ours, optimizer=None))  # no state of what was there before stays
    assert convert("ckpt.pt", "folder", "--overwrite").returncode == 0
    assert not (tmp_path / "folder" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.launches
def test_deepspeed_goes_on_from_what_is_written(ranks, tmp_path, ours):
    """transformers' GPT-2 under each stage, loaded by DeepSpeed's own `load_universal`, against this program's model,
    uninterrupted."""
    pytest.importorskip("deepspeed")
    write(tmp_path / "universal", ours)
    batches = [batch(step).tolist() for step in range(5, 9)]
    task = {"folder": str(tmp_path / "universal"), "lr": 2e-3, "weight_decay": 0.2, "batches": batches}
    tasks = [{**task, "stage": stage} for stage in (1, 2, 3)]
    of_stages = ranks.run("support.universal_worker", tmp_path / "ranks", tasks, 2)
    uninterrupted = losses_of(*trained(), range(5, 9))
    for stage, losses in enumerate(of_stages, 1):
        assert losses == pytest.approx(uninterrupted, abs=1e-5), stage


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize("stage", ["2", "3"])
def test_what_the_installed_deepspeed_writes_holds_the_bits_of_the_run(ranks, tmp_path, token_files, stage):
    """A run of ZeRO, converted by DeepSpeed's own program, against the run's checkpoint in its other form."""
    pytest.importorskip("deepspeed")
    run, universal = tmp_path / "run", tmp_path / "universal"
    flags = f"--run_type optimized --zero_stage {stage} --global_batch_size 4 --max_train_steps 3 --sample_tokens 0"
    flags = [*TINY_RUN, *data_flags(token_files), *flags.split(), "--checkpoint_path", str(run)]
    done = ranks.run_program(flags, tmp_path / "start")
    assert done.returncode == 0, done.stderr
    saved = run / "checkpoints" / "step_000003"
    words = ["--input_folder", saved / "deepspeed", "--output_folder", universal, "--inject_missing_state"]
    words += ["--num_extract_workers", 1, "--num_merge_workers", 1]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, words)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    (universal / "config.json").write_bytes((run / "config.json").read_bytes())
    found, expected = read_checkpoint(universal, "it"), read_checkpoint(saved, "it")
    assert found.optimizer.step == 3 and found.tokenizer == "bpe:300" and same(found, expected)
