"""Files of a stranger, in every reader: nothing of them is run, nothing outside their folder is written, one sentence
each, and in time. `hostile_files` makes them; test_fuzz_files.py breaks good ones by chance."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import os
import pickle
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from enum import EnumType
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as safetensors_of
from support import hostile_files
from support.fuzz import bounded_memory, check_sentence, in_time
from support.metrics_examples import example_metrics, save
from support.nsight_cases import chrome_trace
from support.nsys_examples import stats_text, write_sqlite
from support.programs import REPOSITORY, TINY_RUN, data_flags, python_command, run_program
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from testbed.analysis.profiles.nccl_lines import read_log
from testbed.analysis.profiles.nsight import read_stats
from testbed.analysis.profiles.nsight_sqlite import read_export
from testbed.analysis.profiles.trace_operators import read_operators
from testbed.analysis.runs.verify import as_tsv, verify
from testbed.checkpoint import load
from testbed.checkpoint.find import latest_valid
from testbed.checkpoint.folders import read_description
from testbed.checkpoint.manifest import write_manifest
from testbed.checkpoint.weights import read_initial_weights
from testbed.config.deepspeed_file import read_deepspeed_file
from testbed.config.initial_shape import shape_of_folder
from testbed.data.corpus import CorpusError, find_corpus, read_documents
from testbed.data.pairs import read_pairs
from testbed.data.sidecar import read_sidecar
from testbed.data.tokenizer import load_bpe, train_bpe
from testbed.distributed import watchdog
from testbed.distributed.failures import root_cause
from testbed.distributed.launch import Launch
from testbed.metrics.file import read_metrics
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.profiling.trace import TraceUnreadable, read_trace
from testbed.strategies import state_files, zero_state
from testbed.strategies.description import read_description as read_tensors
from testbed.strategies.old_description import plain_form_of

AT_LEAST = 5000
LONGEST_S = 10.0
SHAPE = ModelShape(num_layers=1, num_heads=2, embedding_size=8, vocab_size=300, max_position_embeddings=64)
CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 300, "n_positions": 64}
DESCRIPTION = {
    "step": 20, "elapsed_s": 1.5, "useful_wall_s": 1.5, "world_size": 2, "run_type": "ddp", "mesh": {"data": 2},
    "settings": {"seed": 1, "run_type": "ddp"},
}  # fmt: skip
# what a program tells the interpreter's auditors when it starts another, changes the disk, or calls somebody
FORBIDDEN = {
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn", "subprocess.Popen", "pty.spawn"),
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("shutil.copyfile", "shutil.copytree", "shutil.move", "shutil.rmtree", "socket.connect", "socket.bind"),
    *("sqlite3.enable_load_extension", "sqlite3.load_extension", "ctypes.dlopen", "os.putenv", "webbrowser.open"),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
ran: Counter = Counter()
seen: list[str] | None = None  # None: nobody looks


def audit(event: str, arguments: tuple) -> None:
    if seen is None:
        return
    if event in FORBIDDEN or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
        seen.append(f"{event} {arguments!r:.200}")


sys.addaudithook(audit)


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    global seen
    seen = found = []
    try:
        yield found
    finally:
        seen = None


def look_of(*folders: Path) -> dict[str, tuple]:
    """Every name below, with what the system says of it; no file is opened, for some have no end."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            state = path.lstat()
            found[str(path)] = state.st_mode, state.st_size if not path.is_dir() else 0, state.st_mtime_ns
    return found


