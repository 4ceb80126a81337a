"""A document in its three forms: what all of them show, what each leads to, and that nothing in it is obeyed."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from support.report_cases import load, write_sweep
from support.scaling_examples import report_of, write_arm

from testbed.analysis.comparison.document import document_of as of_comparison
from testbed.analysis.comparison.two_arms import compare_arms
from testbed.analysis.document import html, markdown, terminal
from testbed.analysis.document.model import (
    Caution,
    Document,
    Link,
    Picture,
    RunLinks,
    Section,
    Source,
    Statement,
    Table,
    Verdict,
)
from testbed.analysis.document.words import BRACKETS, Number, between, counted, digits, gap, joined, ranges, rate, times
from testbed.analysis.report.build import report_of as of_folder
from testbed.analysis.runs.arms import group_into_arms
from testbed.analysis.scaling.tables import document_of as of_study
from testbed.analysis.statistics import DEFAULT_MARGIN

EVIL = "<script>alert(1)</script> [x](http://evil.example) `|` \x1b[31m"


def whole(name: str) -> Document:
    """One of everything, and `name` in every place that a file or a person fills."""
    link = Link(1, name, "#0072B2")
    table = Table(
        ["configuration", name, "rate", "runs"],
        [[link, name, Number(1234.5, ",.1f", 1200, 1300, interval=BRACKETS), RunLinks((1, 2, 4))]],
        name,
        (0, 1),
        name,
    )
    picture = Picture("rates", name, name, (link,), lambda: Figure(figsize=(9, 2)))
    return Document(
        title=name,
        lead=name,
        headlines=(Statement("Best: ", name),),
        verdicts=[Verdict("faster", name, name)],
        cautions=[Caution(name, name, (1,))],
        sections=[Section(name, [name, (Statement("Power: ", name),), table, picture], "rates")],
        notes=[[(name, Number(0.25, ".1%"), name)]],
        sources=[(link, [Source(number, (("run id", name),), name, "./file", name) for number in (1, 2, 4)])],
    )


FORMS = (lambda document: terminal.text(document, 60), lambda document: markdown.text(document, "p"), html.page)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_shows_everything(form):
    shown = form(whole("ddp"))
    for text in ("faster", "ddp", "1,234.5", "1,200.0", "25.0%", "1-2", "Best", "Power"):
        assert text in shown


def test_markup_in_a_name_is_text():
    page, text = html.page(whole(EVIL)), markdown.text(whole(EVIL), "p")
    assert "<script" not in page and "\x1b" not in page
    outside = text.split("```")[0]
    assert "<script" not in outside and "[x](http" not in outside and "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {5}


def test_no_line_of_a_cell_ends_within_a_flag():
    page = html.page(whole("--num_workers 2 --dry-run a--b <b>"))
    flags = '<span class="flag">--num_workers</span> 2 <span class="flag">--dry-run</span> a--b &lt;b&gt;</td>'
    assert flags in page and "<b>" not in page.partition("<td")[2]


def test_what_is_said_of_runs_has_all_three_forms(tmp_path):
    """A comparison of two arms, a scaling study and a report on a folder."""
    write_sweep(tmp_path / "sweep", ("baseline", "ddp"), is_profiled=False)
    runs = load(tmp_path / "sweep")
    for run_type, ranks, tokens_per_s in (("baseline", 1, 1000), ("ddp", 2, 1800)):
        write_arm(tmp_path / "study", run_type, ranks, tokens_per_s)
    arms = group_into_arms(runs)
    documents = {
        "1.60": of_comparison(compare_arms(arms[-1], arms[0]), DEFAULT_MARGIN),
        "1.80x [1.7": of_study(report_of(tmp_path / "study")),
        "x as fast as baseline on 1 rank": of_folder(runs, tmp_path),
    }
    for said, document in documents.items():
        for form in (terminal.text, markdown.text, html.page):
            assert said in form(document), (said, form.__module__)


def test_numbers_in_words():
    assert [digits(value) for value in (13.8, 8.0, 1364.2, 0.0123456)] == ["13.80", "8.000", "1,364", "0.01235"]
    assert [rate(value) for value in (None, 9.876, 12345.6)] == ["n/a", "9.88", "12,346"]
    assert [times(value) for value in (1.0567, 1.5678)] == ["1.057", "1.57"]
    assert (counted(0, "run"), counted(1, "run"), counted(2000, "run")) == ("0 runs", "1 run", "2,000 runs")
    assert [gap(size) for size in (0.0132, -0.0132, -1e-7, 0.0)] == ["0.0132", "0.0132", "less than 0.0001", "0"]
    assert joined(["a", "b", "c"]) == "a, b and c"
    assert joined(list("abcdefghij")) == "a, b, c, d, e, f and 4 more"
    assert ranges([1, 2, 3, 5, 7, 8]) == "1-3, 5, 7-8"
    assert (between(1.55, 1.66, times), between(None, 1.0, times)) == ("1.55 to 1.66", "")


def test_a_number_knows_its_unit_its_digits_and_its_interval():
    assert str(Number(None, ".1f")) == "n/a"
    assert str(Number(1.6, ".2f", unit="x")) == "1.60x"
    assert str(Number(1.6, ".2f", 1.5, 1.7, unit="x")) == "1.60x (1.50 to 1.70)"
    assert str(Number(6134, ",.0f", 6101, 6170, interval=BRACKETS)) == "6,134 [6,101, 6,170]"


def test_a_table_in_a_terminal_aligns_numbers_to_the_right():
    table = Table(["name", "rate"], [["a", Number(1, ",.0f")], ["long name", Number(1000, ",.0f")]], text_columns=(0,))
    assert terminal.table_lines(table) == ["name         rate", "a               1", "long name   1,000"]
