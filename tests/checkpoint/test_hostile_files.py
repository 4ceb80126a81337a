"""Read files that an attacker made: nothing in them runs, nothing outside their folder is written, and each is refused
in one sentence, in time. support/hostile_files.py makes them. Damaged files are drawn by test_fuzz_start.py.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as safetensors_of
from support import hostile_files
from support.attack import Drill
from support.checkpoint_files_cases import look_at_checkpoint, write_checkpoint
from support.fuzz import BAD_PLACES, bounded_memory, remove
from support.programs import TINY_RUN, data_flags
from torch.distributed.checkpoint.api import CheckpointException

from testbed.analysis.profiles.trace_operators import read_operators
from testbed.checkpoint import load
from testbed.checkpoint.manifest import write_manifest
from testbed.checkpoint.weights import read_initial_weights
from testbed.distributed.launch import Launch
from testbed.distributed.process_group import root_cause
from testbed.errors import InputError
from testbed.model.gpt2 import GPT2, to_transformers
from testbed.model.shape import ModelShape
from testbed.model.tensor_archive import load_tensors
from testbed.profiling.trace import TraceUnreadable, read_trace
from testbed.strategies import deepspeed_state, state_files
from testbed.strategies.description import read_description as read_tensors

LONGEST_S = 10.0
SHAPE = ModelShape(num_layers=1, num_heads=2, embedding_size=8, vocab_size=300, max_position_embeddings=64)


@pytest.fixture
def drill(tmp_path) -> Drill:
    return Drill(tmp_path)


def state(fill: float = 0.0) -> dict:
    tensors = {"model": {"w": torch.full((2, 3), fill)}, "optimizer": {"state.w.step": torch.tensor(fill)}}
    return {**tensors, "scaler": {"scale": torch.tensor(fill, dtype=torch.float64)}}


def read_state(folder: Path) -> None:
    state_files.load(state(), folder, None)


def read_random_state(folder: Path) -> None:
    before = torch.get_rng_state()
    try:
        load._restore_random_state(folder, Launch(0, 0, 1, 1), "cpu")
    finally:
        torch.set_rng_state(before)


def read_deepspeeds(folder: Path) -> None:
    deepspeed_state._load_tensors(str(folder / "optim_states.pt"))


NEVER_READ = {
    *("two directories", "two directories, with a record of 64 bits", "bytes after the archive"),
    *("a bomb", "a bomb of lzma", "no archive", "the old form", "a program of TorchScript"),
    *("a planted pickle without an archive", "a planted pickle in the old form", "a planted pickle in the archive"),
}
STATE_ERRORS = (CheckpointException, ValueError, OSError)


def test_a_checkpoint_of_an_earlier_version_is_refused_and_not_read(drill):
    """PyTorch's own writer describes the files in a pickle, as checkpoints did before tensors.json."""
    dcp.save(state(0.1), checkpoint_id=drill.given, no_dist=True)
    for content in ((drill.given / ".metadata").read_bytes(), pickle.dumps(hostile_files.Planted(drill.canary))):
        (drill.given / ".metadata").write_bytes(content)
        with pytest.raises(InputError, match=r"saved by an earlier version, .* --init_from"):
            read_state(drill.given)
    assert not drill.canary.exists()


def test_nothing_is_pickled_but_tensors(tmp_path):
    state_files.save(state(0.1), tmp_path, None)
    assert {path.suffix or path.name for path in tmp_path.iterdir()} == {".json", ".distcp"}
    assert json.loads((tmp_path / "tensors.json").read_text())["tensors"]["model.w"]["size"] == [2, 3]


