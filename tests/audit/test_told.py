"""What a sentence says of rows that it names, by their names, places or roles, in English, German and Chinese."""

from __future__ import annotations

import pytest
from support.programs import run_here
from support.tables import saved, table

from testbed.audit.tables.english import english
from testbed.audit.tables.grid import Table
from testbed.audit.tables.told import Named, said_of_rows, said_of_table
from testbed.audit.tables.words import IN_SENTENCES

THREE, TWO = ["DDP", "ZeRO-3", "CPU offload"], ["big_vision (PyTorch)", "paligemma-jax"]


def told(sentence: str, names: list[str], sizes=None) -> dict[str, list[str]]:
    nothing = (None,) * len(names)
    named = Named(tuple(map(english, names)), (frozenset(),) * len(names), tuple(sizes or nothing), 0)
    said = said_of_table(Table((), (), near=sentence), named)
    return {name: values for name in IN_SENTENCES if any(values := said.told(name))}


@pytest.mark.parametrize(
    ("sentence", "names", "values"),
    [
        ("DDP ran on sixteen V100, ZeRO-3 on eight of them.", THREE, {"devices": ["16", "8", ""], "device": ["V100",
        "", ""]}),
        ("DDP and ZeRO-3 use 16 samples per GPU, but CPU offload uses 64.", THREE, {"micro_batch": ["16", "16", "64"]}),
        ("DDP ran with a global batch size of 1,024, and ZeRO-3 with 512.", THREE, {"batch": ["1,024", "512", ""]}),
        ("DDP ends at a val loss of 3.28, whereas ZeRO-3 ends at 3.41.", THREE, {"val_loss": ["3.28", "3.41", ""]}),
        ("DDP took 16 GB, ZeRO-3 took 8.", THREE, {}),
        ("DDP has a batch size of 16, ZeRO-3 has 64 GB of memory.", THREE, {"any_batch": ["16", "", ""]}),
        ("CPU offload uses a batch of 64, the others 16.", THREE, {"any_batch": ["16", "16", "64"]}),
        ("ZeRO-3 is 2x faster than DDP on 8 GPUs.", THREE, {"devices": ["8", "8", ""]}),
        ("We could only time the original code on 2 GPUs; the port had all 8.", TWO, {"devices": ["2", "8"]}),
        ("We timed the original code and the port on 8 GPUs.", TWO, {}),  # one number for all rows is of the table
        ("For the stock trainer we used 2 sequences on each device; our fork was run with 8.", TWO,
        {"micro_batch": ["2", "8"]}),
        ("The competitor's number is copied from its own README.", TWO, {"status": ["copied from", ""]}),
        ("The last row was run under torch.profiler.", TWO, {"instrumentation": ["", "torch.profiler"]}),
        ("DDP ends at acc 0.91, ZeRO-3 at 0.84.", THREE, {"score": ["0.91", "0.84", ""]}),
        ("Both were timed without torch.profiler.", TWO, {}),
        ("The original ran on 32 instead of 64 GPUs.", TWO, {"devices": ["32", "64"]}),
        ("Die Referenz lief mit Batchgröße 32, die neue Variante mit 96.", ["Referenz", "neue"], {"any_batch": ["32",
        "96"]}),
        ("稠密注意力的验证损失为 2.41\uff0c稀疏注意力为 2.97。", ["稠密注意力", "稀疏注意力"],
         {"val_loss": ["2.41", "2.97"]}),
        ("基线使用 8 卡\uff0c而我们的框架使用 16 卡。", ["DeepSpeed", "快速框架"], {"devices": ["8", "16"]}),
    ],
)  # fmt: skip
def test_a_sentence_tells_rows_apart_or_is_left(sentence, names, values):
    assert told(sentence, names) == values


def test_a_row_is_meant_by_its_devices_and_what_no_row_is_named_for_is_of_all():
    assert (
        told("The figure for 512 cards is what our cost model gives.", ["", "", ""], (8, 64, 512))["status"][2]
        == "cost model"
    )
    named = told("The value for 64 GPUs is scaled from the time on 8 GPUs.", ["", "", ""], (8, 16, 64))
    assert named["status"] == ["", "", "scaled from"]
    (clause,) = said_of_rows(["All in bf16."], Named(("a", "b"), (frozenset(),) * 2, (None, None), 0))
    assert clause.rows == {0, 1}


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
