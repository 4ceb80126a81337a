"""Share cases among the tests of token file."""

from testbed.data.token_file import (
    TokenFileWriter,
)

SOURCE = {"name": "stdlib", "revision": "CPython 3.11.7", "sha256": "0" * 64}


def write(path, documents, vocab_size=300, tokenizer="bpe:300"):
    with TokenFileWriter(path, vocab_size, tokenizer, vocab_size - 1, "bpe_300.json", SOURCE) as writer:
        for document in documents:
            writer.append_document(document)
    return path


def write_pairs(path):
    with TokenFileWriter(path, 300, "bpe:300", 299, has_targets=True) as writer:
        writer.append_document([1, 2, 10, 11], 2)
        writer.append_document([3, 10], 1)
    return path
