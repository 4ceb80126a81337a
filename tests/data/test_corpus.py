"""Corpora: which documents a source gives, in what order, and what a file must hold."""

import functools
import hashlib
import http.server
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.corpus_cases import download, write_jsonl
from support.data_fixtures import ROOT

from testbed.data.corpus import CorpusError, Limits, parse_size, read_documents
from testbed.data.hub import HubDataset, TinyShakespeare
from testbed.data.sources import StandardLibrary, find_source
from testbed.data.streams import SourceError, cut_lines, find_text_field, join_articles


def test_the_standard_library_is_megabytes_of_different_modules_in_a_fixed_order(tmp_path):
    manifest, documents = download(StandardLibrary(), tmp_path / "a", Limits(3_000_000, None))
    again, _ = download(StandardLibrary(), tmp_path / "b", Limits(3_000_000, None))
    assert manifest["sha256"] == again["sha256"]
    assert manifest["stopped_by"] == "max_bytes" and 2_500_000 < manifest["text_bytes"] <= 3_000_000
    assert len(set(documents)) >= 0.95 * len(documents) > 50
    assert sum(text.count("def test_") for text in documents) < 20  # the library's own tests are left out
    assert sum("import" in text for text in documents) > 0.8 * len(documents)


def test_the_manifest_counts_what_is_there(tmp_path):
    manifest, documents = download(
        find_source(str(write_jsonl(tmp_path / "a.jsonl", ["é", " \n", "b"]))), tmp_path / "o"
    )
    data = (tmp_path / "o" / "documents.jsonl").read_bytes()
    assert documents == ["é", "b"]
    assert (manifest["documents"], manifest["text_bytes"], manifest["bytes"]) == (2, 3, len(data))
    assert manifest["sha256"] == hashlib.sha256(data).hexdigest()
    assert manifest["text_field"] == "text" and manifest["stopped_by"] is None
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["documents.jsonl", "manifest.json"]


def test_a_folder_of_mixed_files_is_read_in_the_order_of_names(tmp_path):
    folder = tmp_path / "mixed [1]*"  # a name that is also a pattern
    folder.mkdir()
    (folder / "a.txt").write_text("first\n\nstill first\n")
    write_jsonl(folder / "b.jsonl", ["second", "third"])
    pq.write_table(pa.table({"content": ["fourth", None], "n": [1, 2]}), folder / "c.parquet")
    (folder / "d.txt").write_bytes(b"caf\xe9\r\n")
    (folder / "e.csv").write_text("no")
    source = find_source(str(folder))
    assert source.notes == ["1 files that are none of .txt, .jsonl, .parquet are left out"]
    manifest, documents = download(source, tmp_path / "o")
    assert documents == ["first\n\nstill first\n", "second", "third", "fourth", "caf\ufffd\n"]
    assert manifest["text_field"] is None  # text in one file, content in another


def test_empty_files_are_skipped_and_nothing_else_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no text"):
        find_source(str(tmp_path / "empty.jsonl"))
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("a.jsonl", "b.txt", "d.parquet"):
        (folder / name).touch()
    with pytest.raises(ValueError, match="holds no text"):
        find_source(str(folder))
    write_jsonl(folder / "c.jsonl", ["one"])
    source = find_source(str(folder))
    assert (download(source, tmp_path / "o")[1], source.notes) == (["one"], [])


def test_a_long_text_is_cut_into_documents_that_together_are_the_text(tmp_path):
    text = "".join(f"Line {i} of a play.\n" + ("\n" * (i % 3) if i % 7 == 0 else "") for i in range(40_000))
    (tmp_path / "play.txt").write_text(text)
    _, documents = download(find_source(str(tmp_path / "play.txt")), tmp_path / "o")
    assert "".join(documents) == text
    assert all(8 * 1024 <= len(document) < 10 * 1024 for document in documents[:-1])
    assert all(document.endswith("\n\n") and not document.startswith("\n") for document in documents[:-1])


def test_text_without_blank_lines_is_cut_too():
    documents = [text for (text,) in cut_lines(iter([["x" * 99 + "\n"] * 6000]))]
    assert "".join(documents) == ("x" * 99 + "\n") * 6000
    assert max(map(len, documents)) <= 256 * 1024 + 100 and len(documents) == 3


@pytest.mark.parametrize("between", ["\n\n", "\n"])
@pytest.mark.parametrize("paragraphs", [10, 400])
def test_a_short_text_alone_is_cut_so_that_it_can_be_split(tmp_path, between, paragraphs):
    text = "".join(f"Paragraph {i} of a text.{between}" for i in range(paragraphs))
    (tmp_path / "mine.txt").write_text(text)
    _, documents = download(find_source(str(tmp_path / "mine.txt")), tmp_path / "o")
    assert "".join(documents) == text and 4 <= len(documents) <= 8


def test_of_several_short_texts_each_is_a_document(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"{name}\n\n" * 200)
    assert len(download(find_source(str(tmp_path / "texts")), tmp_path / "o")[1]) == 2


