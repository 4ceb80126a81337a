"""A corpus that is there: what is whole is kept, what is damaged is refused, and how the program says so."""

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.corpus_cases import ALL, download, write_jsonl
from support.data_fixtures import ROOT, offline_environment, run_program

from testbed.data import corpus
from testbed.data.corpus import CorpusError, Limits, existing_corpus, find_corpus, write_corpus
from testbed.data.sources import find_source


def test_an_interrupted_download_goes_on_and_ends_with_the_same_bytes(tmp_path, monkeypatch):
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(3):
        texts = [f"document {number} {i} " + "x" * 50 for i in range(1500)]
        pq.write_table(pa.table({"text": texts}), folder / f"{number}.parquet", row_group_size=400)
    write_jsonl(folder / "last.jsonl", ["end"] * 700)
    whole, _ = download(find_source(str(folder)), tmp_path / "whole")
    monkeypatch.setattr(corpus, "_CHECKPOINT_BYTES", 20_000)

    class ConnectionLost(Exception):
        pass

    seen, resumed_at = 0, []
    for stop_after in (1000, 1700, 3000):
        counted = []

        def progress(_num_bytes, num_documents, counted=counted, stop_after=stop_after):
            counted.append(num_documents)
            if sum(counted) == stop_after:
                raise ConnectionLost

        source = find_source(str(folder))
        source.open()
        with pytest.raises(ConnectionLost):
            write_corpus(source, ALL, tmp_path / "parts", progress)
        resumed_at.append(counted[0])
        assert not (tmp_path / "parts" / "documents.jsonl").exists()
        assert not (tmp_path / "parts" / "manifest.json").exists()
        seen = max(seen, sum(counted))
    assert resumed_at[0] == 1 and resumed_at[1] > 500 and resumed_at[2] > 1200  # it did not start over
    parts, _ = download(find_source(str(folder)), tmp_path / "parts")
    assert parts["sha256"] == whole["sha256"] and parts["documents"] == 5200
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["documents.jsonl", "manifest.json"]


