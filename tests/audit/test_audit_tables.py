"""The audit of tables: a figure that the row's others contradict is found, and usual conventions are left alone."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections import Counter

import pytest
from support import table_cases
from support.programs import run_here
from support.table_cases import CASES, ONLY_NOTES, SOUND_EXCERPTS, SPEED_UP, WRONG_EXCERPTS

from testbed.audit.claims import FAILS, NOTE, audit
from testbed.audit.tables.figures import figures_of
from testbed.audit.tables.read import columns_named
from testbed.audit.tables.relations import FORMULAS
from testbed.errors import InputError

PROGRAM = "scripts/audit_runs.py"
ODD = [
    "",
    "-",
    "nan",
    "inf",
    "-1",
    "0",
    "1e400",
    "9" * 5000,
    "0.1.2",
    '"',
    "\n",
    "|",
    "||",
    "\x00",
    "%",
    "x",
    "TP=4 DP=2",
]
TABLES = [text for name, text in vars(table_cases).items() if name.isupper() and isinstance(text, str) and "|" in text]


def saved(folder, text: str, name: str = "table.md"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("rule", "table", "old", "new", "words", "corrected"), CASES.values(), ids=CASES)
def test_a_changed_figure_is_found_in_its_row(tmp_path, rule, table, old, new, words, corrected, request):
    path = saved(tmp_path, table)
    assert audit([path]) == []
    assert table.count(old) >= 1
    changed = table.replace(old, new, 1)
    line = 1 + next(i for i, (a, b) in enumerate(zip(table.split("\n"), changed.split("\n"), strict=True)) if a != b)
    saved(tmp_path, changed)
    found = [f for f in audit([path]) if f"{path}:{line}" in f.runs and f.rule == rule]
    assert found, audit([path])
    assert words in found[0].message
    assert corrected is None or corrected in found[0].corrected
    assert found[0].severity == (NOTE if request.node.callspec.id in ONLY_NOTES else FAILS)


def test_every_formula_has_a_case(tmp_path):
    said = []
    for number, (_, table, old, new, *_) in enumerate(CASES.values()):
        said += [f.message for f in audit([saved(tmp_path, table.replace(old, new, 1), f"{number}.md")])]
    missing = [f.words for f in FORMULAS if not any(f.words in message for message in said)]
    of_other_units = [words for words in missing if "per second x time of a step" in words]
    assert [words for words in missing if words not in of_other_units] == []


@pytest.mark.parametrize(("table", "line", "corrected"), WRONG_EXCERPTS.values(), ids=WRONG_EXCERPTS)
def test_a_published_row_that_does_not_follow_is_named(tmp_path, table, line, corrected):
    path = saved(tmp_path, table)
    found = audit([path])
    assert [f.runs for f in found] == [(f"{path}:{line}",)]
    assert corrected in found[0].corrected


@pytest.mark.parametrize("table", SOUND_EXCERPTS.values(), ids=SOUND_EXCERPTS)
def test_published_rows_that_add_up_are_left_alone(tmp_path, table):
    assert audit([saved(tmp_path, table)]) == []


LATENCIES = """
| Batch size | Throughput Avg (images/s) | Latency Avg (ms) | Latency 90% (ms) | Latency p95 (ms) | Latency std (ms) |
|---|---|---|---|---|---|
| 1 | 50.0 | 20.00 | 20.9 | 22.1 | 0.61 |
| 2 | 74.0 | 27.03 | 27.1 | 27.2 | 0.12 |
| 4 | 74.0 | 54.05 | 54.1 | 54.2 | 0.10 |
| 8 | 74.0 | 108.11 | 108.2 | 108.3 | 0.11 |
| 16 | 160.0 | 100.00 | 100.1 | 100.2 | 0.10 |
| 32 | 160.0 | 200.00 | 200.1 | 200.2 | 0.10 |
"""
EXPLAINED = {
    "estimates": SPEED_UP.replace("7.39x", "~8.39x"),
    "an estimated column": SPEED_UP.replace("Speed-up", "Projected speed-up").replace("7.39x", "8.39x"),
    "a heading of estimates": f"## Expected results\n{SPEED_UP.replace('7.39x', '8.39x')}\n## Measured\n{SPEED_UP}",
    "another batch in the label": table_cases.PER_STEP.replace("| eager | 145", "| eager, batch 8 | 290"),
    "another reference": """
