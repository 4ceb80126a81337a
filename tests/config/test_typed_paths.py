"""A path that leads nowhere, or to the wrong kind of thing: what is there, and where it was looked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.programs import REPOSITORY, write_token_files
from support.settings import checked_run

from testbed.analysis.comparison.files import arms_from
from testbed.analysis.runs.verify import verify
from testbed.analysis.scaling.report import report_on_directory
from testbed.audit.readers import read_reported
from testbed.data.corpus import find_corpus
from testbed.data.token_file import open_token_file
from testbed.inference.loading import shape_of_config
from testbed.io import cannot_become_a_folder, holds_text, missing, not_a_file, not_a_folder, read_json, write_text

README = REPOSITORY / "README.md"


@pytest.fixture
def here(tmp_path, monkeypatch, token_files) -> Path:
    """A folder that a command is typed in: a text, a folder, a broken link, a FIFO, nothing else."""
    (tmp_path / "README.md").write_bytes(README.read_bytes())
    (tmp_path / "runs").mkdir()
    (tmp_path / "lost").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(call, *arguments) -> str:
    with pytest.raises(ValueError) as refused:
        call(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_is_missing_names_the_folder_it_was_looked_for_in(here):
    assert missing(Path("x.bin")) == f"does not exist (looked for in {here})"
    assert missing(Path("a/x.bin")) == f"does not exist (looked for in {here}/a, which does not exist either)"
    assert missing(Path("README.md/x")) == f"does not exist (looked for in {here}/README.md, which is a file)"
    assert not_a_folder(Path("runs")) is None is not_a_file(Path("README.md"))
    assert not_a_file(Path("runs")) == "is a folder, not a file"
    assert not_a_folder(Path("README.md")) == "is a file, not a folder"


def test_a_new_folder_may_be_anywhere_but_at_or_below_a_file(here):
    assert cannot_become_a_folder(Path("a/b/c")) is None is cannot_become_a_folder(Path("runs"))
    assert cannot_become_a_folder(Path("README.md")) == "is a file, not a folder"
    assert cannot_become_a_folder(Path("README.md/a/b")) == "lies below README.md, which is a file"
    Path("folder").symlink_to("runs")
    assert cannot_become_a_folder(Path("lost")) == "is a link that leads nowhere, not a folder"
    assert cannot_become_a_folder(Path("lost/a")) == "lies below lost, which is a link that leads nowhere"
    assert cannot_become_a_folder(Path("folder")) is None is cannot_become_a_folder(Path("folder/a"))


LOOKED_FOR = "nowhere does not exist (looked for in HERE)"


@pytest.mark.parametrize(("words", "said"), [
    ("--train_data_path nowhere", f"{LOOKED_FOR}; make it with: python download_data.py"),
    ("--train_data_path data/words/train.bin", "data/words/train.bin does not exist (looked for in HERE/data/words, "
     "which does not exist either); make it with: python data/words/prepare.py, which nanoGPT has"),
    ("--train_data_path runs", "runs is a folder, not a file; name a .bin, for example runs/train_small.bin"),
    ("--train_data_path /dev/zero", "/dev/zero is a device, not a file; name a .bin$"),
    ("--val_data_path fifo", "fifo is a FIFO, not a file; name a .bin$"),
    ("--config nowhere", LOOKED_FOR),
    ("--config runs", "runs is a folder, not a file"),
    ("--checkpoint_path README.md", "README.md is a file, not a folder; name a folder"),
    ("--checkpoint_path lost", "lost is a link that leads nowhere, not a folder"),
    ("--init_from README.md", "README.md is a file, not a folder, and is neither scratch"),
    ("--init_from nowhere", f"{LOOKED_FOR}, and is neither scratch"),
    ("--resume nowhere", f"{LOOKED_FOR}; give auto"),
])  # fmt: skip
def test_the_trainer_says_what_is_there(here, token_files, words, said):
    assert f"{refusal(lambda: checked_run(token_files, *words.split()))}$".startswith(
        f"{words.split()[0]} {said.replace('HERE', str(here))}"
    )
    assert sorted(path.name for path in here.iterdir()) == ["README.md", "fifo", "lost", "runs"], "nothing was written"


@pytest.mark.parametrize(
    ("call", "name", "said"),
    [
        (verify, "nowhere", f"--dir {LOOKED_FOR}"),
        (lambda path: arms_from([path], [path]), "nowhere", f"A: {LOOKED_FOR}"),
        (lambda path: read_reported([path]), "nowhere", LOOKED_FOR),
        (report_on_directory, "nowhere", f"{LOOKED_FOR}; give the folder of a sweep"),
        (shape_of_config, "nowhere", f"{LOOKED_FOR}; give the folder of a run"),
        (shape_of_config, "runs", "runs has no model.safetensors; give the folder of a run"),
        (find_corpus, "nowhere", f"--input {LOOKED_FOR}; run python download_data.py first"),
        (read_json, "nowhere", LOOKED_FOR),
    ],
)
def test_other_programs_say_what_is_there(here, call, name, said):
    assert refusal(call, Path(name)).startswith(said.replace("HERE", str(here)))


def test_text_is_told_from_tokens(tmp_path):
    train, _ = write_token_files(tmp_path)
    assert not holds_text(train)
    (tmp_path / "cut.txt").write_bytes(("é" * 4096).encode()[: 4096 + 1])
    assert holds_text(tmp_path / "cut.txt") and holds_text(README)
    (tmp_path / "odd.txt").write_bytes(b"a" + "é".encode() * 4096)
    assert holds_text(tmp_path / "odd.txt"), "the letter at the end of what is looked at is cut in two"
    for number, start in enumerate((b"", b"\x1f\x8b\x08" + bytes(30), np.arange(3000, dtype="<u2").tobytes())):
        (tmp_path / f"{number}.bin").write_bytes(start)
        assert not holds_text(tmp_path / f"{number}.bin")


def test_a_sidecar_is_no_token_file(tmp_path):
    train, _ = write_token_files(tmp_path)
    assert "is not a token file: it holds text" in refusal(open_token_file, train.with_suffix(".json"))
    assert json.loads(train.with_suffix(".json").read_text())["num_tokens"] == len(open_token_file(train).tokens)


def test_a_fifo_or_a_device_is_not_made_a_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="device or a FIFO"):
        write_text(tmp_path / "fifo", "text")
    assert (tmp_path / "fifo").is_fifo()
