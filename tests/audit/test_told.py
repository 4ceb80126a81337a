"""A sentence that gives each of the rows that it names a number is read, and no other one."""

from __future__ import annotations

import pytest

from testbed.audit.tables.told import told_apart

NAMES = ["DDP", "ZeRO-3", "CPU offload"]


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("DDP ran on sixteen V100, ZeRO-3 on eight of them.", {"devices": ["16", "8", ""]}),
        ("DDP and ZeRO-3 use 16 samples per GPU, but CPU offload uses 64.", {"micro_batch": ["16", "16", "64"]}),
        ("DDP ran with a global batch size of 1,024, and ZeRO-3 with 512.", {"batch": ["1,024", "512", ""]}),
        ("DDP ends at a val loss of 3.28, whereas ZeRO-3 ends at 3.41.", {"val_loss": ["3.28", "3.41", ""]}),
        ("DDP took 16 GB, ZeRO-3 took 8.", {}),
        ("DDP has a batch size of 16, ZeRO-3 has 64 GB of memory.", {}),
        ("DDP has a batch size of 16 on 4 GPUs, ZeRO-3 of 64.", {}),
        ("We use a batch size of 16, and ZeRO-3 reaches 64.", {}),
        ("DDP and ZeRO-3 have a batch size of 16.", {}),
        ("DDP has a batch size of 16, ZeRO-3 has 16.", {}),
    ],
)  # fmt: skip
def test_a_sentence_tells_rows_apart_or_is_left(sentence, told):
    assert told_apart([sentence], NAMES, ["", "", ""]) == told


def test_of_two_rows_the_other_need_not_be_named_and_two_sentences_on_one_quantity_tell_nothing():
    sentence = "Ours used a batch of 64 while the baseline used 16."
    assert told_apart([sentence], ["DDP", "Ours"], ["", ""]) == {"any_batch": ["16", "64"]}
    assert told_apart([sentence, sentence.replace("64", "32")], ["DDP", "Ours"], ["", ""]) == {}
    assert told_apart([sentence], [*NAMES, "Ours"], [""] * 4) == {}