class Drill:
    """Cases of one reader. All faults are told together."""

    def __init__(self, tmp_path: Path) -> None:
        self.given, self.outside = tmp_path / "given", tmp_path / "outside"
        self.given.mkdir()
        self.outside.mkdir()
        self.canary = self.outside / "canary"
        (self.outside / ".profile").write_text("echo hello\n")
        self.faults: list[str] = []
        self.outcomes: Counter = Counter()

    def case(self, what: str, read: Callable[[], object], errors: tuple[type, ...], must_refuse: bool = False) -> None:
        before = look_of(self.given, self.outside)
        outcome, fault = "read", None
        with watched() as events:
            try:
                with in_time(LONGEST_S):
                    read()
            except errors as error:
                outcome = "refused"
                try:
                    check_sentence(root_cause(error) if isinstance(error, CheckpointException) else str(error))
                except (AssertionError, UnicodeError) as wrong:
                    fault = f"no sentence: {wrong}"
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a panic of a Rust library is no Exception
                outcome, fault = "FAULT", f"{type(error).__name__}: {error!s:.300}"
        if events:
            fault = f"it did {events}"
        elif look_of(self.given, self.outside) != before:
            fault = "files were changed"
        elif changed := [name for name in CLASSES if hasattr(CLASSES[name], hostile_files.PLANTED)]:
            fault = f"attributes were set on {changed}"
        elif must_refuse and outcome == "read":
            fault = "it was not refused"
        self.outcomes[outcome] += 1
        if fault is not None:
            self.faults.append(f"{what}: {fault}")

    def check(self, name: str, at_least: int, least_refused: int = 1) -> None:
        ran[name] += self.outcomes.total()
        told = "\n".join(f"  {fault[:600]}" for fault in self.faults[:20])
        assert not self.faults, f"{len(self.faults)} of {self.outcomes.total()}, {dict(self.outcomes)}\n{told}"
        assert self.outcomes.total() >= at_least and self.outcomes["refused"] >= least_refused, self.outcomes


def _found(module: str, name: str) -> object:
    return getattr(importlib.import_module(module), name, None)


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory):
    """Whatever the readers import once is imported before anybody looks."""
    global CLASSES
    hostile_files.registered()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        CLASSES = {f"{module}.{name}": _found(module, name) for module, name in hostile_files.CLASSES}
    CLASSES |= {str(member): member for kept in list(CLASSES.values()) if isinstance(kept, EnumType) for member in kept}
    weights = tmp_path_factory.mktemp("weights")
    write_weights(weights)
    load_weights(weights)
    yield
    for name, kept in CLASSES.items():
        assert not hasattr(kept, hostile_files.PLANTED), name


CLASSES: dict[str, object] = {}


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
        load._restore_random_state(folder, Launch(0, 0, 1, 1))
    finally:
        torch.set_rng_state(before)


def read_deepspeeds(folder: Path) -> None:
    zero_state._load_tensors(str(folder / "optim_states.pt"))


NEVER_READ = {
    *("a bomb", "a bomb of lzma", "no archive", "the old form", "a program of TorchScript"),
    *("a planted pickle without an archive", "a planted pickle in the old form", "a planted pickle in the archive"),
}
STATE_ERRORS = (CheckpointException, ValueError, OSError)


def test_what_earlier_checkpoints_have_is_read_bit_for_bit(tmp_path):
    """PyTorch's own writer and its pickle, which checkpoints had before the description was JSON."""
    whole = state(0.1)
    dcp.save(whole, checkpoint_id=tmp_path, no_dist=True)
    assert (tmp_path / ".metadata").is_file() and not (tmp_path / "tensors.json").exists()
    found = state()
    state_files.load(found, tmp_path, None)
    for section, tensors in whole.items():
        for name, tensor in tensors.items():
            assert torch.equal(found[section][name], tensor), name


def test_nothing_is_pickled_but_tensors(tmp_path):
    state_files.save(state(0.1), tmp_path, None)
    assert {path.suffix or path.name for path in tmp_path.iterdir()} == {".json", ".distcp"}
    assert json.loads((tmp_path / "tensors.json").read_text())["tensors"]["model.w"]["size"] == [2, 3]


