"""Claims in the text of a page, answered by the rows that they name."""

from __future__ import annotations

import time

import pytest

from testbed.audit.claim_page import claim_page
from testbed.audit.claims import FAILS, answered, audit, audit_and_count
from testbed.audit.finding import Rule

TABLE = """
| Method | GPUs | Batch size | tokens/s |
|---|---|---|---|
| DDP | 8 | 64 | 100,000 |
| FlashTrain (ours) | 8 | 64 | 200,000 |
| ZeRO-2 | 8 | 128 | 180,000 |
"""


def findings(tmp_path, text: str, table: str = TABLE):
    path = tmp_path / "README.md"
    path.write_text(f"# Fast training\n\n{text}\n{table}\n", encoding="utf-8")
    return [each for each in audit([path]) if each.runs == (f"{path}:3",)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FlashTrain is 2.9x faster than DDP.", "their figures give 2x"),
        ("FlashTrain is **2.9\N{MULTIPLICATION SIGN}** faster than `DDP`.", "their figures give 2x"),
        ("Compared to DDP, FlashTrain reaches a speed-up of 2.9x on our cluster.", "their figures give 2x"),
        ("FlashTrain has 190% higher throughput than plain DDP.", "their figures give 2x"),
        ("FlashTrain vs. DDP: 2.9x training speedup.", "their figures give 2x"),
        ("We see a 1.8x speedup of ZeRO-2 over DDP.", "batch size 64 against 128"),
        ("ZeRO-2 is up to 1.9x faster than DDP!", "batch size 64 against 128"),
        ("FlashTrain (ours) is 2.9x faster than DDP.", "their figures give 2x"),
        ("We ran on one node. Our tests show that\nFlashTrain is 3.5x faster than DDP.", "their figures give 2x"),
    ],
)
def test_a_claim_that_its_rows_do_not_carry_is_found(tmp_path, text, said):
    (finding,) = findings(tmp_path, text)
    assert said in finding.message and finding.severity == FAILS
    assert finding.rule == (Rule.FOLLOWS if "figures give" in finding.message else Rule.EQUAL_WORK)


@pytest.mark.parametrize(
    "text",
    [
        "FlashTrain is 2x faster than DDP.",
        "FlashTrain is 2.0 times faster than DDP.",
        "FlashTrain is 100% faster than DDP.",
        "FlashTrain is almost 2.2x faster than DDP.",  # hedged, and near
        "FlashTrain is 1.5x faster than DDP.",  # less than it is
        "FlashTrain is over 1.8x faster than DDP.",
        "FlashTrain is up to 2.9x faster than DDP.",
        "FlashTrain is 2-3x faster than DDP.",
        "FlashTrain needs 2.9x less memory than DDP, and is faster.",
        "FlashTrain is 2.1x faster.",  # than what?
        "Inference of FlashTrain is 2.9x faster than DDP.",
        "The backward pass of FlashTrain is 2.9x faster than DDP's.",
        "We expect FlashTrain to be 2.9x faster than DDP on H100.",
        "The paper claims that FlashTrain is 2.9x faster than DDP.",
        "FlashTrain is not 2.9x faster than DDP.",
        "FlashTrain, DDP and ZeRO-2: 2.9x faster than others.",
        "FlashTrain is 2.9x faster than Megatron.",
        "FlashTrain is 2.9x faster than Megatron and leaner than DDP.",
        "FlashTrain is 2.9x faster than DDP+compile.",
        "FlashTrain is 2x faster than DDP, or 2.9x with dropout.",  # two figures
        "FlashTrain on 2.9x larger batches is faster than DDP.",
    ],
)
def test_other_sentences_are_left_alone(tmp_path, text):
    assert findings(tmp_path, text) == []


def test_code_is_no_claim(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"# Fast\n```\nFlashTrain is 2.9x faster than DDP.\n```\n{TABLE}")
    assert [each for each in audit([path]) if "the text says" in each.message] == []