def test_wikitext_lines_become_articles():
    rows = [" = One = \n", "", " text \n", " = = Section = = \n", " more \n", " = Two = \n", " end \n"]
    assert [text for (text,) in join_articles(iter([rows[:4], rows[4:]]))] == [
        " = One = \n text \n = = Section = = \n more \n",
        " = Two = \n end \n",
    ]


def test_limits_stop_before_the_document_that_would_pass_them(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["12345", "é234", "1"])
    assert download(find_source(str(path)), tmp_path / "o", Limits(9, None))[1] == ["12345"]  # é counts 2 bytes
    assert download(find_source(str(path)), tmp_path / "o", Limits(10, None))[1] == ["12345", "é234"]
    manifest, documents = download(find_source(str(path)), tmp_path / "o", Limits(None, 1))
    assert documents == ["12345"] and manifest["stopped_by"] == "max_docs"
    with pytest.raises(ValueError, match="--max_bytes 4 is below the first document's 5 bytes"):
        download(find_source(str(path)), tmp_path / "small", Limits(4, None))
    assert not (tmp_path / "small").exists()


def test_shakespeare_is_the_known_text_or_nothing(tmp_path):
    text = "".join(f"ROMEO {i}:\nBut soft!\n\n" for i in range(2000))
    (tmp_path / "input.txt").write_text(text)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/input.txt"
        source = TinyShakespeare(url, hashlib.sha256(text.encode()).hexdigest())
        manifest, documents = download(source, tmp_path / "o")
        assert "".join(documents) == text and manifest["documents"] > 3
        with pytest.raises(SourceError, match="is not the text it was"):
            TinyShakespeare(url, "0" * 64).open()
        with pytest.raises(SourceError, match="cannot be reached"):
            TinyShakespeare(url + ".gone").open()
        server.shutdown()


def test_the_text_column_is_found_or_the_columns_are_listed():
    assert find_text_field(["id", "Text"], ["id", "Text"], None, "x") == "Text"
    assert find_text_field(["body", "content"], ["body", "content"], None, "x") == "content"
    assert find_text_field(["id", "lyrics"], ["lyrics"], None, "x") == "lyrics"
    assert find_text_field(["a", "b"], ["a", "b"], "b", "x") == "b"
    with pytest.raises(ValueError, match=r"--text_field must say .* its columns are: a, b, n"):
        find_text_field(["a", "b", "n"], ["a", "b"], None, "x")
    with pytest.raises(ValueError, match=r"--text_field c is not a column of x; its columns are: a, b"):
        find_text_field(["a", "b"], ["a", "b"], "c", "x")


def test_a_column_of_numbers_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--text_field n .* holds int, not text"):
        download(find_source(str(write_jsonl(tmp_path / "a.jsonl", ["x"])), text_field="n"), tmp_path / "o")


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", b'{"text": "ok"}\n{"text": "c\n'), ("a.jsonl", b'{"text": "\\ud800"}\n'), ("a.parquet", b"PAR1 no")],
)
def test_a_damaged_file_is_one_sentence_and_leaves_nothing(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=rf"{name} cannot be read: ") as caught:
        download(find_source(str(tmp_path / name)), tmp_path / "o")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("missing.txt",), "does not exist"),
        (("./missing",), "does not exist"),
        (("a/b/c",), "does not exist"),
        (("stdlib", "x"), "--config x means nothing"),
        (("stdlib", None, "train"), "--split train means nothing"),
        (("stdlib", None, None, "text"), "--text_field text means nothing"),
        ((str(ROOT / "pyproject.toml"),), "is or holds none of .txt, .jsonl, .parquet"),
        (("oscar", "de", "test"), "--split test is none of the splits"),
    ],
)
def test_what_was_typed_wrongly_is_a_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        find_source(*arguments)


def test_shorthands_and_ids_name_their_folder_and_their_place():
    named = {name: find_source(name) for name in ("openwebtext", "wikitext", "oscar", "webtext", "shakespeare")}
    assert all(source.name == name for name, source in named.items())
    assert named["webtext"].source == "Skylion007/openwebtext" and "OpenWebText" in named["webtext"].notes[0]
    assert (named["wikitext"].source, named["wikitext"].config) == ("Salesforce/wikitext", "wikitext-103-raw-v1")
    assert named["oscar"].config == "en" and "gated" in named["oscar"].notes[0]
    assert isinstance(named["shakespeare"], TinyShakespeare)
    other = find_source("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
    assert isinstance(other, HubDataset) and other.name == "Salesforce--wikitext--wikitext-2-raw-v1--test"


def test_sizes_are_decimal_or_binary():
    assert [parse_size(text) for text in ("100MB", "1.5GiB", "7", "2 kb")] == [100_000_000, 1_610_612_736, 7, 2000]
    for wrong in ("", "MB", "-1", "0", "1XB", "1e6"):
        with pytest.raises(ValueError, match="--max_bytes"):
            parse_size(wrong)


def test_lone_surrogates_are_replaced_when_read(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n{"text": " "}\n')
    assert list(read_documents(path)) == ["a\ufffdb", "😀"]


@pytest.mark.parametrize("line", ["{", "[]", '{"content": "x"}', '{"text": 5}'])
def test_a_line_without_text_is_named(tmp_path, line):
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(CorpusError, match="line 2"):
        list(read_documents(path))
