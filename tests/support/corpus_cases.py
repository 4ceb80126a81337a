"""Corpora written for the tests."""

import json

from testbed.data.corpus import Limits, read_documents, write_corpus

ALL = Limits(None, None)


def download(source, directory, limits=ALL):
    source.open()
    manifest = write_corpus(source, limits, directory)
    return manifest, list(read_documents(directory / "documents.jsonl"))


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    return path


class Documents:
    """A source of five documents that can go on in the middle."""

    name, source, config, split, revision, text_field, wanted_text_field = "five", "five", None, None, "1", "text", None
    texts = ("first", "second", "third", "fourth", "fifth")

    def __init__(self) -> None:
        self.first = self.done = 0

    def batches(self, position: dict | None = None):
        self.first = 0 if position is None else position["stream"]
        for number in range(self.first, len(self.texts)):
            self.done = number + 1
            yield [self.texts[number]]

    def position(self) -> dict:
        return {"stream": self.done}