@pytest.mark.parametrize("name", ["tensors", "random numbers", "DeepSpeed's own"])
def test_no_archive_runs_or_fills_the_memory(drill, name):
    state_files.save({"model": {"w": torch.ones(2, 3)}}, drill.given, None)
    described = json.loads((drill.given / "tensors.json").read_text())
    good, file, read = {
        "tensors": (torch.ones(2, 3), "__0_0.distcp",
                    lambda folder: state_files.load({"model": {"w": torch.zeros(2, 3)}}, folder, None)),
        "random numbers": ({"cpu": torch.get_rng_state()}, "random_state_rank0.pt", read_random_state),
        "DeepSpeed's own": ({"w": torch.ones(2, 3)}, "optim_states.pt", read_deepspeeds),
    }[name]  # fmt: skip
    path = drill.given / file

    def put(content: bytes) -> None:
        path.write_bytes(content)
        described["tensors"]["model.w"]["pieces"][0] |= {"start": 0, "length": len(content)}
        (drill.given / "tensors.json").write_text(json.dumps(described))

    put(hostile_files.saved(good))
    read(drill.given)
    with bounded_memory():
        for what, body in hostile_files.tricks(drill.canary):
            put(hostile_files.archive(hostile_files.whole(body, protocol=2)))
            drill.case(what, lambda: read(drill.given), STATE_ERRORS)
        for what, content in hostile_files.archives(good, drill.canary):
            put(content)
            # of a few numbers nothing is saved by packing, so that such an archive is as good as another
            is_packed = (what, name) == ("compressed members", "random numbers")
            drill.case(what, lambda: read(drill.given), STATE_ERRORS, is_packed or what in NEVER_READ)
        for what, put_there in BAD_PLACES.items():
            remove(path)
            put_there(path)
            drill.case(what, lambda: read(drill.given), STATE_ERRORS, must_refuse=True)
    drill.check(least_refused=70)


def test_a_pickle_that_ends_anywhere_is_one_sentence():
    """In an archive that is whole, so that no checksum tells."""
    whole = zipfile.ZipFile(io.BytesIO(hostile_files.saved({"w": torch.ones(2, 3), "n": [1, 2.5, "x"]})))
    pickled = whole.read("archive/data.pkl")
    for end in range(len(pickled)):
        with pytest.raises(InputError, match=r"^the file cannot be read as tensors"):
            load_tensors(io.BytesIO(hostile_files.archive(pickled[:end])), "the file")


class ByName:
    """What Python 3.11.0 to 3.11.3 save in place of a member of an enum."""

    def __init__(self, enum: type, name: str) -> None:
        self.enum, self.name = enum, name

    def __reduce__(self):
        return getattr, (self.enum, self.name)


def test_a_stage_that_an_early_python_saved_by_its_name_is_its_number(tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    path = tmp_path / "optim_states.pt"
    torch.save({"zero_stage": ByName(ZeroStageEnum, "gradients")}, path)
    assert deepspeed_state._load_tensors(str(path)) == {"zero_stage": 2}
    for enum, name in ((LossScaler, "__init__"), (ZeroStageEnum, "__init__"), (ZeroStageEnum, "mro")):
        torch.save({"zero_stage": ByName(enum, name)}, path)
        with pytest.raises(InputError, match="cannot be read as tensors"):
            deepspeed_state._load_tensors(str(path))


def test_what_deepspeed_reads_past_its_loader_runs_nothing_either(drill, monkeypatch):
    """Universal checkpoints are read by torch.load with weights_only=False, in DeepSpeed's own words."""
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    deepspeed_state.load_only_tensors(SimpleNamespace(checkpoint_engine=SimpleNamespace(load=None)))
    (drill.given / "fp32.pt").write_bytes(hostile_files.saved(hostile_files.Planted(drill.canary)))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(drill.given / "fp32.pt", weights_only=False)
    assert not drill.canary.exists()


def test_what_a_state_holds_instead_of_finite_numbers_is_named(tmp_path):
    for value in (float("nan"), float("inf")):
        broken = torch.zeros(2, 3)
        broken[1, 2] = value
        state_files.save({"model": {"w": broken}}, tmp_path / str(value), None)
        with pytest.raises(CheckpointException) as caught:
            state_files.load({"model": {"w": torch.zeros(2, 3)}}, tmp_path / str(value), None)
        assert "model.w in " in root_cause(caught.value) and "__0_0.distcp holds numbers that are NaN" in root_cause(
            caught.value
        )


def write_weights(folder: Path) -> None:
    """Put a GPT-2 of one block there, whose position embedding is not a number."""
    tensors = dict(GPT2(SHAPE).state_dict())
    tensors["wpe.weight"] = torch.full((64, 8), float("nan"))
    (folder / "model.safetensors").write_bytes(safetensors_of(to_transformers(tensors, SHAPE)))
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 300, "n_positions": 64}
    (folder / "config.json").write_text(json.dumps(config))


