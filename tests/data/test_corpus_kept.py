"""A corpus that is there: what is whole is kept, what is damaged is refused, and how the program says so."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.corpus_cases import ALL, COMMAND, download, write_jsonl
from support.data_fixtures import ROOT, offline_environment, run_program

from testbed.data.corpus import CorpusError, Limits, existing_corpus, find_corpus, write_corpus
from testbed.data.sources import find_source
from testbed.data.streams import SourceError


def test_an_interrupted_download_keeps_what_was_there_and_leaves_nothing_else(tmp_path):
    source = find_source(str(write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])))

    def end(num_bytes):
        raise KeyboardInterrupt

    source.open()
    with pytest.raises(KeyboardInterrupt):
        write_corpus(source, ALL, tmp_path / "new", COMMAND, end)
    assert not (tmp_path / "new").exists()
    download(source, tmp_path / "there")
    before = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}
    with pytest.raises(KeyboardInterrupt):
        write_corpus(source, ALL, tmp_path / "there", COMMAND, end)
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == before


def test_what_is_whole_is_kept_and_anything_else_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    directory = tmp_path / "o"
    assert existing_corpus(find_source(str(path)), ALL, directory) is None
    manifest, _ = download(find_source(str(path)), directory)
    assert existing_corpus(find_source(str(path)), ALL, directory) == manifest
    with pytest.raises(ValueError, match=r"limits .*'max_docs': 1.* --overwrite"):
        existing_corpus(find_source(str(path)), Limits(None, 1), directory)
    with pytest.raises(ValueError, match=r"text_field 'text', now text_field 'n' is asked for"):
        existing_corpus(find_source(str(path), text_field="n"), ALL, directory)
    os.utime(path, (1, 1))
    with pytest.raises(ValueError, match=r"revision 'files .* --overwrite"):
        existing_corpus(find_source(str(path)), ALL, directory)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "documents.jsonl").unlink(), "is missing though its manifest is there"),
        (lambda folder: (folder / "documents.jsonl").write_text("x"), "has 1 bytes, its manifest says"),
        (lambda folder: flip_a_byte(folder / "documents.jsonl"), "does not have the sha256"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "is not a manifest of format 1"),
        (lambda folder: (folder / "manifest.json").unlink(), r"has no manifest.json; pass --overwrite"),
    ],
)
def test_a_damaged_corpus_is_refused_and_overwrite_repairs_it(tmp_path, damage, sentence):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    folder = tmp_path / "dataset" / "a"
    download(find_source(str(path)), folder)
    damage(folder)
    with pytest.raises(CorpusError, match=sentence) as caught:
        existing_corpus(find_source(str(path)), ALL, folder)
    assert "--overwrite" in str(caught.value) and "\n" not in str(caught.value)
    if (folder / "manifest.json").exists():
        with pytest.raises(CorpusError, match=sentence):
            find_corpus(folder)
    assert download(find_source(str(path)), folder)[1] == ["one", "two"]
    assert find_corpus(folder).manifest["documents"] == 2


def test_a_small_corpus_is_not_shown_as_a_part_of_the_limit(download_here, tmp_path):
    """The limit is 100 MB, unless --max_bytes is given."""
    path = tmp_path / "own.txt"
    path.write_text("a line of text\n" * 1000)
    done = download_here("--dataset", str(path))
    assert done.returncode == 0 and "15.0kB" in done.stderr and "100M" not in done.stderr, done.stderr


def test_the_way_out_is_the_command_that_made_the_corpus(download_here, tmp_path):
    """`python download_data.py --overwrite` alone would make another one, the default."""
    write_jsonl(tmp_path / "two words.jsonl", ["one"])
    flags = ("--dataset", "two words.jsonl", "--output_dir", "corpora", "--max_docs", 5)
    assert download_here(*flags).returncode == 0
    (tmp_path / "corpora" / "two-words" / "documents.jsonl").unlink()
    with pytest.raises(CorpusError) as caught:
        find_corpus(tmp_path / "corpora" / "two-words")
    assert "download_data.py --dataset 'two words.jsonl' --output_dir corpora --max_docs 5 --overwrite" in str(
        caught.value
    )


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)


def test_the_newest_manifest_is_the_default(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one"])
    with pytest.raises(ValueError, match=r"run python download_data.py first"):
        find_corpus(None, tmp_path / "dataset")
    for age_s, name in ((10, "old"), (0, "new"), (20, "older")):
        download(find_source(str(path)), tmp_path / "dataset" / name)
        moment = time.time() - age_s
        os.utime(tmp_path / "dataset" / name / "manifest.json", (moment, moment))
    assert find_corpus(None, tmp_path / "dataset").documents == tmp_path / "dataset" / "new" / "documents.jsonl"


@pytest.mark.launches
@pytest.mark.parametrize("dataset", ["Salesforce/wikitext", "openwebtext", "oscar", "shakespeare"])
def test_offline_is_one_sentence_and_leaves_nothing(tmp_path, dataset):
    result = run_program("download_data.py", "--dataset", dataset, cwd=tmp_path)
    assert result.returncode == 1
    assert "cannot be reached" in result.stderr and "--dataset stdlib" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "dataset").exists()


def test_the_program_skips_what_is_whole_and_refuses_other_limits(download_here, tmp_path):
    first = download_here("--max_docs", 5)
    manifest = tmp_path / "dataset" / "stdlib" / "manifest.json"
    assert first.returncode == 0 and "5 documents" in first.stdout
    assert "100%" not in first.stderr  # a limit ended it: there is more
    before = manifest.read_bytes()
    assert "is whole already" in download_here("--max_docs", 5).stdout
    refused = download_here("--max_docs", 6)
    assert refused.returncode == 2 and "--overwrite" in refused.stderr and manifest.read_bytes() == before
    assert download_here("--max_docs", 6, "--overwrite").returncode == 0
    assert json.loads(manifest.read_text())["documents"] == 6
    flip_a_byte(manifest.with_name("documents.jsonl"))
    assert download_here("--max_docs", 6).returncode == 1


@pytest.mark.launches
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_under_a_final_name(tmp_path, ending):
    (tmp_path / "long.txt").write_text("A line of text.\n\n" * 2_000_000)
    process = subprocess.Popen(
        [sys.executable, ROOT / "download_data.py", "--dataset", "long.txt"],
        cwd=tmp_path,
        env=offline_environment(tmp_path),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    while not any(path.stat().st_size > 100_000 for path in tmp_path.glob("dataset/long/.documents.jsonl.*")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(ending)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + ending and "interrupted" in errors and "Traceback" not in errors
    assert not (tmp_path / "dataset" / "long").exists()


def test_without_a_network_the_library_is_not_asked(monkeypatch):
    """It retries for 24 s before it gives up."""
    import datasets

    monkeypatch.setattr("testbed.data.hub.status_of", lambda url: None)
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(SourceError, match="without a network use --dataset stdlib"):
        find_source("a/b").open()