def test_of_a_table_of_two_rows_our_own_needs_no_name(tmp_path):
    two = "\n".join(TABLE.splitlines()[:5])
    (finding,) = findings(tmp_path, "We train 2.9x faster than DDP.", two)
    assert "their figures give 2x" in finding.message
    for text in ("We are 2x faster than PyTorch DDP.", "Apex is 3x faster than DDP.", "A 2x speedup of FlashTrain.",
                 "We are 2.9x faster than Megatron."):  # fmt: skip
        assert findings(tmp_path, text, two) == [], text


def test_a_name_that_two_rows_have_names_none(tmp_path):
    twice = TABLE.replace("ZeRO-2", "DDP")
    assert findings(tmp_path, "FlashTrain is 2.9x faster than DDP.", twice) == []


def test_one_of_several_tables_that_carries_a_claim_is_enough(tmp_path):
    fast = TABLE.replace("200,000", "290,000")
    assert findings(tmp_path, "FlashTrain is 2.9x faster than DDP.", f"{TABLE}\n## On another machine\n{fast}") == []


def test_what_the_names_of_the_rows_say_is_what_is_compared(tmp_path):
    devices = "| GPU | Batch size | tokens/s |\n|---|---|---|\n| A100 | 64 | 100 |\n| H100 | 64 | 210 |\n"
    assert findings(tmp_path, "H100 is 2.1x faster than A100.", devices) == []
    (finding,) = findings(tmp_path, "H100 is 2.1x faster than A100.", devices.replace("| 64 | 210", "| 128 | 210"))
    assert "batch size 64 against 128" in finding.message.lower()


def test_a_line_after_a_heading_and_items_of_a_list_are_sentences_of_their_own(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(
        f"# Results\nFlashTrain is 2.9x faster than DDP.\n- one\n  - ZeRO-2 is 1.8x faster than DDP\n{TABLE}"
    )
    found = [each.runs[0].rpartition(":")[2] for each in audit([path]) if "the text says" in each.message]
    assert found == ["2", "4"]


QUOTED = {
    "two batches": "With FlashTrain there was room for a batch of 128; DDP ran with 16.",
    "another machine": "DDP's row is quoted from its authors, who used 8 V100; ours ran on A100s.",
    "what a time holds": "The FlashTrain figure excludes the first epoch and compilation.",
    "a run that failed": "The FlashTrain job was stopped at step 3,150, when its loss became NaN.",
    "a note": "[^1]: --seq-len 512 for FlashTrain.",
    "a simulator": "The numbers of ZeRO-2 are simulated.",
}


@pytest.mark.parametrize("name", QUOTED)
def test_a_sentence_that_decides_is_quoted_beside_the_ratio(tmp_path, name):
    """Nothing is concluded from it: a page and its answer show it, whatever else they find."""
    path = tmp_path / "README.md"
    path.write_text(f"# Fast\n{TABLE}\n{QUOTED[name]}\n", encoding="utf-8")
    _, _, _, checked = audit_and_count([path])
    assert [text.partition('"')[2].rstrip('"') for text in checked.quotes] == [QUOTED[name]]
    asked = answered([path], None, ("DDP", "FlashTrain (ours)"))
    assert asked is not None and (QUOTED[name] in "".join(asked.quotes)) == (name != "a simulator")  # of another row
    assert ("The text says" in claim_page(asked)) == bool(asked.quotes)


@pytest.mark.parametrize(
    "text",
    ["FlashTrain is a library for everyone.", "FlashTrain is 2x faster than DDP.", "Install it with pip.",
     "# FP8 against BF16 on H100"],
)  # fmt: skip
def test_a_sentence_that_decides_nothing_is_not_quoted(tmp_path, text):
    path = tmp_path / "README.md"
    path.write_text(f"# Fast\n{TABLE}\n{text}\n", encoding="utf-8")
    assert audit_and_count([path])[3].quotes == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Training goes from 10.4 h to 6.2 h, a reduction of 62 %.", "40% less"),
        ("A step went from 412 to 188 ms (2.9x).", "2.19 times"),
        ("We went from 1,000 tokens/s to 1,500 tokens/s, 80 % more.", "50% more"),
        ("We went from 10.0 h to 1.0 h, 50% less.", "90% less"),
        ("On average it is 2.6x faster.", "the mean of `speedup` is 2.03"),
    ],
)
def test_the_figures_of_a_sentence_are_held_against_each_other(tmp_path, text, words):
    path = tmp_path / "README.md"
    rows = "| Model | speedup |\n|---|---|\n| a | 1.8x |\n| b | 2.0x |\n| c | 2.3x |\n"
    path.write_text(f"# Fast\n{text}\n\n{rows}")
    (finding,) = audit([path])
    assert words in finding.message and finding.severity == FAILS