def test_an_interrupted_long_text_starts_again_because_lines_were_held_back(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_CHECKPOINT_BYTES", 1)
    (tmp_path / "play.txt").write_text("".join(f"Line {i}.\n\n" for i in range(30_000)))
    whole, _ = download(find_source(str(tmp_path / "play.txt")), tmp_path / "whole")
    source = find_source(str(tmp_path / "play.txt"))
    source.open()
    with pytest.raises(ZeroDivisionError):
        write_corpus(source, ALL, tmp_path / "parts", counting_down(20))
    assert not (tmp_path / "parts").exists()
    assert download(find_source(str(tmp_path / "play.txt")), tmp_path / "parts")[0]["sha256"] == whole["sha256"]


def test_another_request_does_not_go_on_from_the_partial_one(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_CHECKPOINT_BYTES", 1)
    path = write_jsonl(tmp_path / "a.jsonl", [str(i) for i in range(1000)])
    source = find_source(str(path))
    source.open()
    with pytest.raises(ZeroDivisionError):
        write_corpus(source, Limits(None, 900), tmp_path / "o", counting_down(600))
    assert (tmp_path / "o" / "partial.json").exists()
    assert download(find_source(str(path)), tmp_path / "o", Limits(None, 3))[1] == ["0", "1", "2"]


def counting_down(documents):
    left = iter(range(documents, -1, -1))
    return lambda *_: 1 / next(left)


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


@pytest.mark.parametrize(
    ("arguments", "limits", "command"),
    [
        (("stdlib",), Limits(100, 5), "--dataset stdlib --max_bytes 100 --max_docs 5 --overwrite"),
        (("wikitext",), ALL, "--dataset wikitext --overwrite"),
        (("wikitext", "wikitext-2-raw-v1"), ALL, "--dataset wikitext --config wikitext-2-raw-v1 --overwrite"),
        (("a/b", None, "test"), ALL, "--dataset a/b --split test --overwrite"),
        (("shakespeare",), ALL, "--dataset shakespeare --overwrite"),
    ],
)
def test_the_way_out_names_the_corpus_that_is_damaged(tmp_path, monkeypatch, arguments, limits, command):
    """`python download_data.py --overwrite` alone would make another one, the default."""
    monkeypatch.chdir(tmp_path)
    source = find_source(*arguments)
    manifest = {"name": source.name, **corpus._identity(source, limits), "documents": 1, "bytes": 1, "sha256": "0"}
    folder = tmp_path / "dataset" / source.name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": corpus.FORMAT_VERSION}))
    with pytest.raises(CorpusError) as caught:
        find_corpus(None)
    assert str(caught.value).endswith(f"make it again with: python download_data.py {command}")


def test_the_way_out_names_a_local_file_and_its_folder(tmp_path):
    path = write_jsonl(tmp_path / "two words.jsonl", ["one"])
    download(find_source(str(path)), tmp_path / "corpora" / "two-words")
    (tmp_path / "corpora" / "two-words" / "documents.jsonl").unlink()
    with pytest.raises(CorpusError) as caught:
        find_corpus(tmp_path / "corpora" / "two-words")
    assert f"--dataset '{path}' --output_dir {tmp_path}/corpora --overwrite" in str(caught.value)


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
def test_offline_is_one_sentence_soon_and_leaves_nothing(tmp_path, dataset):
    start_s = time.perf_counter()
    result = run_program("download_data.py", "--dataset", dataset, cwd=tmp_path)
    assert time.perf_counter() - start_s < 30  # 2 to 4 s; the library alone retries for 24 s
    assert result.returncode == 1
    assert "cannot be reached" in result.stderr and "--dataset stdlib" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "dataset").exists()


@pytest.mark.launches
def test_the_program_skips_what_is_whole_and_refuses_other_limits(tmp_path):
    first = run_program("download_data.py", "--max_docs", 5, cwd=tmp_path)
    manifest = tmp_path / "dataset" / "stdlib" / "manifest.json"
    assert first.returncode == 0 and "5 documents" in first.stdout
    assert "100%" not in first.stderr  # a limit ended it: there is more
    before = manifest.read_bytes()
    assert "is whole already" in run_program("download_data.py", "--max_docs", 5, cwd=tmp_path).stdout
    refused = run_program("download_data.py", "--max_docs", 6, cwd=tmp_path)
    assert refused.returncode == 2 and "--overwrite" in refused.stderr and manifest.read_bytes() == before
    assert run_program("download_data.py", "--max_docs", 6, "--overwrite", cwd=tmp_path).returncode == 0
    assert json.loads(manifest.read_text())["documents"] == 6
    flip_a_byte(manifest.with_name("documents.jsonl"))
    assert run_program("download_data.py", "--max_docs", 6, cwd=tmp_path).returncode == 1


@pytest.mark.launches
def test_the_bar_is_full_when_the_source_has_ended(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x" * 1000])
    done = run_program("download_data.py", "--dataset", "a.jsonl", cwd=tmp_path)
    assert done.returncode == 0 and "100%" in done.stderr and "all there is" in done.stdout


@pytest.mark.launches
def test_a_download_without_text_ends_with_2_and_leaves_no_folder(tmp_path):
    (tmp_path / "a.jsonl").touch()
    done = run_program("download_data.py", "--dataset", "a.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and "holds no text" in done.stderr
    assert not (tmp_path / "dataset").exists()


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
    partial = tmp_path / "dataset" / "long" / "documents.jsonl.partial"
    deadline_s = time.perf_counter() + 60
    while not (partial.exists() and partial.stat().st_size > 100_000) and time.perf_counter() < deadline_s:
        time.sleep(0.005)
    assert partial.exists() and process.poll() is None
    process.send_signal(ending)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + ending and "interrupted" in errors and "Traceback" not in errors
    assert not (tmp_path / "dataset" / "long").exists()


@pytest.mark.launches
@pytest.mark.parametrize("program", ["download_data.py", "preprocess_small.py"])
def test_help_is_quick(tmp_path, program):
    times_s = []
    for _ in range(3):  # other work on the machine slows one or the other
        start_s = time.perf_counter()
        assert "--" in run_program(program, "--help", cwd=tmp_path).stdout
        times_s.append(time.perf_counter() - start_s)
    assert min(times_s) < 1.5


@pytest.mark.launches
def test_the_modules_can_be_imported_without_the_heavy_libraries():
    heavy = ("torch", "datasets", "tiktoken", "tokenizers", "requests")
    code = "import sys, testbed.data.corpus, testbed.data.preprocess; "
    code += f"print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