def test_weights_that_are_no_numbers_are_named(tmp_path):
    write_weights(tmp_path)
    with pytest.raises(ValueError, match=r"model.safetensors cannot be used: transformer.wpe.weight holds numbers"):
        read_initial_weights(str(tmp_path), SHAPE)


@pytest.mark.parametrize("name", ["../outside/.profile", "/etc/passwd", "a/../../x", "..", "."])
def test_a_manifest_leads_nowhere_else(drill, name):
    directory = write_checkpoint(drill.given)
    files = json.loads((directory / "manifest.json").read_text())["files"]
    (directory / "manifest.json").write_text(json.dumps({"files": {**files, name: {"bytes": 11, "sha256": ""}}}))
    drill.case(name, lambda: look_at_checkpoint(drill.given), (ValueError,), must_refuse=True)
    drill.check(least_refused=1)


@pytest.mark.parametrize("name", ["__0_0.distcp", "checkpoint.json", "unlisted", "manifest.json"])
def test_a_link_out_of_a_checkpoint_is_refused_however_well_it_is_hashed(drill, name):
    """The stranger has written the manifest too."""
    directory = write_checkpoint(drill.given)
    path = directory / name
    there = drill.outside / "secret"
    there.write_bytes(path.read_bytes() if path.exists() else b"x")
    path.unlink(missing_ok=True)
    path.symlink_to(there)
    assert "is a link that leads out of the checkpoint" in said_of(drill.given)
    path.unlink()
    path.symlink_to("inside")
    (directory / "inside").write_bytes(there.read_bytes())
    if name != "manifest.json":
        look_at_checkpoint(drill.given)


def said_of(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        look_at_checkpoint(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    "file", ["../outside/__0_0.distcp", "/etc/passwd", "__0_0.distcp/../x", "a\0b", "__0_0.distcp\n"]
)
def test_a_description_leads_nowhere_else(drill, file):
    state_files.save({"model": {"w": torch.ones(2, 3)}}, drill.given, None)
    shutil.copyfile(drill.given / "__0_0.distcp", drill.outside / "__0_0.distcp")
    described = json.loads((drill.given / "tensors.json").read_text())
    described["tensors"]["model.w"]["pieces"][0]["file"] = file
    (drill.given / "tensors.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointException) as caught:
        state_files.load({"model": {"w": torch.zeros(2, 3)}}, drill.given, None)
    assert "does not describe a state: tensors.model.w.pieces[0].file is " in root_cause(caught.value)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([{"offsets": [1, 0]}], r"of \[2, 3\] at \[1, 0\] does not lie in \[2, 3\]"),
        ([{"offsets": [0], "sizes": [6]}], r"of \[6\] at \[0\] does not lie in \[2, 3\]"),
        ([{"sizes": [1, 3]}], "have 3 elements, but its size is"),
        ([{}, {}], r"two pieces of 'model.w' lie at \[0, 0\]"),
        ([{"length": 1 << 20}], "has 1,048,576 bytes for"),
        ([{"start": -1}], "start is -1, it must be"),
        ([{"length": True}], "length is True, it must be"),
        ([{"more": 1}], "has no field 'more'"),
        ([], "pieces is \\[\\], it must be"),
    ],
)
def test_pieces_that_do_not_make_up_their_tensor_are_refused(drill, pieces, said):
    state_files.save({"model": {"w": torch.ones(2, 3)}}, drill.given, None)
    described = json.loads((drill.given / "tensors.json").read_text())
    (piece,) = described["tensors"]["model.w"]["pieces"]
    described["tensors"]["model.w"]["pieces"] = [piece | changes for changes in pieces]
    (drill.given / "tensors.json").write_text(json.dumps(described))
    with pytest.raises(InputError, match=f"tensors.json does not describe a state: .*{said}"):
        read_tensors(drill.given)


@pytest.mark.parametrize("name", ["__0_0.distcp", "tensors.json"])
def test_a_state_is_not_read_through_a_link_out_of_its_folder(drill, name):
    state_files.save({"model": {"w": torch.ones(2, 3)}}, drill.given, None)
    (drill.given / name).rename(drill.outside / name)
    (drill.given / name).symlink_to(drill.outside / name)
    with pytest.raises(CheckpointException) as caught:
        state_files.load({"model": {"w": torch.zeros(2, 3)}}, drill.given, None)
    assert "is a link that leads out of the checkpoint" in root_cause(caught.value)