def test_no_pickle_runs_in_the_description_of_an_earlier_checkpoint(drill):
    dcp.save(state(0.1), checkpoint_id=drill.given, no_dist=True)
    description = drill.given / ".metadata"
    good = description.read_bytes()
    harmful = {what for what, _ in [*hostile_files.hostile_calls(drill.canary), *hostile_files.builds()]}
    with bounded_memory():
        for what, body in hostile_files.pickles(drill.canary):
            for where, content in (("before", hostile_files.before(body, good)), ("alone", hostile_files.whole(body))):
                description.write_bytes(content)
                drill.case(f"{what}, {where}", lambda: read_state(drill.given), STATE_ERRORS, what in harmful)
        for part in range(1, 20):
            description.write_bytes(good[: len(good) * part // 20])
            drill.case(f"cut at {part}", lambda: read_state(drill.given), STATE_ERRORS, True)
    drill.check("description of an earlier checkpoint", 500)


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
    calls = {what for what, _ in hostile_files.hostile_calls(drill.canary)}
    with bounded_memory():
        for what, body in hostile_files.pickles(drill.canary):
            put(hostile_files.archive(hostile_files.whole(body, protocol=2)))
            drill.case(what, lambda: read(drill.given), STATE_ERRORS, what in calls)
        for what, content in hostile_files.archives(good, drill.canary):
            put(content)
            # of a few numbers nothing is saved by packing, so that such an archive is as good as another
            is_packed = (what, name) == ("compressed members", "random numbers")
            drill.case(what, lambda: read(drill.given), STATE_ERRORS, is_packed or what in NEVER_READ)
    drill.check(f"archive of {name}", 300)


def test_what_deepspeed_reads_past_its_loader_runs_nothing_either(drill, monkeypatch):
    """Universal checkpoints are read by torch.load with weights_only=False, in DeepSpeed's own words."""
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    zero_state.load_only_tensors(SimpleNamespace(checkpoint_engine=SimpleNamespace(load=None)))
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


def test_weights_that_are_no_numbers_are_named(tmp_path):
    write_weights(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in GPT2(SHAPE).state_dict().items()}
    tensors["transformer.wpe.weight"] = torch.full((64, 8), float("nan"))
    (tmp_path / "model.safetensors").write_bytes(safetensors_of(tensors))
    with pytest.raises(
        ValueError, match=r"model.safetensors cannot be used: transformer.wpe.weight holds numbers that"
    ):
        read_initial_weights(str(tmp_path), SHAPE)


def write_weights(folder: Path) -> bytes:
    from testbed.model.gpt2 import to_transformers

    content = safetensors_of(to_transformers(GPT2(SHAPE).state_dict(), SHAPE), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return content


def load_weights(folder: Path) -> None:
    GPT2(SHAPE).load_state_dict(read_initial_weights(str(folder), SHAPE))


def write_checkpoint(folder: Path) -> Path:
    directory = folder / "checkpoints" / "step_000020"
    directory.mkdir(parents=True)
    (directory / "checkpoint.json").write_text(json.dumps(DESCRIPTION))
    (directory / "__0_0.distcp").write_bytes(b"tensors" * 10)
    write_manifest(directory)
    return directory


def look_at_checkpoint(folder: Path) -> None:
    _, skipped = latest_valid(folder)
    if skipped:
        raise ValueError(next(iter(skipped.values())))
    read_description(folder / "checkpoints" / "step_000020")


def write_documents(drill: Drill, kind: str) -> tuple[Path, object, Callable[[], object]]:
    """A file of JSON, what it holds, and how it is read."""
    given = drill.given
    if kind == "description of a state":
        state_files.save({"model": {"w": torch.ones(2, 3)}}, given, None)
        path = given / "tensors.json"
        read = lambda: state_files.load({"model": {"w": torch.zeros(2, 3)}}, given, None)  # noqa: E731
    elif kind in ("manifest.json", "checkpoint.json"):
        path, read = write_checkpoint(given) / kind, lambda: look_at_checkpoint(given)
        if kind == "checkpoint.json":
            read = lambda: read_description(path.parent)  # noqa: E731
    elif kind == "training_metrics.json":
        save(given, example_metrics(num_steps=3))
        path, read = given / kind, lambda: read_metrics(path)
    elif kind == "config.json":
        write_weights(given)
        path, read = given / kind, lambda: shape_of_folder(given)
    elif kind == "DeepSpeed's configuration":
        path, read = given / "ds.json", lambda: read_deepspeed_file(path)
        path.write_text((REPOSITORY / "src" / "deepspeed_config.json").read_text())
    elif kind == "trace":
        path = given / "profiler_logs" / "rank0.pt.trace.json"
        chrome_trace(given)
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "traceEvents": content["traceEvents"][:12]}))
        read = lambda: (read_operators(path), read_trace(path))  # noqa: E731
    return path, json.loads(path.read_text()), read


