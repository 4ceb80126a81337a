"""Sentences of a page that bear on its rows are quoted, and nothing is concluded from them."""

from __future__ import annotations

import time

import pytest
from support.tables import saved

from testbed.audit.claim_page import claim_page
from testbed.audit.claims import answered, audit, audit_and_count

TABLE = """
| Method | GPUs | Batch size | tokens/s |
|---|---|---|---|
| DDP | 8 | 64 | 100,000 |
| FlashTrain (ours) | 8 | 64 | 200,000 |
| ZeRO-2 | 8 | 64 | 180,000 |
"""
QUOTED = {
    "two batches": "With FlashTrain there was room for a batch of 128; DDP ran with 16.",
    "another machine": "DDP's row is quoted from its authors, who used 8 V100; ours ran on A100s.",
    "what a time holds": "The FlashTrain figure excludes the first epoch and compilation.",
    "a run that failed": "The FlashTrain job was stopped at step 3,150, when its loss became NaN.",
    "a note": "[^1]: --seq-len 512 for FlashTrain.",
    "a speed-up with its reason": "FlashTrain is 2x faster than DDP, for its batch is 128 and not 64.",
    "a simulator": "The numbers of ZeRO-2 are simulated.",
}


@pytest.mark.parametrize("name", QUOTED)
def test_a_sentence_that_decides_is_quoted_beside_the_ratio(tmp_path, name):
    path = saved(tmp_path, f"# Fast\n{TABLE}\n{QUOTED[name]}\n")
    _, _, _, checked = audit_and_count([path])
    assert [text.partition('"')[2].rstrip('"') for text in checked.quotes] == [QUOTED[name]]
    asked = answered([path], None, ("DDP", "FlashTrain (ours)"))
    assert asked is not None and (QUOTED[name] in "".join(asked.quotes)) == (name != "a simulator")  # of another row
    assert ("The text says" in claim_page(asked)) == bool(asked.quotes)


@pytest.mark.parametrize(
    "text",
    ["FlashTrain is a library for everyone.", "FlashTrain is 2x faster than DDP.", "Install it with pip.",
     "# FP8 against BF16 on H100", "```\nDDP ran with a batch of 16, FlashTrain with 128.\n```"],
)  # fmt: skip
def test_a_sentence_that_decides_nothing_is_not_quoted(tmp_path, text):
    assert audit_and_count([saved(tmp_path, f"# Fast\n{TABLE}\n{text}\n")])[3].quotes == ()


def test_a_page_that_names_many_rows_is_read_in_time(tmp_path):
    rows = "\n".join(f"| run{row} | {row + 100} |" for row in range(800))
    text = " ".join(f"run{row} is 2.9x as fast as run{row - 1}." for row in range(1, 800))
    start_s = time.process_time()
    audit([saved(tmp_path, f"| Run | tokens/s |\n|---|---|\n{rows}\n\n{text}\n")])
    assert time.process_time() - start_s < 10


def test_a_long_page_takes_no_quadratic_time(tmp_path):
    for text in ("Foo is 2x faster. " * 20_000, "a " * 400_000, "FlashTrain is 2.9x faster than " * 20_000):
        start_s = time.process_time()
        audit([saved(tmp_path, f"{text}\n{TABLE}")])
        assert time.process_time() - start_s < 10