def test_a_packed_trace_that_fills_the_memory_is_refused(drill, monkeypatch):
    monkeypatch.setattr("testbed.io.LARGEST_TEXT", 1 << 20)
    path = drill.given / "rank0.pt.trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (1 << 21) + b"]}"))
    for read in (read_operators, read_trace):
        with pytest.raises((ValueError, TraceUnreadable), match="it holds more than 1,048,576 bytes"):
            read(path)


@pytest.mark.launches
@pytest.mark.slow
def test_the_program_runs_nothing_of_a_resealed_checkpoint(ranks, token_files, tmp_path, monkeypatch):
    """An attacker can write the manifest too. A pickled description, as earlier checkpoints had, gives the class of all
    paths another text, so that every later write would go into a file of the user's home. And weights that are no
    numbers."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    flags = [*TINY_RUN, *data_flags(token_files), "--max_train_steps", "4", "--checkpoint_path"]
    saved = ranks.run_program([*flags, str(tmp_path / "attacked"), "--stop_at_step", "2"], tmp_path / "saves")
    assert saved.returncode == 0, saved.stderr
    shutil.copytree(tmp_path / "attacked", tmp_path / "numbers")

    def attack(directory: Path) -> None:
        (directory / "tensors.json").unlink()
        state = b"N}(" + hostile_files.text("_str") + hostile_files.text(str(home / ".profile")) + b"u\x86"
        body = hostile_files.stack_global("pathlib", "PosixPath") + state + b"b"
        (directory / ".metadata").write_bytes(hostile_files.whole(body))

    def no_numbers(directory: Path) -> None:
        described = read_tensors(directory).state_dict_metadata
        tensors = {name: torch.zeros(one.size, dtype=one.properties.dtype) for name, one in described.items()}
        state_files.load(tensors, directory, None)
        tensors["model.ln_f.bias"][3] = float("nan")
        state_files.save(tensors, directory, None)

    for name, change, said in (
        ("attacked", attack, "was saved by an earlier version"),
        ("numbers", no_numbers, "model.ln_f.bias in "),
    ):
        directory = tmp_path / name / "checkpoints" / "step_000002"
        change(directory)
        (directory / "manifest.json").unlink()
        write_manifest(directory)
        done = ranks.run_program([*flags, str(tmp_path / name), "--resume"], tmp_path / f"resumes {name}")
        sentence = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and said in sentence, done.stderr
        assert "cannot be read (rank 0: " in sentence and "Traceback" not in done.stderr
    assert not [path for path in home.rglob("*") if path.is_file()]


def _call(function: bytes, *arguments: bytes) -> bytes:
    return b"c" + function + b"\n" + b"(" + b"".join(arguments) + b"tR"


def _text(text: str) -> bytes:
    return pickle.dumps(text, protocol=2)[2:-1].partition(b"q\0")[0]


BIG = 300 * 2**20
BOMBS = {
    "bytearray": b"\x80\x02" + _call(b"builtins\nbytearray", b"J" + BIG.to_bytes(4, "little")) + b".",
    "bytearray of Python 2": b"\x80\x02" + _call(b"__builtin__\nbytearray", b"J" + BIG.to_bytes(4, "little")) + b".",
    "doubled 25 times": b"\x80\x02"
    + _call(b"_codecs\nencode", _text("a" * 8), _text("latin1"))
    + b"q\1"
    + (b"0" + _call(b"_codecs\nencode", b"h\1", _text("HEX-codec")) + b"q\1") * 25
    + b".",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_makes_no_bytes_that_its_archive_does_not_have(name):
    archive = hostile_files.archive(BOMBS[name])
    assert len(archive) < 10_000
    with pytest.raises(InputError, match="which no tensor needs"):
        load_tensors(io.BytesIO(archive), "the file")


def test_bytes_that_torch_writes_are_read():
    file = io.BytesIO()
    torch.save({"bytes": bytes(range(256)), "tensor": torch.ones(2)}, file)
    assert load_tensors(file, "the file")["bytes"] == bytes(range(256))
