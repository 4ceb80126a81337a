"""Bits per byte and perplexity beside a validation loss."""

from __future__ import annotations

import math

import pytest
from support.programs import write_pair_files

from testbed.data.token_file import TokenFileWriter, open_token_file
from testbed.data.tokenizer_file import tokenizer_file_name, train_bpe
from testbed.data.windows import Windows
from testbed.train.validated_text import bytes_per_token, in_words

TEXT = "def main(arguments):\n    return arguments\n" * 30 + "Grüße, 世界\n" * 30
NAME = "bpe:280"


def test_the_bytes_of_what_is_validated_are_counted(tmp_path):
    tokenizer = train_bpe(iter([TEXT]), 280, tmp_path / tokenizer_file_name(NAME))
    ids = tokenizer.encode(TEXT)
    with TokenFileWriter(tmp_path / "val.bin", 280, NAME, tokenizer.end_of_text_id, tokenizer_file_name(NAME)) as file:
        file.append_document(ids)
    windows = Windows(open_token_file(tmp_path / "val.bin"), 16)
    found = bytes_per_token(windows, 5, None)
    assert found == pytest.approx(len(tokenizer.decode_bytes(ids[1 : 5 * 16 + 1])) / (5 * 16))
    assert in_words(2.0, found) == f"perplexity 7.4, {2.0 / math.log(2) / found:.4f} bits per byte"
    (tmp_path / tokenizer_file_name(NAME)).unlink()
    assert bytes_per_token(windows, 5, None) is None
    assert in_words(2.0, None) == "perplexity 7.4"


def test_pairs_and_no_windows_have_none(tmp_path):
    _, val = write_pair_files(tmp_path)
    windows = Windows(open_token_file(val), 32)
    assert bytes_per_token(windows, 3, None) is None is bytes_per_token(windows, 0, None)
