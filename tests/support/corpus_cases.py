"""Corpora written for the tests."""

import json

from testbed.data.corpus import Limits, read_documents, write_corpus

ALL = Limits(None, None)
COMMAND = "python download_data.py --dataset five"


def download(source, directory, limits=ALL):
    source.open()
    manifest = write_corpus(source, limits, directory, COMMAND)
    return manifest, list(read_documents(directory / "documents.jsonl"))


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    return path


class Documents:
    """A source of five documents."""

    name, source, config, split, revision, text_field, wanted_text_field = "five", "five", None, None, "1", "text", None

    def open(self):
        pass

    def batches(self):
        yield ["first", "second"]
        yield ["third", "fourth", "fifth"]
