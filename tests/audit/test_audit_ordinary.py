"""Ordinary tables get no finding: for each thing that explains a row a table that needs it, and one that it leaves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.ordinary_tables import ORDINARY

from testbed.audit.claims import audit_runs
from testbed.audit.tables.ordinary import EXPLANATIONS
from testbed.audit.tables.read import tables_in

# table -> (what is changed in it, to what, words of the finding): what explains a row explains no other
CHANGED = {
    "a speed-up on the row above": ("1.11x", "2.11x", "Speedup does not follow"),
    "a column of sharded ranks": ("| 32 | 4 | 8 | 1", "| 32 | 4 | 6 | 1", "GPUs does not follow"),
    "expert ranks": ("| 128 | 2 | 1 | 8 | 8", "| 128 | 2 | 1 | 4 | 8", "GPUs does not follow"),
    "an average of ratios": ("1.80x", "1.40x", "Speedup does not follow"),
    "a time with its start-up": ("129.1", "109.1", "Total time (s) does not follow"),
    "a time with evaluations": ("250,100", "210,100", "tokens/s does not follow"),
    "another model": ("llama + overlap | 10,390", "llama + overlap | 12,390", "MFU does not follow"),
    "a node that is not full": ("| 5 | 36", "| 5 | 46", "GPUs does not follow"),
    "activation memory": ("Activation memory", "Peak memory", "is less than one byte"),
    "PFLOP-days": ("PFLOP-days", "PFLOP/s", "over the peak"),
    "devices that are not known": ("Gaudi 3", "A100", "over the peak"),
    "a mean without the first run": ("402.0", "462.0", "does not follow from the 3 values"),
    "factors of compression": ("Compression", "Speed-up", "Speed-up does not follow"),
}


def found_in(name, old="", new=""):
    suffix, text = ORDINARY[name]
    assert not old or text.count(old) == 1
    return audit_runs(tables_in(Path(f"table{suffix}"), text.replace(old, new) if old else text))


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_table_is_left_alone(name):
    assert found_in(name) == []


@pytest.mark.parametrize(("name", "old", "new", "words"), [(name, *rest) for name, rest in CHANGED.items()])
def test_what_explains_one_row_explains_no_other(name, old, new, words):
    assert any(words in finding.message for finding in found_in(name, old, new))


@pytest.mark.parametrize("number", range(len(EXPLANATIONS)))
def test_each_explanation_is_needed(monkeypatch, number):
    others = EXPLANATIONS[:number] + EXPLANATIONS[number + 1 :]
    monkeypatch.setattr("testbed.audit.tables.ordinary.EXPLANATIONS", others)
    assert any(found_in(name) for name in ORDINARY)


def test_what_adds_up_over_the_steps_of_a_run_is_not_read():
    """The first sum holds the start-up, and most rates agree with the later ones."""
    rows = [(step, step * 524_288, step * 0.5 + 9, 1_048_576 * (1 + 0.001 * math.sin(step)))
            for step in range(20, 15_000, 20)]  # fmt: skip
    text = "".join(f"{step},{tokens},{seconds:.2f},{rate:.0f},500\n" for step, tokens, seconds, rate in rows)
    head = ",tokens,elapsed_time,tokens_per_sec,step_time_ms\n"
    assert audit_runs(tables_in(Path("steps.csv"), f"step{head}{text}")) == []
    assert audit_runs(tables_in(Path("steps.csv"), f"run{head}{text}"))


def test_a_table_too_wide_for_its_combinations_is_not_read():
    """Of 60 columns that are all known, every formula would try hundreds of choices in every row."""
    head = ",".join(f"{name} ({number})" for number in range(15) for name in ("GPUs", "tokens/s", "Speedup", "MFU"))
    rows = "".join(",".join(str(row * column + 7.5) for column in range(1, 61)) + "\n" for row in range(1, 201))
    assert tables_in(Path("wide.csv"), f"{head}\n{rows}") == []