| Batch / GPU | GPUs | Throughput | Strong scaling |
|---|---|---|---|
| 32 | 1 | 6522.37 | 1.00 |
| 64 | 1 | 7596.32 | 1.00 |
| 32 | 4 | 23660.14 | 3.11 |
| 16 | 8 | 32175.41 | 4.24 |
""",
    "recomputation": table_cases.FLOPS.replace("89.84 | 28.80%", "119.79 | 38.40%"),
    "another precision": table_cases.HFU.replace("| a | 156.0 | 5000", "| fp32 | 19.5 | 625"),
    "percentiles of a latency": LATENCIES,
    "a mean of rates": LATENCIES.replace("160.0 | 200.00", "164.0 | 200.00"),
    "ranks of a node in brackets": table_cases.FLOPS.replace("| 16 | 4 | 8", "| 16 (2 each) | 8 | 8"),
    "rounded": SPEED_UP.replace("3,841,266", "3.8M").replace("6,366,609", "6.4M").replace("12,480,512", "12M"),
    "a schedule of 0.5x": """
| backbone | lr sched | train mem(GB) | train time (s/iter) |
|---|---|---|---|
| a | 1x | 5.8 | 0.4036 |
| b | 0.75x | 13.6 | 0.5444 |
| c | 0.5x | 11.1 | 0.4872 |
""",
    "weights of 4 bits": table_cases.PEAKS.replace("| 60.1", "| 1.5").replace("80GB", "80GB, QLoRA in 4-bit"),
}  # fmt: skip


@pytest.mark.parametrize("table", EXPLAINED.values(), ids=EXPLAINED)
def test_what_the_table_says_explains_the_row(tmp_path, table):
    assert audit([saved(tmp_path, table)]) == []


def test_a_row_without_a_result_is_a_note(tmp_path):
    plan = "".join(f"| {n} | {dp} | 4 | 1 | - |\n" for n, dp in ((4, 1), (8, 2), (16, 4), (32, 4)))
    found = audit(
        [saved(tmp_path, f"| Nodes | DP | TP | PP | Sec/it |\n|---|---|---|---|---|\n| 2 | 2 | 1 | 1 | 9.5 |\n{plan}")]
    )
    assert [(f.severity, f.runs[0][-1]) for f in found] == [(NOTE, "7")]


def test_swapped_headings_are_one_finding(tmp_path):
    path = saved(tmp_path, table_cases.SWAPPED)
    found = audit([path])
    assert [f.runs for f in found] == [tuple(f"{path}:{line}" for line in (4, 5, 6))]
    assert "with the two headings swapped" in found[0].corrected
    right = table_cases.SWAPPED.replace("3.27 | 3.68", "3.68 | 3.27").replace("6.43 | 7.17", "7.17 | 6.43")
    assert audit([saved(tmp_path, right)]) == []


def test_a_scaling_of_rows_with_another_batch_per_device_is_a_note(tmp_path):
    """The last figure follows from the row of batch 2, and not from that of batch 4."""
    rows = [(1, 2, "14.47", "-"), (1, 4, "19.35", "-"), (8, 2, "53.40", "3.69"), (8, 4, "58.33", "4.03")]
    head = "| GPUs | Batch size / GPU | Throughput [img/s] | Weak scaling |\n|---|---|---|---|\n"
    path = saved(tmp_path, head + "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows))
    found = audit([path])
    assert [(f.severity, f.runs) for f in found] == [(NOTE, (f"{path}:6", f"{path}:3"))]
    assert "Batch size / GPU 4 against 2" in found[0].message
    strong = saved(tmp_path, path.read_text(encoding="utf-8").replace("Weak", "Strong"))
    assert audit([strong]) == []


def test_the_steps_of_a_run_are_no_table(tmp_path):
    rows = "".join(f"{n},{100 + n % 7},{0.5 + n % 3}\n" for n in range(2001))
    with pytest.raises(InputError, match="no wandb export"):
        audit([saved(tmp_path, f"steps,tokens/s,step time (s)\n{rows}", "steps.csv")])


def test_csv_is_read_like_markdown(tmp_path):
    lines = [",".join(f'"{cell.strip()}"' for cell in line.strip("|").split("|")) for line in SPEED_UP.split("\n")
             if line and "---" not in line]  # fmt: skip
    path = saved(tmp_path, "\n".join(lines).replace("7.39x", "8.39x"), "table.csv")
    assert [f.runs for f in audit([path])] == [(f"{path}:3",)]


def test_columns_are_named_where_headings_do_not_say_it(tmp_path):
    text = SPEED_UP.replace("GPUs", "Karten").replace("tokens/s", "Tempo").replace("Efficiency", "Anteil")
    path = saved(tmp_path, text.replace("92.3%", "82.3%"))
    with pytest.raises(InputError, match="--columns"):
        audit([path])
    typed = ["--columns", "gpus=Karten,token_rate=Tempo", "--columns", "efficiency=Anteil"]
    done = run_here(PROGRAM, path, *typed, "--json", tmp_path / "found.json")
    assert done.returncode == 1 and "Anteil does not follow from the row" in " ".join(done.stdout.split())
    assert json.loads((tmp_path / "found.json").read_text())["findings"][0]["corrected"].startswith("Anteil 92.3%")


def test_a_number_stands_for_every_row(tmp_path):
    text = table_cases.STEPS.replace(" Seq len |", "").replace(" 2048 |", "").replace("72,018", "82,018")
    found = audit(
        [saved(tmp_path, text.replace("|---|---|---|---|---|", "|---|---|---|---|"))], columns={"length": "2048"}
    )
    assert any("= batch x length" in f.message and "length=2048" in f.message for f in found)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("gpus", "write QUANTITY=HEADING"),
        ("colour=GPUs", "no such quantity"),
        ("devices=Cards", "has no column 'Cards'"),
        ("gpus=GPUs,devices=Efficiency", "devices is 'GPUs' already"),
        ("gpus=GPUs,tp=GPUs", "'GPUs' is another quantity already"),
        ("speedup=Note", "has no figure that can be read under 'Note'"),
        ("length=0", "has no figure that can be read under '0'"),
        ("gpus=\n", "write QUANTITY=HEADING"),
    ],
)
def test_wrong_columns_are_refused_in_one_sentence(tmp_path, typed, words):
    path = saved(tmp_path, SPEED_UP.replace("Efficiency |\n|", "Efficiency | Note |\n|---|").replace("%", "% | plain"))
    done = run_here(PROGRAM, path, "--columns", typed)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_columns_without_a_table_are_refused(tmp_path):
    path = saved(tmp_path, SPEED_UP)
    log = path.with_suffix(".log")
    log.write_text("step 1", encoding="utf-8")
    for typed in (tmp_path, log):
        done = run_here(PROGRAM, typed, "--columns", "gpus=GPUs")
        assert done.returncode == 2 and "type one, as .md, .csv, .tsv" in done.stderr


def test_a_heading_may_hold_a_comma_and_a_file_semicolons(tmp_path):
    path = saved(tmp_path, "run;Tempo, gesamt;faktor\n1;100;1.00x\n2;190;1.90x\n4;300;3.70x\n8;700;7.00x\n", "a.csv")
    named = columns_named(["GPUs=run, token_rate=Tempo, gesamt", "speedup=faktor"])
    assert named == {"devices": "run", "token_rate": "Tempo, gesamt", "speedup": "faktor"}
    assert [finding.runs for finding in audit([path], columns=named)] == [(f"{path}:4",)]


def test_a_table_of_other_things_is_no_table(tmp_path):
    path = saved(tmp_path, "| Name | Colour |\n|---|---|\n| a | red |\n")
    with pytest.raises(InputError, match="--columns"):
        audit([path])


@pytest.mark.parametrize(
    ("cell", "dimension", "value", "low", "high"),
    [
        ("**503,225**", "rate", 503225, 503224, 503226),
        ("2.49e+02", "number", 249, 248, 250),
        ("108K", "rate", 108e3, 107e3, 109e3),
        ("45.0%", "share", 0.45, 0.449, 0.451),
        ("607 ms", "time", 0.607, 0.606, 0.608),
        ("22.0 ± 0.5", "number", 22.0, 21.4, 22.6),
        ("8x H100", "count", 8, 8, 8),
    ],
)
def test_a_cell_is_an_interval(cell, dimension, value, low, high):
    figure = figures_of([cell], dimension)[0]
    assert (figure.value, figure.low, figure.high) == pytest.approx((value, low, high))


@pytest.mark.parametrize("cell", ["", "-", "OOM", "~37", "0.86^", "10-12", "8 / 4", "2h 30m", "-3", "nan", "1e999"])
def test_other_cells_are_no_figures(cell):
    assert figures_of([cell], "number") == [None]


def test_columns_named_takes_several():
    assert columns_named(["gpus=#GPUs,length=2048", "rate=Tempo"]) == {
        "devices": "#GPUs",
        "length": "2048",
        "rate": "Tempo",
    }


def test_a_broken_table_is_read_or_refused(tmp_path):
    """Words of every table replaced by odd ones, cut short, and doubled: no error but a sentence."""
    draw, outcomes = random.Random(1), Counter()
    for number in range(400):
        words = re.split(r"(\W)", draw.choice(TABLES))
        for _ in range(draw.randint(1, 4)):
            odd = draw.choice([*ODD, draw.choice(words), draw.choice(words) * 2])
            words[draw.randrange(len(words))] = odd
        text = "".join(words)[: draw.choice([None, None, draw.randrange(1, 200)])]
        path = saved(tmp_path, text, f"broken{number}.{draw.choice(['md', 'csv', 'tsv'])}")
        try:
            audit([path])
            outcomes["read"] += 1
        except InputError as error:
            assert len(str(error).splitlines()) == 1
            outcomes["refused"] += 1
    assert min(outcomes["read"], outcomes["refused"]) > 8, outcomes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("letter.csv", "a" * 120_000),
        ("letter.md", "| a | b |\n|---|---|\n| 1 | " + "a" * 120_000),
        ("heading.md", f"| {'h' * 32_000} | time |\n|---|---|\n| 1 | 2 |\n"),
        ("words.md", f"# {'h ' * 16_000}\n\n| {'step ' * 6_400} | tokens/s |\n|---|---|\n| 1 | 2 |\n"),
        ("heading.csv", f"{'h' * 32_000},b\n1,2\n"),
        ("heading.html.md", f"<table><tr><th>{'h' * 32_000}</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>"),
        ("cell.csv", f"gpus,tokens/s\n1,{'1' * 32_000}\n2,{'a' * 32_000}"),
        ("spaces.csv", f"gpus,tokens/s\n1,{' ' * 32_000}1\n2,{'( ' * 16_000}"),
        ("log.txt", "step 1 loss 2.0 " + "a" * 120_000),
        ("digits.txt", "1" * 120_000),
    ],
)
def test_a_long_line_or_heading_takes_no_quadratic_time(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    began = time.perf_counter()
    with contextlib.suppress(InputError):
        audit([tmp_path / name])
    assert time.perf_counter() - began < 10
