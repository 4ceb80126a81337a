"""Corpora written for the tests."""

import json

from testbed.corpus import Limits, read_documents, write_corpus

ALL = Limits(None, None)


def download(source, directory, limits=ALL):
    source.open()
    manifest = write_corpus(source, limits, directory)
    return manifest, list(read_documents(directory / "documents.jsonl"))


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    return path