@pytest.mark.parametrize("kind", [
    "description of a state", "manifest.json", "checkpoint.json", "training_metrics.json", "config.json",
    "DeepSpeed's configuration", "trace",
])  # fmt: skip
def test_no_document_breaks_its_reader(drill, kind):
    path, good, read = write_documents(drill, kind)
    with bounded_memory():
        for what, content in hostile_files.documents(good):
            path.write_bytes(content)
            drill.case(what, read, (*STATE_ERRORS, TraceUnreadable))
    drill.check(kind, 60)


@pytest.mark.parametrize("name", ["../outside/.profile", "/etc/passwd", "a/../../x", "..", "."])
def test_a_manifest_leads_nowhere_else(drill, name):
    directory = write_checkpoint(drill.given)
    files = json.loads((directory / "manifest.json").read_text())["files"]
    (directory / "manifest.json").write_text(json.dumps({"files": {**files, name: {"bytes": 11, "sha256": ""}}}))
    drill.case(name, lambda: look_at_checkpoint(drill.given), (ValueError,), must_refuse=True)
    drill.check("manifest that leads out", 1)


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
    assert "which is no file of a state" in root_cause(caught.value)
    ran["description that leads out"] += 1


@pytest.mark.parametrize("name", ["__0_0.distcp", "tensors.json"])
def test_a_state_is_not_read_through_a_link_out_of_its_folder(drill, name):
    state_files.save({"model": {"w": torch.ones(2, 3)}}, drill.given, None)
    (drill.given / name).rename(drill.outside / name)
    (drill.given / name).symlink_to(drill.outside / name)
    with pytest.raises(CheckpointException) as caught:
        state_files.load({"model": {"w": torch.zeros(2, 3)}}, drill.given, None)
    assert "is a link that leads out of the checkpoint" in root_cause(caught.value)


def test_no_header_of_safetensors_breaks_its_reader(drill):
    good = write_weights(drill.given)
    with bounded_memory():
        for what, content in hostile_files.safetensors(good):
            (drill.given / "model.safetensors").write_bytes(content)
            drill.case(what, lambda: load_weights(drill.given), (ValueError, RuntimeError))
    drill.check("safetensors", 70)


def test_no_tokenizer_breaks_its_reader(drill):
    path = drill.given / "bpe_300.json"
    train_bpe(iter(["any text at all, " + " ".join(f"word{number}" for number in range(60))]), 300, path)
    good = json.loads(path.read_text())
    with bounded_memory():
        for what, content in hostile_files.tokenizer_files(good):
            path.write_bytes(content)
            drill.case(what, lambda: load_bpe(path).encode("any text"), (ValueError,))
    drill.check("tokenizer", 60)


def test_no_database_runs_or_fills_the_memory(drill):
    path = drill.given / "nsys_17_node0.sqlite"
    with bounded_memory():
        for what, content in hostile_files.databases(drill.outside):
            path.write_bytes(content)
            must_refuse = what in ("a column that computes", "a column of endless text", "a virtual table")
            drill.case(what, lambda: read_export(path), (ValueError,), must_refuse)
    drill.check("database", 30)


def test_a_packed_trace_that_fills_the_memory_is_refused(drill, monkeypatch):
    monkeypatch.setattr("testbed.io.LARGEST_TEXT", 1 << 20)
    path = drill.given / "rank0.pt.trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (1 << 21) + b"]}"))
    for read in (read_operators, read_trace):
        with pytest.raises((ValueError, TraceUnreadable), match="it holds more than 1,048,576 bytes"):
            read(path)


