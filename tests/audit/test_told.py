"""What a sentence says of rows that it names. What names a row in another way is quoted, and concluded of none."""

from __future__ import annotations

import pytest
from support.programs import run_here
from support.tables import saved, table

from testbed.audit.claims import answered
from testbed.audit.reported import DEVICE, MODEL
from testbed.audit.tables.grid import Table
from testbed.audit.tables.told import Named, said_of_table
from testbed.audit.words import FORMS, value_of

NAMES = ("DDP", "ZeRO-3", "CPU offload")


def told(sentence: str, names: tuple[str, ...] = NAMES) -> dict[str, list[str]]:
    said = said_of_table(Table((), (), near=sentence), Named(names, (frozenset(),) * len(names), 0))
    return {name: values for name in FORMS if any(values := said.told(name))}


@pytest.mark.parametrize(
    ("sentence", "values"),
    [
        ("DDP and ZeRO-3 use 16 samples per GPU, but CPU offload uses 64 samples per GPU.",
         {"micro_batch": ["16", "16", "64"]}),
        ("With a global batch of 64, DDP was timed in bf16.", {"batch": ["64", "", ""], "precision": ["bf16", "", ""]}),
        ("DDP ends at a val loss of 3.28, whereas ZeRO-3 ends at 3.41.", {"val_loss": ["3.28", "3.41", ""]}),
        ("CPU offload was run with batch 64, while the others had 16.", {"any_batch": ["", "", "64"]}),
        ("DDP ran on eight V100 and ZeRO-3 on sixteen V100.", {"device": ["V100", "V100", ""]}),
        ("The number of CPU offload is taken from the paper.", {"status": ["", "", "taken from"]}),
        ("CPU offload sees 2048 images in a step.", {"batch": ["", "", "2048"]}),
        ("The number of ZeRO-3 comes from a fitted model.", {"status": ["", "fitted model", ""]}),
        ("The last row used a batch of 64.", {}),
        ("Both were timed with a batch of 64.", {}),
        ("DDP took 16 GB, ZeRO-3 took 8.", {}),
    ],
)  # fmt: skip
def test_a_part_of_a_sentence_is_about_the_rows_that_it_names(sentence, values):
    assert told(sentence) == values


@pytest.mark.parametrize(
    ("text", "devices", "device"),
    [
        ("p4d.24xlarge", "8", "A100"),
        ("2 p4d.24xlarge", "16", "A100"),
        ("2 \N{MULTIPLICATION SIGN} ml.p4d.24xlarge", "16", "A100"),
        ("p5.48xlarge x 4", "32", "H100"),
        ("4 nodes, p4d.24xlarge", "32", "A100"),
        ("8 nodes of p4d.24xlarge", "64", "A100"),
        ("1,024 p4d.24xlarge", "8192", "A100"),
        ("2\N{MULTIPLICATION SIGN}ml.p4d.24xlarge", "16", "A100"),
        ("DDP | g5.12xlarge | 400", "4", "A10G"),
        ("4 \N{MULTIPLICATION SIGN} H100", "4", "H100"),
        ("p2.xlarge", "", ""),
    ],
)
def test_machines_of_a_cloud_are_so_many_devices(text, devices, device):
    assert (value_of("devices", text), value_of(DEVICE, text)) == (devices, device)


@pytest.mark.parametrize(
    ("text", "model"),
    [("124M", "124M"), ("10B OpenWebText tokens", ""), ("10B tokens", ""), ("1.3B in 12 s", "1.3B"), ("92,170M", "")],
)
def test_a_number_of_tokens_is_no_model(text, model):
    assert value_of(MODEL, text) == model


def test_of_two_rows_the_other_one_is_behind_while():
    said = told("The 8-bit run ends at a loss of 3.61 while the uncompressed run ends at a loss of 3.28.", ("none",
                "8-bit"))  # fmt: skip
    assert said == {"val_loss": ["3.28", "3.61"]}


@pytest.mark.parametrize(
    "text",
    [
        "The goal of this project is fast training.",
        "ZeRO-2 implements the algorithm from their paper.",
        "ZeRO-2 is an end-to-end framework.",
        "Set NCCL_DEBUG=INFO if ZeRO-2 hangs.",
        "ZeRO-2 reaches 76.1% accuracy on ImageNet; DDP reaches 92% on CIFAR-10.",
        "We planned ZeRO-2 for a year.",
    ],
)
def test_prose_about_a_method_is_no_note_on_its_figures(tmp_path, text):
    rows = ("DDP | 4 | 64 | 1000 | 1.0x", "ZeRO-2 | 4 | 64 | 1500 | 1.5x")
    path = saved(tmp_path, table("Run | GPUs | Global batch | tokens/s | Speedup", *rows) + f"\n\n{text}\n")
    done = run_here("scripts/audit_runs.py", path)
    assert done.returncode == 0 and "nothing found" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("heading", "a", "b", "claimed"),
    [("Prefill tok/s", "1000", "1900", 1.9), ("decoding time (s)", "3.0", "1.5", 2.0), ("TTFT ms", "80", "40", 2.0)],
)
def test_a_heading_with_a_unit_compares_two_rows(tmp_path, heading, a, b, claimed):
    """Nothing is known of it but its unit: no formula counts it, and its ratio is one of two rows."""
    path = saved(tmp_path, table(f"Engine | GPUs | batch | {heading}", f"A | 1 | 8 | {a}", f"B | 1 | 32 | {b}"))
    found = answered([path], claimed, ("A", "B"))
    assert found is not None and found.in_question is not None and found.in_question.ratio == pytest.approx(claimed)
    assert any(reason.startswith("Batch size 8 against 32") for reason in found.reasons)


def test_a_claim_is_about_the_heading_that_gives_it(tmp_path):
    rows = table("Engine | Prefill tok/s | Decode tok/s", "A | 1000 | 100", "B | 1500 | 300")
    found = answered([saved(tmp_path, rows)], 3.0, ("A", "B"))
    assert found is not None and found.in_question is not None and found.in_question.name == "Decode tok/s"


def test_the_name_of_a_log_says_what_the_log_does_not(tmp_path):
    steps = "".join(f"iter {step}: loss 3.{step}, time 100.00ms\n" for step in range(9))
    one = saved(tmp_path, steps, "ddp_8xA100_gbs256_seq1024_bf16_350M.log")
    two = saved(tmp_path, steps.replace("100.00", "50.00"), "zero2_8xA100_gbs512_seq1024_bf16_350M.log")
    found = answered([one, two])
    assert found is not None and any("Global batch size 256 against 512" in reason for reason in found.reasons)
    states = {each.name: each.state for each in found.conditions}
    assert {states[name] for name in ("ranks", "model", "sequence length", "precision")} == {"same"}
