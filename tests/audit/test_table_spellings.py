"""Tables as people publish them: names, marks, units and headings that mean no more than they say."""

from __future__ import annotations

import pytest
from support.tables import saved, table

from testbed.audit.answer import OPEN
from testbed.audit.claims import answered, audit
from testbed.audit.readers import read_reported
from testbed.audit.tables.columns import quantity_of
from testbed.audit.tables.figures import figure_of


def test_a_csv_of_runs_is_no_curve_whatever_its_columns_are_called(tmp_path):
    """W&B exports the last step of each run beside its name."""
    path = saved(tmp_path, "Name,State,_step,tokens/s,loss\nddp,crashed,2000,100,3.1\nfsdp,finished,2000,190,3.1\n",
                 "runs.csv")  # fmt: skip
    found = answered([path], 1.9, ("ddp", "fsdp"))
    assert found is not None and "A is not measured: crashed: a ratio needs two measurements." in found.reasons
    steps = "".join(f"{step},{100 + step},3.1\n" for step in range(9))
    assert read_reported([saved(tmp_path, f"step,tokens/s,loss\n{steps}", "curve.csv")])[0].form == "CSV of curves"


def test_two_columns_of_a_turned_table_are_two_rows(tmp_path):
    rows = table(
        "metric | Trainer | Streamline", "tokens/s | 100 | 430", "seq len | 2048 | 512", "batch size | 16 | 16"
    )
    found = answered([saved(tmp_path, rows)], 4.3, ("Trainer", "Streamline"))
    assert found is not None and any("Sequence length 2048 against 512" in reason for reason in found.reasons)


def test_when_a_row_was_made_decides_nothing(tmp_path):
    rows = table("method | date | tokens/s", "ddp | May 3 | 100", "fsdp | May 9 | 190")
    found = answered([saved(tmp_path, rows)], 1.9, ("ddp", "fsdp"))
    assert found is not None and not any("date" in words for words in found.ask)


def test_a_marked_figure_is_not_contradicted_by_another_column(tmp_path):
    rows = table("method | s/step | hours | speed-up", "dense | 1.0 | 20 | 1.0x", "moe | 1.9 | 4.2 \N{DAGGER} | 4.8x")
    assert [each for each in audit([saved(tmp_path, rows)]) if "does not follow" in each.message] == []
    plain = rows.replace(" \N{DAGGER}", "").replace("4.8x", "9.8x")
    assert any("does not follow" in each.message for each in audit([saved(tmp_path, plain)]))


@pytest.mark.parametrize("cell", ["5h 15", "5h15", "5 h 15 min", "5 hrs 15 mins"])
def test_hours_and_minutes_are_a_time(cell):
    figure = figure_of(cell, "time")
    assert figure is not None and figure.value == 5.25 * 3600


@pytest.mark.parametrize(
    ("heading", "quantity"),
    [("s / update", "step_s"), ("global_bs", "batch"), ("micro-bs / GPU", "micro_batch"), ("GPU number", "devices")],
)
def test_spellings_of_headings(heading, quantity):
    assert quantity_of(heading) == quantity


def test_a_scatter_behind_a_figure_is_no_second_figure():
    figure = figure_of("184,000 \N{PLUS-MINUS SIGN} 2,100", "number")
    assert figure is not None and figure.value == 184000


def test_a_rate_of_one_device_beside_one_of_all_is_no_ratio(tmp_path):
    rows = table("method | throughput", "ddp | 2,480 tokens/s/GPU", "ours | 19,900 tokens/s total")
    found = answered([saved(tmp_path, rows)], 8.0, ("ddp", "ours"))
    assert found is not None and found.verdict == OPEN and found.in_question is None


def test_a_mark_of_a_footnote_is_no_part_of_a_name(tmp_path):
    rows = table("optimizer | tokens/s", "AdamW[^1] | 100", "AdamW-8bit[^1] | 150")
    assert answered([saved(tmp_path, f"{rows}\n[^1]: bf16\n")], 1.5, ("AdamW", "AdamW-8bit")) is not None


@pytest.mark.parametrize(
    ("heading", "is_asked"),
    [("Memory format", True), ("Memory-efficient attention", True), ("Peak memory (GB)", False)],
)
def test_what_memory_a_row_took_decides_nothing_and_a_setting_of_it_does(tmp_path, heading, is_asked):
    rows = table(f"method | {heading} | tokens/s", "a | contiguous | 100", "b | OOM-safe | 190")
    found = answered([saved(tmp_path, rows)], 1.9, ("a", "b"))
    assert found is not None and any(heading in words for words in found.ask) == is_asked


def test_a_curve_with_a_name_in_each_row_is_a_curve(tmp_path):
    rows = "".join(f"{step},5.0{step},0.20,ckpt_{step}.pt\n" for step in range(9))
    (run,) = read_reported([saved(tmp_path, f"step,train_loss,step_time_s,checkpoint\n{rows}", "curve.csv")])
    assert run.form == "CSV of curves"


def test_a_failed_row_beside_rates_of_one_device_leaves_them_read(tmp_path):
    rows = table("method | tokens/s", "a | 3,000 tok/s/GPU", "b | 2,900 tok/s/GPU", "c | OOM")
    assert answered([saved(tmp_path, rows)], 0.97, ("a", "b")).in_question is not None