def use_bpe(folder: Path) -> None:
    load_bpe(folder / "bpe_300.json")


PLACES = {
    "manifest.json": ("checkpoints/step_000020/manifest.json", write_checkpoint, look_at_checkpoint),
    "checkpoint.json": ("checkpoints/step_000020/checkpoint.json", write_checkpoint, look_at_checkpoint),
    "a checkpoint's tensors": ("checkpoints/step_000020/__0_0.distcp", write_checkpoint, look_at_checkpoint),
    "a file beside them": ("checkpoints/step_000020/more", write_checkpoint, look_at_checkpoint),
    "a description alone": ("checkpoint.json", lambda folder: None, read_description),
    "tensors.json": ("tensors.json", lambda folder: state_files.save(state(), folder, None), read_state),
    ".metadata": (".metadata", lambda folder: dcp.save(state(), checkpoint_id=folder, no_dist=True), read_state),
    "tensors": ("__0_0.distcp", lambda folder: state_files.save(state(), folder, None), read_state),
    "random numbers": ("random_state_rank0.pt", lambda folder: None, read_random_state),
    "DeepSpeed's own": ("optim_states.pt", lambda folder: None, read_deepspeeds),
    "training_metrics.json": ("training_metrics.json", lambda folder: None,
                              lambda folder: read_metrics(folder / "training_metrics.json")),
    "progress of a rank": (".rank0.progress", lambda folder: None, lambda folder: watchdog.steps_done(folder)),
    "model.safetensors": ("model.safetensors", write_weights, load_weights),
    "config.json": ("config.json", write_weights, shape_of_folder),
    "tokenizer": ("bpe_300.json", lambda folder: None, use_bpe),
    "sidecar": ("train.json", lambda folder: None,
                lambda folder: read_sidecar(folder / "train.json", "--train_data_path")),
    "DeepSpeed's configuration": ("ds.json", lambda folder: None,
                                  lambda folder: read_deepspeed_file(folder / "ds.json")),
    "pairs": ("pairs.jsonl", lambda folder: None, lambda folder: list(read_pairs(folder / "pairs.jsonl"))),
    "documents": ("mine.jsonl", lambda folder: None,
                  lambda folder: list(read_documents(find_corpus(folder / "mine.jsonl").documents))),
    "trace": ("rank0.json", lambda folder: None, lambda folder: read_trace(folder / "rank0.json")),
    "packed trace": ("rank0.json.gz", lambda folder: None, lambda folder: read_operators(folder / "rank0.json.gz")),
    "text of nsys": ("nsys_stats_node0.txt", lambda folder: (folder / "nsys_stats_node0.txt").write_text(stats_text()),
                     lambda folder: read_stats(folder / "nsys_stats_node0.txt")),
    "database of nsys": ("nsys_17_node0.sqlite", lambda folder: write_sqlite(folder / "nsys_17_node0.sqlite"),
                         lambda folder: read_export(folder / "nsys_17_node0.sqlite")),
    "log of NCCL": ("nccl.log", lambda folder: None, lambda folder: read_log(folder / "nccl.log")),
    "RUN_COMPLETE.txt": ("run/RUN_COMPLETE.txt", lambda folder: save(folder / "run", example_metrics(num_steps=3)),
                         lambda folder: as_tsv(verify(folder))),
}  # fmt: skip
SHOWN_IN_THE_REPORT = ("progress of a rank", "RUN_COMPLETE.txt")  # what is wrong there is a finding, no refusal


