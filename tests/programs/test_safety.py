"""What a stranger's file, folder or name must not do, and what of the environment must not land in a file."""

from __future__ import annotations

import ast
import base64
import json
import pickle
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.browser import BROWSER, Page
from support.corpus_cases import Documents, download
from support.evil import EVIL, complete_again, evil_metrics
from support.fuzz import content_of
from support.metrics_examples import example_metrics, save
from support.programs import REPOSITORY
from support.report_cases import load, run_metrics

from testbed import run_files, run_lock
from testbed.analysis.charts.training import write_charts
from testbed.analysis.report.build import write_html, write_markdown
from testbed.analysis.runs.verify import verify
from testbed.data.sources import find_source
from testbed.data.token_file import open_token_file, sidecar_path
from testbed.metrics import run_directory
from testbed.sweep.request import folder_name

SOURCES = [*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "scripts").rglob("*.py"), *REPOSITORY.glob("*.py")]


# What runs or unpacks what it reads. `pickle` and its like may not even be imported, but for the two files below.
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}


MAY_PICKLE = {
    "model/tensor_archive.py": {"pickle.UnpicklingError"},  # what PyTorch raises
    "experiments/peers/nanogpt.py": {"pickle.dumps"},  # writes what nanoGPT wants to read
}


FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "tempfile.mktemp", "shutil.unpack_archive"),
    *("pandas.read_pickle", "numpy.lib.format.read_array", "torch.package.PackageImporter", "torch.jit.load"),
    *("runpy.run_path", "runpy.run_module", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"),
}


class Calls(ast.NodeVisitor):
    """What of a source file runs what it reads, in words; names are followed through its imports."""

    def __init__(self, source: str, name: str = "") -> None:
        self.found: list[str] = []
        self.aliases: dict[str, str] = {}
        self.may_pickle = MAY_PICKLE.get(name, set())
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.aliases |= {each.asname or each.name: each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.aliases |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        self.visit(tree)

    def full_name(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        return f"{self.full_name(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"

    def say(self, node: ast.AST, what: str) -> None:
        self.found.append(f"line {node.lineno}: {what}")

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            if each.name.split(".")[0] in PICKLES and not self.may_pickle:
                self.say(node, f"imports {each.name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] in PICKLES:
            self.say(node, f"imports from {node.module}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.full_name(node)
        if name.split(".")[0] in PICKLES and name not in self.may_pickle:
            self.say(node, name)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        if "pickle.Unpickler" in map(self.full_name, node.bases) and "find_class" not in names:
            self.say(node, "an Unpickler that knows every class")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.full_name(node.func)
        given = {each.arg: each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)}
        if name in FORBIDDEN_CALLS:
            self.say(node, name)
        if name == "pickle.Unpickler":
            self.say(node, "an Unpickler that knows every class")
        if name == "torch.load" and given.get("weights_only") is not True:
            self.say(node, "torch.load without weights_only=True")
        if "allow_pickle" in {each.arg for each in node.keywords} and given.get("allow_pickle") is not False:
            self.say(node, "allow_pickle")
        if "shell" in {each.arg for each in node.keywords} and given.get("shell") is not False:
            self.say(node, "shell")
        if "trust_remote_code" in given and given["trust_remote_code"] is not False:
            self.say(node, "trust_remote_code")
        if name.endswith((".extractall", ".extract")) and given.get("filter") != "data":
            self.say(node, f"{name} without filter='data'")
        self.generic_visit(node)


PLANTED = [
    "import pickle",
    "from cPickle import loads",
    "import torch\ntorch.load('x')",
    "import torch\ntorch.load('x', weights_only=False)",
    "from torch import load as get\nget('x', weights_only=no)",
    "import numpy as np\nnp.load('x', allow_pickle=True)",
    "import yaml as y\ny.load('x', y.Loader)",
    "eval('1')",
    "exec(open('x').read())",
    "import subprocess as s\ns.run('ls', shell=True)",
    "import os\nos.system('ls')",
    "import tarfile\ntarfile.open('x').extractall('y')",
    "import zipfile\nzipfile.ZipFile('x').extractall('y')",
    "from shutil import unpack_archive\nunpack_archive('x')",
    "import datasets\ndatasets.load_dataset('x', trust_remote_code=True)",
]


HARMLESS = [
    "import torch\ntorch.load('x', weights_only=True)\nmodel.eval()\nload('x')",
    "import subprocess\nsubprocess.run(['ls'], shell=False)",
    "import tarfile\ntarfile.open('x').extractall('y', filter='data')",
    "import re\nre.compile('x')\nimport numpy as np\nnp.load('x')\nimport yaml\nyaml.safe_load('x')",
]


@pytest.mark.parametrize("source", PLANTED)
def test_what_runs_what_it_reads_is_noticed(source):
    assert Calls(source).found


@pytest.mark.parametrize("source", HARMLESS)
def test_what_does_not_is_not(source):
    assert Calls(source).found == []


def test_nothing_that_is_read_is_run_or_unpacked():
    """Also: no archive is unpacked at all, so none can write outside its folder."""
    assert len(SOURCES) > 100
    found = {}
    for path in SOURCES:
        name = path.relative_to(REPOSITORY).as_posix().removeprefix("src/testbed/")
        if calls := Calls(path.read_text(encoding="utf-8"), name).found:
            found[name] = calls
    assert found == {}


class Marker:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_in_a_folder_of_weights_is_not_opened(tmp_path, name):
    from testbed.checkpoint.weights import read_initial_weights
    from testbed.model.shape import ModelShape

    mark = tmp_path / "it_ran"
    planted = pickle.dumps(Marker(mark))
    (tmp_path / name).write_bytes(planted)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be used"):
        read_initial_weights(str(tmp_path), ModelShape(1, 1, 8))
    assert not mark.exists()
    pickle.loads(planted)
    assert mark.exists(), "the pickle is not the trap that it should be"


def test_a_report_of_evil_runs_does_nothing(tmp_path):
    """Names, flags, reasons, tokenizers, devices and folders are text in the page and in its pictures."""
    for number in (1, 2):
        folder = f'a"><script>{number}'
        save(tmp_path / "runs" / folder, evil_metrics(number))
        save(tmp_path / "runs" / f"{folder}_whole", evil_metrics(number) | complete_again())
    cells = [
        {"name": EVIL, "variant": EVIL, "run_type": EVIL, "ranks": 2, "batch_size": 8, "folder": "nowhere/run_1",
         "command": [EVIL], "status": status, "reason": EVIL}
        for status in ("failed", "not applicable")
    ]  # fmt: skip
    plan = {"schema": 1, "protocol": "strong", "target_val_loss": None, "cells": cells}
    (tmp_path / "runs" / "sweep.json").write_text(json.dumps(plan))
    path = tmp_path / "report.html"
    write_html(load(tmp_path / "runs"), path)
    found = Page(path)
    assert "script" not in found.tags and EVIL in found.text
    assert [address for address in found.addresses if not address.startswith("data:")] == []
    assert all(link.startswith(("#", "./", "runs/")) for link in found.links)
    pictures = [base64.b64decode(each.partition(",")[2]) for each in found.addresses if "svg+xml;base64," in each]
    assert pictures and not any(b"<script" in picture or b"<img" in picture for picture in pictures)
    if BROWSER:
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom",
             f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        assert "<script" not in done.stdout and "<title>it ran" not in done.stdout and "evil.example" in done.stdout


def test_names_in_a_file_do_not_choose_where_pictures_go(tmp_path):
    for number, name in enumerate(("../../evil", "/tmp/evil")):
        metrics = run_metrics("ddp", 2, number)
        metrics["training_config"] |= {"run_type": name, "model_name": name, "dataset_name": name}
        metrics["settings"]["run_type"] = name
        save(tmp_path / "runs" / str(number), metrics)
    out = tmp_path / "a" / "b" / "out"
    out.mkdir(parents=True)
    before = content_of(tmp_path)
    runs = load(tmp_path / "runs")
    write_html(runs, out / "report.html")
    write_markdown(runs, out / "report.md")
    write_charts(runs, out / "charts")
    made = content_of(tmp_path).keys() - before.keys()
    assert len(made) > 3 and all(name.startswith("a/b/out/") for name in made)


def test_a_plan_that_points_outside_is_only_looked_at(tmp_path):
    """sweep.json names folders; none of them is written to, wherever it lies."""
    cell = {
        "name": "x",
        "variant": "ddp",
        "ranks": 2,
        "batch_size": 8,
        "folder": "../../elsewhere",
        "status": "complete",
    }
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    save(tmp_path / "elsewhere", example_metrics(num_steps=3, warmup_steps=1))
    (folder / "sweep.json").write_text(json.dumps({"schema": 1, "protocol": "strong", "cells": [cell]}))
    before = content_of(tmp_path)
    verify(folder)
    assert content_of(tmp_path) == before


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=20), st.sampled_from(["..", ".", "/", "../x", "a/b", "\\", "C:\\x", "\0"])),
                min_size=3, max_size=3))  # fmt: skip