@pytest.mark.parametrize(
    "text",
    [
        "Training goes from 10.4 h to 6.2 h, 40 % less.",
        "Training goes from 10.4 h to 6.2 h, 60 % of it.",
        "Training goes from 10.4 h to 6.2 h, a speed-up of 1.7x.",
        "Training goes from 10.4 h to 6.2 h at an efficiency of 95 %.",
        "Memory falls from 10.4 GB to 6.2 GB, and it is 2.9x faster.",
        "It goes from 8 GPUs to 16 GPUs, 1.9x faster.",
        "On average it is 2x faster.",
        "We cut 10.4 h to 6.2 h for 20 % of the budget.",
        "Training went from 120 s to 60 s on 4x A100.",
        "Training went from 120 s to 60 s with 8 times as many workers.",
        "Overall, up to 4x faster training.",
        "Overall our best model c is 2.3x faster.",
        "Overall this release is 20% faster than the previous release.",
        "The mean sequence is 512 tokens; b is 2x faster than a.",
    ],
)
def test_figures_that_go_together_or_are_of_something_else_are_left_alone(tmp_path, text):
    path = tmp_path / "README.md"
    rows = "| Model | speedup |\n|---|---|\n| a | 1.8x |\n| b | 2.0x |\n| c | 2.3x |\n"
    path.write_text(f"# Fast\n{text}\n\n{rows}")
    assert [each for each in audit([path]) if each.rule == Rule.FOLLOWS] == []


def test_a_row_that_is_no_faster_than_any_other_is_noted_in_its_section(tmp_path):
    path = tmp_path / "README.md"
    for title, count in (("", 1), ("## Elsewhere\n", 0)):
        path.write_text(f"# Fast\n{TABLE}\n{title}FlashTrain improves throughput by 190 %.\n")
        found = [each for each in audit([path]) if "the text says" in each.message]
        assert len(found) == count and all("its figures give 2x" in each.message for each in found)


def test_numbers_of_devices_name_their_rows(tmp_path):
    path = tmp_path / "README.md"
    rows = "| workers | sec / epoch |\n|---|---|\n| 1 | 148.0 |\n| 2 | 78.3 |\n| 8 | 27.1 |\n"
    for factor, count in ((6.8, 1), (5.4, 0)):
        path.write_text(f"# Fast\nWith 8 workers it reaches a {factor}x speed-up over one worker.\n\n{rows}")
        assert len([each for each in audit([path]) if "the text says" in each.message]) == count


def test_a_long_page_takes_no_quadratic_time(tmp_path):
    for text in ("Foo is 2x faster. " * 20_000, "a " * 400_000, "FlashTrain is 2.9x faster than " * 20_000):
        path = tmp_path / "README.md"
        path.write_text(f"{text}\n{TABLE}")
        start_s = time.perf_counter()
        audit([path])
        assert time.perf_counter() - start_s < 10


def test_words_of_a_name_say_nothing_of_the_sentence(tmp_path):
    table = TABLE.replace("FlashTrain (ours)", "FlashAttention-2 backward")
    (finding,) = findings(tmp_path, "FlashAttention-2 backward is 2.9x faster than DDP.", table)
    assert "their figures give 2x" in finding.message


def test_a_speed_up_of_one_row_is_no_average(tmp_path):
    path = tmp_path / "README.md"
    rows = "| Model | speedup |\n|---|---|\n| resnet | 1.8x |\n| vit-large | 3.0x |\n| convnext | 1.9x |\n"
    for text, count in (("On average vit-large is 3.9x faster.", 0), ("On average it is 3.9x faster.", 1)):
        path.write_text(f"# Fast\n{text}\n\n{rows}")
        assert len([each for each in audit([path]) if "on average" in each.message]) == count