@pytest.mark.parametrize("name", PLACES)
def test_what_is_no_file_is_not_waited_for(drill, name):
    subject, prepare, read = PLACES[name]
    errors = (*STATE_ERRORS, CorpusError, TraceUnreadable)
    with bounded_memory():
        for place, put in hostile_files.places(drill.outside).items():
            shutil.rmtree(drill.given)
            drill.given.mkdir()
            prepare(drill.given)
            path = drill.given / subject
            path.unlink(missing_ok=True)
            put(path)
            is_read = name != "a file beside them" or place not in ("a folder", "a link to itself", "a giant of holes")
            if place == "a giant of holes" and name in ("documents", "pairs", "log of NCCL"):
                continue  # read in lines, as far as they go
            drill.case(place, lambda: read(drill.given), errors, is_read and name not in SHOWN_IN_THE_REPORT)
    drill.check(f"in the place of {name}", 7, least_refused=0 if name in SHOWN_IN_THE_REPORT else 7)


def resealed(folder: Path, change: Callable[[Path], None]) -> None:
    """A run's one checkpoint, changed by somebody who writes the manifest anew."""
    (directory,) = (folder / "checkpoints").glob("step_*")
    change(directory)
    (directory / "manifest.json").unlink()
    write_manifest(directory)


@pytest.mark.launches
@pytest.mark.slow
def test_the_program_runs_nothing_of_a_resealed_checkpoint(token_files, tmp_path, monkeypatch):
    """The attack on 53ea84c: the description of an earlier checkpoint gives the class of all paths another text, so
    that every later write goes into a file of the user's home. And a checkpoint that nobody could go on from."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".profile").write_text("echo hello\n")
    monkeypatch.setenv("HOME", str(home))
    flags = [*TINY_RUN, *data_flags(token_files), "--max_train_steps", "4", "--checkpoint_path"]
    program = [*python_command(), *flags]
    saved = run_program([*program, str(tmp_path / "attacked"), "--stop_at_step", "2"])
    assert saved.returncode == 0, saved.stderr
    shutil.copytree(tmp_path / "attacked", tmp_path / "numbers")

    def attack(directory: Path) -> None:
        pickled = pickle.dumps(read_tensors(directory))
        (directory / "tensors.json").unlink()
        state = b"N}(" + hostile_files.text("_str") + hostile_files.text(str(home / ".profile")) + b"u\x86"
        body = hostile_files.stack_global("pathlib", "PosixPath") + state + b"b"
        (directory / ".metadata").write_bytes(hostile_files.before(body, pickled))

    def no_numbers(directory: Path) -> None:
        described = read_tensors(directory).state_dict_metadata
        tensors = {name: torch.zeros(one.size, dtype=one.properties.dtype) for name, one in described.items()}
        state_files.load(tensors, directory, None)
        tensors["model.ln_f.bias"][3] = float("nan")
        state_files.save(tensors, directory, None)

    for name, change, said in (
        ("attacked", attack, "it sets attributes of pathlib.PosixPath"),
        ("numbers", no_numbers, "model.ln_f.bias in "),
    ):
        resealed(tmp_path / name, change)
        done = run_program([*program, str(tmp_path / name), "--resume"])
        sentence = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and said in sentence and "cannot be read (rank 0: ValueError" in sentence, (
            done.stderr
        )
        assert "Traceback" not in done.stderr
    assert {path.name: path.read_text() for path in home.iterdir() if path.is_file()} == {".profile": "echo hello\n"}


def test_a_size_that_every_piece_means_is_not_copied_for_each():
    """A long torch.Size stands in the pickle once; copied for each of many pieces it would fill the memory."""
    size = torch.Size([0] * 20_000)
    places = {MetadataIndex(f"model.{n}", size): _StorageInfo("__0_0.distcp", 0, 1) for n in range(50)}
    bomb = pickle.dumps(Metadata({}, storage_data=places))

    with pytest.raises(ValueError, match=r"a torch.Size of 20,000 numbers"):
        plain_form_of(bomb, ".metadata")


def test_so_many_hostile_files_were_read(capsys):
    with capsys.disabled():
        print("".join(f"\n  {number:>5} {name}" for name, number in ran.items()) + f"\n  {ran.total():>5} cases")
    if len(ran) < 40:
        pytest.skip("not counted: only some of the drill ran")
    assert ran.total() >= AT_LEAST