def test_a_name_of_a_dataset_is_one_folder(words):
    """What a dataset, its configuration and its split are called becomes one folder's name, below --output_dir."""
    dataset, config, split = words
    try:
        name = find_source(f"owner/{dataset}".replace("\0", ""), config or None, split or None).name
    except ValueError:
        return
    assert name not in ("", ".", "..") and Path(name).name == name
    assert Path(folder_name(f"ddp:{config}")).name == folder_name(f"ddp:{config}") != ".."


def test_a_folder_of_files_is_one_folder_too(tmp_path):
    for name in ("..x", "a b", "-", "..."):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.txt").write_text("text")
        found = find_source(str(tmp_path / name)).name
        assert found not in ("", ".", "..") and Path(found).name == found


@pytest.mark.parametrize("name", ["../bpe.json", "/etc/passwd", "..", ".", "a/b.json", "a\x00b"])
def test_a_sidecar_names_a_tokenizer_in_its_own_folder(tmp_path, token_files, name):
    path = tmp_path / "train.bin"
    path.write_bytes(token_files[0].read_bytes())
    sidecar = json.loads(sidecar_path(token_files[0]).read_text())
    sidecar_path(path).write_text(json.dumps({**sidecar, "tokenizer_file": name}))
    with pytest.raises(ValueError, match="a file name without folders"):
        open_token_file(path)


@pytest.mark.parametrize("name", ["documents.jsonl", "manifest.json"])
def test_a_link_in_the_folder_of_a_corpus_is_not_written_through(tmp_path, name):
    """Whoever gave away the folder could have put a link there."""
    victim = tmp_path / "victim"
    victim.write_text("precious\n" * 100)
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    download(Documents(), folder)
    assert victim.read_text() == "precious\n" * 100
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_overwriting_a_run_takes_links_away_and_not_what_they_lead_to(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    run = tmp_path / "run"
    run.mkdir()
    (run / run_files.CHECKPOINTS).symlink_to(outside)
    (run / run_files.METRICS).symlink_to(outside / "precious")
    run_directory.claim(run, overwrite=True)
    assert (outside / "precious").read_text() == "x"
    assert list(run.iterdir()) == []


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / run_lock.LOCK).symlink_to(victim)
    with pytest.raises(ValueError, match="cannot be written"):
        run_lock.keep_others_out(tmp_path / "run")
    assert victim.read_text() == "precious"
